"""The contract of a KV manager: what it charges, gives and takes back (paper, sections 4.2 to 4.4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from minipaged.learn.contracts.rules import Rules, call_text, short
from minipaged.memory import BlockCopy, KVManager
from minipaged.memory.prefix_hits import Admission, KVSequence


class KVManagerContract(KVManager):
    """Who may have blocks; watches a subclass of `KVManager`, into which this class is mixed.

    1. `admission_charge` answers with two counts: at most one block for each cached block, and at most the
       group's tokens.
    2. Asking changes nothing.
    3. After `admit` and `grow` each sequence has a slot for all its tokens, and writes to no block that
       another table holds; they return a copy for each block that is to be copied, and no other.
    4. `blocks_to_grow` is no less than what the tokens need.
    5. `register` registers only blocks that will be full.
    6. `free` leaves a sequence no block and no token that counts as computed.
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

    def admit(self, sequences: Sequence[KVSequence], admission: Admission) -> list[BlockCopy]:
        """Rule 3."""
        copies = self.rules.call(super().admit, sequences, admission)
        self._require_slots("admit", sequences)
        cached = [
            (hit.copy_from, s.table.blocks[hit.num_shared]) for s, hit in zip(sequences, admission.hits)
        ]
        wanted = [(old, new) for old, new in cached if old not in (None, new)]
        return self._require_copies("admit", copies, wanted)

    def blocks_to_grow(self, sequences: Sequence[KVSequence]) -> int:
        """Rules 2 and 4."""
        needed, free = KVManager.blocks_to_grow(self, sequences), self.num_free
        answer = self.rules.call(super().blocks_to_grow, sequences)
        what = f"blocks_to_grow of {len(sequences)} sequences returned {answer!r}"
        enough = isinstance(answer, int) and answer >= needed
        self.rules.require(enough, f"{what}; their tokens need {needed} more blocks")
        self.rules.require(self.num_free == free, f"{what} and changed num_free from {free}")
        return answer

    def grow(self, sequences: Sequence[KVSequence], needed: int) -> list[BlockCopy]:
        """Rule 3."""
        before = [(list(s.table.blocks), s.table.num_tokens) for s in sequences]
        copies = self.rules.call(super().grow, sequences, needed)
        self._require_slots("grow", sequences)
        wanted = []
        for s, (blocks, num_tokens) in zip(sequences, before):
            wanted += [(old, new) for old, new in zip(blocks, s.table.blocks) if old != new]
            if num_tokens < len(s.token_ids):
                block = s.table.blocks[num_tokens // self.block_size]
                alone = s.table.pool.ref_count(block) == 1
                message = f"grow lets {short(s)} write to block {block}, which another table holds"
                self.rules.require(alone, f"{message}; replace it by a fresh one and return the copy")
        return self._require_copies("grow", copies, wanted)

    def register(self, sequence: KVSequence, num_tokens: int) -> None:
        """Rule 5."""
        full = max(sequence.num_registered_blocks, num_tokens // self.block_size)
        self.rules.call(super().register, sequence, num_tokens)
        now = sequence.num_registered_blocks
        message = f"{call_text('register', (sequence, num_tokens))} left {now} blocks registered"
        self.rules.require(now <= full, f"{message}, of which {full} are full")

    def free(self, sequences: Iterable[KVSequence]) -> None:
        """Rule 6."""
        sequences = list(sequences)
        # Judged anew each time: even after a breach elsewhere blocks come back.
        rules = Rules(self.rules.concept)
        rules.call(super().free, sequences)
        for s in sequences:
            blocks, computed = len(s.table.blocks), s.num_computed_tokens
            message = f"free left {short(s)} with {blocks} blocks and {computed} tokens computed"
            rules.require(not blocks and not computed, f"{message}; give back all, count none")

    def _require_slots(self, name: str, sequences: Sequence[KVSequence]) -> None:
        for s in sequences:
            slots, tokens = min(s.table.num_tokens, len(s.table.blocks) * self.block_size), len(s.token_ids)
            message = f"{name} left {short(s)} with slots for {slots} of its {tokens} tokens"
            self.rules.require(slots == tokens, f"{message}; give every token one")

    def _require_copies(self, name: str, copies: Any, wanted: list[Any]) -> list[BlockCopy]:
        message = f"{name} returned the copies {copies} where {wanted} are needed; return one for each"
        right = isinstance(copies, list) and len(copies) == len(wanted) and all(c in wanted for c in copies)
        self.rules.require(right, f"{message} block that is replaced")
        return copies
