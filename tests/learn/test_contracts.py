"""Contracts: an override that keeps them is never accused; one that breaks them is told the rule."""

import random
import re
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minipaged import memory
from minipaged.decoding.beam_search import BeamSearch
from minipaged.decoding.methods import SamplingMethod
from minipaged.decoding.params import SamplingParams
from minipaged.decoding.stopping import StopChecker
from minipaged.learn.contracts import CONCEPTS, ContractError, prefix_cache
from minipaged.learn.contracts.rules import call_text
from minipaged.scheduling import (
    Auto,
    Branch,
    ChunkedPrefill,
    Decision,
    FCFSScheduler,
    PreemptionCosts,
    PrefillFirst,
    Recompute,
    RequestTooLongError,
    Sample,
    StepPlan,
    Swap,
)
from tests.concepts.decoding_driver import make_request
from tests.toy import ToyEngine, alone, beams, samples, tokens

COSTS = PreemptionCosts(1.0, 1.0, 1.0)


def watched(concept, override):
    """An override behind its contract, as `--use` would load it."""
    CONCEPTS[concept].check(override)
    return CONCEPTS[concept].watch(override)


def subclass(base):
    """The project's own, made to look like somebody's."""
    return type(base.__name__, (base,), {})


def watched_engine(rng):
    """A toy engine, all of whose components are watched."""
    block_size, num_blocks = rng.choice([1, 3, 4]), rng.randint(8, 24)
    allocator = watched("allocator", subclass(memory.BlockAllocator))(num_blocks)
    cache = watched("prefix_cache", subclass(memory.PrefixCache))(allocator, block_size)
    kv = watched("kv_manager", subclass(memory.KVManager))(
        allocator,
        block_size,
        watched("page_growth", subclass(rng.choice([memory.OnDemand, memory.Chunked, memory.Reserve])))(),
        cache if rng.random() < 0.7 else None,
        memory.SwapSpace(rng.randint(1, num_blocks), num_blocks) if rng.random() < 0.7 else None,
        block_table=watched("block_table", subclass(memory.BlockTable)),
    )
    concept, policy = rng.choice([("chunked_prefill", ChunkedPrefill), ("prefill_first", PrefillFirst)])
    scheduler = watched("scheduler", subclass(FCFSScheduler))(
        kv,
        watched(concept, subclass(policy))(),
        watched("preemption", subclass(rng.choice([Recompute, Swap, Auto])))(COSTS),
        max_num_seqs=rng.randint(4, 12),
        max_num_batched_tokens=rng.randint(4, 30),
        max_model_len=1000,
    )
    return ToyEngine(scheduler, vocabulary=6)


@pytest.mark.parametrize("seed", range(40))
def test_the_projects_own_classes_keep_every_contract(seed):
    """Catches a watcher that accuses a correct override, or changes what it watches."""
    rng = random.Random(seed)
    engine = watched_engine(rng)
    stem = [rng.randrange(3) for _ in range(20)]
    for _ in range(rng.randint(2, 8)):
        prompt = [*stem[: rng.randint(1, 20)], rng.randrange(3)]
        own = rng.choice([samples, beams])(rng.randint(1, 3))
        concept = "beam_search" if isinstance(own, BeamSearch) else "parallel_sampling"
        method = CONCEPTS[concept].watch(type(own))(own.params, own.stop)
        try:
            engine.add(prompt, rng.choice([1, 5, 12]), method).params = own
        except ValueError as error:
            assert "needs" in str(error) or "sequences at once" in str(error)  # noqa: PT017
    engine.run()
    cut = {e.request_id for plan in engine.plans for e in plan.events if e.kind == "outgrown"}
    for request in engine.requests:
        if request.request_id not in cut:
            limit = request.max_num_tokens - len(request.prompt_token_ids)
            got = [c.output_token_ids for c in sorted(request.completions, key=lambda c: c.index)]
            assert got == alone(request.prompt_token_ids, limit, request.params, 6)


# -- breaches: one line, with the concept, what happened and the rule --------------------------------------


def allocator_with(**methods):
    return watched("allocator", type("Mine", (memory.BlockAllocator,), methods))


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            {"allocate": lambda self, count=1: [3] * count},
            r"^allocator: allocate\(2\) returned \[3, 3\]; each block may be handed out once",
        ),
        ({"allocate": lambda self, count=1: [0]}, r"returned \[0\]; give a list of 2 block ids"),
        ({"allocate": lambda self, count=1: [3, 4]}, "block ids are the integers 0 to 3"),
        ({"allocate": lambda self, count=1: [0, 1.0]}, "block ids are the integers 0 to 3"),
        ({"allocate": lambda self, count=1: None}, "returned None; give a list"),
        ({"num_free": property(lambda self: 4)}, r"num_free is 4 after allocate\(2\) .*; 2 blocks are free"),
    ],
)
def test_an_allocator_that_hands_out_nonsense_is_reported(methods, message):
    """Catches each rule of `allocate` that is not checked."""
    with pytest.raises(ContractError, match=message):
        allocator_with(**methods)(4).allocate(2)


def test_an_allocator_that_hands_out_a_block_in_use_is_reported():
    """Catches a block of two sequences told as a count that is wrong."""

    def allocate(self, count=1):
        memory.BlockAllocator.allocate(self, count)
        return [0]

    pool = allocator_with(allocate=allocate)(3)
    assert pool.allocate() == [0]
    with pytest.raises(ContractError, match=r"may be handed out once \(block 0 is in use\)$"):
        pool.allocate()


def test_an_allocator_must_refuse_without_taking_anything():
    """Catches a partial allocation before the error, and an error although blocks are free."""

    def takes_some(self, count=1):
        taken = []
        while len(taken) < count:
            taken += memory.BlockAllocator.allocate(self)
        return taken

    with pytest.raises(ContractError, match=r"num_free is 0 after .* may take nothing"):
        allocator_with(allocate=takes_some)(3).allocate(4)

    def refuses(self, count=1):
        raise memory.OutOfBlocksError("none")

    with pytest.raises(ContractError, match="raised OutOfBlocksError though 3 blocks are free"):
        allocator_with(allocate=refuses)(3).allocate(1)


def test_a_call_is_reported_with_the_shapes_of_its_tensors():
    """Catches numbers of a tensor in a message, which say nothing."""
    assert call_text("attend", (torch.zeros(2, 3), "a")) == "attend(Tensor [2, 3] torch.float32, 'a')"


def test_a_call_is_reported_without_addresses():
    """Catches half a line of module names and an address for an object that has no text."""
    pool = memory.BlockAllocator(1)
    assert call_text("admit", (pool, [pool])) == "admit(<BlockAllocator>, [<BlockAllocator>])"


def test_an_allocator_that_miscounts_references_is_reported():
    """Catches `share` without a count, a double free that passes, `release` that returns the wrong thing."""
    pool = allocator_with(share=lambda self, block: None)(3)
    with pytest.raises(ContractError, match=r"ref_count\(0\) is 1; its holders have 2 references$"):
        pool.share(*pool.allocate())
    pool = allocator_with(free=lambda self, block: None)(3)
    with pytest.raises(ContractError, match=r"num_free is 2 after free\(0\); 3 blocks are free"):
        pool.free(*pool.allocate())
    pool = allocator_with(release=lambda self, block: memory.BlockAllocator.release(self, block) and False)(3)
    with pytest.raises(ContractError, match=r"release\(0\) returned False"):
        pool.release(*pool.allocate())
    pool = allocator_with(release=lambda self, block: not memory.BlockAllocator.release(self, block))(3)
    (block,) = pool.allocate()
    pool.share(block)
    with pytest.raises(ContractError, match=r"returned True; the block has 1 reference left, and True means"):
        pool.release(block)
    with pytest.raises(ContractError, match="without references must raise ValueError"):
        allocator_with(free=lambda self, block: None)(3).free(1)
    pool = allocator_with(reclaim=lambda self, block: None)(3)
    with pytest.raises(
        ContractError, match=r"reclaim\(0\) of a block that is not evictable must raise Value"
    ):
        pool.reclaim(*pool.allocate())


