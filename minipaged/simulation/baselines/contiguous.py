"""Orca's memory: one contiguous region per sequence, reserved at admission (paper, sections 3.1 and 6.1).

    Max      the model's longest sequence         | 2048 slots, whatever is needed
    Pow2     prompt + next power of two of output | knows the output to a factor of 2
    Oracle   prompt + output                      | knows the output, which nobody can

The differences from the paged manager: regions come from a buddy allocator, which rounds them up to powers of
two; nothing ever grows; nothing is shared, so a request with n sequences reserves n regions, and a fork
copies. A slot is a block of one token.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import cast

from minipaged.memory import (
    Admission,
    BlockAllocator,
    BlockCopy,
    BlockPool,
    BlockTable,
    Hit,
    KVManager,
    KVSequence,
    OnDemand,
)
from minipaged.scheduling import Request, Sequence
from minipaged.simulation.baselines.buddy import BuddyAllocator


def reserve_max(prompt: int, output: int, longest: int) -> int:
    """The longest sequence there can be."""
    return longest


def reserve_pow2(prompt: int, output: int, longest: int) -> int:
    """The output is known to a factor of 2: 25 tokens reserve 32."""
    return min(longest, prompt + (1 << (output - 1).bit_length()))


def reserve_oracle(prompt: int, output: int, longest: int) -> int:
    """The output is known."""
    return prompt + output


RESERVATIONS = {"orca-max": reserve_max, "orca-pow2": reserve_pow2, "orca-oracle": reserve_oracle}


class Region(BlockTable):
    """The table of a sequence that has one region, or none yet."""

    __slots__ = ("source",)

    def __init__(self, pool: BlockPool, block_size: int, source: BlockTable | None = None) -> None:
        super().__init__(pool, block_size)
        self.source = source  # the table it was forked from, while nothing of it is copied yet

    def occupy(self, start: int, size: int, num_computed_tokens: int) -> list[BlockCopy]:
        """Take the slots from `start` on. Returns the copies of what its source has computed."""
        self.blocks = list(range(start, start + size))
        source, self.source = self.source, None
        filled = self.blocks[:num_computed_tokens]
        return [] if source is None else [BlockCopy(a, b) for a, b in zip(source.blocks, filled)]

    def leave(self) -> list[int]:
        """Become empty. Returns the start of the region, if it had one."""
        left = self.blocks[:1]
        self.blocks, self.num_tokens, self.source = [], 0, None
        return left


class ContiguousKVManager(KVManager):
    """Regions under the same scheduler; `reserve`: (prompt, output, longest sequence) -> slots."""

    def __init__(self, num_slots: int, longest: int, reserve: Callable[[int, int, int], int]) -> None:
        self.regions = BuddyAllocator(num_slots)
        pool = cast(BlockAllocator, self.regions)
        super().__init__(pool, 1, OnDemand(), block_table=Region)
        self.longest = longest
        self.reserve = reserve
        self._unused: dict[Request, list[int]] = {}  # regions of a request that no sequence of it uses now

    def _reservation(self, request: Request) -> int:
        return self.reserve(request.params.prompt, request.params.output, self.longest)

    def can_admit(self, sequences: SequenceOf[KVSequence], others_run: bool = True) -> Admission:
        """Whether there is a region for every sequence that the request will ever have."""
        request = cast(Sequence, sequences[0]).request
        sizes = [self._reservation(request)] * request.method.num_sequences
        num_tokens = len(sequences[0].token_ids)
        return Admission(self.regions.can_allocate(sizes), [Hit(0, [])], sizes, 0, num_tokens)

    def admit(self, sequences: SequenceOf[KVSequence], admission: Admission) -> list[BlockCopy]:
        """Take the regions; the prompt gets the first."""
        request = cast(Sequence, sequences[0]).request
        self._unused[request] = [self.regions.allocate(size) for size in admission.grants][::-1]
        return self.grow(sequences, 0)

    def blocks_to_grow(self, sequences: SequenceOf[KVSequence]) -> int:
        """Nothing ever grows."""
        return 0

    def grow(self, sequences: SequenceOf[KVSequence], needed: int) -> list[BlockCopy]:
        """Count the new tokens; a forked sequence gets its region and a copy of what its parent has."""
        copies: list[BlockCopy] = []
        for sequence in sequences:
            table = cast(Region, sequence.table)
            if not table.blocks:
                request = cast(Sequence, sequence).request
                start, size = self._unused[request].pop(), self._reservation(request)
                copies += table.occupy(start, size, sequence.num_computed_tokens)
            table.use_slots(len(sequence.token_ids))
        return copies

    def fork(self, sequence: KVSequence) -> BlockTable:
        """An empty table; `grow` gives it a region once the sequences that ended have left theirs."""
        return Region(self.pool, 1, sequence.table)

    def free(self, sequences: Iterable[KVSequence]) -> None:
        """Give regions back to the request; when no sequence is left, all of them to the pool."""
        for sequence in sequences:
            request = cast(Sequence, sequence).request
            unused = self._unused.get(request, [])
            unused += cast(Region, sequence.table).leave()
            if len(unused) == request.method.num_sequences:
                for start in self._unused.pop(request):
                    self.regions.free(start)
            sequence.num_computed_tokens = 0

    def check_invariants(self, sequences: Iterable[KVSequence]) -> None:
        """Raise AssertionError unless regions are disjoint and every one has an owner."""
        starts = [start for unused in self._unused.values() for start in unused]
        starts += [sequence.table.blocks[0] for sequence in sequences if sequence.table.blocks]
        assert sorted(starts) == sorted(self.regions.regions()), "a region is lost or used twice"
        self.regions.check_invariants()
