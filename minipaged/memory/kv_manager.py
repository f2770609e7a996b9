"""The one place the scheduler asks about memory: may these sequences have blocks, and then have them.

Composes allocator, block tables, growth policy, prefix cache and swap space (paper, sections 4.2 to
4.5). Every question `can_x` changes nothing; its answer holds until the next call that changes
something. Sequences come in groups (the sequences of one request): all get their blocks or none.

The manager knows block ids and token ids; no queues, no tensors, no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from minipaged.memory.allocator import BlockAllocator, BlockPool
from minipaged.memory.block_table import BlockCopy, BlockTable
from minipaged.memory.page_growth import PageGrowth
from minipaged.memory.prefix_cache import PrefixCache
from minipaged.memory.prefix_hits import Admission, KVSequence, find_hits, num_hit_tokens
from minipaged.memory.swap_space import SwapSpace


class KVManager:
    """Block accounting for all sequences.

    Args:
        allocator: the device pool.
        block_size: tokens a block.
        growth: how many blocks to ask for.
        prefix_cache: built over `allocator`, or None when prefixes are not cached.
        swap_space: host blocks, or None when nothing is swapped.
        watermark: share of the pool that admission leaves free while others run (not growth).
        prefix_aware: False counts cached blocks as if they had to be allocated and computed: the
            scheduler that the third source improves on, kept for its experiment.
        block_table: makes the tables; None: `BlockTable`.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        growth: PageGrowth,
        prefix_cache: PrefixCache | None = None,
        swap_space: SwapSpace | None = None,
        watermark: float = 0.01,
        prefix_aware: bool = True,
        block_table: Callable[[BlockPool, int], BlockTable] | None = None,
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.growth = growth
        self.prefix_cache = prefix_cache
        self.swap_space = swap_space
        self.pool: BlockPool = prefix_cache if prefix_cache is not None else allocator
        self.num_watermark_blocks = int(watermark * allocator.num_blocks)
        self.prefix_aware = prefix_aware
        self._block_table = block_table or BlockTable

    def new_table(self) -> BlockTable:
        """An empty block table over the device pool."""
        return self._block_table(self.pool, self.block_size)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, idle cached blocks included."""
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
        """Blocks without which a sequence of `num_tokens` tokens is never admitted, nothing cached."""
        needed = self.num_blocks_of(num_tokens)
        return self.growth.at_admission(needed, max(needed, self.num_blocks_of(max_num_tokens)))[-1]

    def can_admit(self, sequences: Sequence[KVSequence], others_run: bool = True) -> Admission:
        """Whether the group gets blocks for all its tokens; only blocks that are not cached count.

        Args:
            sequences: the group; their tables are empty.
            others_run: leave the watermark free, and the growth policy its say. When nothing else
                runs, what the tokens need will do: waiting would free nothing.
        """
        hits = find_hits(sequences, self.prefix_cache, self.block_size)
        wishes = []
        for sequence, hit in zip(sequences, hits):
            needed = self.num_blocks_of(len(sequence.token_ids)) - hit.num_shared
            remaining = self.num_blocks_of(sequence.max_num_tokens) - hit.num_shared
            wish = self.growth.at_admission(needed, max(needed, remaining))
            wishes.append(wish if others_run else (*wish, needed))
        available = self.pool.num_free
        if others_run:
            available -= self.num_watermark_blocks
        cached = {block for hit in hits for block in hit.blocks}
        if not self.prefix_aware:
            available -= len(cached)
        elif self.prefix_cache is not None:
            available -= self.prefix_cache.count_idle(cached)
        num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        num_cached = sum(num_hit_tokens(s, hit, self.block_size) for s, hit in zip(sequences, hits))
        num_charged = num_tokens - num_cached if self.prefix_aware else num_tokens
        grants = [wish[0] for wish in wishes]
        if sum(grants) > available:
            grants = [wish[-1] for wish in wishes]
        return Admission(sum(grants) <= available, hits, grants, num_cached, num_charged)

    def admit(self, sequences: Sequence[KVSequence], admission: Admission) -> list[BlockCopy]:
        """Give the group its blocks, as `can_admit` answered just before.

        Returns:
            Copies to run before the step computes.
        """
        # Cached blocks first: once shared they cannot be evicted by the allocations that follow.
        for sequence, hit in zip(sequences, admission.hits):
            if hit.leader is None:
                sequence.table.share(hit.blocks)
        copies = []
        for sequence, hit, grant in zip(sequences, admission.hits, admission.grants):
            table = sequence.table
            if hit.leader is not None:
                table.share(sequences[hit.leader].table.blocks[: hit.num_shared])
            sequence.num_computed_tokens = num_hit_tokens(sequence, hit, self.block_size)
            sequence.num_published_blocks = hit.num_shared
            table.append(len(sequence.token_ids) - table.num_tokens)
            if hit.copy_from is not None and hit.copy_from != table.blocks[-1]:
                # (If the pool was so tight that the cached block itself was evicted and handed to us,
                # its content is where we want it.)
                copies.append(BlockCopy(hit.copy_from, table.blocks[-1]))
            spare = hit.num_shared + grant - len(table.blocks)
            if spare:
                table.reserve(spare)
        return copies

    # -- growth ---------------------------------------------------------------------------------

    def blocks_to_grow(self, sequences: Sequence[KVSequence]) -> int:
        """Blocks it takes to give each sequence of the group a slot for all its tokens."""
        if len(sequences) == 1:
            table = sequences[0].table
            return table.blocks_to_append(len(sequences[0].token_ids) - table.num_tokens)
        needed = sum(s.table.blocks_to_append(len(s.token_ids) - s.table.num_tokens) for s in sequences)
        if needed:
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
        """Give each sequence a slot for all its tokens.

        Args:
            sequences: the group.
            needed: what `blocks_to_grow` answered, at most `num_free`.

        Returns:
            Copies (copy-on-write) to run before the step computes.

        Raises:
            OutOfBlocksError: more was needed; sequences before the failing one have grown.
        """
        copies: list[BlockCopy] = []
        if not needed:  # 15 steps of 16: every next token has its slot
            for sequence in sequences:
                sequence.table.num_tokens = len(sequence.token_ids)
            return copies
        for i, sequence in enumerate(sequences):
            table = sequence.table
            if table.num_tokens == len(table.blocks) * self.block_size:
                self._grant(sequence, sequences[i + 1 :])
            copy = table.append(len(sequence.token_ids) - table.num_tokens)
            if copy is not None:
                copies.append(copy)
        return copies

    def _grant(self, sequence: KVSequence, others: Sequence[KVSequence]) -> None:
        """Take blocks as the growth policy wishes; more than the minimum only if the rest of the
        group still gets its own."""
        held = len(sequence.table.blocks)
        needed = self.num_blocks_of(len(sequence.token_ids)) - held
        remaining = self.num_blocks_of(sequence.max_num_tokens) - held
        for wish in self.growth.while_running(needed, max(needed, remaining)):
            if wish == needed:
                return  # `append` takes the minimum itself
            if wish + self.blocks_to_grow(others) <= self.pool.num_free:
                sequence.table.reserve(wish)
                return

    def give_back_spare(self, sequences: Sequence[KVSequence]) -> int:
        """Free the blocks of the sequences that hold no token yet. Returns how many came free."""
        before = self.pool.num_free
        for sequence in sequences:
            sequence.table.truncate(sequence.table.num_tokens)
        return self.pool.num_free - before

    # -- the rest of a sequence's life ----------------------------------------------------------

    def fork(self, sequence: KVSequence) -> BlockTable:
        """A second table over the blocks of the sequence (paper, Fig. 8)."""
        return sequence.table.fork()

    def free(self, sequences: Iterable[KVSequence]) -> None:
        """Give back all blocks of the sequences."""
        for sequence in sequences:
            sequence.table.free()
            sequence.table.pool = self.pool  # a swapped-out table was over host blocks
            sequence.num_computed_tokens = 0
            sequence.num_published_blocks = 0

    def publish(self, sequence: KVSequence, num_tokens: int) -> None:
        """Make the blocks findable that are full once `num_tokens` tokens are computed (by the step
        being planned)."""
        cache = self.prefix_cache
        stop = num_tokens // self.block_size
        if cache is None or stop <= sequence.num_published_blocks:
            return
        cache.extend_hashes(sequence.block_hashes, sequence.token_ids, sequence.cache_salt)
        size, token_ids = self.block_size, sequence.token_ids
        blocks, hashes = sequence.table.blocks, sequence.block_hashes
        for i in range(sequence.num_published_blocks, stop):
            cache.publish(blocks[i], hashes[i], token_ids[i * size : (i + 1) * size])
        sequence.num_published_blocks = stop

    def commit_published(self) -> None:
        """The planned step ran: its published blocks hold what they promise."""
        if self.prefix_cache is not None:
            self.prefix_cache.commit()

    def withdraw_published(self) -> None:
        """The planned step failed: nobody may find what it did not compute."""
        if self.prefix_cache is not None:
            self.prefix_cache.withdraw()

    # -- swapping -------------------------------------------------------------------------------

    def can_swap_out(self, sequences: Sequence[KVSequence]) -> bool:
        """Whether the group can move to the host: there is room, and it is not half recomputed.

        While a group is recomputed, a sequence counts blocks as computed that it shares with an
        earlier one and that this one has not filled yet; such a state cannot be cut off and moved.
        """
        if self.swap_space is None:
            return False
        if len(sequences) > 1 and any(len(s.token_ids) - s.num_computed_tokens > 1 for s in sequences):
            return False
        distinct = {
            block for s in sequences for block in s.table.blocks[: self.num_blocks_of(s.num_computed_tokens)]
        }
        return len(distinct) <= self.swap_space.allocator.num_free

    def swap_out(self, sequences: Sequence[KVSequence]) -> list[BlockCopy]:
        """Move the group's computed blocks to the host; blocks not computed yet are just freed."""
        assert self.swap_space is not None
        for sequence in sequences:
            sequence.table.truncate(sequence.num_computed_tokens)
        return self.swap_space.swap_out([sequence.table for sequence in sequences])

    def can_swap_in(self, sequences: Sequence[KVSequence]) -> bool:
        """Whether the group fits back, with a slot for every token it has."""
        moved = {block for s in sequences for block in s.table.blocks}
        return len(moved) + self.blocks_to_grow(sequences) <= self.pool.num_free

    def swap_in(self, sequences: Sequence[KVSequence]) -> list[BlockCopy]:
        """Move the group's blocks back to the device. `grow` then gives the missing slots."""
        assert self.swap_space is not None
        return self.swap_space.swap_in([sequence.table for sequence in sequences], self.pool)

    def _repr_html_(self) -> str:
        from minipaged.observability.drawing_pool import manager_svg

        return manager_svg(self)

    # -- checks ---------------------------------------------------------------------------------

    def check_invariants(self, sequences: Iterable[KVSequence]) -> None:
        """Raise AssertionError unless every block is accounted for.

        Args:
            sequences: all sequences that may hold blocks, swapped-out ones included.
        """
        device: list[int] = []
        host: list[int] = []
        writable: Counter[int] = Counter()
        for sequence in sequences:
            table = sequence.table
            assert sequence.num_computed_tokens <= len(sequence.token_ids)
            assert len(table.blocks) >= table.num_filled_blocks, "a token has no slot"
            if table.pool is self.pool:
                device += table.blocks
                # Between the plan and its commit the last block is being written by its one holder.
                writable.update(table.blocks[table.num_filled_blocks :])
            else:
                host += table.blocks
        checked = self.prefix_cache if self.prefix_cache is not None else self.allocator
        checked.check_invariants(device)
        assert self.num_free + self.num_used == self.allocator.num_blocks
        shared_spare = [block for block, n in writable.items() if n > 1]
        assert not shared_spare, f"spare blocks {shared_spare} belong to two tables"
        if self.swap_space is not None:
            self.swap_space.check_invariants(host)
            used = self.swap_space.allocator.num_blocks - self.swap_space.allocator.num_free
            assert used <= self.allocator.num_blocks
        else:
            assert not host
