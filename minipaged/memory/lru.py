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
        # Entry `size` is the end of the ring; an id whose next is itself is not in the list.
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
        following, preceding, end = self._next, self._previous, self._end
        if following[item] != item:
            raise ValueError(f"{item} is in the list already")
        newest = preceding[end]
        following[newest] = preceding[end] = item
        preceding[item], following[item] = newest, end
        self._length += 1

    def discard(self, item: int) -> bool:
        """Take an id out, if it is in the list. Returns whether it was."""
        following = self._next
        after = following[item]
        if after == item:
            return False
        before = self._previous[item]
        following[before], self._previous[after] = after, before
        following[item] = item
        self._length -= 1
        return True

    def pop_oldest(self) -> int:
        """Take the oldest id out and return it. Raises IndexError when the list is empty."""
        oldest = self._next[self._end]
        if not self.discard(oldest):
            raise IndexError("the list is empty")
        return oldest
