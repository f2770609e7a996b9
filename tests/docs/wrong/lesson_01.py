"""Lesson 01, done wrong; `caught_by` names the test that must notice, `task` the task whose tests must."""

from minipaged.memory import BlockTable, OutOfBlocksError


class TakesABlockTooEarly(BlockTable):
    """n // size + 1 blocks instead of the ceiling: a new block as soon as the last is full."""

    caught_by = "test_figure_6_the_first_decode_writes_into_the_free_slot"

    def blocks_to_append(self, count=1):
        return max(0, (self.num_tokens + count) // self.block_size + 1 - len(self.blocks))

    def append(self, count=1):
        self.blocks += self.pool.allocate(self.blocks_to_append(count))
        self.num_tokens += count


class TellsWhatItTook(BlockTable):
    """`append` returns the new blocks."""

    caught_by = "test_append_returns_nothing"

    def append(self, count=1):
        held = len(self.blocks)
        super().append(count)
        return self.blocks[held:]


class DividesSlots(BlockTable):
    """A slot from a true division: 12.0."""

    caught_by = "test_the_slot_of_a_token_is_found_through_the_table"

    def slot(self, position):
        return super().slot(position) / 1


class CountsLogicalBlocks(BlockTable):
    """The slot without the table: right for the first request of a fresh pool, wrong for all others."""

    caught_by = "test_the_slot_of_a_token_is_found_through_the_table"

    def slot(self, position):
        return position


class RoundsDown(BlockTable):
    """Off by one at the block boundary."""

    caught_by = "test_a_full_block_is_one_block"

    @property
    def num_filled_blocks(self):
        return self.num_tokens // self.block_size


class CountsBeforeItHas(BlockTable):
    """The tokens are counted, then the pool says no."""

    caught_by = "test_an_append_that_fails_changes_nothing"

    def append(self, count=1):
        needed = self.blocks_to_append(count)
        self.num_tokens += count
        self.blocks += self.pool.allocate(needed)


class GivesBackTheHeadFirst(BlockTable):
    """A prefix cache would lose the beginning of a prefix before its end."""

    caught_by = "test_a_table_gives_its_tail_back_first"

    def truncate(self, num_tokens):
        keep = -(-num_tokens // self.block_size)
        for block in self.blocks[keep:]:
            self.pool.free(block)
        del self.blocks[keep:]
        self.num_tokens = num_tokens


class ForgetsToGiveBack(BlockTable):
    """Drops the ids, and nobody else knows them."""

    caught_by = "test_truncate_keeps_the_blocks_of_the_first_tokens"

    def truncate(self, num_tokens):
        del self.blocks[-(-num_tokens // self.block_size) :]
        self.num_tokens = num_tokens


class KeepsPreallocatedBlocks(BlockTable):
    """Gives blocks back only if tokens go."""

    caught_by = "test_preallocated_blocks_are_given_back_with_the_rest"

    def truncate(self, num_tokens):
        if num_tokens < self.num_tokens or not num_tokens:
            super().truncate(num_tokens)


# -- from the exercise's text alone --------------------------------------------------------------------------


class AFullLastBlockIsEmpty(BlockTable):
    """8 % 4 is 0: the last block loses its tokens when it is full."""

    task = 1

    def filled(self, logical):
        if logical == self.num_filled_blocks - 1:
            return self.num_tokens % self.block_size
        return self.block_size if logical < self.num_filled_blocks else 0


class FilledBelowZero(BlockTable):
    """A preallocated block has fewer than no tokens."""

    task = 1

    def filled(self, logical):
        return min(self.block_size, self.num_tokens - logical * self.block_size)


class CapacityOfTheTokens(BlockTable):
    """Counts the blocks that hold tokens; preallocated ones have room, too."""

    task = 1

    @property
    def capacity(self):
        return self.num_filled_blocks * self.block_size


class OneSlotTooMany(BlockTable):
    """Includes `stop`."""

    task = 1

    def slots(self, start, stop):
        return [self.slot(position) for position in range(start, min(stop + 1, self.capacity))]


class IgnoresPreallocatedBlocks(BlockTable):
    """Asks for new blocks while it has empty ones."""

    task = 2

    def blocks_to_append(self, count=1):
        return max(0, -(-(self.num_tokens + count) // self.block_size) - self.num_filled_blocks)

    def append(self, count=1):
        self.blocks += self.pool.allocate(self.blocks_to_append(count))
        self.num_tokens += count


class AsksForLessThanNothing(BlockTable):
    """With blocks to spare the answer is negative."""

    task = 2

    def blocks_to_append(self, count=1):
        return -(-(self.num_tokens + count) // self.block_size) - len(self.blocks)


class TakesBlocksOneByOne(BlockTable):
    """The first blocks are kept when the pool has no more."""

    task = 2

    def append(self, count=1):
        for _ in range(self.blocks_to_append(count)):
            self.blocks += self.pool.allocate(1)
        self.num_tokens += count


class PreallocatedTokensCount(BlockTable):
    """Room for tokens is taken for tokens."""

    task = 2

    def preallocate(self, count):
        self.blocks += self.pool.allocate(count)
        self.num_tokens += count * self.block_size


class PreallocatesOverTheOldBlocks(BlockTable):
    """= instead of +=: the blocks so far are lost."""

    task = 2

    def preallocate(self, count):
        self.blocks = self.pool.allocate(count)


class KeepsOneBlockMore(BlockTable):
    """n // size + 1: an empty block stays when the tokens end on a block's edge."""

    task = 3

    def truncate(self, num_tokens):
        keep = num_tokens // self.block_size + 1
        for block in reversed(self.blocks[keep:]):
            self.pool.free(block)
        del self.blocks[keep:]
        self.num_tokens = num_tokens


class CutsTheTokensOnly(BlockTable):
    """Gives the blocks back and goes on using them."""

    task = 3

    def truncate(self, num_tokens):
        for block in reversed(self.blocks[-(-num_tokens // self.block_size) :]):
            self.pool.free(block)
        self.num_tokens = num_tokens


class TheFreedTableHasTokens(BlockTable):
    """Empty of blocks, not of tokens."""

    task = 3

    def free(self):
        num_tokens = self.num_tokens
        super().free()
        self.num_tokens = num_tokens


class LooksUpTheFirstSlot(BlockTable):
    """`slots(start, start)` has a slot, or an index past the table."""

    caught_by = "test_no_positions_have_no_slots"

    def slots(self, start, stop):
        first = self.slot(start)
        return [first] + [self.slot(position) for position in range(start + 1, stop)]


class TopsUp(BlockTable):
    """Preallocates until there are `count` empty blocks instead of `count` more."""

    caught_by = "test_preallocating_twice_adds_up"

    def preallocate(self, count):
        self.blocks += self.pool.allocate(max(0, count - (len(self.blocks) - self.num_filled_blocks)))


class CountsBeforeItHasTheBlocks(BlockTable):
    """`num_tokens` grows first: an allocation that fails leaves tokens without a slot."""

    task = 2

    def append(self, count=1):
        needed = self.blocks_to_append(count)
        self.num_tokens += count
        self.blocks += self.pool.allocate(needed) if needed else []


class AlwaysKeepsABlock(BlockTable):
    """`truncate(0)` leaves the first block held; `free` is right."""

    task = 3

    def truncate(self, num_tokens):
        self.num_tokens = num_tokens
        while len(self.blocks) > max(1, self.num_filled_blocks):
            self.pool.free(self.blocks.pop())

    def free(self):
        self.truncate(0)
        while self.blocks:
            self.pool.free(self.blocks.pop())


class FreesTheFilledBlocks(BlockTable):
    """A table that ends keeps what it preallocated: a leak."""

    task = 3

    def free(self):
        while filled := self.num_filled_blocks:
            self.pool.free(self.blocks.pop(filled - 1))
            self.num_tokens = (filled - 1) * self.block_size


class TruncatesFromTheFront(BlockTable):
    """Of the blocks that go, the first goes first; `free` is right."""

    task = 3

    def truncate(self, num_tokens):
        self.num_tokens = num_tokens
        going = self.blocks[self.num_filled_blocks :]
        del self.blocks[self.num_filled_blocks :]
        for block in going:
            self.pool.free(block)

    def free(self):
        BlockTable.truncate(self, 0)


class SlotsOfTokensOnly(BlockTable):
    """The list ends with the last token, although the table has more slots."""

    task = 1

    def slots(self, start, stop):
        return super().slots(start, min(stop, self.num_tokens))


class PreallocatesOneByOne(BlockTable):
    """When the pool runs dry, the blocks taken before are kept."""

    task = 2

    def preallocate(self, count):
        for _ in range(count):
            self.blocks += self.pool.allocate()


class LosesAFullLastBlock(BlockTable):
    """Block by block, up to stop % size in the last: nothing when that block is full."""

    caught_by = "test_slots_end_with_a_full_block"

    def slots(self, start, stop):
        size, result = self.block_size, []
        for logical in range(start // size, -(-stop // size)):
            low = start % size if logical == start // size else 0
            high = stop % size if logical == (stop - 1) // size else size
            result += [self.blocks[logical] * size + offset for offset in range(low, high)]
        return result


class LooksOneAhead(BlockTable):
    """Right for chunks of slots that begin anywhere but in the last slot of a block."""

    caught_by = "test_slots_may_begin_with_the_last_of_a_block"

    def slots(self, start, stop):
        size, result = self.block_size, []
        while start < stop:
            end = min(stop, ((start + 1) // size + 1) * size)
            block = self.blocks[start // size]
            result += [block * size + position % size for position in range(start, end)]
            start = end
        return result


class ShiftsAndMasks(BlockTable):
    """A block size that is not a power of two has no such bits."""

    caught_by = "test_a_block_need_not_have_four_slots"

    def slot(self, position):
        bits = self.block_size.bit_length() - 1
        return (self.blocks[position >> bits] << bits) + (position & (self.block_size - 1))


class PreallocatesOneAtLeast(BlockTable):
    """0 more blocks are 1."""

    caught_by = "test_nothing_to_append_takes_no_block"

    def preallocate(self, count):
        super().preallocate(max(1, count))


class AFullTableNeedsABlock(BlockTable):
    """Whatever is appended, be it nothing."""

    task = 2

    def blocks_to_append(self, count=1):
        missing = self.num_tokens + count - self.capacity
        return 0 if missing < 0 else max(1, -(-missing // self.block_size)) if missing or not count else 0


class CleansUpWithTruncate(BlockTable):
    """Token by token; what was taken in vain goes back, and with it what was preallocated."""

    caught_by = "test_an_append_that_fails_keeps_the_preallocated_blocks"

    def append(self, count=1):
        before = self.num_tokens
        try:
            for _ in range(count):
                if self.num_tokens == self.capacity:
                    self.blocks += self.pool.allocate()
                self.num_tokens += 1
        except OutOfBlocksError:
            self.truncate(before)
            raise


class FreesIfThereAreTokens(BlockTable):
    """Without a token there seems to be nothing to free."""

    caught_by = "test_a_table_without_tokens_gives_its_blocks_back"

    def free(self):
        if self.num_tokens:
            super().free()


class TakesWhatItIsAskedFor(BlockTable):
    """`blocks_to_append` allocates: `append` works, but whoever only asks takes blocks."""

    caught_by = "test_asking_for_the_number_of_blocks_takes_none"

    def blocks_to_append(self, count=1):
        missing = super().blocks_to_append(count)
        self.blocks += self.pool.allocate(missing)
        return missing

    def append(self, count=1):
        self.blocks_to_append(count)
        self.num_tokens += count


class CutsFromTheEnd(BlockTable):
    """`[-0:]` is the whole list."""

    caught_by = "test_truncate_gives_nothing_back_when_all_is_needed"

    def truncate(self, num_tokens):
        going = len(self.blocks) - -(-num_tokens // self.block_size)
        for block in reversed(self.blocks[-going:]):
            self.pool.free(block)
        del self.blocks[-going:]
        self.num_tokens = num_tokens
