"""Lesson 08: prefix caching. Write the methods that raise; the lesson is in lesson.md.

Check with    minipaged learn check 08
Stuck?        minipaged learn hint 08

Given by the base class:

    self.allocator          the allocator of lesson 02: allocate, release, reclaim, ref_count, num_free
    self.block_size         tokens a block
    self._hash((parent, tokens as bytes))     a number that stands for a block and all before it
    self._index             chain hash -> block: find(hash) gives the block or None; add(hash, block) answers
                            whether it was added: not if the hash is taken or the block has one
    self._content           list: block -> its tokens as bytes, or None if it is not published
    self._evictable              LRU list of evictable blocks: add, discard (was it there?), pop_oldest, `in`, len
    self._pending           set of blocks published by the step that is being planned
    self._forget(block)     the block can no longer be found (index, content and pending)
"""

from array import array
from collections.abc import Sequence

from minipaged.memory import OutOfBlocksError
from minipaged.memory import PrefixCache as GivenPrefixCache


class PrefixCache(GivenPrefixCache):
    """A pool of blocks that remembers what full blocks contain."""

    # -- task 1: a name for a prefix ------------------------------------------------------------

    def extend_hashes(self, hashes: list[int], token_ids: array, salt: str = "") -> None:
        """Append the chain hashes of the full blocks of `token_ids` that `hashes` does not have yet.

        The hash of a block is self._hash((hash of the block before, token_ids[...].tobytes())); before the
        first block stands self._hash((0, salt.encode())). A partly filled block has no hash.
        """
        raise NotImplementedError("Lesson 8, task 1: append the chain hashes of the full blocks")

    # -- task 2: publish ------------------------------------------------------------------------

    def register(self, block: int, chain_hash: int, tokens: array) -> None:
        """Make a full, held block findable. The first block of a content wins; it is pending until `commit`."""
        raise NotImplementedError("Lesson 8, task 2: make a full block findable")

    def roll_back(self) -> None:
        """The step failed: forget what it published; what nobody holds any more goes to the free list."""
        raise NotImplementedError("Lesson 8, task 2: forget what the failed step published")

    # -- task 3: find ---------------------------------------------------------------------------

    def match(self, hashes: Sequence[int], token_ids: array) -> list[int]:
        """The blocks of the longest cached prefix: walk the chain until the first miss.

        Compare the tokens, too: two contents may have one hash, and that is a miss.
        """
        raise NotImplementedError("Lesson 8, task 3: the blocks of the longest cached prefix")

    # -- task 4: keep and evict -----------------------------------------------------------------

    def free(self, block: int) -> None:
        """Drop a reference; the last one makes a published block evictable and any other free."""
        raise NotImplementedError("Lesson 8, task 4: evictable if published, else free")

    def allocate(self, count: int = 1) -> list[int]:
        """Take free blocks, then the least recently used evictable ones, whose content is forgotten.

        Raises:
            OutOfBlocksError: not enough even with eviction (self.num_free counts both); nothing was evicted.
        """
        raise NotImplementedError("Lesson 8, task 4: free blocks first, then evict the oldest evictable ones")
