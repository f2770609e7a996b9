"""What the memory holds at one moment, as plain data: every table, every block, who owns it.

    look(scheduler) -> PoolView          the one thing that pictures are drawn from,
    replay(trace)   -> PoolView          whether the engine is here or only its trace

Blocks are free (nobody's), used (held by one or more tables) or evictable (held by none, kept for the prefix
cache); paper, section 4.2. Knows nothing of drawing, files or tensors, and changes nothing it looks at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

State = Literal["free", "used", "evictable"]


class TableView(NamedTuple):
    """One block table.

    Attributes:
        request: id of the request; with `position` the name of the sequence.
        position: place among the live sequences of the request.
        on_host: whether the blocks are host blocks (the request is swapped out).
        blocks: physical block of each logical block.
        num_tokens: tokens that have a slot.
        num_computed: tokens whose keys and values are in their slots.
        num_prompt: how many of the tokens are the prompt.
        token_ids: prompt and generated tokens; the newest may have no slot yet. Empty if unknown.
    """

    request: str
    position: int
    on_host: bool
    blocks: tuple[int, ...]
    num_tokens: int
    num_computed: int
    num_prompt: int
    token_ids: tuple[int, ...]

    @property
    def name(self) -> str:
        """The sequence's name: request, slash, position."""
        return f"{self.request}/{self.position}"

    def filled(self, logical: int, block_size: int) -> int:
        """Slots of a logical block that have a token."""
        return max(0, min(block_size, self.num_tokens - logical * block_size))

    def computed(self, logical: int, block_size: int) -> int:
        """Slots of a logical block whose keys and values are there."""
        return max(0, min(block_size, self.num_computed - logical * block_size))

    def tokens_of(self, logical: int, block_size: int) -> tuple[int, ...]:
        """Tokens that have a slot in a logical block, as far as they are known."""
        start = logical * block_size
        return self.token_ids[start : start + self.filled(logical, block_size)]


class BlockView(NamedTuple):
    """One physical block.

    Attributes:
        block: its id.
        state: free, used or evictable.
        owners: tables that hold it, in the order of the view. Empty also when they are unknown.
        ref_count: how many hold it.
        filled: slots that have a token; None when unknown (a block that nobody holds).
    """

    block: int
    state: State
    owners: tuple[TableView, ...]
    ref_count: int
    filled: int | None


@dataclass(frozen=True, slots=True)
class PoolView:
    """All tables and all blocks at one moment.

    Attributes:
        block_size: tokens a block.
        num_blocks: device blocks.
        num_host_blocks: host blocks.
        tables: name of the sequence -> its table, device and host.
        evictable: device blocks that only the prefix cache remembers.
    """

    block_size: int
    num_blocks: int
    num_host_blocks: int = 0
    tables: Mapping[str, TableView] = field(default_factory=dict)
    evictable: frozenset[int] = frozenset()

    def blocks(self, on_host: bool = False) -> list[BlockView]:
        """Every block of the device pool, or of the host pool, in the order of its id."""
        owners: dict[int, list[TableView]] = {}
        filled: dict[int, int] = {}
        for table in self.tables.values():
            if table.on_host == on_host:
                for logical, block in enumerate(table.blocks):
                    owners.setdefault(block, []).append(table)
                    filled[block] = max(filled.get(block, 0), table.filled(logical, self.block_size))
        return [
            BlockView(block, "used", tuple(owners[block]), len(owners[block]), filled[block])
            if block in owners
            else BlockView(
                block, "evictable" if block in self.evictable and not on_host else "free", (), 0, None
            )
            for block in range(self.num_host_blocks if on_host else self.num_blocks)
        ]

    @property
    def num_used(self) -> int:
        """Device blocks that some table holds."""
        return len({block for table in self.tables.values() if not table.on_host for block in table.blocks})

    @property
    def num_free(self) -> int:
        """Device blocks that nobody holds and nobody remembers."""
        return self.num_blocks - self.num_used - len(self.evictable)


def look(scheduler: Any) -> PoolView:
    """The memory of a scheduler now.

    Args:
        scheduler: anything with the `kv`, `running` and `swapped` of `scheduling.scheduler.Scheduler`.
    """
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
    return view_of(tables, kv.block_size, kv.allocator.num_blocks, host, evictable_blocks(kv))


def view_of(
    tables: Iterable[TableView],
    block_size: int,
    num_blocks: int,
    num_host_blocks: int = 0,
    evictable: Iterable[int] = (),
) -> PoolView:
    """A view of these tables."""
    named = {table.name: table for table in tables}
    return PoolView(block_size, num_blocks, num_host_blocks, named, frozenset(evictable))


def evictable_blocks(kv: Any) -> frozenset[int]:
    """Blocks of a `KVManager` that nobody holds and the prefix cache remembers."""
    cache, allocator = kv.prefix_cache, kv.allocator
    missing = kv.num_free - allocator.num_free
    found: set[int] = set()
    for block in range(allocator.num_blocks if missing else 0):
        if len(found) == missing:
            break
        if not allocator.ref_count(block) and cache.count_evictable((block,)):
            found.add(block)
    return frozenset(found)
