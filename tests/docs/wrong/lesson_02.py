"""Lesson 02, done wrong; `caught_by` names the test that must notice."""

from minipaged.memory import BlockAllocator, BlockTable


class TakesWhatItCanGet(BlockAllocator):
    """Hands out the blocks there are, and only then finds that they are too few."""

    caught_by = "test_an_allocation_that_cannot_be_met_takes_nothing"

    def allocate(self, count=1):
        return [super(TakesWhatItCanGet, self).allocate()[0] for _ in range(count)]


class DoesNotCountSharing(BlockAllocator):
    """One holder is as good as two."""

    caught_by = "test_a_shared_block_is_free_only_after_its_last_holder"

    def share(self, block):
        self._ref_count[block] = max(1, self._ref_count[block])


class FreesOnTheFirstRelease(BlockAllocator):
    """The block goes back while others still read it."""

    caught_by = "test_a_shared_block_is_free_only_after_its_last_holder"

    def free(self, block):
        self._ref_count[block] = 0
        self.reclaim(block)


class ForgivesADoubleFree(BlockAllocator):
    """A count below zero, and a block that is handed out twice."""

    caught_by = "test_a_double_free_raises_and_changes_nothing"

    def free(self, block):
        if self._ref_count[block]:
            super().free(block)


class SharesFreeBlocks(BlockAllocator):
    """A block that the next request will overwrite."""

    caught_by = "test_a_free_block_cannot_be_shared"

    def share(self, block):
        self._ref_count[block] += 1


class ForkDoesNotCount(BlockTable):
    """Missing incref: the parent's free takes the child's blocks away."""

    caught_by = "test_a_fork_holds_the_same_blocks_and_counts"

    def fork(self):
        child = BlockTable(self.pool, self.block_size)
        child.blocks, child.num_tokens = self.blocks[: self.num_filled_blocks], self.num_tokens
        return child


class WritesInPlace(BlockTable):
    """No copy-on-write: the second sample overwrites the first one's token."""

    caught_by = "test_figure_8_the_first_writer_copies_exactly_the_last_block"

    def _missing(self, count):
        return max(0, -(-(self.num_tokens + count) // self.block_size) - len(self.blocks))

    def blocks_to_append(self, count=1):
        return self._missing(count)

    def append(self, count=1):
        self.blocks += self.pool.allocate(self._missing(count))
        self.num_tokens += count


class CopiesForEveryWriter(BlockTable):
    """Missing decref: the block that was left keeps its count, and the last holder copies, too."""

    caught_by = "test_figure_8_the_second_writer_writes_in_place"

    def append(self, count=1):
        copy = super().append(count)
        if copy is not None:
            self.pool.share(copy.source)
        return copy


class CopiesFullBlocks(BlockTable):
    """Copies the shared last block although the next token goes to a new one."""

    caught_by = "test_a_full_last_block_is_never_copied"

    def append(self, count=1):
        if self.blocks and self.num_tokens % self.block_size == 0:
            last = len(self.blocks) - 1
            if self.pool.ref_count(self.blocks[last]) > 1:
                source, [fresh] = self.blocks[last], self.pool.allocate()
                self.pool.free(source)
                self.blocks[last] = fresh
                super().append(count)
                return (source, fresh)
        return super().append(count)
