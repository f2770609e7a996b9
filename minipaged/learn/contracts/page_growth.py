"""The contract of a growth policy, and a policy that is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from minipaged.learn.contracts.rules import Rules

CONCEPT = "page_growth"


class Growth(Protocol):
    """How many blocks to ask for, made by `cls()`.

    1. Both methods answer with at least one block count, the preferred first.
    2. No count is below `needed` (a token would have no slot) or above `remaining` (it would never be used).
    """

    def at_admission(self, needed: int, remaining: int) -> tuple[int, ...]:
        """Block counts to try when the sequence is admitted."""
        ...

    def while_running(self, needed: int, remaining: int) -> tuple[int, ...]:
        """Block counts to try when the sequence has filled its last block."""
        ...


class WatchedGrowth:
    """A growth policy whose every answer is checked."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.rules = Rules(CONCEPT)
        self._inner = self.rules.call(make)

    def at_admission(self, needed: int, remaining: int) -> tuple[int, ...]:
        """See `Growth`."""
        return self._check("at_admission", needed, remaining)

    def while_running(self, needed: int, remaining: int) -> tuple[int, ...]:
        """See `Growth`."""
        return self._check("while_running", needed, remaining)

    def _check(self, name: str, needed: int, remaining: int) -> tuple[int, ...]:
        wishes = self.rules.call(getattr(self._inner, name), needed, remaining)
        what = f"{name}(needed={needed}, remaining={remaining}) answered {wishes!r}"
        self.rules.require(
            isinstance(wishes, tuple) and wishes != () and all(isinstance(wish, int) for wish in wishes),
            f"{what}; give a tuple of at least one block count",
        )
        self.rules.require(
            min(wishes) >= needed, f"{what}; a count below {needed} leaves tokens without a slot"
        )
        self.rules.require(max(wishes) <= remaining, f"{what}; more than {remaining} blocks are never used")
        return wishes


def watch(part: Callable[[], Any]) -> Callable[[], WatchedGrowth]:
    """A maker of watched policies."""
    return lambda: WatchedGrowth(part)
