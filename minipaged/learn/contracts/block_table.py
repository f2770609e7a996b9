"""The contract of a block table (paper, sections 4.2 to 4.4)."""

from __future__ import annotations

from typing import Any, Self

from minipaged.learn.contracts.rules import Rules, Watcher
from minipaged.memory import BlockCopy, BlockPool, BlockTable, OutOfBlocksError


class BlockTableContract(Watcher):
    """Logical blocks of one sequence -> physical blocks, made by `cls(pool, block_size)`.

    Attributes `blocks` (list of ids), `num_tokens`, `pool`, `block_size`; only its own methods set them.

    1. Every token has a slot: `blocks[position // block_size] * block_size + position % block_size`.
    2. `append(n)` takes exactly `blocks_to_append(n)` blocks; when the pool has too few it raises
       `OutOfBlocksError` and changes nothing.
    3. The first block that `append` writes is held by this table alone afterwards: if it was shared, it
       is replaced by a fresh one, and the copy (old block, new block) is returned.
    4. `fork` is a table over the same filled blocks, each with one reference more.
    5. `truncate`, `free` and `move_to` give back every block they drop, once.
    """

    own = BlockTable

    @property
    def capacity(self) -> int:
        """What fits in the blocks."""
        return self._ask("capacity")

    @property
    def num_filled_blocks(self) -> int:
        """Blocks that hold a token."""
        return self._ask("num_filled_blocks")

    def filled(self, logical: int) -> int:
        """Filled slots of a block."""
        return self._ask("filled", logical)

    def writes_to_shared_block(self) -> bool:
        """Whether the next token goes to a block that another table holds."""
        return self._ask("writes_to_shared_block")

    def blocks_to_append(self, count: int = 1) -> int:
        """What `append(count)` takes."""
        return self._ask("blocks_to_append", count)

    def slot(self, position: int) -> int:
        """Rule 1."""
        return self._check_slot(position, self._call("slot", position))

    def slots(self, start: int, stop: int) -> list[int]:
        """Rule 1."""
        slots = self._call("slots", start, stop)
        told = f"slots({start}, {stop}) gave {len(slots)} slots for {stop - start}"
        self.require(len(slots) == stop - start, told)
        return [self._check_slot(start + i, slot) for i, slot in enumerate(slots)]

    def append(self, count: int = 1) -> BlockCopy | None:
        """Rules 2 and 3."""
        pool, own = self.pool, self._like_own()
        before, tokens, free = own.blocks, own.num_tokens, pool.num_free
        shared, missing = own.writes_to_shared_block(), own.blocks_to_append(count)
        what = f"append({count}) at {tokens} tokens in blocks {before} of {self.block_size}"
        try:
            copy = self._call("append", count, may_raise=(OutOfBlocksError,))
        except OutOfBlocksError:
            unchanged = (before, tokens, free) == (self.blocks, self.num_tokens, pool.num_free)
            self.require(unchanged, f"{what} raised OutOfBlocksError but changed table or pool")
            self.require(missing > free, f"{what} needs {missing} blocks of {free} free, yet raised")
            raise
        after = list(self.blocks)
        taken = len(set(after) - set(before))
        self.require(self.num_tokens == tokens + count, f"{what}: num_tokens became {self.num_tokens}")
        fits = self.num_tokens <= len(after) * self.block_size
        self.require(fits, f"{what}: a token has no slot, the blocks are {after}")
        self.require(taken == missing, f"{what} took {taken} blocks ({after}) where {missing} are needed")
        if shared:
            last = tokens // self.block_size
            wanted = (before[last], after[last])
            self.require(
                after[last] != before[last],
                f"{what} writes to block {before[last]}, which another table holds; take a fresh block and "
                "return the copy (copy-on-write)",
            )
            self.require(copy == wanted, f"{what} returned {copy}; the copy to run is {wanted}")
        else:
            self.require(copy is None, f"{what} returned {copy}; nothing is shared, so nothing is copied")
            kept = after[: len(before)] == before
            self.require(kept, f"{what} moved blocks that were there: {after}")
        # A block dropped by the copy keeps its other holders, so the free blocks shrink by what was taken.
        self.require(
            pool.num_free == free - missing,
            f"{what}: the pool had {free} blocks free and now has {pool.num_free}; {missing} are needed",
        )
        return copy

    def use_slots(self, num_tokens: int) -> None:
        """Tokens for slots that are there: the blocks stay."""
        blocks = list(self.blocks)
        self._call("use_slots", num_tokens)
        told = f"use_slots({num_tokens}) over blocks {blocks} left {self._state()}"
        self.require((self.blocks, self.num_tokens) == (blocks, num_tokens), told)

    def preallocate(self, count: int) -> None:
        """Blocks for tokens to come, behind those that are there."""
        before = list(self.blocks)
        self._call("preallocate", count, may_raise=(OutOfBlocksError,))
        self.require(
            self.blocks[: len(before)] == before and len(self.blocks) == len(before) + count,
            f"preallocate({count}) changed the blocks {before} to {self.blocks}",
        )

    def share(self, blocks: list[int]) -> None:
        """Full blocks that somebody else computed, each with one reference more."""
        given, counts = list(blocks), [self.pool.ref_count(block) for block in blocks]
        self._call("share", blocks)
        self._check_shared("share", given, counts, len(given) * self.block_size)

    def fork(self) -> Self:
        """Rule 4."""
        given = self.blocks[: self._like_own().num_filled_blocks]
        counts = [self.pool.ref_count(block) for block in given]
        child = type(self)._around(self._call("fork"), self.rules)
        child._check_shared("fork", given, counts, self.num_tokens)
        return child

    def move_to(self, pool: BlockPool, blocks: list[int]) -> None:
        """Rule 5; the tokens stay, over `blocks` of `pool`."""
        given, tokens = list(blocks), self.num_tokens
        self._give_back(f"move_to(pool, {given})", self.blocks, "move_to", pool, blocks)
        there = self.pool is pool and (self.blocks, self.num_tokens) == (given, tokens)
        self.require(there, f"move_to(pool, {given}) at {tokens} tokens left {self._state()}")

    def truncate(self, num_tokens: int) -> None:
        """Rule 5."""
        dropped = self.blocks[-(-num_tokens // self.block_size) :]
        self._give_back(f"truncate({num_tokens})", dropped, "truncate", num_tokens)
        self._check_dropped(f"truncate({num_tokens})", dropped, num_tokens)

    def free(self) -> None:
        """Rule 5."""
        dropped = list(self.blocks)
        self._give_back("free()", dropped, "free")
        self._check_dropped("free()", dropped, 0)

    @classmethod
    def _around(cls, inner: Any, rules: Rules) -> Self:
        table = cls(rules.concept, lambda: inner)
        table.rules, table.require = rules, rules.require
        return table

    def _state(self) -> str:
        return f"{self.num_tokens} tokens in blocks {self.blocks}"

    def _like_own(self) -> BlockTable:
        """The project's own table in the state of this one."""
        table = self.own(self.pool, self.block_size)
        table.blocks, table.num_tokens = list(self.blocks), self.num_tokens
        return table

    def _ask(self, name: str, *args: int) -> Any:
        """A question whose answer the project's own table knows."""
        wanted, answer = getattr(self._like_own(), name), self.rules.call(getattr, self._inner, name)
        if callable(wanted):
            wanted, answer = wanted(*args), self.rules.call(answer, *args)
            name = f"{name}({', '.join(map(str, args))})"
        told = f"{name} is {answer}; {self._state()} of {self.block_size} make {wanted}"
        self.require(answer == wanted, told)
        return answer

    def _check_slot(self, position: int, slot: int) -> int:
        logical, offset = divmod(position, self.block_size)
        wanted = self.blocks[logical] * self.block_size + offset
        self.require(
            slot == wanted,
            f"the slot of position {position} is {slot}; block {self.blocks[logical]} x {self.block_size} "
            f"+ {offset} = {wanted}",
        )
        return slot

    def _give_back(self, what: str, dropped: list[int], name: str, *args: Any) -> None:
        old, counts = self.pool, {block: self.pool.ref_count(block) for block in dropped}
        self._call(name, *args)
        for block, count in counts.items():
            now = old.ref_count(block)
            told = f"{what} dropped block {block}, whose references went from {count} to {now}"
            self.require(now == count - 1, f"{told}; give it back once")

    def _check_dropped(self, what: str, dropped: list[int], num_tokens: int) -> None:
        kept = self.num_tokens == num_tokens and not set(dropped) & set(self.blocks)
        self.require(kept, f"{what} leaves {self._state()}")

    def _check_shared(self, what: str, given: list[int], counts: list[int], num_tokens: int) -> None:
        told = f"{what} of {num_tokens} tokens in blocks {given} made a table of {self._state()}"
        self.require((self.blocks, self.num_tokens) == (given, num_tokens), told)
        for block, count in zip(given, counts):
            now = self.pool.ref_count(block)
            told = f"{what}: block {block} had {count} references and has {now}; each table adds one"
            self.require(now == count + 1, told)
