"""The contract of a block table, and a table that is watched (paper, sections 4.2 to 4.4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from minipaged.learn.contracts.rules import Rules
from minipaged.memory import BlockCopy, BlockPool, OutOfBlocksError

CONCEPT = "block_table"


class Table(Protocol):
    """Logical blocks of one sequence -> physical blocks, made by `cls(pool, block_size)`.

    Attributes `blocks` (list of ids), `num_tokens`, `pool`, `block_size`; others may set the first three.

    1. Every token has a slot: `blocks[position // block_size] * block_size + position % block_size`.
    2. `append(n)` takes exactly `blocks_to_append(n)` blocks; when the pool has too few it raises
       `OutOfBlocksError` and changes nothing.
    3. The first block that `append` writes is held by this table alone afterwards: if it was shared, it
       is replaced by a fresh one, and the copy (old block, new block) is returned.
    4. `fork` is a table over the same filled blocks, each with one reference more.
    5. `truncate` and `free` give back every block they drop, once.
    """

    def slot(self, position: int) -> int:
        """Where the token at `position` lives."""
        ...

    def slots(self, start: int, stop: int) -> list[int]:
        """Slots of the positions start <= p < stop."""
        ...

    def filled(self, logical: int) -> int:
        """Filled slots of a logical block."""
        ...

    def blocks_to_append(self, count: int = 1) -> int:
        """Blocks that `append(count)` will take, a copy-on-write included."""
        ...

    def append(self, count: int = 1) -> BlockCopy | None:
        """Give the next `count` tokens a slot."""
        ...

    def reserve(self, count: int) -> None:
        """Take `count` preallocated blocks."""
        ...

    def share(self, blocks: list[int]) -> None:
        """Start with full blocks that somebody else computed."""
        ...

    def fork(self) -> Any:
        """A second table over the same filled blocks."""
        ...

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens."""
        ...

    def free(self) -> None:
        """Give every block back."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens that fit in the blocks."""
        ...

    @property
    def num_filled_blocks(self) -> int:
        """Blocks that hold at least one token."""
        ...