@pytest.mark.parametrize("name", ["share", "release", "reclaim", "free"])
def test_an_allocator_that_refuses_what_it_must_do_is_reported(name):
    """Catches "double free of 0" without a concept, or laid at the door of the table that called."""

    def refuse(self, block):
        raise ValueError("no")

    pool = allocator_with(**{name: refuse})(3)
    (block,) = pool.allocate()
    if name == "reclaim":
        pool.release(block)
    references = "0 references and is not free" if name == "reclaim" else "1 reference"
    expected = rf"^allocator: {name}\({block}\) raised ValueError: no; the block has {references}$"
    with pytest.raises(ContractError, match=expected):
        getattr(pool, name)(block)


@pytest.mark.parametrize("name", ["share", "release", "reclaim", "free"])
def test_an_allocator_that_refuses_a_free_block_is_not_accused(name):
    """Catches an allocator blamed for the mistake of its caller."""
    with pytest.raises(ValueError, match="block 1 is") as caught:
        getattr(allocator_with()(3), name)(1)
    assert not isinstance(caught.value, ContractError)


@pytest.mark.parametrize("name", ["share", "release", "reclaim", "free"])
@pytest.mark.parametrize("block", [-1, 3])
def test_an_allocator_that_refuses_an_unknown_block_is_not_accused(name, block):
    """Catches an IndexError of the contract's own, and "-1 is not free" for what is not a block."""

    def refuse(self, block):
        raise ValueError(f"there is no block {block}")

    with pytest.raises(ValueError, match=f"^there is no block {block}$"):
        getattr(allocator_with(**{name: refuse})(3), name)(block)


def test_an_exception_of_another_kind_is_reported_with_its_line():
    """Catches a stack trace from deep inside instead of the rule."""

    def allocate(self, count=1):
        return 1 // 0

    message = r"allocator: allocate\(2\) raised ZeroDivisionError: .*\(test_contracts.py, line \d+\)"
    with pytest.raises(ContractError, match=message) as caught:
        allocator_with(allocate=allocate)(3).allocate(2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StopIteration(), r"allocate\(2\) raised StopIteration \(test_contracts.py, line \d+\)"),
        (KeyError("a\n b\nc"), r"allocate\(2\) raised KeyError: .* \(test_contracts.py, line \d+\)"),
        (
            RuntimeError("a\n b\nc"),
            r"allocate\(2\) raised RuntimeError: a b c \(test_contracts.py, line \d+\)",
        ),
    ],
)
def test_an_exception_is_reported_in_one_line_whatever_its_text(error, expected):
    """Catches "raised StopIteration: " and nothing, and a message of several lines."""

    def allocate(self, count=1):
        raise error

    with pytest.raises(ContractError, match=f"^allocator: {expected}$"):
        allocator_with(allocate=allocate)(3).allocate(2)


@pytest.mark.parametrize(
    ("error", "text"), [(ValueError(), "ValueError"), (ValueError("a\nb"), "ValueError: a b")]
)
def test_a_refusal_is_reported_in_one_line_whatever_its_text(error, text):
    """Catches "raised ValueError: ; the block has 1 reference"."""

    def share(self, block):
        raise error

    pool = allocator_with(share=share)(3)
    with pytest.raises(
        ContractError, match=rf"^allocator: share\(0\) raised {text}; the block has 1 reference$"
    ):
        pool.share(*pool.allocate())


def test_after_a_breach_every_call_repeats_it():
    """Catches a second, misleading message from whoever cleans up after the first, and one that a student who
    has corrected the class takes for a new one."""
    pool = allocator_with(allocate=lambda self, count=1: [9])(3)
    message = r"^allocator: allocate\(1\) returned \[9\]; block ids are the integers 0 to 2"
    with pytest.raises(ContractError, match=f"{message}$"):  # noqa: PT012
        try:
            pool.allocate()
        finally:
            pool.free(0)
    for call in (pool.allocate, pool.allocate, lambda: pool.free(0)):
        with pytest.raises(
            ContractError, match=rf"{message} \(reported before; correct the class and load it anew\)$"
        ):
            call()


def test_a_stub_speaks_for_itself():
    """Catches a stub's own words buried under a contract."""

    def allocate(self, count=1):
        raise NotImplementedError("Lesson 2, task 1: take blocks off the free list")

    with pytest.raises(NotImplementedError, match="Lesson 2, task 1"):
        allocator_with(allocate=allocate)(3).allocate()


def table_with(**methods):
    pool = memory.BlockAllocator(8)
    return watched("block_table", type("Mine", (memory.BlockTable,), methods))(pool, 4)


