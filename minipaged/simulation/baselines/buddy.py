"""A buddy allocator (Knuth, TAOCP 1, section 2.5): regions of 2^k slots, split and merged in halves.

    16 slots, allocate(3):    [........ ........]  ->  [....|....|........]
                                                        ^ 4 slots, of which 1 is never used

A request takes the next power of two; a region merges with its buddy (address XOR size) when both are
free. This causes two kinds of the waste in Fig. 2 of the paper: the rounding inside a region, and free slots
that would be enough together but are not contiguous.
"""

from minipaged.memory import OutOfBlocksError


class BuddyAllocator:
    """Contiguous regions of a pool of `num_blocks` slots, at least 1.

    A pool that is not a power of two is cut into the largest aligned regions, the largest first; these
    have no buddy and never merge with each other.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs at least 1 block")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._free: list[set[int]] = [set() for _ in range(num_blocks.bit_length())]  # by order: addresses
        self._order_of: dict[int, int] = {}  # allocated regions
        start = 0
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def can_allocate(self, sizes: list[int]) -> bool:
        """Whether regions of all these sizes can be allocated."""
        free = [len(regions) for regions in self._free]
        for order in sorted(map(order_of, sizes), reverse=True):
            # Splitting the smallest region that is large enough leaves one of each order below it.
            source = next((o for o in range(order, len(free)) if free[o]), None)
            if source is None:
                return False
            free[source] -= 1
            for o in range(order, source):
                free[o] += 1
        return True

    def allocate(self, size: int) -> int:
        """Take the smallest region that holds `size` slots; its address. `OutOfBlocksError` if none does."""
        order = order_of(size)
        source = next((o for o in range(order, len(self._free)) if self._free[o]), None)
        if source is None:
            raise OutOfBlocksError(
                f"no free region of {1 << order} slots; {self.num_free} slots are free in all"
            )
        start = min(self._free[source])
        self._free[source].remove(start)
        for o in range(source - 1, order - 1, -1):
            self._free[o].add(start + (1 << o))
        self._order_of[start] = order
        self.num_free -= 1 << order
        return start

    def free(self, start: int) -> None:
        """Free a region, and merge it with its buddy as long as that one is free, too."""
        if start not in self._order_of:
            raise ValueError(f"no region is allocated at {start}")
        order = self._order_of.pop(start)
        self.num_free += 1 << order
        while start ^ (1 << order) in self._free[order]:
            self._free[order].remove(start ^ (1 << order))
            start &= ~(1 << order)
            order += 1
        self._free[order].add(start)

    def regions(self) -> list[int]:
        """Addresses of the allocated regions."""
        return list(self._order_of)

    def check_invariants(self) -> None:
        """Raise AssertionError unless regions tile the pool and every free pair of buddies is merged."""
        spans = [(start, order) for order, starts in enumerate(self._free) for start in starts]
        for start, order in spans:
            assert start ^ (1 << order) not in self._free[order], f"{start} is free and so is its buddy"
        spans += self._order_of.items()
        end = 0
        for start, order in sorted(spans):
            assert start == end, f"slots {end}..{start - 1} are lost, or used twice"
            assert start % (1 << order) == 0, f"the region at {start} is not aligned"
            end = start + (1 << order)
        assert end == self.num_blocks
        assert self.num_free == sum(len(starts) << order for order, starts in enumerate(self._free))


def order_of(size: int) -> int:
    """The k of the smallest 2^k that holds `size` slots."""
    if size < 1:
        raise ValueError(f"size is {size}; a region has at least 1 slot")
    return (size - 1).bit_length()