class WatchedTable:
    """A block table whose every step is compared with the pool."""

    __slots__ = ("_inner", "rules")

    def __init__(self, inner: Any, rules: Rules) -> None:
        self._inner = inner
        self.rules = rules

    @property
    def blocks(self) -> list[int]:
        """Physical blocks in logical order."""
        return self._inner.blocks

    @blocks.setter
    def blocks(self, blocks: list[int]) -> None:
        self._inner.blocks = blocks

    @property
    def num_tokens(self) -> int:
        """Tokens that have a slot."""
        return self._inner.num_tokens

    @num_tokens.setter
    def num_tokens(self, num_tokens: int) -> None:
        self._inner.num_tokens = num_tokens

    @property
    def pool(self) -> BlockPool:
        """Where the blocks come from."""
        return self._inner.pool

    @pool.setter
    def pool(self, pool: BlockPool) -> None:
        self._inner.pool = pool

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._inner.block_size

    @property
    def capacity(self) -> int:
        """See `Table`."""
        return self._number("capacity", len(self.blocks) * self.block_size)

    @property
    def num_filled_blocks(self) -> int:
        """See `Table`."""
        return self._number("num_filled_blocks", -(-self.num_tokens // self.block_size))

    def filled(self, logical: int) -> int:
        """See `Table`."""
        filled = self.rules.call(self._inner.filled, logical)
        wanted = max(0, min(self.block_size, self.num_tokens - logical * self.block_size))
        self.rules.require(
            filled == wanted,
            f"filled({logical}) is {filled}; of {self.num_tokens} tokens in blocks of {self.block_size}, "
            f"block {logical} holds {wanted}",
        )
        return filled

    def slot(self, position: int) -> int:
        """See `Table`."""
        return self._check_slot(position, self.rules.call(self._inner.slot, position))

    def slots(self, start: int, stop: int) -> list[int]:
        """See `Table`."""
        slots = self.rules.call(self._inner.slots, start, stop)
        self.rules.require(
            len(slots) == stop - start, f"slots({start}, {stop}) gave {len(slots)} slots for {stop - start}"
        )
        return [self._check_slot(start + i, slot) for i, slot in enumerate(slots)]

    def blocks_to_append(self, count: int = 1) -> int:
        """See `Table`."""
        return self.rules.call(self._inner.blocks_to_append, count)

    def append(self, count: int = 1) -> BlockCopy | None:
        """See `Table`."""
        pool, size = self.pool, self.block_size
        before, tokens, free = list(self.blocks), self.num_tokens, pool.num_free
        last, offset = divmod(tokens, size)
        shared = bool(offset) and pool.ref_count(before[last]) > 1
        missing = max(0, -(-(tokens + count) // size) - len(before)) + shared
        what = f"append({count}) at {tokens} tokens in blocks {before} of {size}"
        try:
            copy = self.rules.call(self._inner.append, count, may_raise=OutOfBlocksError)
        except OutOfBlocksError:
            unchanged = (before, tokens, free) == (self.blocks, self.num_tokens, pool.num_free)
            self.rules.require(unchanged, f"{what} raised OutOfBlocksError but changed table or pool")
            self.rules.require(missing > free, f"{what} needs {missing} blocks of {free} free, yet raised")
            raise
        after = list(self.blocks)
        taken = len(set(after) - set(before))
        self.rules.require(self.num_tokens == tokens + count, f"{what}: num_tokens became {self.num_tokens}")
        self.rules.require(
            self.num_tokens <= len(after) * size, f"{what}: a token has no slot, the blocks are {after}"
        )
        self.rules.require(
            taken == missing, f"{what} took {taken} blocks ({after}) where {missing} are needed"
        )
        if shared:
            wanted = (before[last], after[last])
            self.rules.require(
                after[last] != before[last],
                f"{what} writes to block {before[last]}, which another table holds; take a fresh block and "
                "return the copy (copy-on-write)",
            )
            self.rules.require(copy == wanted, f"{what} returned {copy}; the copy to run is {wanted}")
        else:
            self.rules.require(
                copy is None, f"{what} returned {copy}; nothing is shared, so nothing is copied"
            )
            self.rules.require(
                after[: len(before)] == before, f"{what} moved blocks that were there: {after}"
            )
        # A block dropped by the copy keeps its other holders, so the free blocks shrink by what was taken.
        self.rules.require(
            pool.num_free == free - missing,
            f"{what}: the pool had {free} blocks free and now has {pool.num_free}; {missing} are needed",
        )
        return copy

    def reserve(self, count: int) -> None:
        """See `Table`."""
        before = list(self.blocks)
        self.rules.call(self._inner.reserve, count, may_raise=OutOfBlocksError)
        self.rules.require(
            self.blocks[: len(before)] == before and len(self.blocks) == len(before) + count,
            f"reserve({count}) changed the blocks {before} to {self.blocks}",
        )

    def share(self, blocks: list[int]) -> None:
        """See `Table`."""
        counts = [self.pool.ref_count(block) for block in blocks]
        given = list(blocks)
        self.rules.call(self._inner.share, blocks)
        self._check_shared("share", given, counts, len(given) * self.block_size, self)

    def fork(self) -> WatchedTable:
        """See `Table`."""
        given = self.blocks[: -(-self.num_tokens // self.block_size)]
        counts = [self.pool.ref_count(block) for block in given]
        child = WatchedTable(self.rules.call(self._inner.fork), self.rules)
        self._check_shared("fork", given, counts, self.num_tokens, child)
        return child

    def truncate(self, num_tokens: int) -> None:
        """See `Table`."""
        dropped = self.blocks[-(-num_tokens // self.block_size) :]
        self._give_back(f"truncate({num_tokens})", dropped, num_tokens, self._inner.truncate, num_tokens)

    def free(self) -> None:
        """See `Table`."""
        self._give_back("free()", list(self.blocks), 0, self._inner.free)

    def _give_back(
        self, what: str, dropped: list[int], num_tokens: int, function: Callable[..., None], *args: int
    ) -> None:
        counts = {block: self.pool.ref_count(block) for block in dropped}
        self.rules.call(function, *args)
        for block, count in counts.items():
            now = self.pool.ref_count(block)
            self.rules.require(
                now == count - 1,
                f"{what} dropped block {block}, whose references went from {count} to {now}; "
                "give it back once",
            )
        self.rules.require(
            self.num_tokens == num_tokens and not set(dropped) & set(self.blocks),
            f"{what} leaves {self.num_tokens} tokens in blocks {self.blocks}",
        )

    def _check_shared(
        self, what: str, given: list[int], counts: list[int], num_tokens: int, table: WatchedTable
    ) -> None:
        self.rules.require(
            table.blocks == given and table.num_tokens == num_tokens,
            f"{what} of {num_tokens} tokens in blocks {given} made a table of {table.num_tokens} tokens in "
            f"{table.blocks}",
        )
        for block, count in zip(given, counts):
            now = self.pool.ref_count(block)
            self.rules.require(
                now == count + 1,
                f"{what}: block {block} had {count} references and has {now}; each table adds one",
            )

    def _check_slot(self, position: int, slot: int) -> int:
        logical, offset = divmod(position, self.block_size)
        wanted = self.blocks[logical] * self.block_size + offset
        self.rules.require(
            slot == wanted,
            f"the slot of position {position} is {slot}; block {self.blocks[logical]} x {self.block_size} "
            f"+ {offset} = {wanted}",
        )
        return slot

    def _number(self, name: str, wanted: int) -> int:
        value = self.rules.call(lambda: getattr(self._inner, name))
        self.rules.require(
            value == wanted,
            f"{name} is {value}; {self.num_tokens} tokens in {len(self.blocks)} blocks of {self.block_size} "
            f"make {wanted}",
        )
        return value


def watch(part: Callable[[BlockPool, int], Any]) -> Callable[[BlockPool, int], WatchedTable]:
    """A maker of watched tables."""

    def make(pool: BlockPool, block_size: int) -> WatchedTable:
        rules = Rules(CONCEPT)
        return WatchedTable(rules.call(part, pool, block_size), rules)

    return make
