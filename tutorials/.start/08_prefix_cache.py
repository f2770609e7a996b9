"""Lesson 08: prefix caching. Write the methods that raise; the lesson is in lesson.md.

Check with    minipaged learn check 08
Stuck?        minipaged learn hint 08

Given by the base class:

    self.allocator          the allocator of lesson 02: allocate, release (True if it was the last reference),
                            reclaim, ref_count, num_free
    self.block_size         tokens per block
    self._hash((parent, tokens as bytes))     a hash of a block and everything before it
    CachedBlock(chain_hash, tokens, parent)   what a registered block contains: its hash, its tokens as bytes, and
                            the CachedBlock before it (before the first: the salt)
    self.block_of          dict: chain hash -> block
    self.cached            list: block -> its CachedBlock, or None if it is not registered
    self.pending           set of blocks registered by the step that is being planned
    self.evictable         OrderedDict whose keys are the evictable blocks, the least recently used first
    self.forget(block)     make a block impossible to find (it is removed from all of these except `evictable`)
    self.count_evictable(blocks)    how many of some blocks are evictable
"""

from array import array
from collections.abc import Sequence

from minipaged.memory import CachedBlock, OutOfBlocksError
from minipaged.memory import KVManager as GivenKVManager
from minipaged.memory import PrefixCache as GivenPrefixCache


class PrefixCache(GivenPrefixCache):
    """A pool of blocks that remembers what full blocks contain."""

    # -- task 1: a name for a prefix ------------------------------------------------------------

    def extend_hashes(self, hashes: list[int], token_ids: array, salt: str = "") -> None:
        """Append the chain hashes of the full blocks of `token_ids` that `hashes` does not have yet.

        The hash of a block is self._hash((hash of the block before, token_ids[...].tobytes())); the first
        block follows self._hash((0, salt.encode())). A partly filled block has no hash.
        """
        raise NotImplementedError("Lesson 8, task 1: append the chain hashes of the full blocks")

    # -- task 2: register -----------------------------------------------------------------------

    def register(
        self, block: int, chain_hash: int, tokens: array, parent: "CachedBlock | str" = ""
    ) -> CachedBlock:
        """Make a full, held block findable; it is pending until `commit`.

        If several blocks have the same hash, only the first is registered.

        Args:
            block: a block that some table holds.
            chain_hash: its hash from `extend_hashes`.
            tokens: its `block_size` tokens.
            parent: what `register` returned for the block before it; the salt for the first.

        Returns:
            The entry that stands for these tokens after this parent: the existing one if there is one (so
            that equal prefixes have the same parents), else a new one.
        """
        raise NotImplementedError("Lesson 8, task 2: make a full block findable")

    def roll_back(self) -> None:
        """The step failed: forget what it registered; blocks that nobody holds any more go to the free list."""
        raise NotImplementedError("Lesson 8, task 2: forget what the failed step registered")

    # -- task 3: find ---------------------------------------------------------------------------

    def match(self, hashes: Sequence[int], token_ids: array, salt: str = "") -> list[int]:
        """The blocks of the longest cached prefix: walk the chain until the first miss.

        Different contents may have the same hash, and that is a miss: compare the tokens, and compare the
        parent with the entry of the block before (for the first block, with the salt). Looking changes nothing,
        not even the order of `evictable`.
        """
        raise NotImplementedError("Lesson 8, task 3: the blocks of the longest cached prefix")

    # -- task 4: keep and evict -----------------------------------------------------------------

    def free(self, block: int) -> None:
        """Drop a reference; the last one makes a registered block evictable and any other free."""
        raise NotImplementedError("Lesson 8, task 4: evictable if registered, else free")

    def allocate(self, count: int = 1) -> list[int]:
        """Take free blocks, then the least recently used evictable ones, whose content is forgotten.

        Raises:
            OutOfBlocksError: not enough even with eviction (self.num_free counts both); nothing was evicted.
        """
        raise NotImplementedError("Lesson 8, task 4: free blocks first, then evict the oldest evictable ones")


class KVManager(GivenKVManager):
    """Decides whether a waiting request gets blocks. Everything but the cost of an admission is given.

    `self.prefix_cache` is the cache, or None if there is none.
    """

    # -- task 5: a scheduler that knows about the cache -----------------------------------------

    def admission_charge(self, cached: set[int], num_tokens: int, num_cached: int) -> tuple[int, int]:
        """The cost of an admission, besides the blocks for what is not cached.

        Args:
            cached: the cached blocks that the request will share.
            num_tokens: the tokens of its prompt.
            num_cached: how many of them need not be computed.

        Returns:
            (blocks, tokens): how many fewer blocks can be allocated once `cached` is shared (a block that
            somebody already holds costs nothing; an evictable one can no longer be evicted), and how many
            tokens of the step's budget the admission takes.
        """
        raise NotImplementedError("Lesson 8, task 5: charge only what is not cached")