def append_without_copy(self, count=1):
    missing = -(-(self.num_tokens + count) // 4) - len(self.blocks)
    self.blocks += self.pool.allocate(max(0, missing))
    self.num_tokens += count


def test_a_table_that_writes_to_a_shared_block_is_reported():
    """Catches a missing copy-on-write, the breach that would corrupt a neighbour."""
    table = table_with(append=append_without_copy)
    table.append(6)
    table.fork()
    with pytest.raises(ContractError, match=r"block_table: append\(1\) at 6 tokens .* where 1 are needed"):
        table.append(1)


def test_a_table_that_keeps_the_block_it_has_copied_is_reported():
    """Catches a copy-on-write without the `free`: blocks leak, although every token is where it belongs."""

    def append(self, count=1):
        copy = memory.BlockTable.append(self, count)
        if copy is not None:
            self.pool.share(copy.source)
        return copy

    table = table_with(append=append)
    table.append(6)
    table.fork()
    with pytest.raises(ContractError, match=r"leaves block 1 with 2 of 2 holders; free it"):
        table.append(1)


def copies_in_silence(self, count=1):
    memory.BlockTable.append(self, count)


def counts_no_tokens(self, count=1):
    copy = memory.BlockTable.append(self, count)
    self.num_tokens -= count
    return copy


def takes_one_aside(self, count=1):
    self.pool.allocate()
    return memory.BlockTable.append(self, count)


def refuses(self, count=1):
    raise memory.OutOfBlocksError("none")


def refuses_late(self, count=1):
    memory.BlockTable.append(self)
    raise memory.OutOfBlocksError("none")


@pytest.mark.parametrize(
    ("append", "message"),
    [
        (copies_in_silence, r"returned None; the copy to run is BlockCopy\(source=1, destination=2\)"),
        (counts_no_tokens, r"left 6 tokens in blocks \[0, 2\], not 7 in \[0, 2\]"),
        (takes_one_aside, "the pool had 6 blocks free and now has 4; 1 are needed"),
        (refuses, "needs 1 blocks of 6 free, yet raised"),
        (refuses_late, "raised OutOfBlocksError but changed table or pool"),
    ],
)
def test_an_append_that_forgets_a_part_of_its_work_is_reported(append, message):
    """Catches a block whose old tokens are never copied, a token without a count, and a block that leaks."""
    table = table_with(append=lambda self, count=1: memory.BlockTable.append(self, count))
    table.append(6)
    table.fork()
    type(table._inner).append = append
    with pytest.raises(ContractError, match=rf"append\(1\) at 6 tokens in blocks \[0, 1\] of 4.* {message}"):
        table.append(1)


def test_a_table_that_finds_too_few_blocks_is_not_accused():
    """Catches a full pool laid at the door of the table."""
    table = table_with()
    table.append(30)
    for call in (lambda: table.append(5), lambda: table.preallocate(2)):
        with pytest.raises(memory.OutOfBlocksError):
            call()
    assert table.num_tokens == 30


def test_a_table_of_something_else_than_ids_is_reported():
    """Catches "array indices must be integers" from deep inside: the list of ids was put in as one block."""

    def append(self, count=1):
        self.blocks.append(self.pool.allocate(self.blocks_to_append(count)))
        self.num_tokens += count

    table = watched("block_table", type("Mine", (memory.BlockTable,), {"append": append}))
    table = table(memory.BlockAllocator(4), 2)
    expected = r"^block_table: append\(1\) .* left \[\[0\]\]; blocks are the ids that `pool.allocate` lists$"
    with pytest.raises(ContractError, match=expected):
        table.append()


def test_a_table_off_by_one_is_reported():
    """Catches a block taken one token early or late, and slots in the wrong order."""

    def early(self, count=1):
        self.blocks += self.pool.allocate((self.num_tokens + count) // 4 + 1 - len(self.blocks))
        self.num_tokens += count

    with pytest.raises(
        ContractError, match=r"append\(4\) at 0 tokens in blocks \[\] of 4 took 2 blocks \(\[0, 1\]\) where 1"
    ):
        table_with(append=early).append(4)
    table = table_with(slot=lambda self, position: self.blocks[0] + position + (position < 3))
    table.append(4)
    with pytest.raises(ContractError, match=r"the slot of position 2 is 3; block 0 x 4 \+ 2 = 2"):
        table.slot(2)


def test_slots_that_only_the_engine_would_compute_are_checked():
    """Catches a table whose slots nobody asks for: the engine computes its own from `blocks`."""
    table = table_with(slot=lambda self, position: position)
    table.pool.allocate(2)
    with pytest.raises(ContractError, match=r"the slot of position 4 is 4; block 3 x 4 \+ 0 = 12"):
        table.append(5)


def test_a_table_that_keeps_or_loses_references_is_reported():
    """Catches a fork that does not count, and a free that forgets to give back."""
    table = table_with(fork=lambda self: _copy_of(self))
    table.append(5)
    with pytest.raises(ContractError, match="fork: block 0 had 1 reference and has 1; each table adds one"):
        table.fork()

    def forgetful(self):
        self.blocks, self.num_tokens = [], 0

    table = table_with(free=forgetful)
    table.append(5)
    with pytest.raises(ContractError, match=r"free\(\) dropped block 0, whose references went from 1 to 1"):
        table.free()


def test_a_fork_that_shares_the_list_is_reported():
    """Catches a block appended to the other table too: the text is wrong, and every count is right."""

    def fork(self):
        for block in self.blocks:
            self.pool.share(block)
        child = type(self)(self.pool, self.block_size)
        child.blocks, child.num_tokens = self.blocks, self.num_tokens
        return child

    table = table_with(fork=fork)
    table.append(5)
    with pytest.raises(ContractError, match="fork: both tables have the same list of blocks"):
        table.fork()


def test_a_fork_of_another_class_is_reported():
    """Catches the project's own table behind every sample but the first: a student's code is never called."""

    class Mine(memory.BlockTable):
        kind = None

        def fork(self):
            child = (self.kind or Mine)(self.pool, self.block_size)
            child.share(self.blocks[: self.num_filled_blocks])
            child.num_tokens = self.num_tokens
            return child

    table = watched("block_table", Mine)(memory.BlockAllocator(8), 4)
    table.append(5)
    table.fork().fork()
    Mine.kind = type("Special", (Mine,), {})
    table.fork()
    Mine.kind = memory.BlockTable
    with pytest.raises(
        ContractError,
        match=r"fork returned a BlockTable of minipaged.memory.block_table; make one of yours: type\(self\)$",
    ):
        table.fork()


def _copy_of(table):
    child = type(table)(table.pool, table.block_size)
    child.blocks, child.num_tokens = list(table.blocks), table.num_tokens
    return child


def test_a_table_whose_answers_are_wrong_is_reported():
    """Catches a count that is off, and blocks that are lost on the way to another pool."""
    table = table_with(filled=lambda self, logical: 4, capacity=property(lambda self: 0))
    table.append(6)
    with pytest.raises(ContractError, match=r"filled\(1\) is 4; 6 tokens in blocks \[0, 1\] of 4 make 2"):
        table.filled(1)
    table = table_with(capacity=property(lambda self: 0))
    table.append(6)
    with pytest.raises(ContractError, match=r"capacity is 0; 6 tokens in blocks \[0, 1\] of 4 make 8"):
        table.capacity  # noqa: B018

    def as_if_alone(self, count=1):
        return max(0, -(-(self.num_tokens + count) // self.block_size) - len(self.blocks))

    table = table_with(blocks_to_append=as_if_alone)
    table.append(5)
    shared = table.fork()
    with pytest.raises(ContractError, match=r"is 0; 5 tokens .* is shared and has to be copied .* make 1"):
        shared.blocks_to_append()

    def forgets_its_tokens(self, pool, blocks):
        self.free()
        self.pool, self.blocks = pool, blocks

    table, host = table_with(move_to=forgets_its_tokens), memory.BlockAllocator(2)
    table.append(6)
    with pytest.raises(
        ContractError, match=r"move_to\(pool, \[0, 1\]\) left 0 tokens in blocks \[0, 1\], not 6"
    ):
        table.move_to(host, host.allocate(2))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((), "give a tuple of at least one int"),
        ((3.0,), r"returned \(3\.0,\); give a tuple of at least one int"),
        ((3, 4.0), "give a tuple of at least one int"),
        ([3], "give a tuple"),
        ((9, 2), r"at_admission\(needed=3, remaining=9\) returned \(9, 2\); a count below 3"),
        ((16, 3), "more than 9 blocks are never used"),
    ],
)
def test_a_growth_policy_that_asks_for_nonsense_is_reported(answer, message):
    """Catches each rule of a growth policy that is not checked."""
    policy = type("Mine", (memory.OnDemand,), {"at_admission": lambda self, needed, remaining: answer})
    with pytest.raises(ContractError, match="^page_growth: .*" + message):
        watched("page_growth", policy)().at_admission(3, 9)


def cache_with(**methods):
    pool = memory.BlockAllocator(4)
    return watched("prefix_cache", type("Mine", (memory.PrefixCache,), methods))(pool, 2)


def registered(cache, *values):
    """Blocks that hold these tokens, registered and committed; their hashes."""
    hashes: list[int] = []
    cache.extend_hashes(hashes, tokens(*values))
    blocks = cache.allocate(len(hashes))
    entry = ""
    for i, block in enumerate(blocks):
        entry = cache.register(block, hashes[i], tokens(*values[2 * i : 2 * i + 2]), entry)
    cache.commit()
    return blocks, hashes


def test_a_watched_cache_registers_a_block_without_looking_at_all_others():
    """Catches a check that makes a pool of 16,384 blocks take seconds."""

    class Hash(int):
        num_compared = 0
        __hash__ = int.__hash__

        def __eq__(self, other):
            Hash.num_compared += 1
            return int(self) == int(other)

    cache = watched("prefix_cache", subclass(memory.PrefixCache))(memory.BlockAllocator(200), 2)
    for i, block in enumerate(cache.allocate(200)):
        cache.register(block, Hash(i), tokens(i, i))
    assert Hash.num_compared < 200 * 10


def test_a_watched_cache_shows_the_tokens_of_a_prompt_once(monkeypatch):
    """Catches a message written for every block: a prompt of 32,768 tokens took 5 s."""
    shown = []
    monkeypatch.setattr(prefix_cache, "short", lambda value: shown.append(value) or "")
    cache = watched("prefix_cache", subclass(memory.PrefixCache))(memory.BlockAllocator(4), 2)
    cache.extend_hashes([], tokens(*range(100)))
    assert len(shown) == 1


def test_a_cache_whose_head_was_evicted_before_its_tail_is_not_accused():
    """Catches the project's own cache blamed for finding a tail again that hung on an evicted head."""
    cache = cache_with()
    blocks, hashes = registered(cache, 1, 2, 3, 4)
    for block in blocks:  # (the project's own tables free their tails first)
        cache.free(block)
    for block in cache.allocate(3):  # two that were free, and the head
        cache.free(block)
    blocks, _ = registered(cache, 1, 2, 3, 4)
    assert cache.match(hashes, tokens(1, 2, 3, 4)) == blocks


def test_a_cache_that_finds_the_wrong_block_is_reported():
    """Catches a match that ignores the tokens, and a hash without its parent."""
    cache = cache_with(match=lambda self, hashes, token_ids, salt="": list(range(len(hashes))))
    registered(cache, 1, 2, 3, 4)
    hashes: list[int] = []
    cache.extend_hashes(hashes, tokens(1, 2, 9, 9))
    with pytest.raises(
        ContractError,
        match=r"match returned block 1 for tokens \[9, 9\], but it was registered with other tokens",
    ):
        cache.match(hashes, tokens(1, 2, 9, 9))

    def without_parent(self, hashes, token_ids, salt=""):
        hashes += [
            hash(token_ids[i : i + 2].tobytes()) for i in range(2 * len(hashes), len(token_ids) - 1, 2)
        ]

    cache = cache_with(extend_hashes=without_parent)
    registered(cache, 5, 6, 1, 2)
    with pytest.raises(ContractError, match="the same tokens after another prefix"):
        cache.extend_hashes([], tokens(1, 2))


def test_a_cache_that_finds_evicted_blocks_is_reported():
    """Catches a block handed out again without its content being forgotten."""

    def allocate(self, count=1):
        while self.allocator.num_free < count:
            self.allocator.reclaim(self.evictable.popitem(last=False)[0])
        return self.allocator.allocate(count)

    cache = cache_with(allocate=allocate)
    blocks, hashes = registered(cache, 1, 2, 3, 4)
    for block in reversed(blocks):
        cache.free(block)
    cache.allocate(4)
    with pytest.raises(ContractError, match="is not registered"):
        cache.match(hashes, tokens(1, 2, 3, 4))


def test_a_cache_that_holds_what_it_finds_is_reported():
    """Catches blocks lost one by one: `match` only looks, and admission may still refuse."""

    def match(self, hashes, token_ids, salt=""):
        blocks = memory.PrefixCache.match(self, hashes, token_ids, salt)
        for block in blocks:
            self.share(block)
        return blocks

    cache = cache_with(match=match)
    _, hashes = registered(cache, 1, 2, 3, 4)
    with pytest.raises(ContractError, match=r"match changed the references of blocks \[0, 1\] from \[1, 1\]"):
        cache.match(hashes, tokens(1, 2, 3, 4))


def test_a_cache_that_finds_more_than_was_asked_for_is_reported():
    """Catches an IndexError of the contract's own."""
    cache = cache_with(match=lambda self, hashes, token_ids, salt="": [0, 1])
    _, hashes = registered(cache, 1, 2, 3, 4)
    with pytest.raises(ContractError, match="match found 2 blocks of 1"):
        cache.match(hashes[:1], tokens(1, 2))


def test_a_cache_that_keeps_the_later_of_two_equal_blocks_is_reported():
    """Catches blocks that others share and nobody finds any more."""

    def register(self, block, chain_hash, tokens, parent=""):
        if chain_hash in self.block_of:
            self.forget(self.block_of[chain_hash])
        return memory.PrefixCache.register(self, block, chain_hash, tokens, parent)

    cache = cache_with(register=register)
    registered(cache, 1, 2)
    _, hashes = registered(cache, 1, 2)
    with pytest.raises(ContractError, match=r"match returned block 1 .* but the block is not registered"):
        cache.match(hashes, tokens(1, 2))


def test_a_cache_that_hashes_too_few_blocks_is_reported():
    """Catches blocks that are never registered: nothing is wrong, and nothing is ever found."""
    cache = cache_with(extend_hashes=lambda self, hashes, token_ids, salt="": None)
    with pytest.raises(ContractError, match="turned 0 hashes into 0; 5 tokens in blocks of 2 make 2"):
        cache.extend_hashes([], tokens(1, 2, 3, 4, 5))


def test_a_cache_that_changes_hashes_that_are_there_is_reported():
    """Catches blocks that are registered under one hash and looked for under another."""

    def extend_hashes(self, hashes, token_ids, salt=""):
        memory.PrefixCache.extend_hashes(self, hashes, token_ids, salt)
        hashes[0] = 7

    hashes = [5]
    with pytest.raises(
        ContractError, match=r"turned 1 hashes into 2; .* make 2; append these, and leave those"
    ):
        cache_with(extend_hashes=extend_hashes).extend_hashes(hashes, tokens(1, 2, 3, 4))


def test_a_cache_that_refuses_while_blocks_are_evictable_is_reported():
    """Catches a cache that fills up: what nobody holds was never evicted."""
    cache = cache_with(allocate=lambda self, count=1: self.allocator.allocate(count))
    blocks, _ = registered(cache, 1, 2)
    cache.free(*blocks)
    with pytest.raises(
        ContractError, match=r"allocate\(4\) raised OutOfBlocksError though 4 blocks are free"
    ):
        cache.allocate(4)
    with pytest.raises(memory.OutOfBlocksError, match="5"):
        cache_with().allocate(5)


def test_a_watched_cache_forgets_what_it_must():
    """Catches a contract that keeps `roll_back` or `clear` to itself: a failed step's garbage is found."""
    cache = cache_with()
    hashes: list[int] = []
    cache.extend_hashes(hashes, tokens(1, 2))
    (block,) = cache.allocate()
    cache.register(block, hashes[0], tokens(1, 2))
    cache.roll_back()
    assert cache.match(hashes, tokens(1, 2)) == []
    cache.register(block, hashes[0], tokens(1, 2))
    cache.commit()
    cache.free(block)
    assert cache.match(hashes, tokens(1, 2)) == [block]
    cache.clear()
    assert cache.match(hashes, tokens(1, 2)) == []


def test_a_cache_that_frees_a_block_under_its_other_holder_is_reported():
    """Catches the first of two references taken for the last: the block would be handed out again."""

    def free(self, block):
        self.allocator.release(block)
        self.evictable[block] = None

    cache = cache_with(free=free)
    blocks, _ = registered(cache, 1, 2)
    cache.share(blocks[0])
    with pytest.raises(ContractError, match=r"free\(0\) .* num_free went from 3 to 4"):
        cache.free(blocks[0])


def test_a_cache_that_loses_a_block_is_reported():
    """Catches a block that nobody holds and nobody can have: neither free nor evictable."""
    cache = cache_with(free=lambda self, block: self.allocator.release(block))
    (block,) = cache.allocate()
    with pytest.raises(ContractError, match=r"free\(0\) .* num_free went from 3 to 3"):
        cache.free(block)
    cache = cache_with(free=lambda self, block: None)
    with pytest.raises(ContractError, match=r"free\(0\) left block 0 with 1 reference$"):
        cache.free(*cache.allocate())


def test_a_cache_whose_entries_forget_their_parents_is_reported():
    """Catches an entry without a parent: blocks whose hashes collide would be mistaken for each other."""

    def without_parent(self, block, chain_hash, tokens, parent=""):
        return memory.PrefixCache.register(self, block, chain_hash, tokens)

    with pytest.raises(
        ContractError, match=r"register\(1\) returned .*; give the CachedBlock of its hash, tok"
    ):
        registered(cache_with(register=without_parent), 1, 2, 3, 4)


def test_a_cache_that_registers_without_a_word_is_reported():
    """Catches an AttributeError of None in the contract's own file."""
    with pytest.raises(ContractError, match=r"register\(0\) returned None; give the CachedBlock of its hash"):
        registered(cache_with(register=lambda *_: None), 1, 2)


@pytest.mark.parametrize("name", ["share", "free"])
def test_a_cache_that_refuses_a_free_block_is_not_accused(name):
    """Catches a cache blamed for the mistake of its caller."""
    with pytest.raises(ValueError, match="block 1 is") as caught:
        getattr(cache_with(), name)(1)
    assert not isinstance(caught.value, ContractError)


def test_a_cache_that_keeps_what_it_must_forget_is_reported():
    """Catches `roll_back` and `clear` that forget nothing."""
    cache = cache_with(roll_back=lambda self: None)
    hashes: list[int] = []
    cache.extend_hashes(hashes, tokens(1, 2))
    cache.register(*cache.allocate(), hashes[0], tokens(1, 2))
    cache.roll_back()
    with pytest.raises(ContractError, match="is not registered"):
        cache.match(hashes, tokens(1, 2))
    cache = cache_with(clear=lambda self: None)
    blocks, hashes = registered(cache, 1, 2)
    cache.free(*blocks)
    cache.clear()
    with pytest.raises(ContractError, match="is not registered"):
        cache.match(hashes, tokens(1, 2))


def toy_with(
    scheduler=FCFSScheduler, policy=ChunkedPrefill, preemption=Recompute, num_blocks=16, num_host_blocks=0
):
    allocator = memory.BlockAllocator(num_blocks)
    swap = memory.SwapSpace(num_host_blocks, num_blocks) if num_host_blocks else None
    kv = memory.KVManager(allocator, 4, memory.OnDemand(), swap_space=swap)
    return ToyEngine(
        watched("scheduler", subclass(scheduler))(
            kv,
            watched("chunked_prefill", subclass(policy))(),
            watched("preemption", subclass(preemption))(COSTS),
            max_num_seqs=4,
            max_num_batched_tokens=8,
            max_model_len=100,
        )
    )


def test_a_policy_over_budget_or_idle_is_reported():
    """Catches a step of more tokens than the budget, and an engine that stands still."""

    class Greedy:
        def fill(self, plan, scheduler):
            scheduler.admit_waiting(plan, 100)

    class Idle:
        def fill(self, plan, scheduler):
            pass

    for policy, message in (
        (Greedy, "chunked_prefill: the plan of step 0 has 9 tokens; the budget is 8"),
        (Idle, "chunked_prefill: step 0 does nothing, though 0 requests run, 0 are swapped out and 1 wait"),
    ):
        engine = toy_with(policy=policy)
        engine.add(range(9))
        with pytest.raises(ContractError, match=message):
            engine.scheduler.schedule()


def crowded(preemption):
    """Two requests for which there is no room; one will be preempted."""
    engine = toy_with(preemption=preemption, num_blocks=4)
    engine.add(range(7), 20)
    engine.add(range(7), 20)
    return engine


def test_a_victim_from_elsewhere_is_reported():
    """Catches a victim that is planned already or was never running, and a swap without room."""

    class Stranger(Recompute):
        def choose_victim(self, candidates):
            return SimpleNamespace(request_id="nobody")

    engine = crowded(Stranger)
    with pytest.raises(
        ContractError, match=r"preemption: choose_victim chose .*, which is not one of the candidates"
    ):
        engine.run()

    class Hopeful(Recompute):
        def choose_mode(self, victim, kv):
            return Decision("swap", "why not")

    engine = crowded(Hopeful)
    with pytest.raises(ContractError, match=r"choose_mode\(r1\) returned .*ask kv.can_swap_out first"):
        engine.run()


@pytest.mark.parametrize("answer", ["swap", ("swap",), ("recompute", None), ("pause", "why not")])
def test_what_is_not_a_decision_is_reported(answer):
    """Catches a ValueError of the unpacking, and a mode that nobody knows taken for "recompute"."""
    engine = crowded(type("Unclear", (Recompute,), {"choose_mode": lambda self, victim, kv: answer}))
    with pytest.raises(
        ContractError, match=r'choose_mode\(r1\) returned .*; give Decision\("recompute" or "sw'
    ):
        engine.run()


@pytest.mark.parametrize(
    "change",
    [
        lambda request: request.sequences.clear(),
        lambda request: request.sequences[0].table.free(),
        lambda request: setattr(request.sequences[0], "num_computed_tokens", 1),
    ],
)
def test_a_policy_that_changes_its_victim_is_reported(change):
    """Catches an IndexError later, and tokens that are computed twice."""

    class Meddling(Recompute):
        def choose_mode(self, victim, kv):
            change(victim)
            return Decision("recompute", "why not")

    engine = crowded(Meddling)
    with pytest.raises(ContractError, match=r"choose_mode\(r1\) changed its sequences, tokens or blocks"):
        engine.run()


@pytest.mark.parametrize("phase", ["plan_decodes", "continue_prefills", "resume_preempted", "admit_waiting"])
def test_a_phase_that_reports_what_it_did_not_spend_is_reported(phase):
    """Catches `left` returned for `budget - left`: the policy stops, and is blamed for an empty step."""

    def wrong(self, plan, budget, *args, **options):
        return budget - getattr(FCFSScheduler, phase)(self, plan, budget, *args, **options)

    engine = toy_with(type("Wrong", (FCFSScheduler,), {phase: wrong}))
    engine.add(range(3))
    with pytest.raises(
        ContractError, match=rf"scheduler: {phase} scheduled \d+ tokens .* and returned \d+; ret"
    ):
        engine.run()


def scheduled(**change):
    """A step whose first scheduled sequence is replaced by another."""

    def spoil(plan, scheduler):
        plan.scheduled[0] = plan.scheduled[0]._replace(**change)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda plan, scheduler: plan.scheduled.append(plan.scheduled[0]), "schedules sequence r0/0 twice"),
        (
            scheduled(start=1, num_tokens=1),
            "computes tokens 1 to 2 of sequence r0/0, which has 0 of 2 comput",
        ),
        (scheduled(num_tokens=0), "computes tokens 0 to 0 of sequence r0/0, which has 0 of 2 computed"),
        (scheduled(num_tokens=3), "computes tokens 0 to 3 of sequence r0/0, which has 0 of 2 computed"),
        (
            lambda plan, scheduler: plan.scheduled[0].sequence.table.truncate(1),
            "computes tokens of sequence r0/0 that have no slot",
        ),
        (
            lambda plan, scheduler: scheduler.waiting.append(scheduler.running.pop()),
            "computes sequence r1/0, whose request is not running",
        ),
        (lambda plan, scheduler: plan.sampling.reverse(), "all sequences of a request are sampled together"),
        (lambda plan, scheduler: plan.sampling.pop(), "all sequences of a request are sampled together"),
        (
            lambda plan, scheduler: setattr(plan, "num_preempted", 1),
            r"preempts and admits \['r0', 'r1'\]; the blocks are for those who run",
        ),
    ],
)
def test_a_plan_that_cannot_be_run_is_reported(spoil, message):
    """Catches a scheduler whose steps compute the wrong tokens: the text would be wrong without a word."""

    class Spoils(FCFSScheduler):
        def schedule(self):
            plan = super().schedule()
            spoil(plan, self)
            return plan

    engine = toy_with(Spoils)
    engine.add(range(2))
    engine.add(range(2))
    with pytest.raises(ContractError, match=f"^scheduler: .*step 0 .*{message}"):
        engine.scheduler.schedule()


