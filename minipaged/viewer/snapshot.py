"""The contents of the memory at one moment, as plain data: every table, every block, and its holders.

    look(scheduler) -> PoolView          what all pictures are drawn from; a trace gives the same

A block is free, used (held by one or more tables) or evictable (held by none, kept for the prefix cache).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from minipaged.memory import KVManager
from minipaged.scheduling import FCFSScheduler
from minipaged.text_io import counted


class TableView(NamedTuple):
    """One block table."""

    request: str  # its id
    position: int  # place among the live sequences of the request
    on_host: bool = False  # the request is swapped out: the blocks are host blocks
    blocks: tuple[int, ...] = ()  # physical block of each logical block
    num_tokens: int = 0  # that have a slot
    num_computed: int = 0  # whose keys and values are in their slots
    num_prompt: int = 0
    token_ids: tuple[int, ...] = ()  # prompt, then generated; the newest may have no slot yet; () if unknown

    @property
    def name(self) -> str:
        """Name of the sequence."""
        return f"{self.request}/{self.position}"

    def filled(self, logical: int, block_size: int) -> int:
        """Slots of a logical block that have a token."""
        return max(0, min(block_size, self.num_tokens - logical * block_size))

    def computed(self, logical: int, block_size: int) -> int:
        """Slots of a logical block whose keys and values have been computed."""
        return max(0, min(block_size, self.num_computed - logical * block_size))

    def tokens_of(self, logical: int, block_size: int) -> tuple[int, ...]:
        """Tokens that have a slot in a logical block, as far as they are known."""
        start = logical * block_size
        return self.token_ids[start : start + self.filled(logical, block_size)]

    def texts_of(self, logical: int, block_size: int, text_of: Callable[[int], str] | None) -> list[str]:
        """The texts of those tokens in one line; the ids if there is no tokenizer."""
        tokens = self.tokens_of(logical, block_size)
        return [text_of(t).replace("\n", "\u23ce") if text_of else f"{t} " for t in tokens]

    def usage(self, block_size: int) -> str:
        """How many tokens, blocks and empty slots, in words."""
        slots = len(self.blocks) * block_size
        tokens, blocks = counted(self.num_tokens, "token"), counted(len(self.blocks), "block")
        return f"{tokens} in {blocks}, {slots - self.num_tokens} of {counted(slots, 'slot')} empty"


class BlockView(NamedTuple):
    """One physical block."""

    block: int  # its id
    state: Literal["free", "used", "evictable"]
    owners: tuple[TableView, ...] = ()  # tables that hold it, in the order of the view; () also if unknown
    ref_count: int = 0
    filled: int | None = None  # slots that have a token; None if unknown (a block that nobody holds)


@dataclass(frozen=True, slots=True)
class PoolView:
    """All tables and all blocks at one moment."""

    block_size: int
    num_blocks: int  # on the device
    num_host_blocks: int = 0
    tables: Mapping[str, TableView] = field(default_factory=dict)  # by name of the sequence, device and host
    evictable: frozenset[int] = frozenset()  # device blocks that only the prefix cache remembers

    def on_device(self) -> list[TableView]:
        """The tables that are not swapped out."""
        return [table for table in self.tables.values() if not table.on_host]

    def blocks(self, on_host: bool = False) -> list[BlockView]:
        """Every block of the device pool, or of the host pool, in the order of its id."""
        count = self.num_host_blocks if on_host else self.num_blocks
        evictable = frozenset() if on_host else self.evictable
        views = [BlockView(block, "evictable" if block in evictable else "free") for block in range(count)]
        for table in self.tables.values():
            if table.on_host == on_host:
                for logical, block in enumerate(table.blocks):
                    owners = (*views[block].owners, table)
                    filled = max(views[block].filled or 0, table.filled(logical, self.block_size))
                    views[block] = BlockView(block, "used", owners, len(owners), filled)
        return views

    @property
    def num_used(self) -> int:
        """Device blocks that some table holds."""
        return len({block for table in self.on_device() for block in table.blocks})

    @property
    def num_free(self) -> int:
        """Device blocks that no table holds and the prefix cache does not keep."""
        return self.num_blocks - self.num_used - len(self.evictable)

    @property
    def usage(self) -> str:
        """How many blocks are in use, evictable and free, in words."""
        evictable = f"{len(self.evictable):,} cached and evictable, " if self.evictable else ""
        blocks = f"{self.num_blocks:,} block{'s' * (self.num_blocks != 1)}"
        return f"{self.num_used:,} of {blocks} in use, {evictable}{self.num_free:,} free"


def look(scheduler: FCFSScheduler) -> PoolView:
    """The memory of a scheduler now."""
    kv = scheduler.kv
    tables = [
        TableView(
            request.request_id,
            position,
            sequence.table.pool is not kv.pool,
            tuple(sequence.table.blocks),
            sequence.table.num_tokens,
            sequence.num_computed_tokens,
            sequence.num_prompt_tokens,
            tuple(sequence.token_ids),
        )
        for request in (*scheduler.running, *scheduler.swapped)
        for position, sequence in enumerate(request.sequences)
    ]
    host = kv.swap_space.allocator.num_blocks if kv.swap_space is not None else 0
    named = {table.name: table for table in tables}
    return PoolView(kv.block_size, kv.allocator.num_blocks, host, named, evictable_blocks(kv))


def view_of(
    tables: Iterable[TableView], block_size: int, num_blocks: int, evictable: Iterable[int] = ()
) -> PoolView:
    """A view of these tables, without a host pool."""
    named = {table.name: table for table in tables}
    return PoolView(block_size, num_blocks, 0, named, frozenset(evictable))


def evictable_blocks(kv: KVManager) -> frozenset[int]:
    """Blocks that no table holds, but that the prefix cache keeps."""
    return frozenset(() if kv.prefix_cache is None else kv.prefix_cache.evictable)
