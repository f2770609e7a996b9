"""Prefix-caching-aware scheduling (vLLM): what is cached needs neither free blocks nor budget."""

import pytest

from minipaged.memory import BlockAllocator, KVManager, OnDemand, PrefixCache
from minipaged.scheduling import PrefillFirst
from tests.toy import ToyEngine, kv_sequence, toy_scheduler


def warm(engine, prompt):
    """Run a prompt to its end, so that its full blocks are cached."""
    engine.add(prompt, max_tokens=1)
    engine.run()


def manager_that_knows(token_ids, num_blocks):
    """A manager over blocks of 2 tokens; nobody holds the cached ones."""
    allocator = BlockAllocator(num_blocks)
    kv = KVManager(allocator, 2, OnDemand(), PrefixCache(allocator, 2))
    sequence = kv_sequence(kv, token_ids)
    kv.admit([sequence], kv.can_admit([sequence]))
    kv.register(sequence, len(token_ids))
    kv.commit_registered()
    kv.free([sequence])
    return kv


def admitted_blocks(prefix_aware):
    """The source's first example: 16 blocks of prompt, 12 of them cached, 4 blocks free."""
    engine = ToyEngine(
        toy_scheduler(18, 4, caching=True, max_num_seqs=8, budget=1000, prefix_aware=prefix_aware)
    )
    system = range(48)
    keeper = engine.add(system, 20)  # holds 12 blocks of prompt, which are cached, and 1 of output
    engine.step()
    engine.add([9], 20)  # another one
    engine.step()
    assert len(keeper.sequences[0].table.blocks) == 13
    assert engine.scheduler.kv.num_free == 4
    request = engine.add([*system, *range(100, 116)], 4)
    plan = engine.scheduler.schedule()
    return request, plan


def test_a_prompt_of_16_blocks_with_12_cached_is_admitted_with_4_free_blocks():
    """Catches an admission that asks for blocks which the prompt will not take."""
    request, plan = admitted_blocks(prefix_aware=True)
    assert request.state.value == "running"
    (event,) = [event for event in plan.events if event.kind == "admitted"]
    assert event.detail["blocks"] == 4
    assert event.detail["cached_tokens"] == 48
    assert [c.num_tokens for c in plan.scheduled if c.sequence.request is request] == [16]


def test_the_unaware_scheduler_makes_it_wait():
    """Catches an ablation that measures nothing."""
    request, _ = admitted_blocks(prefix_aware=False)
    assert request.state.value == "waiting"


def first_step_of_two_long_prompts(prefix_aware, policy=None):
    """The source's second example: two prompts of 1024 tokens, 512 of them cached, budget 2048."""
    engine = ToyEngine(
        toy_scheduler(
            400, 16, caching=True, budget=2048, max_model_len=4000, policy=policy, prefix_aware=prefix_aware
        )
    )
    warm(engine, range(512))
    prompts = [[*range(512), *range(n, n + 512)] for n in (1000, 3000, 5000)]
    for prompt in prompts:
        engine.add(prompt, 4)
    plan = engine.step()
    return engine, plan


@pytest.mark.parametrize("policy", [None, PrefillFirst()])
def test_two_prompts_of_1024_with_512_cached_use_1024_of_a_budget_of_2048(policy):
    """Catches cached tokens charged to the budget: the third prompt would have to wait for a step."""
    engine, plan = first_step_of_two_long_prompts(True, policy)
    assert [chunk.num_tokens for chunk in plan.scheduled] == [512, 512, 512]
    assert plan.num_tokens == 1536
    assert [request.num_cached_tokens for request in engine.requests[1:]] == [512, 512, 512]


def test_the_unaware_scheduler_fills_its_budget_with_cached_tokens():
    """Catches an ablation that measures nothing: 1024 computed tokens fill a budget of 2048."""
    _, plan = first_step_of_two_long_prompts(False)
    assert [chunk.num_tokens for chunk in plan.scheduled] == [512, 512]


def test_cached_tokens_use_up_no_more_than_the_budget():
    """Catches a budget below zero, with which a phase goes on."""
    engine = ToyEngine(toy_scheduler(40, 4, caching=True, prefix_aware=False, budget=8))
    warm(engine, range(20))
    for _ in range(2):
        engine.add(range(21), 2)
    assert [chunk.num_tokens for chunk in engine.step().scheduled] == [1]
    assert engine.run() == engine.alone()


