"""The contract of a prefix cache, and a cache that is watched (paper, section 4.4).

What was published under which hash is kept beside the watched cache, so that a block found with other
content than it was published with is noticed at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from minipaged.learn.contracts.rules import Rules, short
from minipaged.memory import OutOfBlocksError

CONCEPT = "prefix_cache"


class Cache(Protocol):
    """A pool that remembers what full blocks contain, made by `cls(allocator, block_size)`.

    1. `allocate(n)` gives n distinct blocks that nobody holds, or raises `OutOfBlocksError`; then nothing
       was evicted. What it hands out is forgotten first.
    2. A hash depends on the block's tokens *and* on the hash before it; the salt starts the chain.
    3. `match` returns blocks of an unbroken prefix, each published under that hash with those very tokens
       and neither evicted nor withdrawn since.
    4. `roll_back` forgets what was published since the last `commit`.
    5. `num_free` counts free and evictable blocks; both can be handed out.
    """

    def allocate(self, count: int = 1) -> list[int]:
        """Take free blocks, then the least recently used evictable ones."""
        ...

    def share(self, block: int) -> None:
        """Add a reference; an evictable block is in use again."""
        ...

    def free(self, block: int) -> None:
        """Drop a reference; the last one makes a published block evictable and any other free."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out."""
        ...

    def extend_hashes(self, hashes: list[int], token_ids: array[int], salt: str = "") -> None:
        """Append the chain hashes of the full blocks that `hashes` lacks."""
        ...

    def match(self, hashes: Sequence[int], token_ids: array[int]) -> list[int]:
        """Blocks of the longest cached prefix."""
        ...

    def register(self, block: int, chain_hash: int, tokens: array[int]) -> None:
        """Make a full, held block findable."""
        ...

    def is_pending(self, block: int) -> bool:
        """Whether the step being planned computes the block."""
        ...

    def commit(self) -> None:
        """What was published is real now."""
        ...

    def roll_back(self) -> None:
        """Forget what was published since the last commit."""
        ...