def test_a_scheduler_that_stands_still_is_reported():
    """Catches an engine that takes steps for ever, and computes nothing."""

    class Rests(FCFSScheduler):
        def schedule(self):
            return super().schedule() if self.num_steps == 0 else StepPlan(1)

    engine = toy_with(Rests)
    engine.add(range(2), 5)
    with pytest.raises(
        ContractError, match=r"^scheduler: step 1 does nothing, though 1 requests run, 0 are sw"
    ):
        engine.run()


def test_a_scheduler_that_calls_something_wrongly_is_shown_its_own_line():
    """Catches the line of the project, or of the library, where the exception came up."""

    class Wrong(FCFSScheduler):
        def admit_waiting(self, plan, budget, *args, **options):
            return self.preempt(plan, None)

    class Regex(FCFSScheduler):
        def admit_waiting(self, plan, budget, *args, **options):
            return re.compile("(")

    for scheduler in (Wrong, Regex):
        engine = toy_with(scheduler)
        engine.add(range(4), 2)
        line = scheduler.admit_waiting.__code__.co_firstlineno + 1
        with pytest.raises(ContractError, match=rf" raised .* \(test_contracts.py, line {line}\)$"):
            engine.run()


def test_a_scheduler_that_runs_in_circles_is_reported():
    """Catches an engine that takes steps for ever, each with something to do, and never samples a token."""

    class Preempts(FCFSScheduler):  # a prompt of two steps never gets to its second
        def continue_prefills(self, plan, budget, share=None):
            for request in list(self.running):
                self.preempt(plan, request)
            return 0

    class Copies(FCFSScheduler):
        def admit_waiting(self, plan, budget, *args, **options):
            plan.copies.append((1, 2))
            return 0

    class Counts(FCFSScheduler):  # a request as finished that waits on
        def admit_waiting(self, plan, budget, *args, **options):
            plan.finished.append(self.waiting[0])
            return 0

    for scheduler in (Preempts, Copies, Counts):
        engine = toy_with(scheduler)
        engine.add(range(12), 5)
        with pytest.raises(ContractError, match=r"^scheduler: 1000 steps have preempted, moved or "):
            engine.run()


