"""The contract of an allocator, and an allocator that is watched (paper, section 4.2).

A shadow count per block is kept beside the watched allocator; whatever it answers is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from minipaged.learn.contracts.rules import Rules
from minipaged.memory import OutOfBlocksError

CONCEPT = "allocator"


class Allocator(Protocol):
    """A pool of block ids 0..num_blocks - 1, made by `cls(num_blocks)`.

    1. A block is handed out once: never again before it is given back.
    2. `allocate(n)` gives n distinct blocks with one reference each, or raises `OutOfBlocksError` and
       takes none.
    3. `share` adds a reference, `release` drops one and says whether it was the last; a block without a
       reference can neither be released nor, once it is free, be shared: `ValueError`.
    4. `free` is release and, at the last reference, reclaim.
    5. `num_free` counts the blocks that `allocate` could hand out.
    """

    def allocate(self, count: int = 1) -> list[int]:
        """Take `count` blocks, each with one reference."""
        ...

    def share(self, block: int) -> None:
        """Add a reference to a block that is used or evictable."""
        ...

    def release(self, block: int) -> bool:
        """Drop a reference; True when it was the last (the block is evictable now, not yet free)."""
        ...

    def reclaim(self, block: int) -> None:
        """Put an evictable block back on the free list."""
        ...

    def free(self, block: int) -> None:
        """Drop a reference; the last one puts the block back on the free list."""
        ...

    def ref_count(self, block: int) -> int:
        """References of a block."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out."""
        ...


class WatchedAllocator:
    """An allocator whose every answer is compared with a shadow count."""

    def __init__(self, make: Callable[[int], Any], num_blocks: int) -> None:
        self.rules = Rules(CONCEPT)
        self.num_blocks = num_blocks
        self._inner = self.rules.call(make, num_blocks)
        self._count = [0] * num_blocks
        self._free = set(range(num_blocks))
        self._compare(f"a new pool of {num_blocks} blocks")

    def allocate(self, count: int = 1) -> list[int]:
        """See `Allocator`."""
        possible = count <= len(self._free)
        try:
            blocks = self.rules.call(self._inner.allocate, count, may_raise=OutOfBlocksError)
        except OutOfBlocksError:
            self.rules.require(
                not possible,
                f"allocate({count}) raised OutOfBlocksError though {len(self._free)} blocks are free",
            )
            self._compare(f"allocate({count}), which raised OutOfBlocksError and may take nothing")
            raise
        what = f"allocate({count}) returned {blocks}"
        self.rules.require(
            possible, f"{what} with {len(self._free)} blocks free; raise OutOfBlocksError and take none"
        )
        self.rules.require(
            isinstance(blocks, list) and len(blocks) == count, f"{what}; give a list of {count} block ids"
        )
        self.rules.require(
            all(isinstance(block, int) and 0 <= block < self.num_blocks for block in blocks),
            f"{what}; block ids are the integers 0 to {self.num_blocks - 1}",
        )
        self.rules.require(
            len(set(blocks)) == count and self._free.issuperset(blocks),
            f"{what}; each block may be handed out once"
            + "".join(f" (block {block} is in use)" for block in blocks if block not in self._free),
        )
        self._free.difference_update(blocks)
        for block in blocks:
            self._count[block] = 1
        self._compare(what, blocks)
        return blocks

    def share(self, block: int) -> None:
        """See `Allocator`."""
        self.rules.call(self._inner.share, block, may_raise=ValueError)
        self.rules.require(
            block not in self._free, f"share({block}) of a free block must raise ValueError: it is nobody's"
        )
        self._count[block] += 1
        self._compare(f"share({block})", [block])

    def release(self, block: int) -> bool:
        """See `Allocator`."""
        last = self.rules.call(self._inner.release, block, may_raise=ValueError)
        self._drop(block, f"release({block})")
        self.rules.require(
            bool(last) == (self._count[block] == 0),
            f"release({block}) returned {last}; the block has {self._count[block]} references left, "
            "and True means none",
        )
        self._compare(f"release({block})", [block])
        return bool(last)

    def reclaim(self, block: int) -> None:
        """See `Allocator`."""
        self.rules.call(self._inner.reclaim, block, may_raise=ValueError)
        evictable = not self._count[block] and block not in self._free
        self.rules.require(
            evictable, f"reclaim({block}) of a block that is not evictable must raise ValueError"
        )
        self._free.add(block)
        self._compare(f"reclaim({block})", [block])

    def free(self, block: int) -> None:
        """See `Allocator`."""
        self.rules.call(self._inner.free, block, may_raise=ValueError)
        self._drop(block, f"free({block})")
        if not self._count[block]:
            self._free.add(block)
        self._compare(f"free({block})", [block])

    def ref_count(self, block: int) -> int:
        """See `Allocator`."""
        count = self.rules.call(self._inner.ref_count, block)
        self.rules.require(
            count == self._count[block],
            f"ref_count({block}) is {count}; {self._count[block]} references were taken and not given back",
        )
        return count

    @property
    def num_free(self) -> int:
        """See `Allocator`."""
        self._compare("the calls so far")
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Blocks that nobody holds and that are not free."""
        return self._count.count(0) - len(self._free)

    def check_invariants(self, references: Iterable[int]) -> None:
        """Compare the counts with the table entries that hold each block."""
        held = [0] * self.num_blocks
        for block in references:
            held[block] += 1
        for block, count in enumerate(held):
            assert self.ref_count(block) == count, f"block {block}: {count} table entries hold it"

    def _drop(self, block: int, what: str) -> None:
        self.rules.require(
            self._count[block] > 0, f"{what} of a block without references must raise ValueError"
        )
        self._count[block] -= 1

    def _compare(self, after: str, blocks: Iterable[int] = ()) -> None:
        free = self.rules.call(lambda: self._inner.num_free)
        self.rules.require(
            free == len(self._free), f"num_free is {free} after {after}; {len(self._free)} blocks are free"
        )
        for block in blocks:
            self.ref_count(block)


def watch(part: Callable[[int], Any]) -> Callable[[int], WatchedAllocator]:
    """A maker of watched allocators."""
    return lambda num_blocks: WatchedAllocator(part, num_blocks)
