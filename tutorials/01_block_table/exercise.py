"""Lesson 01: a block table. Write the methods that raise; the lesson is in lesson.md beside this file.

Check with    minipaged learn check 01
Stuck?        minipaged learn hint 01
"""

from minipaged.memory import BlockPool
from minipaged.memory import BlockTable as GivenBlockTable


class BlockTable(GivenBlockTable):
    """The block table of one sequence.

    Attributes:
        pool: hands out blocks (`pool.allocate(n)` returns n ids, `pool.free(block)` takes one back).
        block_size: tokens per block.
        blocks: physical block of each logical block; those past `num_tokens` are preallocated.
        num_tokens: tokens that have a slot.

    Sharing a block between two tables (`share`, `fork`) is given here; it is the subject of lesson 02. So are
    `use_slots`, an `append` that takes no block, and `move_to`, for a sequence whose blocks are swapped out.
    """

    __slots__ = ()

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        super().__init__(pool, block_size)  # an empty table: blocks = [], num_tokens = 0

    # -- task 1: where a token lives ------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Tokens that fit in the blocks the table holds."""
        raise NotImplementedError("Lesson 1, task 1: tokens that fit in self.blocks")

    @property
    def num_filled_blocks(self) -> int:
        """Blocks that hold at least one token."""
        raise NotImplementedError("Lesson 1, task 1: blocks that hold at least one of self.num_tokens")

    def filled(self, logical: int) -> int:
        """Filled slots of a logical block, 0 to block_size (the "# filled" column of Fig. 6)."""
        raise NotImplementedError("Lesson 1, task 1: filled slots of one logical block")

    def slot(self, position: int) -> int:
        """Where the token at `position` lives: physical block x block_size + offset."""
        raise NotImplementedError("Lesson 1, task 1: position -> slot")

    def slots(self, start: int, stop: int) -> list[int]:
        """Slots of the positions start <= p < stop."""
        raise NotImplementedError("Lesson 1, task 1: the slots of several positions")

    # -- task 2: room for the next tokens -------------------------------------------------------

    def blocks_to_append(self, count: int = 1) -> int:
        """Blocks that `append(count)` will take from the pool (preallocated ones first; nothing is shared yet)."""
        raise NotImplementedError("Lesson 1, task 2: how many blocks the next `count` tokens need")

    def append(self, count: int = 1) -> None:
        """Give the next `count` tokens a slot; take blocks from the pool when the last one is full.

        Preallocated blocks are filled before any new one is taken. `pool.allocate` raises OutOfBlocksError when it
        has too few; the table must then be unchanged.
        """
        raise NotImplementedError("Lesson 1, task 2: give the next `count` tokens a slot")

    def preallocate(self, count: int) -> None:
        """Take `count` more blocks now, for tokens to come."""
        raise NotImplementedError("Lesson 1, task 2: take preallocated blocks")

    # -- task 3: give back ----------------------------------------------------------------------

    def truncate(self, num_tokens: int) -> None:
        """Keep the slots of the first `num_tokens` tokens; give all other blocks back, the last first."""
        raise NotImplementedError("Lesson 1, task 3: give back what the first `num_tokens` tokens do not need")

    def free(self) -> None:
        """Give every block back, the last first; the table is then empty."""
        raise NotImplementedError("Lesson 1, task 3: give every block back")