def test_a_request_that_ends_is_no_circle(monkeypatch):
    """Catches steps counted on from one request to the next: each is preempted, then aborted."""

    class Preempts(FCFSScheduler):
        def continue_prefills(self, plan, budget, share=None):
            for request in list(self.running):
                self.preempt(plan, request)
            return 0

    monkeypatch.setattr("minipaged.learn.contracts.scheduler.CIRCLES", 2)
    engine = toy_with(Preempts)
    for _ in range(4):
        request = engine.add(range(12), 5)
        assert [engine.step().num_preempted for _ in range(2)] == [0, 1]
        engine.scheduler.abort(request)


def test_a_scheduler_that_runs_too_many_sequences_is_reported():
    """Catches `max_num_seqs` ignored: a GPU's graphs and buffers are made for so many."""
    engine = toy_with(type("Hospitable", (FCFSScheduler,), {"has_room_for": lambda self, request: True}))
    for _ in range(5):
        engine.add([1])
    with pytest.raises(ContractError, match=r"^scheduler: 5 sequences run in step 0; max_num_seqs is 4$"):
        engine.run()


def test_a_scheduler_that_admits_before_those_that_are_swapped_out_is_reported():
    """Catches a request that stays on the host for ever, because others take its place."""

    class Impatient(FCFSScheduler):
        def admit_waiting(self, *args, **options):
            swapped, self.swapped = self.swapped, deque()
            used = super().admit_waiting(*args, **options)
            self.swapped = swapped
            return used

    engine = toy_with(Impatient, preemption=Swap, num_blocks=4, num_host_blocks=4)
    for length in (7, 7, 1):
        engine.add(range(length), 9)
    with pytest.raises(
        ContractError, match=r"admits \['r2'\] while a request that came earlier is swapped out"
    ):
        engine.run()


