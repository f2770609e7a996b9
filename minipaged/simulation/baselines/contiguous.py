"""Orca's memory: one contiguous region a sequence, reserved at admission (paper, sections 3.1 and 6.1).

    Max      the model's longest sequence         | 2048 slots, whatever is asked
    Pow2     prompt + next power of two of output | knows the output to a factor of 2
    Oracle   prompt + output                      | knows the output, which nobody can

As a diff against the paged manager: regions come from a buddy allocator, which rounds them up to powers
of two; nothing ever grows; nothing is shared, so a request with n sequences reserves n regions, and a
fork copies. A slot is a block of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import cast

from minipaged.memory import (
    Admission,
    BlockAllocator,
    BlockCopy,
    BlockTable,
    Hit,
    KVManager,
    KVSequence,
    OnDemand,
)
from minipaged.scheduling import Request, Sequence
from minipaged.simulation.baselines.buddy import BuddyAllocator

Reservation = Callable[[int, int, int], int]
"""(prompt tokens, output tokens, longest sequence) -> slots to reserve."""


def reserve_max(prompt: int, output: int, longest: int) -> int:
    """The longest sequence there can be."""
    return longest


def reserve_pow2(prompt: int, output: int, longest: int) -> int:
    """The output is known to a factor of 2: 25 tokens reserve 32."""
    return min(longest, prompt + (1 << (output - 1).bit_length()))


def reserve_oracle(prompt: int, output: int, longest: int) -> int:
    """The output is known."""
    return prompt + output


class ContiguousKVManager(KVManager):
    """Regions under the same scheduler.

    Args:
        num_slots: size of the pool, tokens.
        longest: the longest sequence, prompt and output together.
        reserve: how many slots a sequence gets.
    """

    def __init__(self, num_slots: int, longest: int, reserve: Reservation) -> None:
        self.regions = BuddyAllocator(num_slots)
        super().__init__(cast(BlockAllocator, self.regions), 1, OnDemand(), watermark=0.0)
        self.longest = longest
        self.reserve = reserve
        self._spare: dict[Request, list[int]] = {}  # regions of a request that no sequence of it uses now
        self._source: dict[BlockTable, BlockTable] = {}  # forked, not copied yet -> what to copy

    def _reservation(self, request: Request) -> int:
        lengths = request.params
        return self.reserve(lengths.prompt, lengths.output, self.longest)

    def can_admit(self, sequences: SequenceOf[KVSequence], others_run: bool = True) -> Admission:
        """Whether there is a region for every sequence that the request will ever have."""
        request = cast(Sequence, sequences[0]).request
        sizes = [self._reservation(request)] * request.method.num_sequences
        num_tokens = len(sequences[0].token_ids)
        return Admission(self.regions.can_allocate(sizes), [Hit(0, [])], sizes, 0, num_tokens)

    def admit(self, sequences: SequenceOf[KVSequence], admission: Admission) -> list[BlockCopy]:
        """Take the regions; the prompt gets the first."""
        request = cast(Sequence, sequences[0]).request
        self._spare[request] = [self.regions.allocate(size) for size in admission.grants][::-1]
        return self.grow(sequences, 0)

    def blocks_to_grow(self, sequences: SequenceOf[KVSequence]) -> int:
        """Nothing ever grows."""
        return 0

    def grow(self, sequences: SequenceOf[KVSequence], needed: int) -> list[BlockCopy]:
        """Count the new tokens; a forked sequence gets its region and a copy of what its parent has."""
        copies: list[BlockCopy] = []
        for sequence in sequences:
            table = sequence.table
            if not table.blocks:
                request = cast(Sequence, sequence).request
                start = self._spare[request].pop()
                table.blocks = list(range(start, start + self._reservation(request)))
                parent = self._source.pop(table, None)
                if parent is not None:
                    pairs = zip(parent.blocks, table.blocks[: sequence.num_computed_tokens])
                    copies += [BlockCopy(a, b) for a, b in pairs]
            table.num_tokens = len(sequence.token_ids)
        return copies

    def fork(self, sequence: KVSequence) -> BlockTable:
        """An empty table; `grow` gives it a region once the sequences that ended have left theirs."""
        child = self.new_table()
        self._source[child] = sequence.table
        return child

    def free(self, sequences: Iterable[KVSequence]) -> None:
        """Give regions back to the request; when no sequence is left, all of them to the pool."""
        for sequence in sequences:
            table = sequence.table
            self._source.pop(table, None)
            if table.blocks:
                request = cast(Sequence, sequence).request
                spare = self._spare[request]
                spare.append(table.blocks[0])
                if len(spare) == request.method.num_sequences:
                    for start in self._spare.pop(request):
                        self.regions.free(start)
            table.blocks, table.num_tokens = [], 0
            sequence.num_computed_tokens = 0

    def check_invariants(self, sequences: Iterable[KVSequence]) -> None:
        """Raise AssertionError unless regions are disjoint and every one has an owner."""
        starts = [start for spare in self._spare.values() for start in spare]
        starts += [sequence.table.blocks[0] for sequence in sequences if sequence.table.blocks]
        assert sorted(starts) == sorted(self.regions.regions()), "a region is lost or used twice"
        self.regions.check_invariants()
