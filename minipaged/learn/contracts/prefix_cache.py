"""The contract of a prefix cache (paper, section 4.4)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from minipaged.learn.contracts.rules import Watcher, short
from minipaged.memory import CachedBlock, OutOfBlocksError
from minipaged.text_io import counted

Parent = CachedBlock | str  # the block before, or the salt


class PrefixCacheContract(Watcher):
    """A pool that remembers what full blocks contain, made by `cls(allocator, block_size)`.

    1. `allocate(n)` gives n distinct blocks that nobody holds, or raises `OutOfBlocksError`; then nothing
       was evicted. What it hands out is forgotten first.
    2. A hash depends on the block's tokens *and* on the hash before it; the salt starts the chain.
    3. `register` returns a `CachedBlock` with the hash, tokens and parent it was given.
    4. `match` returns blocks of an unbroken prefix, each registered under that hash with those very tokens
       after the same parent, and neither evicted nor rolled back since. It adds no reference.
    5. `roll_back` forgets what was registered since the last `commit`.
    6. `num_free` counts free and evictable blocks; both can be handed out.
    """

    def __init__(self, concept: str, make: Callable[..., Any], allocator: Any, block_size: int) -> None:
        super().__init__(concept, make, allocator, block_size)
        self.allocator = allocator
        self.block_size = block_size
        self._registered: dict[int, CachedBlock] = {}
        self._block_of: dict[int, int] = {}  # hash -> the block that was last registered under it
        self._since_commit: set[int] = set()
        self._chain: dict[int, tuple[object, bytes]] = {}  # hash -> the hash (or salt) before it, tokens

    def allocate(self, count: int = 1) -> list[int]:
        """Rule 1."""
        free = self.num_free
        try:
            blocks = self._call("allocate", count, may_raise=(OutOfBlocksError,))
        except OutOfBlocksError:
            message = f"allocate({count}) raised OutOfBlocksError"
            self.require(count > free, f"{message} though {free} blocks are free or evictable")
            self.require(self.num_free == free, f"{message} and left {self.num_free} of {free} blocks")
            raise
        what = f"allocate({count}) returned {short(blocks)}"
        self.require(isinstance(blocks, list), f"{what}; give a list of block ids")
        self.require(count <= free, f"{what} with {free} blocks free or evictable")
        distinct = len(blocks) == len(set(blocks)) == count
        self.require(distinct, f"{what}; each block may be handed out once")
        for block in blocks:
            references = self.allocator.ref_count(block)
            self.require(references == 1, f"{what}; block {block} has {counted(references, 'reference')}")
            self._registered.pop(block, None)
            self._since_commit.discard(block)
        now = self.num_free
        self.require(now == free - count, f"{what}; num_free went from {free} to {now}")
        return blocks

    def share(self, block: int) -> None:
        """One reference more."""
        self._count("share", block, 1)

    def free(self, block: int) -> None:
        """One reference less."""
        self._count("free", block, -1)

    def extend_hashes(self, hashes: list[int], token_ids: array[int], salt: str = "") -> None:
        """Rule 2."""
        before = list(hashes)
        self._call("extend_hashes", hashes, token_ids, salt)
        full = len(token_ids) // self.block_size
        message = f"extend_hashes turned {len(before)} hashes into {len(hashes)}; {len(token_ids)} tokens in"
        extended = hashes[: len(before)] == before and len(hashes) == max(full, len(before))
        fix = f"{message} blocks of {self.block_size} make {full}; append these, and leave those before them"
        self.require(extended, fix)
        shown = short(token_ids.tolist())
        for i in range(len(before), len(hashes)):
            tokens = token_ids[i * self.block_size : (i + 1) * self.block_size]
            link = (hashes[i - 1] if i else salt, tokens.tobytes())
            message = f"extend_hashes gives block {i} of {shown} a hash that another block"
            known = self._chain.setdefault(hashes[i], link)
            self.require(known == link, f"{message} has, or the same tokens after another prefix")

    def match(self, hashes: Sequence[int], token_ids: array[int], salt: str = "") -> list[int]:
        """Rule 4."""
        known = [self._block_of[h] for h in hashes if h in self._block_of]
        before = self._references(known)
        blocks = self._call("match", hashes, token_ids, salt)
        self.require(isinstance(blocks, list), f"match returned {short(blocks)}; give a list of block ids")
        now = self._references(known)
        message = f"match changed the references of blocks {short(known)} from {short(before)}"
        self.require(now == before, f"{message} to {short(now)}; it only looks")
        self.require(len(blocks) <= len(hashes), f"match found {len(blocks)} blocks of {len(hashes)}")
        parent: Parent = salt
        for i, block in enumerate(blocks):
            tokens = token_ids[i * self.block_size : (i + 1) * self.block_size]
            what = f"match returned block {block} for tokens {short(tokens.tolist())}"
            found = self._registered.get(block)
            if found is None:
                self.rules.fail(f"{what}, but the block is not registered (evicted or rolled back?)")
            same = _is(found, hashes[i], tokens, parent)
            self.require(same, f"{what}, but it was registered with other tokens, or after another prefix")
            parent = found
        return blocks

    def register(self, block: int, chain_hash: int, tokens: array[int], parent: Parent = "") -> CachedBlock:
        """Rule 3; of equal contents the first block wins, unless its parent is gone: no `match` finds it."""
        entry = self._call("register", block, chain_hash, tokens, parent)
        message = f"register({block}) returned {short(entry)}; give the CachedBlock of its hash, tokens"
        is_entry = isinstance(entry, CachedBlock) and _is(entry, chain_hash, tokens, parent)
        self.require(is_entry, f"{message} and parent")
        first = self._entry(chain_hash)
        above = None if first is None else first.parent
        is_lost = isinstance(above, CachedBlock) and self._entry(above.chain_hash) is not above
        if block not in self._registered and (first is None or (is_lost and entry is not first)):
            self._registered[block], self._block_of[chain_hash] = entry, block
            self._since_commit.add(block)
        return entry

    def _entry(self, chain_hash: int) -> CachedBlock | None:
        """What is registered under a hash."""
        found = self._registered.get(self._block_of.get(chain_hash, -1))
        return found if found is not None and found.chain_hash == chain_hash else None

    def is_pending(self, block: int) -> bool:
        """Whether the step being planned computes the block."""
        pending = self._call("is_pending", block)
        message = f"is_pending({block}) is {pending}; it is true of blocks registered since the last commit"
        self.require(bool(pending) == (block in self._since_commit), message)
        return pending

    def commit(self) -> None:
        """What was registered is real."""
        self._call("commit")
        self._since_commit.clear()

    def roll_back(self) -> None:
        """Rule 5."""
        self._call("roll_back")
        for block in self._since_commit:
            del self._registered[block]
        self._since_commit.clear()

    def clear(self) -> None:
        """Every evictable block is forgotten."""
        self._call("clear")
        self._registered = {b: e for b, e in self._registered.items() if self.allocator.ref_count(b)}

    def _references(self, blocks: list[int]) -> list[int]:
        return [self.allocator.ref_count(block) for block in blocks]

    def _count(self, name: str, block: int, change: int) -> None:
        before, free = self.allocator.ref_count(block), self.num_free
        self._call(name, block, may_raise=(ValueError,))
        now, free_now = self.allocator.ref_count(block), self.num_free
        what = f"{name}({block}) left block {block} with {counted(now, 'reference')}"
        self.require(now == before + change, what)
        grown = (now == 0) - (before == 0)
        message = f"{what}, but num_free went from {free} to {free_now}; it counts blocks without references"
        self.require(free_now == free + grown, message)


def _is(entry: CachedBlock, chain_hash: int, tokens: array[int], parent: Parent) -> bool:
    return (entry.chain_hash, entry.tokens, entry.parent) == (chain_hash, tokens.tobytes(), parent)