def test_a_phase_may_take_what_its_own_policy_gives_it():
    """Catches a right scheduler refused: one argument more for `plan_decodes`, a NumPy integer returned."""

    class Capped(FCFSScheduler):
        def plan_decodes(self, plan, budget, most=1):
            return np.int64(super().plan_decodes(plan, min(budget, most)))

    class Policy(ChunkedPrefill):
        def fill(self, plan, scheduler):
            left = 8 - scheduler.plan_decodes(plan, 8, 2)
            left -= scheduler.continue_prefills(plan, left)
            scheduler.admit_waiting(plan, left)

    engine = toy_with(Capped, Policy)
    for _ in range(3):
        engine.add(range(3))
    assert len(engine.run()) == 3


def test_an_earlier_request_may_be_admitted_before_those_that_are_swapped_out():
    """Catches a right scheduler refused: the shortest come first, so the longest, the earliest, waits."""

    class ShortestFirst(FCFSScheduler):
        def admit_waiting(self, *args, **options):
            self.waiting = deque(sorted(self.waiting, key=lambda request: len(request.prompt_token_ids)))
            used = super().admit_waiting(*args, **options)
            self.waiting = deque(sorted(self.waiting, key=lambda request: request.arrival))
            return used

    for num_blocks in range(6, 12):
        engine = toy_with(ShortestFirst, preemption=Swap, num_blocks=num_blocks, num_host_blocks=num_blocks)
        for length in (14, 3, 4, 5):
            engine.add([length] * length, 10)
        assert len(engine.run()) == 4


def test_a_scheduler_that_loses_or_disorders_requests_is_reported():
    """Catches a queue that drops a request and one that runs them in another order."""

    class Forgetful(FCFSScheduler):
        def add(self, request):
            pass

    engine = toy_with(Forgetful)
    with pytest.raises(ContractError, match=r"scheduler: add\(r0\) left the request out of the queue"):
        engine.add(range(4))

    class Lifo(FCFSScheduler):
        def schedule(self):
            plan = super().schedule()
            self.running.reverse()
            return plan

    engine = toy_with(Lifo)
    engine.add(range(3))
    engine.add(range(3))
    with pytest.raises(ContractError, match="running requests stand in the order"):
        engine.run()


