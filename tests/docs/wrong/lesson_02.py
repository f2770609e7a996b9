"""Lesson 02, done wrong; `caught_by` names the test that must notice, `task` the task whose tests must."""

from minipaged.memory import BlockAllocator, BlockCopy, BlockTable, OutOfBlocksError


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

    caught_by = "test_what_the_state_of_a_block_forbids_changes_nothing"
    says = "share of a block that is free must raise ValueError"

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


# -- from the exercise's text alone --------------------------------------------------------------------------


class FirstInFirstOut(BlockAllocator):
    """The free list is a queue: the block that was freed last is the last to be used again."""

    task = 2

    def reclaim(self, block):
        super().reclaim(block)
        self._free.insert(0, self._free.pop())


class KeepsTheLastBlock(BlockAllocator):
    """>= instead of >: the last block is never handed out."""

    task = 1

    def allocate(self, count=1):
        if count >= len(self._free) and count:
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} free")
        return super().allocate(count)


class LeavesTheFlag(BlockAllocator):
    """Takes a block off the list and leaves it marked as free."""

    task = 1

    def allocate(self, count=1):
        blocks = super().allocate(count)
        for block in blocks:
            self._is_free[block] = True
        return blocks


class CountsEvictableAsFree(BlockAllocator):
    """Everything without a holder counts as free."""

    task = 2

    @property
    def num_free(self):
        return self._ref_count.count(0)


class AlwaysTheLastHolder(BlockAllocator):
    """`release` says yes to everybody."""

    task = 2

    def release(self, block):
        super().release(block)
        return True


class ReleasesWithoutAWord(BlockAllocator):
    """`release` returns nothing, so that `free` never reclaims."""

    task = 2
    first_red = "test_release_reports_the_last_holder"

    def release(self, block):
        super().release(block)


class RefusesEvictableBlocks(BlockAllocator):
    """A prefix hit on a block without holders raises."""

    task = 2

    def share(self, block):
        if self._ref_count[block] == 0:
            raise ValueError(f"block {block} is not used")
        super().share(block)


class ReclaimsTwice(BlockAllocator):
    """Does not ask whether the block is on the free list already."""

    task = 2

    def reclaim(self, block):
        if self._ref_count[block]:
            raise ValueError(f"block {block} is used")
        self._is_free[block] = True
        self._free.append(block)


class ReclaimsWhatIsUsed(BlockAllocator):
    """Does not ask whether somebody holds it."""

    task = 2

    def reclaim(self, block):
        if self._is_free[block]:
            raise ValueError(f"block {block} is free")
        self._is_free[block] = True
        self._free.append(block)


class FreesWithoutReclaiming(BlockAllocator):
    """The block stays evictable, and there is nobody to evict it."""

    task = 2

    def free(self, block):
        self.release(block)


class AForkOfFullBlocks(BlockTable):
    """The number of tokens that `share` set stays: the child sees slots that nobody wrote."""

    task = 3

    def fork(self):
        child = type(self)(self.pool, self.block_size)
        child.share(self.blocks[: self.num_filled_blocks])
        return child


