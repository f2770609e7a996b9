"""Logical blocks of a sequence -> physical blocks of the pool (paper, sections 4.2 to 4.4).

    logical    0            1            2 (preallocated)
             +------------+------------+------------+
    tokens   | Four score | years ago  |            |     block_size 4, num_tokens 7
             | and seven  | our  _     |            |
             +------------+------------+------------+
    physical   7            1            3

Blocks fill from left to right, so at most the last one is partly filled. Every decoding method needs only
`append`, `fork` and `free` (section 5.2). A block that two tables hold is copied by the first to write to it
(copy-on-write); since only the last block is ever written, at most one block is copied.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from minipaged.memory.allocator import BlockPool


class BlockCopy(NamedTuple):
    """Copy the content of one physical block to another, before the step computes anything."""

    source: int
    destination: int


class BlockTable:
    """The block table of one sequence. Other code may read its attributes; only its methods change them."""

    __slots__ = ("block_size", "blocks", "num_tokens", "pool")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block holds at least 1 token")
        self.pool = pool  # where the blocks come from: host blocks while the sequence is swapped out
        self.block_size = block_size
        self.blocks: list[int] = []  # physical block of each logical one; beyond `num_tokens`, preallocated
        self.num_tokens = 0  # tokens that have a slot

    @property
    def capacity(self) -> int:
        """Tokens that fit in the blocks the table holds."""
        return len(self.blocks) * self.block_size

    @property
    def num_filled_blocks(self) -> int:
        """Blocks that hold at least one token."""
        return -(-self.num_tokens // self.block_size)

    def filled(self, logical: int) -> int:
        """Filled slots of a logical block, 0 to block_size (the "# filled" column of Fig. 6)."""
        return max(0, min(self.block_size, self.num_tokens - logical * self.block_size))

    def slot(self, position: int) -> int:
        """Where the token at `position` lives: physical block x block_size + offset."""
        logical, offset = divmod(position, self.block_size)
        return self.blocks[logical] * self.block_size + offset

    def slots(self, start: int, stop: int) -> list[int]:
        """Slots of the positions start <= p < stop. (The batch builder computes the same, faster.)"""
        return [self.slot(position) for position in range(start, stop)]

    def writes_to_shared_block(self) -> bool:
        """Whether the next token goes to a block that another table also holds."""
        # At a block's start, the next token goes to a new or preallocated block, and those are never shared.
        count, size = self.num_tokens, self.block_size
        return count % size != 0 and self.pool.ref_count(self.blocks[count // size]) > 1

    def blocks_to_append(self, count: int = 1) -> int:
        """Blocks that `append(count)` will take from the pool, a copy-on-write included."""
        missing = -(-(self.num_tokens + count) // self.block_size) - len(self.blocks)
        return (missing if missing > 0 else 0) + (count > 0 and self.writes_to_shared_block())

    def append(self, count: int = 1) -> BlockCopy | None:
        """Give the next `count` tokens a slot; take blocks when the last is full. If the last was shared,
        returns the copy that must run before the tokens are written.

        Raises:
            OutOfBlocksError: the pool cannot give the blocks; nothing was changed.
        """
        needed = self.blocks_to_append(count)
        is_shared = count > 0 and self.writes_to_shared_block()
        fresh = self.pool.allocate(needed) if needed else []
        copy = None
        if is_shared:
            # Fig. 8: the first writer moves to a fresh block; the last holder left writes in place.
            last = self.num_tokens // self.block_size
            copy = BlockCopy(self.blocks[last], fresh.pop())
            self.pool.free(copy.source)
            self.blocks[last] = copy.destination
        self.blocks += fresh
        self.num_tokens += count
        return copy

    def use_slots(self, num_tokens: int) -> None:
        """`append` up to `num_tokens` where no block is missing or shared (`blocks_to_append` is 0)."""
        self.num_tokens = num_tokens

    def preallocate(self, count: int) -> None:
        """Take `count` blocks now, for future tokens."""
        self.blocks += self.pool.allocate(count)

    def share(self, blocks: list[int]) -> None:
        """Start an empty table with blocks in use or cached, all counted as full (`fork` corrects that)."""
        for block in blocks:
            self.pool.share(block)
            self.blocks.append(block)
        self.num_tokens = len(blocks) * self.block_size

    def fork(self) -> Self:
        """A second table over the same filled blocks; preallocated ones stay with this one."""
        child = type(self)(self.pool, self.block_size)
        child.share(self.blocks[: self.num_filled_blocks])
        child.num_tokens = self.num_tokens
        return child

    def move_to(self, pool: BlockPool, blocks: list[int]) -> None:
        """Free every block and continue on `blocks` of `pool`, which hold the same tokens."""
        num_tokens = self.num_tokens
        self.free()
        self.pool, self.blocks, self.num_tokens = pool, blocks, num_tokens

    def truncate(self, num_tokens: int) -> None:
        """Keep the slots of the first `num_tokens` tokens; free all other blocks, tail first."""
        self.num_tokens = num_tokens
        while len(self.blocks) > self.num_filled_blocks:
            self.pool.free(self.blocks[-1])
            del self.blocks[-1]  # (only now: if that fails, the table still holds the block)

    def free(self) -> None:
        """Free every block, tail first."""
        self.truncate(0)