def test_a_queue_left_out_of_order_is_reported():
    """Catches a queue still sorted by length: preemption would put requests back wrongly."""

    class ShortestFirst(FCFSScheduler):
        def admit_waiting(self, plan, budget, whole=False, share=None):
            self.waiting = deque(sorted(self.waiting, key=lambda request: len(request.prompt_token_ids)))
            return super().admit_waiting(plan, budget, whole, share)

    class PutsItBack(ShortestFirst):
        def admit_waiting(self, plan, budget, whole=False, share=None):
            used = super().admit_waiting(plan, budget, whole, share)
            self.waiting = deque(sorted(self.waiting, key=lambda request: request.arrival))
            return used

    class LastOutFirstIn(FCFSScheduler):
        def resume_preempted(self, plan, budget):
            self.swapped.reverse()
            return super().resume_preempted(plan, budget)

    def run(scheduler, preemption=Recompute):
        engine = toy_with(scheduler, preemption=preemption, num_blocks=8, num_host_blocks=8)
        for length in (6, 5, 4, 4):
            engine.add(range(length), 12)
        engine.run()

    expected = r"^scheduler: waiting requests stand in the order \[\d, .*\] of arrival; keep every"
    with pytest.raises(ContractError, match=expected):
        run(ShortestFirst)
    with pytest.raises(ContractError, match=expected.replace("waiting", "swapped")):
        run(LastOutFirstIn, Swap)
    run(PutsItBack)
    run(PutsItBack, Swap)


@pytest.mark.parametrize("queue", [None, (), 7])
def test_a_queue_that_is_not_one_is_reported(queue):
    """Catches a TypeError out of the checks: `reverse()` returns None."""

    class Replaces(FCFSScheduler):
        def schedule(self):
            plan = super().schedule()
            self.waiting = queue
            return plan

    engine = toy_with(Replaces)
    engine.add(range(3))
    for _ in range(2):  # the first breach is repeated
        with pytest.raises(ContractError, match=rf"^scheduler: waiting is {re.escape(repr(queue))}; keep a "):
            engine.scheduler.schedule()
        engine.scheduler.running.clear()
        engine.scheduler.waiting = deque()


def test_a_request_that_is_lost_or_queued_twice_is_reported():
    """Catches a caller that waits forever, and a request that silently ends."""

    class Drops(FCFSScheduler):
        def admit_waiting(self, plan, budget, whole=False, share=None):
            if len(self.waiting) > 1:
                self.waiting.pop()
            return super().admit_waiting(plan, budget, whole, share)

    class DropsTheLast(FCFSScheduler):
        def commit(self, plan, result):
            touched = super().commit(plan, result)
            self.running.clear()
            return touched

    class SaysThatAllIsDone(DropsTheLast):
        has_unfinished = property(lambda self: False)

    class Doubles(FCFSScheduler):
        def add(self, request):
            super().add(request)
            self.waiting.append(request)

    lost = "was added, has not ended and is in no queue; keep it in one until it ends"
    for scheduler, message in (
        (Drops, rf"^scheduler: request r1 {lost}$"),
        (DropsTheLast, rf"^scheduler: request r0 {lost}$"),
        (SaysThatAllIsDone, rf"^scheduler: request r0 {lost}$"),
        (Doubles, "^scheduler: request r0 was added, has not ended and is in the queues 2 times; keep"),
    ):
        engine = toy_with(scheduler)
        engine.add(range(3))
        engine.add(range(3))
        with pytest.raises(ContractError, match=message):  # noqa: PT012
            while engine.scheduler.has_unfinished:
                plan = engine.scheduler.schedule()
                engine.scheduler.commit(plan, engine.executor.execute(plan))


def test_a_request_that_has_ended_is_not_missed():
    """Catches a scheduler accused of losing what was aborted, refused or failed."""
    engine = toy_with()
    scheduler = engine.scheduler
    with pytest.raises(RequestTooLongError):
        engine.add(range(100))
    waits, runs, fails = (engine.add(range(3)) for _ in range(3))
    scheduler.abort(waits)
    plan = scheduler.schedule()
    scheduler.abort(runs)
    scheduler.roll_back(plan)
    scheduler.end(fails, "error")
    assert not scheduler.has_unfinished
    scheduler.commit(plan := scheduler.schedule(), engine.executor.execute(plan))


def test_a_branch_from_nowhere_is_reported():
    """Catches a method that invents a token or keeps a dead sequence alive."""

    class Inventive(SamplingMethod):
        def advance(self, request, samples):
            return [Branch(request.sequences[0], 49, -9.0)]

    method = watched("parallel_sampling", Inventive)(SamplingParams(), None)
    request = make_request([1, 2], method, SamplingParams())
    with pytest.raises(
        ContractError,
        match=r"parallel_sampling: advance.r. continues .* with 49 .* not one of its candidates",
    ):
        method.advance(request, [Sample([1], [-0.5])])
    with pytest.raises(ContractError, match=r"num_candidates returned 0"):
        watched("parallel_sampling", type("Zero", (Inventive,), {"num_candidates": lambda s, r: 0}))(
            SamplingParams(), None
        ).num_candidates(request)
    with pytest.raises(ContractError, match=r"num_candidates returned 1\.5; give at least 1"):
        watched("parallel_sampling", type("Half", (Inventive,), {"num_candidates": lambda s, r: 1.5}))(
            SamplingParams(), None
        ).num_candidates(request)
    none = property(lambda self: 0, lambda self, count: None)
    with pytest.raises(ContractError, match=r"num_sequences is 0; give at least 1"):
        watched("parallel_sampling", type("Empty", (Inventive,), {"num_sequences": none}))(
            SamplingParams(), None
        )


@pytest.mark.parametrize("answer", [None, [None], "x", 5, [("parent", 1)]])
def test_what_is_not_a_list_of_branches_is_reported(answer):
    """Catches an AttributeError of None in the engine's own files."""
    mute = type("Mute", (SamplingMethod,), {"advance": lambda self, request, samples: answer})
    method = watched("parallel_sampling", mute)(SamplingParams(), None)
    request = make_request([1, 2], method, SamplingParams())
    with pytest.raises(ContractError, match=r"parallel_sampling: advance.r. returned .*give a list of Bran"):
        method.advance(request, [Sample([1], [-0.5])])


def test_a_method_that_does_the_work_of_the_scheduler_is_reported():
    """Catches `advance` that frees, appends or drops: if the step fails later, that could not be undone."""
    meddling = {
        "free": lambda request: request.sequences[0].table.free(),
        "append": lambda request: request.sequences[0].append(Branch(request.sequences[0], 1, -0.5)),
        "drop": lambda request: request.sequences.clear(),
        "end": lambda request: request.completions.append(request.sequences[0]),
    }
    for meddle in meddling.values():

        class Meddling(SamplingMethod):
            def advance(self, request, samples, meddle=meddle):
                branches = super().advance(request, samples)
                meddle(request)
                return branches

        params = SamplingParams()
        make = watched("parallel_sampling", Meddling)
        method = make(params, StopChecker(params, ()))
        request = make_request([1, 2], method, params)
        request.sequences[0].table.append(1)
        with pytest.raises(ContractError, match=r"parallel_sampling: advance.r. changed its sequences"):
            method.advance(request, [Sample([1], [-0.5])])


def test_a_rank_that_returns_nothing_is_reported():
    """Catches a command that ends well and prints no text."""
    mute = type("Mute", (SamplingMethod,), {"rank": lambda self, request: []})
    method = watched("parallel_sampling", mute)(SamplingParams(), None)
    assert method.rank(SimpleNamespace(request_id="r", completions=[])) == []
    with pytest.raises(ContractError, match=r"rank.r. returned none of 1 completions"):
        method.rank(SimpleNamespace(request_id="r", completions=["done"]))


