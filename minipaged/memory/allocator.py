"""Who holds which KV block: a reference-counted free list of block ids (paper, sections 4.2 and 4.4).

A block is **free** (on the free list), **used** (held by one or more block tables; the reference count says
by how many) or **evictable** (held by no table, but kept for the prefix cache).

        allocate                 share +1 / release -1
  free ----------> used (1) <------------------------> used (2, 3, ...)
   ^                 |  ^
   | reclaim         v  | share
   +----------- evictable (0)        free(block) = release + reclaim
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Protocol


class OutOfBlocksError(RuntimeError):
    """More blocks were requested than are available; nothing was changed."""


class BlockPool(Protocol):
    """What a `BlockTable` takes its blocks from: an allocator, or the prefix cache over one."""

    def allocate(self, count: int = 1) -> list[int]:
        """Take `count` blocks, each with one reference, or raise `OutOfBlocksError` and take none."""
        ...

    def share(self, block: int) -> None:
        """Add a reference to a used or evictable block; a free block raises `ValueError`."""
        ...

    def free(self, block: int) -> None:
        """Drop one reference; the last returns the block to the pool. A double free raises `ValueError`."""
        ...

    def ref_count(self, block: int) -> int:
        """How many references the block has."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now."""
        ...


class BlockAllocator:
    """A pool of `num_blocks` block ids. Every operation is O(1) per block.

    Args:
        num_blocks: size of the pool, at least 1.
        order: ids in the order in which a fresh pool hands them out (default 0, 1, 2, ...).

    Raises:
        ValueError: `num_blocks` below 1, or `order` with an unknown or repeated id.
    """

    def __init__(self, num_blocks: int, order: Iterable[int] | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs at least 1 block")
        ids = list(range(num_blocks)) if order is None else list(order)
        if len(set(ids)) != len(ids) or not set(ids) <= set(range(num_blocks)):
            raise ValueError(f"order {ids} must name each block of 0..{num_blocks - 1} at most once")
        ids += sorted(set(range(num_blocks)) - set(ids))
        self.num_blocks = num_blocks
        # A stack: the block freed last is handed out first, while it is still warm in the caches.
        self._free = array("i", reversed(ids))
        self._is_free = bytearray(b"\x01") * num_blocks
        self._ref_count = array("i", [0]) * num_blocks

    def allocate(self, count: int = 1) -> list[int]:
        """Take `count` blocks off the free list, each with reference count 1; see `BlockPool`."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._ref_count[block] = 1
            self._is_free[block] = False
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to a used block, or bring an evictable one back into use; see `BlockPool`."""
        if self._is_free[block]:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._ref_count[block] += 1

    def release(self, block: int) -> bool:
        """Drop one reference. True if it was the last: the block is now evictable, not yet free. Raises
        ValueError if no reference is left to drop (a double free)."""
        if self._ref_count[block] == 0:
            raise ValueError(f"block {block} is freed twice: it has no reference left")
        self._ref_count[block] -= 1
        return self._ref_count[block] == 0

    def reclaim(self, block: int) -> None:
        """Put an evictable block back on the free list. Raises ValueError if it is used or free."""
        if self._ref_count[block] or self._is_free[block]:
            state = "free" if self._is_free[block] else f"used {self._ref_count[block]} times"
            raise ValueError(f"block {block} is {state}; only an evictable block can be reclaimed")
        self._is_free[block] = True
        self._free.append(block)

    def free(self, block: int) -> None:
        """Drop one reference; the last one puts the block back on the free list."""
        if self.release(block):
            self.reclaim(block)

    def ref_count(self, block: int) -> int:
        """How many tables hold the block."""
        return self._ref_count[block]

    @property
    def num_free(self) -> int:
        """Blocks on the free list."""
        return len(self._free)

    def check_invariants(self, references: Iterable[int]) -> None:
        """Raise AssertionError unless counts and free list agree with `references`: every block id once for
        each table entry that holds it."""
        held = [0] * self.num_blocks
        for block in references:
            held[block] += 1
        wrong = {b: (self._ref_count[b], n) for b, n in enumerate(held) if self._ref_count[b] != n}
        assert not wrong, f"reference counts differ from table entries, block: (count, entries) {wrong}"
        marked = [b for b, free in enumerate(self._is_free) if free]
        assert sorted(self._free) == marked, f"free list {self._free}, but marked as free are {marked}"
        assert not any(held[b] for b in self._free), "a block on the free list is held by a table"
