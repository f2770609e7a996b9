"""The contract of a block table (paper, sections 4.2 to 4.4)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from minipaged.learn.contracts.rules import Watcher, call_text, short
from minipaged.memory import BlockCopy, BlockPool, BlockTable, OutOfBlocksError
from minipaged.text_io import counted


class BlockTableContract(Watcher):
    """Logical blocks of one sequence -> physical blocks, made by `cls(pool, block_size)`.

    Attributes `blocks` (list of ids), `num_tokens`, `pool`, `block_size`; only its own methods set them.

    1. Every token has a slot: `blocks[position // block_size] * block_size + position % block_size`.
    2. `append(n)` takes exactly `blocks_to_append(n)` blocks; when the pool has too few it raises
       `OutOfBlocksError` and changes nothing.
    3. The first block that `append` writes is held by this table alone afterwards: if it was shared, it
       is replaced by a fresh one, and the copy (old block, new block) is returned.
    4. `fork` is a table of the same class over the same filled blocks, each with one reference more.
    5. `truncate`, `free` and `move_to` give back every block they drop, once.
    """

    questions = ("capacity", "num_filled_blocks", "filled", "slots", "blocks_to_append")

    def __getattr__(self, name: str) -> Any:
        answer = super().__getattr__(name)
        if name not in self.questions:
            return answer
        wanted = getattr(self._like_own(), name)
        if not callable(wanted):
            return self._compare(name, answer, wanted)
        return lambda *args: self._compare(call_text(name, args), answer(*args), wanted(*args))

    def slot(self, position: int) -> int:
        """Rule 1."""
        slot, (logical, offset) = self._call("slot", position), divmod(position, self.block_size)
        wanted = self.blocks[logical] * self.block_size + offset
        message = f"the slot of position {position} is {slot}; block {self.blocks[logical]}"
        self.require(slot == wanted, f"{message} x {self.block_size} + {offset} = {wanted}")
        return slot

    def append(self, count: int = 1) -> BlockCopy | None:
        """Rules 2 and 3."""
        pool, own = self.pool, self._like_own()
        before, tokens, free = own.blocks, own.num_tokens, pool.num_free
        shared, missing = own.writes_to_shared_block(), own.blocks_to_append(count)
        first = tokens // self.block_size  # the block that is written first
        holders = pool.ref_count(before[first]) if shared else 0
        what = f"append({count}) at {tokens} tokens in blocks {before} of {self.block_size}"
        try:
            copy = self._call("append", count, may_raise=(OutOfBlocksError,))
        except OutOfBlocksError:
            unchanged = (before, tokens, free) == (self.blocks, self.num_tokens, pool.num_free)
            self.require(unchanged, f"{what} raised OutOfBlocksError but changed table or pool")
            self.require(missing > free, f"{what} needs {missing} blocks of {free} free, yet raised")
            raise
        after = list(self.blocks)
        are_ids = all(hasattr(block, "__index__") for block in after)
        self.require(are_ids, f"{what} left {after}; blocks are the ids that `pool.allocate` lists")
        taken = len(set(after) - set(before))
        self.require(taken == missing, f"{what} took {taken} blocks ({after}) where {missing} are needed")
        wanted = None
        if shared:
            message = f"{what} writes to block {before[first]}, which another table holds; take a fresh block"
            self.require(after[first] != before[first], f"{message} and return the copy (copy-on-write)")
            wanted = BlockCopy(before[first], after[first])
            before[first] = after[first]
        self.require(copy == wanted, f"{what} returned {copy}; the copy to run is {wanted}")
        if wanted is not None:
            held = pool.ref_count(wanted.source)
            message = f"{what} leaves block {wanted.source} with {held} of {holders} holders; free it: "
            self.require(held == holders - 1, message + "this table holds it no more")
        self._require_state(what, before + after[len(before) :], tokens + count)
        # A block dropped by the copy keeps its other holders, so the free blocks shrink by what was taken.
        message = f"{what}: the pool had {free} blocks free and now has {pool.num_free}; {missing} are needed"
        self.require(pool.num_free == free - missing, message)
        if count:
            self.slot(self.num_tokens - 1)  # (the engine computes slots itself, from `blocks`)
        return copy

    def use_slots(self, num_tokens: int) -> None:
        """Tokens for slots that are there: the blocks stay."""
        before = list(self.blocks)
        self._call("use_slots", num_tokens)
        self._require_state(f"use_slots({num_tokens})", before, num_tokens)

    def preallocate(self, count: int) -> None:
        """Blocks for tokens to come, behind those that are there."""
        before, tokens = list(self.blocks), self.num_tokens
        self._call("preallocate", count, may_raise=(OutOfBlocksError,))
        taken = self.blocks[len(before) :]
        self.require(len(taken) == count, f"preallocate({count}) took {len(taken)} blocks")
        self._require_state(f"preallocate({count})", before + taken, tokens)

    def share(self, blocks: list[int]) -> None:
        """Full blocks that somebody else computed."""
        given = list(blocks)
        with self._references("share", given, 1):
            self._call("share", blocks)
            self._require_state("share", given, len(given) * self.block_size)

    def fork(self) -> Self:
        """Rule 4."""
        given = self.blocks[: self._like_own().num_filled_blocks]
        with self._references("fork", given, 1):
            made = self._call("fork")
            self.require(hasattr(made, "blocks"), f"fork returned {short(made)}; give the second table")
            kind, mine = type(made), inspect.unwrap(type(self._inner))
            message = f"fork returned a {kind.__name__} of {kind.__module__}; make one of yours: type(self)"
            self.require(issubclass(kind, mine), message)
            child = type(self)(self.rules.concept, lambda: made)
            child.rules, child.require = self.rules, self.require
            child._require_state("fork", given, self.num_tokens)
        message = "fork: both tables have the same list of blocks, so that each changes the other; copy it"
        self.require(child.blocks is not self.blocks, message)
        return child

    def move_to(self, pool: BlockPool, blocks: list[int]) -> None:
        """Rule 5; the tokens stay, over `blocks` of `pool`."""
        given, tokens = list(blocks), self.num_tokens
        with self._references(f"move_to(pool, {given})", list(self.blocks), -1):
            self._call("move_to", pool, blocks)
        self.require(self.pool is pool, f"move_to(pool, {given}) left the table over another pool")
        self._require_state(f"move_to(pool, {given})", given, tokens)

    def truncate(self, num_tokens: int) -> None:
        """Rule 5."""
        self._drop(f"truncate({num_tokens})", num_tokens, "truncate", num_tokens)

    def free(self) -> None:
        """Rule 5."""
        self._drop("free()", 0, "free")

    def _drop(self, what: str, num_tokens: int, name: str, *args: int) -> None:
        keep = -(-num_tokens // self.block_size)
        kept, dropped = self.blocks[:keep], self.blocks[keep:]
        with self._references(what, dropped, -1):
            self._call(name, *args)
        self._require_state(what, kept, num_tokens)

    def _like_own(self) -> BlockTable:
        """The project's own table in the state of this one."""
        table = BlockTable(self.pool, self.block_size)
        table.blocks, table.num_tokens = list(self.blocks), self.num_tokens
        return table

    def _compare(self, name: str, answer: Any, wanted: Any) -> Any:
        state = f"{self.num_tokens} tokens in blocks {self.blocks} of {self.block_size}"
        if self._like_own().writes_to_shared_block():
            state += ", of which the last is shared and has to be copied before it is written (lesson 02),"
        self.require(answer == wanted, f"{name} is {answer}; {state} make {wanted}")
        return answer

    def _require_state(self, what: str, blocks: list[int], num_tokens: int) -> None:
        message = (
            f"{what} left {self.num_tokens} tokens in blocks {self.blocks}, not {num_tokens} in {blocks}"
        )
        self.require((self.blocks, self.num_tokens) == (blocks, num_tokens), message)

    @contextmanager
    def _references(self, what: str, blocks: list[int], change: int) -> Iterator[None]:
        """Each of the blocks gets one reference more, or is given back once."""
        pool, counts = self.pool, [self.pool.ref_count(block) for block in blocks]
        yield
        for block, count in zip(blocks, counts):
            now = pool.ref_count(block)
            had = counted(count, "reference")
            message = f"{what}: block {block} had {had} and has {now}; each table adds one"
            if change < 0:
                message = f"{what} dropped block {block}, whose references went from {count} to {now}"
                message += "; give it back once"
            self.require(now == count + change, message)
