"""Lesson 15, done wrong; `caught_by` names the test that must notice, `task` the task whose tests must."""

from minipaged.memory import BlockTable


class Worked(BlockTable):
    """Both methods done right, to be spoilt one at a time."""

    __slots__ = ()

    def slide(self, window, null):
        replaced = 0
        for logical in range(self.num_hidden(window)):
            block = self.blocks[logical]
            if block != null:
                self.pool.share(null)
                self.pool.free(block)
                self.blocks[logical] = null
                replaced += 1
        return replaced

    def num_hidden(self, window):
        return max(0, self.num_tokens + 1 - window) // self.block_size

    def settle(self, drafted, chosen):
        if len(chosen) != len(drafted) + 1 or len(drafted) > self.num_tokens:
            raise ValueError("lengths")
        kept = self.num_kept(drafted, chosen)
        if kept < len(drafted):
            self.truncate(self.num_tokens - len(drafted) + kept)
        return list(chosen[: kept + 1])

    def num_kept(self, drafted, chosen):
        kept = 0
        while kept < len(drafted) and drafted[kept] == chosen[kept]:
            kept += 1
        return kept


class ForgetsTheNextTokensOwnPosition(Worked):
    """The window of the last token, not of the next: a block stays for one token too long."""

    task = 1

    def num_hidden(self, window):
        return max(0, self.num_tokens - window) // self.block_size


