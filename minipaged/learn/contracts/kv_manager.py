"""The contract of a KV manager: what an admission is charged (paper, section 4.4; vLLM's aware scheduler)."""

from __future__ import annotations

from minipaged.learn.contracts.rules import Rules
from minipaged.memory import KVManager


class KVManagerContract(KVManager):
    """Who may have blocks; a subclass of `KVManager`, mixed into by this class to be checked.

    1. `admission_charge` answers with two counts: at most one block for each cached block, and at most the
       group's tokens.
    2. Asking changes nothing.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rules = Rules("kv_manager")

    def admission_charge(self, cached: set[int], num_tokens: int, num_cached: int) -> tuple[int, int]:
        """Rules 1 and 2."""
        free = self.num_free
        answer = self.rules.call(super().admission_charge, set(cached), num_tokens, num_cached)
        what = f"admission_charge of {len(cached)} cached blocks and {num_tokens} tokens returned {answer!r}"
        counts = isinstance(answer, tuple) and len(answer) == 2 and all(type(n) is int for n in answer)
        self.rules.require(counts, f"{what}; give two counts, blocks and tokens")
        blocks, tokens = answer
        self.rules.require(0 <= blocks <= len(cached), f"{what}; charge 0 to {len(cached)} blocks")
        self.rules.require(0 <= tokens <= num_tokens, f"{what}; charge 0 to {num_tokens} tokens")
        self.rules.require(
            self.num_free == free, f"{what} and changed num_free from {free} to {self.num_free}"
        )
        return blocks, tokens


def watch_kv_manager(_: str, override: type[KVManager]) -> type[KVManager]:
    """The class with the checks of the contract before its own methods."""
    return type(override.__name__, (KVManagerContract, override), {})