class ForksFullBlocksOnly(BlockTable):
    """The tokens in the partly filled block are gone."""

    task = 3

    def fork(self):
        child = type(self)(self.pool, self.block_size)
        child.share(self.blocks[: self.num_tokens // self.block_size])
        child.num_tokens = self.num_tokens
        return child


class CopiesForNoToken(BlockTable):
    """`append(0)` leaves a shared block although nothing is written."""

    task = 4

    def append(self, count=1):
        if count or not self.writes_to_shared_block():
            return super().append(count)
        last = self.num_tokens // self.block_size
        source, [fresh] = self.blocks[last], self.pool.allocate()
        self.pool.free(source)
        self.blocks[last] = fresh
        return BlockCopy(source, fresh)


class CopiesTheLastOfTheTable(BlockTable):
    """blocks[-1]: with preallocated blocks that is not where the next token goes."""

    task = 4

    def writes_to_shared_block(self):
        return self.num_tokens % self.block_size != 0 and self.pool.ref_count(self.blocks[-1]) > 1


class CopiesBackwards(BlockTable):
    """Destination and source exchanged: the fresh block's rubbish goes over the prompt."""

    task = 4

    def append(self, count=1):
        copy = super().append(count)
        return copy and BlockCopy(copy.destination, copy.source)


class TakesTheCopyLast(BlockTable):
    """Two calls of `allocate`: when the second fails, the first one's blocks are in the table."""

    task = 4

    def append(self, count=1):
        missing = max(0, -(-(self.num_tokens + count) // self.block_size) - len(self.blocks))
        is_shared = count > 0 and self.writes_to_shared_block()
        self.blocks += self.pool.allocate(missing)
        copy = None
        if is_shared:
            last = self.num_tokens // self.block_size
            copy = BlockCopy(self.blocks[last], self.pool.allocate()[0])
            self.pool.free(copy.source)
            self.blocks[last] = copy.destination
        self.num_tokens += count
        return copy


class PromisesWithoutTheCopy(BlockTable):
    """`blocks_to_append` forgets the copy that `append` takes."""

    task = 4

    def blocks_to_append(self, count=1):
        return max(0, -(-(self.num_tokens + count) // self.block_size) - len(self.blocks))

    def append(self, count=1):
        fresh = self.pool.allocate(
            self.blocks_to_append(count) + (count > 0 and self.writes_to_shared_block())
        )
        copy = None
        if count and self.writes_to_shared_block():
            last = self.num_tokens // self.block_size
            copy = BlockCopy(self.blocks[last], fresh.pop())
            self.pool.free(copy.source)
            self.blocks[last] = copy.destination
        self.blocks += fresh
        self.num_tokens += count
        return copy


class ForksOnePastAFullBlock(BlockTable):
    """n // size + 1 blocks: right unless the last one is full and another is preallocated."""

    caught_by = "test_a_fork_after_a_full_block_shares_no_preallocated_one"

    def fork(self):
        child = type(self)(self.pool, self.block_size)
        child.share(self.blocks[: self.num_tokens // self.block_size + 1])
        child.num_tokens = self.num_tokens
        return child


class ReleasesEvictableBlocks(BlockAllocator):
    """Refuses only what is on the free list: an evictable block has -1 references."""

    task = 2

    def release(self, block):
        if self._is_free[block]:
            raise ValueError(f"block {block} is free")
        self._ref_count[block] -= 1
        return self._ref_count[block] == 0


class CountsThenRefuses(BlockAllocator):
    """The reference is there before the error."""

    task = 2

    def share(self, block):
        self._ref_count[block] += 1
        if self._is_free[block]:
            raise ValueError(f"block {block} is free")


class SlicesFromTheEnd(BlockAllocator):
    """`[-0:]` is the whole list."""

    task = 1

    def allocate(self, count=1):
        if count > len(self._free):
            raise OutOfBlocksError("too few")
        blocks = list(self._free[-count:])[::-1]
        del self._free[-count:]
        for block in blocks:
            self._ref_count[block], self._is_free[block] = 1, False
        return blocks


class FreesEvictableBlocks(BlockAllocator):
    """`free` counts by itself: with no reference to drop, an evictable block goes to the free list."""

    task = 2

    def free(self, block):
        if self._ref_count[block]:
            self._ref_count[block] -= 1
        if not self._ref_count[block]:
            self.reclaim(block)


class PutsBackInDisorder(BlockAllocator):
    """Takes what there is, and puts it back the other way round when there is no more."""

    caught_by = "test_a_refused_allocation_leaves_the_order"

    def allocate(self, count=1):
        taken = []
        while len(taken) < count:
            if not self._free:
                self._free.extend(taken)
                raise OutOfBlocksError(f"{count} wanted, {len(taken)} free")
            taken.append(self._free.pop())
        for block in taken:
            self._ref_count[block], self._is_free[block] = 1, False
        return taken


class ReclaimsThenRefuses(BlockAllocator):
    """The used block is on the free list before the error."""

    caught_by = "test_what_the_state_of_a_block_forbids_changes_nothing"

    def reclaim(self, block):
        if self._is_free[block]:
            raise ValueError(f"block {block} is free")
        self._is_free[block] = True
        self._free.append(block)
        if self._ref_count[block]:
            raise ValueError(f"block {block} is used")


class AnEmptyTableIsItsOwnFork(BlockTable):
    """There is nothing to share yet, but the next token goes to both."""

    caught_by = "test_a_table_without_tokens_has_a_fork"

    def fork(self):
        return super().fork() if self.num_tokens else self


class ForksIntoTheGivenTable(BlockTable):
    """The child is the project's own table: what the student writes for task 4 never runs on a fork."""

    caught_by = "test_a_fork_holds_the_same_blocks_and_counts"

    def fork(self):
        child = BlockTable(self.pool, self.block_size)
        child.share(self.blocks[: self.num_filled_blocks])
        child.num_tokens = self.num_tokens
        return child


class CountsTheNewTokensOnly(BlockTable):
    """= instead of +=: right for the first append."""

    caught_by = "test_appended_tokens_are_added_to_those_there"

    def append(self, count=1):
        copy = super().append(count)
        self.num_tokens = count
        return copy


class ACopyIsNoToken(BlockTable):
    """Returns the copy before the token is counted."""

    task = 4

    def append(self, count=1):
        before = self.num_tokens
        copy = super().append(count)
        if copy:
            self.num_tokens = before
        return copy


class CopiesIfAnyBlockIsShared(BlockTable):
    """The blocks of the prompt stay shared: every token costs a copy."""

    caught_by = "test_after_its_copy_a_table_writes_in_place"

    def writes_to_shared_block(self):
        return self.num_tokens % self.block_size != 0 and self.pool.ref_count(self.blocks[0]) > 1
