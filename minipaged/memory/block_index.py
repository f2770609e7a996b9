"""Chain hash -> block: a hash table in two integer arrays that never grows.

    bucket 0 -> block 7 -> block 2 -> bucket 0        a ring per bucket: the blocks whose hash
    bucket 1 -> bucket 1                              leaves this remainder
    bucket 2 -> block 5 -> bucket 2

It takes 16 bytes a block, full or empty. A dictionary takes more than 100: key and value are objects, and
its table doubles. Knows block ids and hashes; no tokens.
"""

from __future__ import annotations

from array import array


class BlockIndex:
    """Blocks 0..size-1, each with at most one hash.

    Args:
        size: how many blocks there are; there is a bucket for each.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # What follows in the ring: first the entries of the blocks, then those of the buckets. A block that
        # points to itself has no hash; a bucket that points to itself is empty.
        self._next = array("i", range(2 * size))
        self._hashes = array("q", [0]) * size  # valid for the blocks that are in a ring
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: int) -> bool:
        """Whether the block has a hash."""
        return self._next[block] != block

    def find(self, chain_hash: int) -> int | None:
        """The block with this hash, or None."""
        bucket = self._size + chain_hash % self._size
        block = self._next[bucket]
        while block != bucket:
            if self._hashes[block] == chain_hash:
                return block
            block = self._next[block]
        return None

    def add(self, chain_hash: int, block: int) -> bool:
        """Give a block this hash (64 bits, signed), unless it has one or another block has this one.

        Returns:
            Whether it got the hash; if not, nothing was changed.
        """
        following, hashes = self._next, self._hashes
        if following[block] != block:
            return False
        bucket = self._size + chain_hash % self._size
        first = other = following[bucket]
        while other != bucket:
            if hashes[other] == chain_hash:
                return False
            other = following[other]
        hashes[block] = chain_hash
        following[bucket], following[block] = block, first
        self._length += 1
        return True

    def remove(self, block: int) -> None:
        """Take the hash of a block away. Raises ValueError if it has none."""
        following = self._next
        after = following[block]
        if after == block:
            raise ValueError(f"block {block} has no hash")
        before = self._size + self._hashes[block] % self._size
        while following[before] != block:
            before = following[before]
        following[before], following[block] = after, block
        self._length -= 1

    def check_invariants(self) -> None:
        """Raise AssertionError unless each block with a hash is in the ring of its bucket, once."""
        found = []
        for bucket in range(self._size):
            block = self._next[self._size + bucket]
            while block != self._size + bucket:
                assert self._hashes[block] % self._size == bucket, f"block {block} is in a wrong ring"
                found.append(block)
                assert len(found) <= self._length, f"ring {bucket} does not come back to its bucket"
                block = self._next[block]
        assert sorted(found) == [block for block in range(self._size) if block in self]
        assert len(found) == self._length