class RoundsUp(Worked):
    """A block that is still half visible goes, too."""

    task = 1

    def num_hidden(self, window):
        return min(len(self.blocks), -(-max(0, self.num_tokens + 1 - window) // self.block_size))


class CountsBlocksBehindTheWindow(Worked):
    """All but the blocks that a window fills: wrong unless the window begins at a block's first slot."""

    task = 1

    def num_hidden(self, window):
        return max(0, len(self.blocks) - -(-window // self.block_size))


class PointsWithoutAReference(Worked):
    """An entry that holds no reference: the end of the table frees the null block once too often."""

    task = 1

    def slide(self, window, null):
        replaced = 0
        for logical in range(self.num_hidden(window)):
            if self.blocks[logical] != null:
                self.pool.free(self.blocks[logical])
                self.blocks[logical] = null
                replaced += 1
        return replaced


class CutsTheTable(Worked):
    """The entries go: every later position is a block off."""

    task = 1

    def slide(self, window, null):
        hidden = self.blocks[: self.num_hidden(window)]
        for block in hidden:
            self.pool.free(block)
        del self.blocks[: len(hidden)]
        return len(hidden)


class CountsTheOldOnes(Worked):
    """Answers how many entries are null by now, not how many became so."""

    task = 1

    def slide(self, window, null):
        super().slide(window, null)
        return self.num_hidden(window)


class OneACall(Worked):
    """Only the block that left the window last: a prompt leaves many at once."""

    task = 1

    def slide(self, window, null):
        last = self.num_hidden(window) - 1
        if last < 0 or self.blocks[last] == null:
            return 0
        self.pool.share(null)
        self.pool.free(self.blocks[last])
        self.blocks[last] = null
        return 1


class SparesSharedBlocks(Worked):
    """A block that another table holds, too, is kept: the reference stays until the end."""

    task = 1

    def slide(self, window, null):
        replaced = 0
        for logical in range(self.num_hidden(window)):
            block = self.blocks[logical]
            if block != null and self.pool.ref_count(block) == 1:
                self.pool.share(null)
                self.pool.free(block)
                self.blocks[logical] = null
                replaced += 1
        return replaced


class KeepsEveryMatch(Worked):
    """Counts the positions that agree, also those after a wrong token."""

    task = 2

    def num_kept(self, drafted, chosen):
        return sum(a == b for a, b in zip(drafted, chosen))


class ComparesOneOff(Worked):
    """Compares with the model's choice after the drafted token."""

    task = 2

    def num_kept(self, drafted, chosen):
        return super().num_kept(drafted, chosen[1:])


class WithoutTheModelsToken(Worked):
    """The model's own next token is dropped: a draft that fails yields nothing."""

    task = 2

    def settle(self, drafted, chosen):
        return super().settle(drafted, chosen)[:-1]


class ReturnsTheRejectedToken(Worked):
    """The drafted token in place of the model's."""

    task = 2

    def settle(self, drafted, chosen):
        tokens = super().settle(drafted, chosen)
        return [*tokens[:-1], (*drafted, tokens[-1])[len(tokens) - 1]]


class KeepsASlotForTheNextToken(Worked):
    """One slot too many, with the keys of a rejected token in it."""

    task = 2

    def settle(self, drafted, chosen):
        before = self.num_tokens
        tokens = super().settle(drafted, chosen)
        if self.num_tokens < before:
            self.append()
        return tokens


class KeepsTheBlocks(Worked):
    """Counts back and leaves the blocks with the table."""

    task = 2

    def truncate(self, num_tokens):
        if num_tokens:
            self.num_tokens = num_tokens
        else:
            super().truncate(0)


class GivesBackWhatWasPreallocated(Worked):
    """Truncates even if the whole draft is kept."""

    task = 2

    def settle(self, drafted, chosen):
        tokens = super().settle(drafted, chosen)
        self.truncate(self.num_tokens)
        return tokens


class ChecksNothing(Worked):
    """A choice too few is taken as it is."""

    task = 2

    def settle(self, drafted, chosen):
        drafted = drafted[: max(0, len(chosen) - 1)]
        return super().settle(drafted, chosen)


class ChecksTooLate(Worked):
    """The table is cut before the lengths are compared."""

    task = 2

    def settle(self, drafted, chosen):
        kept = self.num_kept(drafted, [*chosen, *drafted])
        self.truncate(max(0, self.num_tokens - len(drafted) + kept))
        if len(chosen) != len(drafted) + 1 or len(drafted) > self.num_tokens + len(drafted) - kept:
            raise ValueError("lengths")
        return list(chosen[: kept + 1])


class OnlyTheFirst(Worked):
    """Keeps one drafted token at most."""

    task = 2

    def num_kept(self, drafted, chosen):
        return min(1, super().num_kept(drafted, chosen))


class RefusesTheWholeTable(Worked):
    """A draft that is all of the table is refused as one that is longer."""

    caught_by = "test_a_draft_may_be_all_of_the_table"

    def settle(self, drafted, chosen):
        if len(drafted) >= self.num_tokens:
            raise ValueError("the draft is longer than the table")
        return super().settle(drafted, chosen)


class LeavesTheLastBlock(Worked):
    """The last block stays, also when no later token sees it."""

    task = 1

    def num_hidden(self, window):
        return min(super().num_hidden(window), len(self.blocks) - 1)


class AllowsANegativePosition(Worked):
    """`blocks[:-1]` is all but the last: a window longer than the text hides most of it."""

    task = 1

    def num_hidden(self, window):
        return len(self.blocks[: (self.num_tokens + 1 - window) // self.block_size])


class TheWindowOfTheCapacity(Worked):
    """Preallocated slots count as tokens: the window is behind the text."""

    task = 1

    def num_hidden(self, window):
        return max(0, self.capacity + 1 - window) // self.block_size


class OneReferenceACall(Worked):
    """Takes one reference of the null block for all entries that a call replaces."""

    caught_by = "test_each_null_entry_holds_a_reference"

    def slide(self, window, null):
        replaced = 0
        for logical in range(self.num_hidden(window)):
            block = self.blocks[logical]
            if block != null:
                if not replaced:
                    self.pool.share(null)
                self.pool.free(block)
                self.blocks[logical] = null
                replaced += 1
        return replaced


class WaitsForMoreThanAWindow(Worked):
    """As long as the text is no longer than the window; but the next token takes a place in it."""

    caught_by = "test_a_full_window_has_lost_a_block_of_one_token"

    def slide(self, window, null):
        return 0 if self.num_tokens <= window else super().slide(window, null)


class BlocksFromTheEnd(Worked):
    """Keeps what a window may touch, counted from the end: a block too many unless the last one is full."""

    caught_by = "test_any_length_and_window_hide_what_is_before_the_window"

    def num_hidden(self, window):
        return max(0, self.num_tokens // self.block_size - -(-(window - 1) // self.block_size))


class FromPositionOne(Worked):
    """The first visible position is 1 at least: with blocks of one token, the first is always hidden."""

    task = 1

    def num_hidden(self, window):
        return min(len(self.blocks), max(1, self.num_tokens + 1 - window) // self.block_size)


class NullBySize(Worked):
    """Only block 0 is smaller than all others."""

    caught_by = "test_the_null_block_may_be_any_block"

    def slide(self, window, null):
        replaced = 0
        for logical in range(self.num_hidden(window)):
            if self.blocks[logical] > null:
                self.pool.share(null)
                self.pool.free(self.blocks[logical])
                self.blocks[logical] = null
                replaced += 1
        return replaced


class NullByIdentity(Worked):
    """`is not` for numbers."""

    task = 1

    def slide(self, window, null):
        replaced = 0
        for logical in range(self.num_hidden(window)):
            if self.blocks[logical] is not null:
                self.pool.share(null)
                self.pool.free(self.blocks[logical])
                self.blocks[logical] = null
                replaced += 1
        return replaced


class LooksUpTheWrongToken(Worked):
    """`index` finds the first token of that value, which may be right."""

    caught_by = "test_a_token_may_be_drafted_twice"

    def num_kept(self, drafted, chosen):
        wrong = [token for token, own in zip(drafted, chosen) if token != own]
        return drafted.index(wrong[0]) if wrong else len(drafted)


class TokensByIdentity(Worked):
    """`is` for numbers."""

    task = 2

    def num_kept(self, drafted, chosen):
        kept = 0
        while kept < len(drafted) and drafted[kept] is chosen[kept]:
            kept += 1
        return kept


class PartOfTheChoices(Worked):
    """A slice of the choices is what they are: a list, or something else."""

    caught_by = "test_a_draft_may_be_long_and_any_sequence"

    def settle(self, drafted, chosen):
        return chosen[: len(super().settle(drafted, chosen))]
