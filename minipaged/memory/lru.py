"""An LRU order over block ids: a doubly linked list in two integer arrays, O(1) an operation.

             next ->
[end] <-> oldest <-> ... <-> newest <-> [end]         8 bytes a block, no object per entry
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator


class LRUList:
    """Ids 0..size-1, each at most once, ordered by when they were added."""

    def __init__(self, size: int) -> None:
        # Entry `size` is the end of the ring; an id that points to itself is not in the list.
        self._end = size
        self._next = array("i", range(size + 1))
        self._previous = array("i", range(size + 1))
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, item: int) -> bool:
        return self._next[item] != item

    def __iter__(self) -> Iterator[int]:
        """From the least to the most recently added."""
        item = self._next[self._end]
        while item != self._end:
            yield item
            item = self._next[item]

    def add(self, item: int) -> None:
        """Append as the newest. Raises ValueError if it is in the list."""
        if item in self:
            raise ValueError(f"{item} is in the list already")
        newest = self._previous[self._end]
        self._next[newest] = self._previous[self._end] = item
        self._previous[item], self._next[item] = newest, self._end
        self._length += 1

    def remove(self, item: int) -> None:
        """Take an id out. Raises ValueError if it is not in the list."""
        before, after = self._previous[item], self._next[item]
        if after == item:
            raise ValueError(f"{item} is not in the list")
        self._next[before], self._previous[after] = after, before
        self._next[item] = self._previous[item] = item
        self._length -= 1

    def pop_oldest(self) -> int:
        """Take the oldest id out and return it. Raises IndexError when the list is empty."""
        oldest = self._next[self._end]
        if oldest == self._end:
            raise IndexError("the list is empty")
        self.remove(oldest)
        return oldest