@pytest.mark.parametrize("ranked", [["a", "a"], ["a", "live"]])
def test_a_rank_of_what_is_not_a_completion_is_reported(ranked):
    """Catches a text that is given twice, or before it has ended."""
    odd = type("Odd", (SamplingMethod,), {"rank": lambda self, request: ranked[: len(request.completions)]})
    method = watched("parallel_sampling", odd)(SamplingParams(), None)
    assert method.rank(SimpleNamespace(request_id="r", completions=["a"])) == ["a"]
    with pytest.raises(ContractError, match=r"rank.r. returned 2 sequences of which 1 are completions"):
        method.rank(SimpleNamespace(request_id="r", completions=["a", "b"]))


def test_a_class_that_cannot_be_made_is_reported():
    """Catches a TypeError out of the middle of the project's files."""
    mine = type("Mine", (memory.BlockAllocator,), {"__init__": lambda self: None})
    with pytest.raises(ContractError, match=r"allocator: the engine calls Mine\(7\), but .* takes 1"):
        watched("allocator", mine)(7)


# -- the interface, before anything runs -------------------------------------------------------------------


def test_a_missing_method_is_reported_when_the_class_is_loaded():
    """Catches an AttributeError in the middle of a run."""
    message = r"allocator: Empty has no method allocate\(count=1\), .* and no attribute num_free; see"
    with pytest.raises(ContractError, match=message):
        watched("allocator", type("Empty", (), {}))
    methods = {k: v for k, v in vars(memory.BlockAllocator).items() if k != "num_free"}
    with pytest.raises(ContractError, match="allocator: Mine has no attribute num_free; see BlockAllocator"):
        watched("allocator", type("Mine", (), methods))


def test_all_that_a_class_lacks_is_reported_at_once():
    """Catches a class that is mended seven times, beginning with what only the tests call."""
    lacking = ("check_invariants", "release", "share")
    methods = {k: v for k, v in vars(memory.BlockAllocator).items() if k not in lacking}
    message = r"Mine has no method share\(block\), release\(block\), check_invariants\(references\); see"
    with pytest.raises(ContractError, match=message):
        watched("allocator", type("Mine", (), methods))


def test_a_property_written_as_a_method_is_reported_when_the_class_is_loaded():
    """Catches "num_free is <bound method ...>" after the first call, or a comparison with a method."""
    mine = type("Mine", (memory.BlockAllocator,), {"num_free": lambda self: 3})
    message = r"^allocator: Mine.num_free is a method; make it a property \(with @property\)$"
    with pytest.raises(ContractError, match=message):
        watched("allocator", mine)


def test_a_missing_method_can_be_inherited_where_there_is_a_class():
    """Catches a message that sends a student who wrote a class from scratch to the solution."""
    with pytest.raises(
        ContractError, match=r"see BlockTable in .*block_table, from which yours can inherit it$"
    ):
        watched("block_table", type("Mine", (), {}))
    with pytest.raises(ContractError, match=r"see PageGrowth in minipaged.memory.page_growth$"):
        watched("page_growth", type("Mine", (), {}))


def test_a_constructor_in_another_order_is_reported_when_the_class_is_loaded():
    """Catches "'<' not supported between instances of 'BlockAllocator' and 'int'", in every test."""

    class Mine(memory.BlockTable):
        def __init__(self, block_size, pool):
            super().__init__(pool, block_size)

    message = r"Mine is declared with \(block_size, pool\), but the order is pool, block_size; change it"
    with pytest.raises(ContractError, match=message):
        watched("block_table", Mine)


def test_a_method_with_other_arguments_is_reported_when_the_class_is_loaded():
    """Catches a TypeError in the middle of a run."""
    mine = type("Mine", (memory.OnDemand,), {"at_admission": lambda self, needed: (needed,)})
    with pytest.raises(
        ContractError, match=r"page_growth: the contract calls Mine.at_admission\(needed, remaining\), but"
    ):
        watched("page_growth", mine)


def test_a_static_method_needs_no_self():
    """Catches a refusal whose two halves say the same."""
    methods = {
        "at_admission": staticmethod(lambda needed, remaining: (needed,)),
        "while_running": classmethod(lambda cls, needed, remaining: (needed,)),
    }
    policy = watched("page_growth", type("Mine", (), methods))()
    assert policy.at_admission(2, 5) == policy.while_running(2, 5) == (2,)


def test_what_is_not_a_class_is_reported():
    """Catches an object given where a class is wanted."""
    with pytest.raises(ContractError, match=r"allocator: .* is not a class"):
        watched("allocator", memory.BlockAllocator(3))


def test_a_scheduler_must_be_a_subclass():
    """Catches a class whose queues the engine could not read."""
    alien = type("Alien", (), {k: v for k, v in vars(FCFSScheduler).items() if k[0] != "_"})
    with pytest.raises(ContractError, match="scheduler: Alien must be a subclass of FCFSScheduler"):
        watched("scheduler", alien)


def manager_that_charges(answer):
    class Mine(memory.KVManager):
        def admission_charge(self, cached, num_tokens, num_cached):
            return answer

    return watched("kv_manager", Mine)(memory.BlockAllocator(8), 4, memory.OnDemand())


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((4, 8), "charge 0 to 3 blocks"),
        ((-1, 8), "charge 0 to 3 blocks"),
        ((0, 21), "charge 0 to 20 tokens"),
        (8, "give two counts"),
        ((0, 2.5), "give two counts"),
    ],
)
def test_an_admission_that_is_charged_wrongly_is_reported(answer, expected):
    """Catches a request that is never admitted, or admitted for less than nothing, with no word why."""
    with pytest.raises(ContractError, match=f"kv_manager: admission_charge of 3 cached blocks .*{expected}"):
        manager_that_charges(answer).admission_charge({1, 2, 3}, 20, 12)


@pytest.mark.parametrize("answer", [(0, 0), (3, 20)])
def test_an_admission_may_be_charged_nothing_or_all(answer):
    """Catches a right manager refused at the bounds."""
    assert manager_that_charges(answer).admission_charge({1, 2, 3}, 20, 12) == answer


class FixedDrafter:
    """Returns what it is told to."""

    drafts = ()

    def draft(self, sequences, counts):
        return self.drafts


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        ([], r"draft returned \[\] for 1 sequences; give a list of as many lists"),
        (None, r"draft returned None for 1 sequences"),
        ([[1, 2, 3]], r"draft returned \[1, 2, 3\] where 2 tokens were asked for"),
        ([[-1]], r"draft returned \[-1\]; give a list of token ids"),
        ([["a"]], r"draft returned \['a'\]; give a list of token ids"),
    ],
)
def test_a_drafter_that_drafts_too_much_or_no_tokens_is_reported(drafts, expected):
    """Catches a token id that fails in the model's embeddings, far from the drafter."""
    drafter = watched("drafter", type("Mine", (FixedDrafter,), {"drafts": drafts}))()
    with pytest.raises(ContractError, match=f"drafter: {expected}"):
        drafter.draft([SimpleNamespace(token_ids=[5])], [2])


def test_a_drafter_may_draft_little_or_nothing():
    """Catches a right draft refused: none, or token 0."""
    drafter = watched("drafter", type("Mine", (FixedDrafter,), {"drafts": [[], [0]]}))()
    assert drafter.draft([SimpleNamespace(token_ids=[5])] * 2, [2, 2]) == [[], [0]]


def test_a_drafter_may_only_read():
    """Catches a draft that is appended to the text itself."""

    class Writer:
        def draft(self, sequences, counts):
            sequences[0].token_ids.append(3)
            return [[3]]

    drafter = watched("drafter", Writer)()
    with pytest.raises(ContractError, match="drafter: draft changed a sequence; only read it"):
        drafter.draft([SimpleNamespace(token_ids=[5])], [2])