class WatchedCache:
    """A prefix cache whose every answer is compared with what was published."""

    def __init__(self, make: Callable[[Any, int], Any], allocator: Any, block_size: int) -> None:
        self.rules = Rules(CONCEPT)
        self.allocator = allocator
        self.block_size = block_size
        self._inner = self.rules.call(make, allocator, block_size)
        self._published: dict[int, tuple[int, bytes]] = {}  # block -> hash, tokens
        self._since_commit: set[int] = set()
        self._chain: dict[int, tuple[object, bytes]] = {}  # hash -> the hash (or salt) before it, tokens

    def allocate(self, count: int = 1) -> list[int]:
        """See `Cache`."""
        free = self.num_free
        try:
            blocks = self.rules.call(self._inner.allocate, count, may_raise=OutOfBlocksError)
        except OutOfBlocksError:
            self.rules.require(
                count > free,
                f"allocate({count}) raised OutOfBlocksError though {free} blocks are free or evictable",
            )
            self.rules.require(
                self.num_free == free,
                f"allocate({count}) raised OutOfBlocksError and left {self.num_free} of {free} blocks",
            )
            raise
        what = f"allocate({count}) returned {short(blocks)}"
        self.rules.require(count <= free, f"{what} with {free} blocks free or evictable")
        self.rules.require(
            len(blocks) == len(set(blocks)) == count, f"{what}; each block may be handed out once"
        )
        for block in blocks:
            references = self.allocator.ref_count(block)
            self.rules.require(references == 1, f"{what}; block {block} has {references} references")
            self._published.pop(block, None)
            self._since_commit.discard(block)
        self.rules.require(
            self.num_free == free - count, f"{what}; num_free went from {free} to {self.num_free}"
        )
        return blocks

    def share(self, block: int) -> None:
        """See `Cache`."""
        before = self.allocator.ref_count(block)
        self.rules.call(self._inner.share, block, may_raise=ValueError)
        self._expect(f"share({block})", block, before + 1)

    def free(self, block: int) -> None:
        """See `Cache`."""
        before = self.allocator.ref_count(block)
        self.rules.call(self._inner.free, block, may_raise=ValueError)
        self._expect(f"free({block})", block, before - 1)

    def ref_count(self, block: int) -> int:
        """See `Cache`."""
        return self.rules.call(self._inner.ref_count, block)

    @property
    def num_free(self) -> int:
        """See `Cache`."""
        return self.rules.call(lambda: self._inner.num_free)

    @property
    def num_evictable(self) -> int:
        """Blocks that nobody holds and that are not free."""
        return self.num_free - self.allocator.num_free

    @property
    def num_registered(self) -> int:
        """Blocks that can be found."""
        return self._inner.num_registered

    def extend_hashes(self, hashes: list[int], token_ids: array[int], salt: str = "") -> None:
        """See `Cache`."""
        before = list(hashes)
        self.rules.call(self._inner.extend_hashes, hashes, token_ids, salt)
        full = len(token_ids) // self.block_size
        self.rules.require(
            hashes[: len(before)] == before and len(hashes) == max(full, len(before)),
            f"extend_hashes turned {len(before)} hashes into {len(hashes)}; {len(token_ids)} tokens in "
            f"blocks of {self.block_size} make {full}",
        )
        for i in range(len(before), len(hashes)):
            tokens = token_ids[i * self.block_size : (i + 1) * self.block_size]
            link = (hashes[i - 1] if i else salt, tokens.tobytes())
            self.rules.require(
                self._chain.setdefault(hashes[i], link) == link,
                f"extend_hashes gives block {i} of {short(token_ids.tolist())} a hash that another block "
                "has, or the same tokens after another prefix",
            )

    def match(self, hashes: Sequence[int], token_ids: array[int]) -> list[int]:
        """See `Cache`."""
        blocks = self.rules.call(self._inner.match, hashes, token_ids)
        size = self.block_size
        for i, block in enumerate(blocks):
            tokens = token_ids[i * size : (i + 1) * size]
            found = self._published.get(block)
            what = f"match returned block {block} for tokens {short(tokens.tolist())}"
            self.rules.require(
                found is not None, f"{what}, but the block is not published (evicted or withdrawn?)"
            )
            self.rules.require(
                found is None or (i < len(hashes) and found == (hashes[i], tokens.tobytes())),
                f"{what}, but it was published with other tokens, or after another prefix",
            )
        return blocks

    def register(self, block: int, chain_hash: int, tokens: array[int]) -> None:
        """See `Cache`."""
        self.rules.call(self._inner.register, block, chain_hash, tokens)
        known = {found for found, _ in self._published.values()}
        if chain_hash not in known and block not in self._published:  # the first block of a content wins
            self._published[block] = (chain_hash, tokens.tobytes())
            self._since_commit.add(block)

    def is_pending(self, block: int) -> bool:
        """See `Cache`."""
        pending = self.rules.call(self._inner.is_pending, block)
        self.rules.require(
            bool(pending) == (block in self._since_commit),
            f"is_pending({block}) is {pending}; it is true of blocks published since the last commit",
        )
        return pending

    def commit(self) -> None:
        """See `Cache`."""
        self.rules.call(self._inner.commit)
        self._since_commit.clear()

    def roll_back(self) -> None:
        """See `Cache`."""
        self.rules.call(self._inner.roll_back)
        for block in self._since_commit:
            del self._published[block]
        self._since_commit.clear()

    def clear(self) -> None:
        """Forget every evictable block."""
        self._inner.clear()
        self._published = {b: found for b, found in self._published.items() if self.ref_count(b)}

    def count_evictable(self, blocks: Iterable[int]) -> int:
        """How many of these distinct blocks are evictable: published, and held by nobody."""
        return sum(block in self._published and not self.allocator.ref_count(block) for block in blocks)

    def check_invariants(self, references: Iterable[int]) -> None:
        """Compare the counts with the table entries that hold each block."""
        self.allocator.check_invariants(references)
        evictable = sum(not self.allocator.ref_count(block) for block in self._published)
        assert self.num_evictable == evictable, (
            f"{self.num_evictable} blocks are evictable, {evictable} are published and not held"
        )

    def _expect(self, what: str, block: int, references: int) -> None:
        now = self.allocator.ref_count(block)
        self.rules.require(now == references, f"{what} left block {block} with {now} references")


def watch(part: Callable[[Any, int], Any]) -> Callable[[Any, int], WatchedCache]:
    """A maker of watched caches."""
    return lambda allocator, block_size: WatchedCache(part, allocator, block_size)
