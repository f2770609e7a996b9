"""Lesson 02: the allocator, and copy-on-write. Write the methods that raise; the lesson is in lesson.md.

Check with    minipaged learn check 02
Stuck?        minipaged learn hint 02
"""

from collections.abc import Iterable

from minipaged.memory import BlockCopy, OutOfBlocksError
from minipaged.memory import BlockTable as GivenBlockTable


class BlockAllocator:
    """A pool of `num_blocks` block ids: free, used (reference count >= 1) or evictable (count 0, not free).

            allocate                 share +1 / release -1
      free ----------> used (1) <------------------------> used (2, 3, ...)
       ^                 |  ^
       | reclaim         v  | share
       +-------------- evictable (0)          free(block) = release + reclaim
    """

    def __init__(self, num_blocks: int, order: Iterable[int] | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs at least 1 block")
        ids = list(range(num_blocks)) if order is None else list(order)
        if len(set(ids)) != len(ids) or not set(ids) <= set(range(num_blocks)):
            raise ValueError(f"order {ids} must name each block of 0..{num_blocks - 1} at most once")
        ids += sorted(set(range(num_blocks)) - set(ids))
        self.num_blocks = num_blocks
        self._free = ids[::-1]  # a stack: pop() gives the block that was freed last, or the first of `order`
        self._is_free = [True] * num_blocks
        self._ref_count = [0] * num_blocks

    # -- task 1: hand out -----------------------------------------------------------------------

    def allocate(self, count: int = 1) -> list[int]:
        """Take `count` blocks off the free list, each with reference count 1.

        Raises:
            OutOfBlocksError: fewer than `count` blocks are free; nothing was taken.
        """
        raise NotImplementedError("Lesson 2, task 1: take blocks off the free list, all or none")

    def ref_count(self, block: int) -> int:
        """How many tables hold the block."""
        raise NotImplementedError("Lesson 2, task 1: how many tables hold the block")

    @property
    def num_free(self) -> int:
        """Blocks on the free list."""
        raise NotImplementedError("Lesson 2, task 1: how many blocks are on the free list")

    # -- task 2: count references ---------------------------------------------------------------

    def share(self, block: int) -> None:
        """Add a reference to a used block, or bring an evictable one back into use.

        Raises:
            ValueError: the block is free, so its content may already have been overwritten.
        """
        raise NotImplementedError("Lesson 2, task 2: one more table holds the block")

    def release(self, block: int) -> bool:
        """Drop one reference. True when it was the last: the block is now evictable, not yet free.

        Raises:
            ValueError: no reference is left to drop (a double free).
        """
        raise NotImplementedError("Lesson 2, task 2: one fewer table holds the block")

    def reclaim(self, block: int) -> None:
        """Put an evictable block back on the free list.

        Raises:
            ValueError: the block is used or already free.
        """
        raise NotImplementedError("Lesson 2, task 2: put an evictable block back on the free list")

    def free(self, block: int) -> None:
        """Drop one reference; the last one puts the block back on the free list."""
        raise NotImplementedError("Lesson 2, task 2: release and, after the last reference, reclaim")

    # -- given: for reports and tests -----------------------------------------------------------

    @property
    def num_evictable(self) -> int:
        """Blocks that nobody holds and that are not on the free list."""
        return self._ref_count.count(0) - len(self._free)

    def check_invariants(self, references: Iterable[int]) -> None:
        """Compare the counts with `references`, which lists each block id once per table entry that holds it."""
        held = [0] * self.num_blocks
        for block in references:
            held[block] += 1
        wrong = {b: (self._ref_count[b], n) for b, n in enumerate(held) if self._ref_count[b] != n}
        assert not wrong, f"reference counts differ from table entries, block: (count, entries) {wrong}"
        marked = [b for b, free in enumerate(self._is_free) if free]
        assert sorted(self._free) == marked, f"_free has {sorted(self._free)}, _is_free marks {marked}"
        assert not any(held[b] for b in self._free), "a block on the free list is held by a table"


class BlockTable(GivenBlockTable):
    """The block table of lesson 01, except that a block may belong to several tables.

    Inherited from the project's table, all as in lesson 01: `slot`, `slots`, `filled`, `num_filled_blocks`,
    `capacity`, `preallocate`, `truncate`, `free`. Also given: `share(blocks)`, which fills an empty table with
    full blocks and adds a reference to each, and `writes_to_shared_block()`, which says whether the next token
    goes to a block that another table also holds.

    `self.pool` may be another pool than yours (the prefix cache's, or a test's): call only its `allocate`,
    `share`, `free`, `ref_count` and `num_free`.
    """

    __slots__ = ()

    # -- task 3: fork ---------------------------------------------------------------------------

    def fork(self) -> "BlockTable":
        """A second table over the same filled blocks, each with one more reference; preallocated ones stay here."""
        raise NotImplementedError("Lesson 2, task 3: a second table over the same blocks")

    # -- task 4: copy-on-write ------------------------------------------------------------------

    def blocks_to_append(self, count: int = 1) -> int:
        """Blocks that `append(count)` will take from the pool, a copy-on-write included."""
        raise NotImplementedError(
            "Lesson 2, task 4: lesson 1's answer, plus 1 if count > 0 and the next token's block is shared"
        )

    def append(self, count: int = 1) -> BlockCopy | None:
        """Give the next `count` tokens a slot; take blocks when the last is full.

        Returns:
            BlockCopy(source, destination) if the block of the next token was shared: this table has replaced it
            with a fresh one (any of those taken), and the content must be copied there before the token is
            written.

        Raises:
            OutOfBlocksError: the pool cannot give the blocks; nothing was changed.
        """
        raise NotImplementedError("Lesson 2, task 4: append, and leave a shared block before writing to it")
