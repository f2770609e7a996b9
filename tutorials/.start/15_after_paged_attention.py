"""Lesson 15: what came after. Write the methods that raise; the lesson is in lesson.md.

Check with    minipaged learn check 15
Stuck?        minipaged learn hint 15

Given by the base class, the project's own table:

    self.blocks             list: logical block -> physical block
    self.num_tokens         tokens that have a slot
    self.block_size         tokens per block
    self.pool               share(block), free(block), ref_count(block)
    self.truncate(n)        keep the slots of the first n tokens, give all other blocks back
"""

from collections.abc import Sequence

from minipaged.memory import BlockTable as GivenBlockTable


class BlockTable(GivenBlockTable):
    """A block table that gives back blocks outside a sliding window, and slots of rejected draft tokens."""

    __slots__ = ()

    # -- task 1: sliding window -----------------------------------------------------------------

    def slide(self, window: int, null: int) -> int:
        """Give back every block that no future token can see; its entry becomes the block `null`.

        The next token is at position `num_tokens` and sees `window` positions, including its own; later
        tokens see none before those. A block with even one visible slot stays. The table keeps its length, so
        positions and slots of the other tokens do not change.

        Args:
            window: how many positions a token sees, at least 1.
            null: a block that is in use but that nobody reads. Each entry that points to it holds a
                reference, as with any other block.

        Returns:
            How many entries were replaced; those that are `null` already do not count.
        """
        raise NotImplementedError("Lesson 15, task 1: give back the blocks before the window")

    # -- task 2: speculative decoding -----------------------------------------------------------

    def settle(self, drafted: Sequence[int], chosen: Sequence[int]) -> list[int]:
        """Keep the accepted draft tokens, and give back the slots of the rest.

        The last `len(drafted)` tokens of this table are draft tokens. One step of the model has computed them
        and the token before them, so it has chosen one token more: `chosen[i]` is its choice in place of
        `drafted[i]`, given everything before; the last choice follows the whole draft.

        Draft tokens are accepted up to the first that the model would not have chosen. Those after it were
        computed after a wrong token. Blocks that held only rejected tokens go back to the pool; if the whole
        draft is accepted, no block does.

        Returns:
            The new tokens of the sequence: the accepted ones, then the model's own next token. (It has no
            slot yet: the next step computes it.)

        Raises:
            ValueError: `chosen` does not have exactly one token more than `drafted`, or the table has fewer
                tokens than the draft; nothing was changed.
        """
        raise NotImplementedError("Lesson 15, task 2: keep the accepted draft tokens")
