"""Prefill first, vLLM's schedule before chunked prefill: steps of whole prompts, then steps of decodes."""

import pytest

from minipaged.decoding.params import SamplingParams
from minipaged.scheduling import PrefillFirst, StepPlan, Swap
from tests.engine.toy_model import toy_engine
from tests.toy import ToyEngine, samples, toy_scheduler


def engine_of(**options):
    return ToyEngine(toy_scheduler(policy=PrefillFirst(), **options))


def shape(plan):
    """(request, tokens) of each chunk."""
    return [(chunk.sequence.request.request_id, chunk.num_tokens) for chunk in plan.scheduled]


def test_a_prompt_runs_in_one_step_alone():
    """Catches a prompt that shares a step with decodes, which prefill first never allows."""
    engine = engine_of()
    engine.add(range(5), 4)
    assert shape(engine.step()) == [("r0", 5)]
    engine.add(range(7), 4)
    assert shape(engine.step()) == [("r1", 7)]
    assert shape(engine.step()) == [("r0", 1), ("r1", 1)]


def test_prompts_that_fit_together_share_a_step():
    """Catches only one prompt per step."""
    engine = engine_of(budget=16)
    for length in (6, 7, 5, 2):
        engine.add(range(length), 4)
    assert shape(engine.step()) == [("r0", 6), ("r1", 7)]
    assert shape(engine.step()) == [("r2", 5), ("r3", 2)]


def test_a_prompt_is_not_cut_while_another_is_in_the_step():
    """Catches a chunk where whole prompts were promised."""
    engine = engine_of(budget=10)
    engine.add(range(6), 1)
    engine.add(range(6), 1)
    assert shape(engine.step()) == [("r0", 6)]
    assert shape(engine.step()) == [("r1", 6)]


def test_a_prompt_beyond_the_budget_takes_several_steps():
    """Catches a long prompt that is never admitted, or overruns the budget."""
    engine = engine_of(budget=8)
    engine.add(range(19), 2)
    assert [shape(engine.step()) for _ in range(4)] == [[("r0", 8)], [("r0", 8)], [("r0", 3)], [("r0", 1)]]


def test_the_rest_of_a_long_prompt_leaves_room_for_others():
    """Catches a last step that computes three tokens and nothing else, or more than its budget of 8."""
    engine = engine_of(budget=8)
    for length in (11, 5, 1):
        engine.add(range(length), 2)
    assert [shape(engine.step()) for _ in range(4)] == [
        [("r0", 8)],
        [("r0", 3), ("r1", 5)],
        [("r2", 1)],
        [("r0", 1), ("r1", 1), ("r2", 1)],
    ]


def test_the_same_tokens_as_alone_with_swapping():
    """Catches swapped-out requests that wait behind prefills forever."""
    engine = engine_of(num_blocks=9, block_size=2, num_host_blocks=9, preemption=Swap())
    for i in range(5):
        engine.add([i] * 4, 7, samples(1 + i % 2))
    assert engine.run() == engine.alone()
    assert any(plan.swap_in for plan in engine.plans)


def test_what_the_decodes_spend_is_not_there_for_those_who_come_back():
    """Catches a step of decodes that computes more tokens than its budget."""
    engine = engine_of(budget=2, num_host_blocks=64, preemption=Swap())
    *_, last = [engine.add([i], 4) for i in range(3)]
    engine.step()
    engine.step()
    swap_out = StepPlan(2)
    engine.scheduler.preempt(swap_out, last)
    engine.executor.execute(swap_out)
    assert shape(engine.step()) == [("r0", 1), ("r1", 1)]
    assert engine.run() == engine.alone()


@pytest.mark.parametrize(("options", "tokens"), [({}, [1, 5]), ({"enable_chunked_prefill": False}, [5])])
def test_it_replaces_chunked_prefill_where_that_is_switched_off(options, tokens):
    """Catches a setting that is ignored, and another default: does the second prompt share its step?"""
    engine, plans = toy_engine(**options), []
    engine.on_planned.append(plans.append)
    for i in range(2):
        engine.add_request(f"r{i}", [i] * 5, SamplingParams(max_tokens=4))
        engine.step()
    assert [chunk.num_tokens for chunk in plans[1].scheduled] == tokens
