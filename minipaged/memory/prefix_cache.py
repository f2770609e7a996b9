"""Full blocks found again by their content: a hash chain over an allocator (paper, section 4.4).

    H0 = hash(salt)   H1 = hash(H0, tokens of block 0)   H2 = hash(H1, tokens of block 1)   ...

A hash stands for a block *and everything before it*, so the longest cached prefix is found by walking
the chain until the first miss. A block that nobody holds stays idle with its content, in LRU order; it
is evicted when an allocation that will succeed needs it. Tables free their tail first, so a chain
loses its end before its head. The cache knows blocks and tokens; no requests, no tensors.

Published blocks are *pending* until their step is committed: they are computed by that very step, so
others admitted in it may attend to them, but nobody may copy from them yet.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from minipaged.memory.allocator import BlockAllocator, OutOfBlocksError
from minipaged.memory.block_index import BlockIndex
from minipaged.memory.lru import LRUList

HashFunction = Callable[[tuple[int, bytes]], int]


class PrefixCache:
    """A `BlockPool` that remembers what full blocks contain.

    Args:
        allocator: the pool underneath.
        block_size: tokens a block.
        hash_function: hashes (parent hash, tokens as int32 bytes) to 64 bits, signed; tests pass a weak
            one to force collisions.
    """

    def __init__(
        self, allocator: BlockAllocator, block_size: int, hash_function: HashFunction = hash
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.ref_count = allocator.ref_count  # how many tables hold a block; idle ones have none
        self._hash = hash_function
        self._index = BlockIndex(allocator.num_blocks)  # chain hash -> block
        # Block -> its tokens as bytes, or None if it is not published.
        self._content: list[bytes | None] = [None] * allocator.num_blocks
        self._idle = LRUList(allocator.num_blocks)
        self._pending: set[int] = set()

    # -- BlockPool ------------------------------------------------------------------------------

    def allocate(self, count: int = 1) -> list[int]:
        """Take free blocks, then the least recently used idle ones, whose content is forgotten.

        Raises:
            OutOfBlocksError: not enough even with eviction; nothing was evicted.
        """
        if count > self.num_free:
            raise OutOfBlocksError(
                f"{count} blocks wanted, {self.allocator.num_free} free and {len(self._idle)} idle "
                f"of {self.allocator.num_blocks}"
            )
        while self.allocator.num_free < count:
            block = self._idle.pop_oldest()
            self._forget(block)
            self.allocator.reclaim(block)
        return self.allocator.allocate(count)

    def share(self, block: int) -> None:
        """Add a reference; an idle block is in use again."""
        self._idle.discard(block)
        self.allocator.share(block)

    def free(self, block: int) -> None:
        """Drop a reference; the last one makes a published block idle and any other free."""
        if self.allocator.release(block):
            if self._content[block] is None:
                self.allocator.reclaim(block)
            else:
                self._idle.add(block)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out: free ones and idle ones."""
        return self.allocator.num_free + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Published blocks that nobody holds."""
        return len(self._idle)

    @property
    def num_published(self) -> int:
        """Blocks that can be found, idle or in use."""
        return len(self._index)

    # -- content --------------------------------------------------------------------------------

    def extend_hashes(self, hashes: list[int], token_ids: array[int], salt: str = "") -> None:
        """Append the chain hashes of the full blocks of `token_ids` that `hashes` does not have yet."""
        size = self.block_size
        start = len(hashes)
        stop = len(token_ids) // size
        if start >= stop:
            return
        parent = hashes[-1] if hashes else self._hash((0, salt.encode()))
        content = token_ids[start * size : stop * size].tobytes()
        width = size * token_ids.itemsize
        hash_function = self._hash
        for offset in range(0, len(content), width):
            parent = hash_function((parent, content[offset : offset + width]))
            hashes.append(parent)

    def match(self, hashes: Sequence[int], token_ids: array[int]) -> list[int]:
        """The blocks of the longest cached prefix. Valid until the next `allocate`.

        Args:
            hashes: chain hashes from `extend_hashes`.
            token_ids: the tokens they were made from; compared, so that a collision is a miss.
        """
        content = token_ids.tobytes()
        width = self.block_size * token_ids.itemsize
        find, known = self._index.find, self._content
        blocks: list[int] = []
        position = 0
        for chain_hash in hashes:
            block = find(chain_hash)
            if block is None:
                break
            if known[block] != content[position : position + width]:
                break
            blocks.append(block)
            position += width
        return blocks

    def publish(self, block: int, chain_hash: int, tokens: array[int]) -> None:
        """Make a full, held block findable. The first block of a content wins; it stays pending.

        Args:
            block: a block that some table holds and that the step being planned completes.
            chain_hash: its hash from `extend_hashes`.
            tokens: its `block_size` tokens.
        """
        if self._index.add(chain_hash, block):
            self._content[block] = tokens.tobytes()
            self._pending.add(block)

    def is_pending(self, block: int) -> bool:
        """Whether the block is being computed by the step that is planned, not by an earlier one."""
        return block in self._pending

    def commit(self) -> None:
        """The step ran: what it published is real."""
        self._pending.clear()

    def withdraw(self) -> None:
        """The step failed: forget what it published, so that nobody attends to garbage."""
        for block in list(self._pending):
            self._forget(block)
            if self._idle.discard(block):
                self.allocator.reclaim(block)

    def clear(self) -> None:
        """Forget every idle block (blocks in use stay findable)."""
        while self._idle:
            block = self._idle.pop_oldest()
            self._forget(block)
            self.allocator.reclaim(block)

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these distinct blocks are idle: sharing them uses up what `num_free` counts."""
        return sum(block in self._idle for block in blocks)

    def _forget(self, block: int) -> None:
        self._index.remove(block)
        self._content[block] = None
        self._pending.discard(block)

    def check_invariants(self, references: Iterable[int]) -> None:
        """Raise AssertionError unless index, LRU list and allocator agree; see the allocator's."""
        self.allocator.check_invariants(references)
        self._index.check_invariants()
        assert all((content is not None) == (b in self._index) for b, content in enumerate(self._content))
        assert len(self._idle) == self.allocator.num_idle
        for block in self._idle:
            assert self.allocator.ref_count(block) == 0, f"idle block {block} is held by a table"
            assert self._content[block] is not None, f"idle block {block} has no content"
