"""The contract of an allocator (paper, section 4.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from minipaged.learn.contracts.rules import ContractError, Watcher, error_text
from minipaged.memory import OutOfBlocksError
from minipaged.text_io import counted


class AllocatorContract(Watcher):
    """A pool of block ids 0..num_blocks - 1, made by `cls(num_blocks)`. A count per block is kept beside it.

    1. A block is handed out once: never again before it is given back.
    2. `allocate(n)` gives n distinct blocks with one reference each, or raises `OutOfBlocksError` and
       takes none.
    3. `share` adds a reference, `release` drops one and returns whether it was the last; a block without a
       reference can neither be released nor, once it is free, be shared: `ValueError`.
    4. `free` is release and, at the last reference, reclaim.
    5. `num_free` counts the blocks that `allocate` could hand out.
    """

    def __init__(self, concept: str, make: Callable[[int], Any], num_blocks: int) -> None:
        super().__init__(concept, make, num_blocks)
        self.num_blocks = num_blocks
        self._count: Counter[int] = Counter()  # 0 for unknown blocks, too
        self._free = set(range(num_blocks))
        self._compare(f"a new pool of {num_blocks} blocks")

    def allocate(self, count: int = 1) -> list[int]:
        """Rules 1 and 2."""
        possible = count <= len(self._free)
        try:
            blocks = self._call("allocate", count, may_raise=(OutOfBlocksError,))
        except OutOfBlocksError:
            message = f"allocate({count}) raised OutOfBlocksError though {len(self._free)} blocks are free"
            self.require(not possible, message)
            self._compare(f"allocate({count}), which raised OutOfBlocksError and may take nothing")
            raise
        what = f"allocate({count}) returned {blocks}"
        message = f"{what} with {len(self._free)} blocks free; raise OutOfBlocksError and take none"
        self.require(possible, message)
        is_list = isinstance(blocks, list) and len(blocks) == count
        self.require(is_list, f"{what}; give a list of {count} block ids")
        are_ids = all(isinstance(block, int) and 0 <= block < self.num_blocks for block in blocks)
        self.require(are_ids, f"{what}; block ids are the integers 0 to {self.num_blocks - 1}")
        used = "".join(f" (block {block} is in use)" for block in blocks if block not in self._free)
        once = len(set(blocks)) == count and not used
        self.require(once, f"{what}; each block may be handed out once{used}")
        self._free.difference_update(blocks)
        for block in blocks:
            self._count[block] = 1
        self._compare(what, *blocks)
        return blocks

    def share(self, block: int) -> None:
        """Rule 3."""
        self._change("share", block, block not in self._free)
        message = f"share({block}) of a free block must raise ValueError: it is nobody's"
        self.require(block not in self._free, message)
        self._count[block] += 1
        self._compare(f"share({block})", block)

    def release(self, block: int) -> bool:
        """Rule 3."""
        last = self._change("release", block, self._count[block] > 0)
        self._drop(block, f"release({block})")
        left = counted(self._count[block], "reference")
        message = f"release({block}) returned {last}; the block has {left} left, and True means none"
        self.require(bool(last) == (not self._count[block]), message)
        self._compare(f"release({block})", block)
        return bool(last)

    def reclaim(self, block: int) -> None:
        """Only an evictable block: neither used nor free."""
        evictable = not self._count[block] and block not in self._free
        self._change("reclaim", block, evictable)
        self.require(evictable, f"reclaim({block}) of a block that is not evictable must raise ValueError")
        self._free.add(block)
        self._compare(f"reclaim({block})", block)

    def free(self, block: int) -> None:
        """Rule 4."""
        self._change("free", block, self._count[block] > 0)
        self._drop(block, f"free({block})")
        if not self._count[block]:
            self._free.add(block)
        self._compare(f"free({block})", block)

    def ref_count(self, block: int) -> int:
        """References that were taken and not given back."""
        count, taken = self._call("ref_count", block), self._count[block]
        message = f"ref_count({block}) is {count}; its holders have {counted(taken, 'reference')}"
        self.require(count == taken, message)
        return count

    @property
    def num_free(self) -> int:
        """Rule 5."""
        self._compare("the calls so far")
        return len(self._free)

    def _change(self, name: str, block: int, allowed: bool) -> Any:
        """Call a method, which may refuse only what is not allowed, and unknown blocks."""
        try:
            return self._call(name, block, may_raise=(ValueError,))
        except ContractError:
            raise
        except ValueError as error:
            state = counted(self._count[block], "reference") + " and is not free" * (not self._count[block])
            message = f"{name}({block}) raised {error_text(error)}; the block has {state}"
            self.require(not allowed or block not in range(self.num_blocks), message)
            raise

    def _drop(self, block: int, what: str) -> None:
        self.require(self._count[block] > 0, f"{what} of a block without references must raise ValueError")
        self._count[block] -= 1

    def _compare(self, after: str, *blocks: int) -> None:
        free = self.rules.call(getattr, self._inner, "num_free")
        message = f"num_free is {free} after {after}; {len(self._free)} blocks are free"
        self.require(free == len(self._free), message)
        for block in blocks:
            self.ref_count(block)
