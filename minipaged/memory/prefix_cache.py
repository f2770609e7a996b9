"""Full blocks found again by content: a hash chain (vLLM's; section 4.4 of the paper has fixed prefixes).

    H0 = hash(salt)   H1 = hash(H0, tokens of block 0)   H2 = hash(H1, tokens of block 1)   ...

A hash covers a block *and everything before it*, so the longest cached prefix is found by walking the chain
until the first miss. A block that no table holds keeps its content and is evictable, in LRU order, until an
allocation that will succeed needs it. Tables free their tail first, so a chain loses its end before its head.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from minipaged.memory.allocator import BlockAllocator, OutOfBlocksError

HashFunction = Callable[[tuple[int, bytes]], int]


@dataclass(slots=True, eq=False, repr=False)
class CachedBlock:
    """What a registered block contains. Compared by identity."""

    chain_hash: int
    tokens: bytes  # int32
    parent: CachedBlock | str  # the cached block before it; the salt for the first
    is_findable: bool = False  # registered, and not forgotten since


class PrefixCache:
    """A `BlockPool` that remembers what full blocks contain.

    Args:
        allocator: the pool underneath.
        block_size: tokens per block.
        hash_function: hashes (parent hash, tokens as int32 bytes); tests pass a weak one to force collisions.
    """

    def __init__(
        self, allocator: BlockAllocator, block_size: int, hash_function: HashFunction = hash
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.ref_count = allocator.ref_count  # evictable blocks have none
        self._hash = hash_function
        self.block_of: dict[int, int] = {}  # chain hash -> block
        self.cached: list[CachedBlock | None] = [None] * allocator.num_blocks
        self.evictable: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self.pending: set[int] = set()

    def allocate(self, count: int = 1) -> list[int]:
        """Take free blocks, then evict the least recently used evictable ones. Raises OutOfBlocksError if
        there are too few; then nothing was evicted."""
        missing = count - self.allocator.num_free
        if missing > len(self.evictable):
            state = f"{self.allocator.num_free} free and {len(self.evictable)} evictable"
            raise OutOfBlocksError(f"{count} blocks wanted, {state} of {self.allocator.num_blocks}")
        for _ in range(missing):
            self._evict(next(iter(self.evictable)))
        return self.allocator.allocate(count)

    def share(self, block: int) -> None:
        """Add a reference; an evictable block is in use again."""
        self.evictable.pop(block, None)
        self.allocator.share(block)

    def free(self, block: int) -> None:
        """Drop a reference; the last one makes a registered block evictable, any other free."""
        if self.allocator.release(block):
            if self.cached[block] is None:
                self.allocator.reclaim(block)
            else:
                self.evictable[block] = None

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out: free and evictable ones."""
        return self.allocator.num_free + len(self.evictable)

    def count_evictable(self, blocks: Iterable[int]) -> int:
        """How many of these distinct blocks are evictable: sharing them lowers `num_free`."""
        return sum(block in self.evictable for block in blocks)

    def extend_hashes(self, hashes: list[int], token_ids: array[int], salt: str = "") -> None:
        """Append the chain hashes of the full blocks of `token_ids` that `hashes` does not have yet."""
        width = self.block_size * token_ids.itemsize
        start, stop = len(hashes) * self.block_size, len(token_ids) - len(token_ids) % self.block_size
        parent = hashes[-1] if hashes else self._hash((0, salt.encode()))
        content = token_ids[start:stop].tobytes()
        for offset in range(0, len(content), width):
            parent = self._hash((parent, content[offset : offset + width]))
            hashes.append(parent)

    def match(self, hashes: Sequence[int], token_ids: array[int], salt: str = "") -> list[int]:
        """The blocks of the longest cached prefix of `token_ids`; `hashes` are its chain hashes. Valid
        until the next `allocate`. Tokens and parents are compared: a hash collision is a miss."""
        content = token_ids.tobytes()
        width = self.block_size * token_ids.itemsize
        parent: CachedBlock | str = salt
        blocks: list[int] = []
        for i, chain_hash in enumerate(hashes):
            block = self.block_of.get(chain_hash)
            if block is None:
                break
            cached = self.cached[block]
            assert cached is not None
            if cached.tokens != content[i * width : (i + 1) * width] or cached.parent != parent:
                break
            blocks.append(block)
            parent = cached
        return blocks

    def register(
        self, block: int, chain_hash: int, tokens: array[int], parent: CachedBlock | str = ""
    ) -> CachedBlock:
        """Make a full block findable. If two blocks have the same content, the first is kept.

        The block is *pending* until the step is committed: the step being planned computes it, so others
        admitted in that step may attend to it, but must not copy from it yet.

        Args:
            block: held by some table.
            chain_hash: its hash from `extend_hashes`.
            tokens: its `block_size` tokens.
            parent: what `register` returned for the block before it; the salt for the first.

        Returns:
            The entry for this content.
        """
        entry = CachedBlock(chain_hash, tokens.tobytes(), parent)
        if (holder := self.block_of.get(chain_hash)) is not None:
            known = self.cached[holder]
            assert known is not None
            if known.tokens == entry.tokens and known.parent == parent:
                return known
            if isinstance(known.parent, str) or known.parent.is_findable:
                return entry  # a hash collision: this block is not found, nor is what follows it
            self._evict(holder)  # (nobody finds it any more: `match` stops at its missing parent)
        self.block_of[chain_hash] = block
        self.cached[block] = entry
        entry.is_findable = True
        self.pending.add(block)
        return entry

    def entry_of(self, block: int) -> CachedBlock | None:
        """What a block contains, if it is registered."""
        return self.cached[block]

    def is_pending(self, block: int) -> bool:
        """Whether the block is computed by the step being planned, not by an earlier one."""
        return block in self.pending

    def commit(self) -> None:
        """The step ran: the blocks it registered are now computed."""
        self.pending.clear()

    def roll_back(self) -> None:
        """The step failed: forget what it registered, so that no request attends to garbage."""
        for block in list(self.pending):
            self._evict(block)

    def clear(self) -> None:
        """Forget every evictable block (blocks in use stay findable)."""
        while self.evictable:
            self._evict(next(iter(self.evictable)))

    def _evict(self, block: int) -> None:
        self.forget(block)
        if block in self.evictable:  # (else a table holds it)
            del self.evictable[block]
            self.allocator.reclaim(block)

    def forget(self, block: int) -> None:
        """Make a registered block unfindable."""
        cached, self.cached[block] = self.cached[block], None
        assert cached is not None, f"block {block} is not registered"
        cached.is_findable = False
        del self.block_of[cached.chain_hash]
        self.pending.discard(block)

    def check_invariants(self, references: Iterable[int]) -> None:
        """Raise AssertionError unless index, LRU order and allocator agree; see the allocator's."""
        references = list(references)
        self.allocator.check_invariants(references)
        used = set(references)
        cached = {b: content.chain_hash for b, content in enumerate(self.cached) if content is not None}
        findable = {block: chain_hash for chain_hash, block in self.block_of.items()}
        assert cached == findable, "`cached` and `block_of` differ"
        assert set(self.evictable) == set(cached) - used, "evictable: cached and held by nobody"
        known = self.allocator.num_free + len(self.evictable) + len(used)
        total = self.allocator.num_blocks
        assert known == total, f"{known} blocks of {total} are free, evictable or held by a table"