def test_the_unaware_scheduler_never_cuts_what_fits():
    """Catches cached blocks that are counted twice: with nobody else running, the request would be
    ended as if it had outgrown the pool."""
    engine = ToyEngine(toy_scheduler(6, 4, caching=True, prefix_aware=False))
    warm(engine, range(20))
    engine.add(range(20), 4)
    assert engine.run() == engine.alone()


def test_without_a_shared_prefix_both_schedule_the_same():
    """Catches a price for prompts that have nothing in common."""

    def chunks(prefix_aware):
        engine = ToyEngine(toy_scheduler(40, 4, caching=True, budget=12, prefix_aware=prefix_aware))
        for i in range(6):
            engine.add([i] * (i + 5), 4)
        engine.run()
        return [[chunk[1:] for chunk in plan.scheduled] for plan in engine.plans]

    assert chunks(prefix_aware=True) == chunks(prefix_aware=False)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 12, 13, 16])
@pytest.mark.parametrize("num_blocks", ["just enough", "ample"])
def test_a_repeated_prompt_computes_its_partly_filled_block_or_its_last_token(length, num_blocks):
    """Catches zero tokens for a prompt of full blocks (a crash elsewhere), and a whole block instead of
    one token."""
    size = 4
    pool = -(-(length + 1) // size) if num_blocks == "just enough" else 40
    engine = ToyEngine(toy_scheduler(pool, size, caching=True))
    warm(engine, range(length))
    engine.add(range(length), 1)
    plan = engine.step()
    assert [chunk.num_tokens for chunk in plan.scheduled] == [length % size or 1]
    assert engine.run() == engine.alone()


def test_the_last_block_of_a_fully_cached_prompt_is_copied():
    """Catches a write into a block that the cache, and whoever holds it, relies on."""
    engine = ToyEngine(toy_scheduler(40, 4, caching=True))
    keeper = engine.add(range(8), 10)
    engine.step()
    request = engine.add(range(8), 10)
    plan = engine.step()
    first, second = (r.sequences[0].table.blocks for r in (keeper, request))
    assert plan.copies == [(first[1], second[1])]
    assert first[0] == second[0]
    assert engine.run() == engine.alone()


def test_a_pool_so_tight_that_the_cached_last_block_is_used_for_its_own_copy():
    """Catches a copy from a block that was evicted and overwritten in between: 2 blocks are all there is."""
    engine = ToyEngine(toy_scheduler(2, 4, caching=True))
    engine.add(range(8), 1)
    engine.run()
    engine.add(range(8), 1)
    plan = engine.step()
    assert plan.copies == []
    assert [chunk.num_tokens for chunk in plan.scheduled] == [1]
    assert engine.run() == engine.alone()


def test_an_admission_that_does_not_fit_evicts_nothing():
    """Catches a look at the cache that throws away what it looks for."""
    kv = manager_that_knows(range(6), num_blocks=8)
    assert not kv.can_admit([kv_sequence(kv, range(20))]).fits
    assert len(kv.prefix_cache.block_of) == 3
    assert kv.can_admit([kv_sequence(kv, range(16))]).num_cached_tokens == 6


def test_cached_blocks_that_nobody_holds_are_not_free_as_well():
    """Catches counting an evictable block twice: as a hit, and as a block to hand out."""
    kv = manager_that_knows(range(4), num_blocks=4)
    assert kv.num_free == 4
    assert kv.can_admit([kv_sequence(kv, range(8))]).fits
    assert not kv.can_admit([kv_sequence(kv, range(10))]).fits


def test_a_resumed_request_computes_only_what_is_no_longer_cached():
    """Catches tokens scheduled from a stale count of cached tokens after preemption: an index error, or
    a token computed at the wrong place."""
    engine = ToyEngine(toy_scheduler(10, 2, caching=True))
    for i in range(2):
        engine.add(range(10 * i, 10 * i + 6), 12)
    assert engine.run() == engine.alone()
    plans = [plan for plan in engine.plans if any(e.kind == "resumed" for e in plan.events)]
    assert plans
    for plan in plans:
        (event,) = [event for event in plan.events if event.kind == "resumed"]
        (start,) = [c.start for c in plan.scheduled if c.sequence.request.request_id == event.request_id]
        assert start == event.detail["cached_tokens"] > 0
