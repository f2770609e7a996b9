"""The scheduler's interface to memory: can these sequences get blocks? Then allocate them.

Composes allocator, block tables, growth policy, prefix cache and swap space (paper, sections 4.2 to 4.5).
The `can_x` methods change nothing; an answer holds until the next call that does. Sequences
come in groups (the sequences of one request): all get their blocks or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from minipaged.memory.allocator import BlockAllocator, BlockPool
from minipaged.memory.block_table import BlockCopy, BlockTable
from minipaged.memory.page_growth import PageGrowth
from minipaged.memory.prefix_cache import PrefixCache
from minipaged.memory.prefix_hits import Admission, KVSequence, find_hits
from minipaged.memory.swap_space import SwapSpace


@dataclass(eq=False, repr=False)
class KVManager:
    """Block accounting for all sequences."""

    allocator: BlockAllocator  # the device pool
    block_size: int
    growth: PageGrowth
    prefix_cache: PrefixCache | None = None  # over `allocator`
    swap_space: SwapSpace | None = None
    watermark: float = 0.01  # share of the pool that admission (not growth) leaves free while others run
    block_table: Callable[[BlockPool, int], BlockTable] = BlockTable
    kept_states: Container[int] | None = None  # of a hybrid model: see `find_hits`

    def __post_init__(self) -> None:
        self.pool = self.allocator if self.prefix_cache is None else self.prefix_cache

    def new_table(self) -> BlockTable:
        """An empty block table over the device pool."""
        return self.block_table(self.pool, self.block_size)

    @property
    def num_free(self) -> int:
        """Free and evictable blocks."""
        return self.pool.num_free

    @property
    def num_used(self) -> int:
        """Blocks that some table holds."""
        return self.allocator.num_blocks - self.pool.num_free

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # -- admission ------------------------------------------------------------------------------

    def blocks_for_admission(self, num_tokens: int, max_num_tokens: int) -> int:
        """The fewest blocks that admit a sequence of `num_tokens` tokens if nothing is cached."""
        needed = self.num_blocks_of(num_tokens)
        return self.growth.at_admission(needed, max(needed, self.num_blocks_of(max_num_tokens)))[-1]

    def can_admit(self, sequences: Sequence[KVSequence], others_run: bool = True) -> Admission:
        """Whether the group, whose tables are empty, can get blocks for all its tokens.

        While `others_run`, the watermark stays free. If nothing else runs, the bare minimum is tried last,
        because waiting would not free anything.
        """
        hits = find_hits(sequences, self.prefix_cache, self.block_size, self.kept_states)
        wishes = []
        for sequence, hit in zip(sequences, hits):
            needed, remaining = self._blocks_left(sequence, hit.num_shared)
            wish = self.growth.at_admission(needed, remaining)
            wishes.append(wish if others_run else (*wish, needed))
        num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        num_cached = sum(hit.num_tokens(sequence) for sequence, hit in zip(sequences, hits))
        cached = {block for hit in hits for block in hit.blocks}
        num_evictable, num_charged = self.admission_charge(cached, num_tokens, num_cached)
        available = self.pool.num_free - num_evictable
        if others_run:
            available -= int(self.watermark * self.allocator.num_blocks)
        for i in range(max(map(len, wishes))):  # the preferred counts first, the smallest last
            grants = [wish[min(i, len(wish) - 1)] for wish in wishes]
            if sum(grants) <= available:
                break
        return Admission(sum(grants) <= available, hits, grants, num_cached, num_charged)

    def admission_charge(self, cached: set[int], num_tokens: int, num_cached: int) -> tuple[int, int]:
        """What an admission costs besides its grants: free blocks that its cached blocks use up, and tokens
        of the step's budget. Cached ones do not count (vLLM's prefix-caching-aware scheduling)."""
        evictable = self.prefix_cache.count_evictable(cached) if self.prefix_cache else 0
        return evictable, num_tokens - num_cached

    def admit(self, sequences: Sequence[KVSequence], admission: Admission) -> list[BlockCopy]:
        """Give the group its blocks, as `can_admit` has just granted. Returns the copies to run first."""
        # Cached blocks first: once shared they cannot be evicted by the allocations that follow.
        for sequence, hit in zip(sequences, admission.hits):
            if hit.leader is None:
                sequence.table.share(hit.blocks)
                sequence.num_registered_blocks = hit.num_shared
                if hit.blocks and self.prefix_cache is not None:
                    sequence.last_registered = self.prefix_cache.entry_of(hit.blocks[-1])
        copies = []
        for sequence, hit, grant in zip(sequences, admission.hits, admission.grants):
            table = sequence.table
            if hit.leader is not None:
                table.share(sequences[hit.leader].table.blocks[: hit.num_shared])
            sequence.num_computed_tokens = hit.num_tokens(sequence)
            table.append(len(sequence.token_ids) - table.num_tokens)
            if hit.copy_from is not None and hit.copy_from != table.blocks[-1]:
                # (In a tight pool the cached block itself may have been evicted and handed to us.)
                copies.append(BlockCopy(hit.copy_from, table.blocks[-1]))
            if preallocated := hit.num_shared + grant - len(table.blocks):
                table.preallocate(preallocated)
        return copies

    # -- growth ---------------------------------------------------------------------------------

    def blocks_to_grow(self, sequences: Sequence[KVSequence]) -> int:
        """Blocks needed to give each sequence of the group a slot for all its tokens."""
        needed = 0
        for s in sequences:
            table = s.table
            needed += table.blocks_to_append(len(s.token_ids) - table.num_tokens)
        if needed and len(sequences) > 1:
            # Of the holders of one block, the last to write finds a count of 1 and copies nothing.
            writers = Counter(
                s.table.blocks[s.table.num_tokens // self.block_size]
                for s in sequences
                if s.table.num_tokens % self.block_size
            )
            count = sequences[0].table.pool.ref_count
            needed -= sum(n > 1 and n == count(block) for block, n in writers.items())
        return needed

    def grow(self, sequences: Sequence[KVSequence], needed: int) -> list[BlockCopy]:
        """Give each sequence a slot for all its tokens; `needed` is what `blocks_to_grow` returned, at most
        `num_free`. Returns the copies (copy-on-write) to run first."""
        copies: list[BlockCopy] = []
        if not needed:  # (nearly always: a block of 16 tokens is taken every 16 steps)
            for sequence in sequences:
                sequence.table.use_slots(len(sequence.token_ids))
            return copies
        for i, sequence in enumerate(sequences):
            table = sequence.table
            if table.num_tokens == len(table.blocks) * self.block_size:
                self._preallocate(sequence, sequences[i + 1 :])
            if copy := table.append(len(sequence.token_ids) - table.num_tokens):
                copies.append(copy)
        return copies

    def _preallocate(self, sequence: KVSequence, others: Sequence[KVSequence]) -> None:
        # More than the minimum (which `append` takes itself) only if the others still get theirs.
        needed, remaining = self._blocks_left(sequence, len(sequence.table.blocks))
        for wish in self.growth.while_running(needed, remaining):
            if wish == needed:
                return
            if wish + self.blocks_to_grow(others) <= self.pool.num_free:
                sequence.table.preallocate(wish)
                return

    def _blocks_left(self, sequence: KVSequence, held: int) -> tuple[int, int]:
        # Blocks that its tokens need besides those held, and all that it could need until its last token.
        needed = self.num_blocks_of(len(sequence.token_ids))
        return needed - held, max(needed, self.num_blocks_of(sequence.max_num_tokens)) - held

    def free_preallocated(self, sequences: Sequence[KVSequence]) -> int:
        """Free the sequences' blocks that hold no token yet. Returns how many became free."""
        before = self.pool.num_free
        for sequence in sequences:
            sequence.table.truncate(sequence.table.num_tokens)
        return self.pool.num_free - before

    def fork(self, sequence: KVSequence) -> BlockTable:
        """A second table over the blocks of the sequence (paper, Fig. 8)."""
        return sequence.table.fork()

    def free(self, sequences: Iterable[KVSequence]) -> None:
        """Free all blocks of the sequences; none of their tokens counts as computed any more."""
        for sequence in sequences:
            sequence.num_computed_tokens = sequence.num_registered_blocks = 0
            sequence.last_registered = None
            sequence.table.free()
            sequence.table.move_to(self.pool, [])  # (a swapped-out table was over host blocks)

    # -- prefix caching -------------------------------------------------------------------------

    def register(self, sequence: KVSequence, num_tokens: int) -> None:
        """Register the blocks that will be full once the planned step has computed `num_tokens` tokens."""
        cache, size = self.prefix_cache, self.block_size
        start, stop = sequence.num_registered_blocks, num_tokens // size
        if cache is None or stop <= start:
            return
        cache.extend_hashes(sequence.block_hashes, sequence.token_ids, sequence.cache_salt)
        hashes, blocks = sequence.block_hashes, sequence.table.blocks
        for i in range(start, stop):
            tokens = sequence.token_ids[i * size : (i + 1) * size]
            parent = sequence.last_registered or sequence.cache_salt
            sequence.last_registered = cache.register(blocks[i], hashes[i], tokens, parent)
        sequence.num_registered_blocks = stop

    def commit_registered(self) -> None:
        """The planned step ran: its registered blocks are now filled."""
        if self.prefix_cache is not None:
            self.prefix_cache.commit()

    def roll_back_registered(self) -> None:
        """The planned step failed: no request may find blocks that it did not compute."""
        if self.prefix_cache is not None:
            self.prefix_cache.roll_back()

    # -- swapping -------------------------------------------------------------------------------

    def can_swap_out(self, sequences: Sequence[KVSequence]) -> bool:
        """Whether the group can move to the host: there is room, and it is not half recomputed."""
        # While a group is recomputed, a sequence counts blocks as computed that its leader has
        # yet to fill; in this state, the group cannot be swapped out.
        halfway = any(len(s.token_ids) - s.num_computed_tokens > 1 for s in sequences)
        if self.swap_space is None or (halfway and len(sequences) > 1):
            return False
        return len(self.computed_blocks(sequences)) <= self.swap_space.allocator.num_free

    def computed_blocks(self, sequences: Sequence[KVSequence]) -> set[int]:
        """The distinct blocks that hold computed tokens: what a swap moves."""
        return {b for s in sequences for b in s.table.blocks[: self.num_blocks_of(s.num_computed_tokens)]}

    def swap_out(self, sequences: Sequence[KVSequence]) -> list[BlockCopy]:
        """Move the group's computed blocks to the host; blocks not computed yet are just freed."""
        assert self.swap_space is not None
        for sequence in sequences:
            sequence.table.truncate(sequence.num_computed_tokens)
        return self.swap_space.swap_out([sequence.table for sequence in sequences])

    def can_swap_in(self, sequences: Sequence[KVSequence]) -> bool:
        """Whether the group fits on the device again, with a slot for every token."""
        moved = {block for s in sequences for block in s.table.blocks}
        return len(moved) + self.blocks_to_grow(sequences) <= self.pool.num_free

    def swap_in(self, sequences: Sequence[KVSequence]) -> list[BlockCopy]:
        """Move the group's blocks back to the device. `grow` then allocates the missing slots."""
        assert self.swap_space is not None
        return self.swap_space.swap_in([sequence.table for sequence in sequences], self.pool)

    def check_invariants(self, sequences: Iterable[KVSequence]) -> None:
        """Raise AssertionError unless every block is accounted for; `sequences` are all that may hold one."""
        device: list[int] = []
        host: list[int] = []
        preallocated: Counter[int] = Counter()
        for sequence in sequences:
            table = sequence.table
            assert sequence.num_computed_tokens <= len(sequence.token_ids), "more computed tokens than tokens"
            assert len(table.blocks) >= table.num_filled_blocks, "a token has no slot"
            (device if table.pool is self.pool else host).extend(table.blocks)
            if table.pool is self.pool:
                preallocated.update(table.blocks[table.num_filled_blocks :])
        self.pool.check_invariants(device)
        known, total = self.num_free + len(set(device)), self.allocator.num_blocks
        assert known == total, f"{known} blocks of {total} are free, evictable or held by a table"
        shared = [block for block, n in preallocated.items() if n > 1]
        assert not shared, f"preallocated blocks {shared} belong to two tables"
        if self.swap_space is not None:
            self.swap_space.check_invariants(host)
        assert len(set(host)) <= self.allocator.num_blocks, "more on the host than was ever on the device"
