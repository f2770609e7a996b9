"""Where swapped-out blocks live: host memory with its own allocator (paper, section 4.5).

The blocks of all tables of a request move together. A block that several of them hold moves once and
is shared on the other side as it was here:

    device  A: 7 1     B: 7 3           host  A: 0 1     B: 0 2       three copies, not four

The host pool never has more blocks than the device pool. The executor does the copying.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minipaged.memory.allocator import BlockAllocator, BlockPool
from minipaged.memory.block_table import BlockCopy, BlockTable


class SwapSpace:
    """A bounded pool of host blocks.

    Args:
        num_blocks: host blocks.
        num_device_blocks: size of the device pool; the bound.

    Raises:
        ValueError: more host than device blocks.
    """

    def __init__(self, num_blocks: int, num_device_blocks: int) -> None:
        if num_blocks > num_device_blocks:
            raise ValueError(
                f"a swap space of {num_blocks} blocks exceeds the {num_device_blocks} device blocks; "
                "give at most as many"
            )
        self.allocator = BlockAllocator(num_blocks)

    def swap_out(self, tables: Sequence[BlockTable]) -> list[BlockCopy]:
        """Move the tables to host blocks and give their device blocks back.

        Returns:
            Copies (device block, host block) that must run before anyone writes the device blocks.

        Raises:
            OutOfBlocksError: the host pool is too full; nothing changed.
        """
        return _move(tables, self.allocator)

    def swap_in(self, tables: Sequence[BlockTable], pool: BlockPool) -> list[BlockCopy]:
        """Move the tables back to device blocks of `pool`.

        Returns:
            Copies (host block, device block) that must run before anyone reads the device blocks.
        """
        return _move(tables, pool)

    def check_invariants(self, references: Iterable[int]) -> None:
        """Raise AssertionError unless the host counts match the entries of swapped-out tables."""
        self.allocator.check_invariants(references)


def _move(tables: Sequence[BlockTable], pool: BlockPool) -> list[BlockCopy]:
    distinct = list(dict.fromkeys(block for table in tables for block in table.blocks))
    moved = dict(zip(distinct, pool.allocate(len(distinct))))
    placed: set[int] = set()
    for table in tables:
        blocks = [moved[block] for block in table.blocks]
        for block in blocks:
            if block in placed:
                pool.share(block)
            placed.add(block)
        table.move_to(pool, blocks)
    return [BlockCopy(source, destination) for source, destination in moved.items()]
