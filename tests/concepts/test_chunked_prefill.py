"""Chunked prefill: decodes first, prompts cut to the rest of the budget (SARATHI, arXiv 2308.16369).

budget 8    | 0 | 1 | 2 | 3 3 3 3 3 |    three decodes, and the first five tokens of a prompt of 12
            | 0 | 1 | 2 | 3 3 3 3 3 |    the next five
            | 0 | 1 | 2 | 3 3 |          the last two, which sample
"""

import pytest

from minipaged.scheduling import ChunkedPrefill, Swap
from tests.toy import ToyEngine, samples, toy_scheduler


def engine_of(**options):
    return ToyEngine(toy_scheduler(policy=ChunkedPrefill(), **options))


def shape(plan):
    """(request, first position, tokens) of each chunk."""
    return [(chunk.sequence.request.request_id, chunk.start, chunk.num_tokens) for chunk in plan.scheduled]


def test_a_prompt_is_cut_to_the_budget():
    """Catches a chunk that begins where the last one did not end."""
    engine = engine_of(budget=8)
    engine.add(range(19), 2)
    plans = [engine.step() for _ in range(4)]
    assert [shape(plan) for plan in plans] == [
        [("r0", 0, 8)],
        [("r0", 8, 8)],
        [("r0", 16, 3)],
        [("r0", 19, 1)],
    ]


def test_only_the_last_chunk_of_a_prompt_samples():
    """Catches a token sampled in the middle of a prompt."""
    engine = engine_of(budget=8)
    engine.add(range(19), 2)
    plans = [engine.step() for _ in range(4)]
    assert [chunk.num_candidates for plan in plans for chunk in plan.scheduled] == [0, 0, 1, 1]


def test_decodes_come_first_and_share_the_step_with_a_prompt():
    """Catches decodes that wait for a prompt: the time between tokens would grow with the prompt."""
    engine = engine_of(budget=8)
    for _ in range(3):
        engine.add([1], 9)
    engine.step()
    engine.add(range(12), 4)
    assert shape(engine.step()) == [("r0", 1, 1), ("r1", 1, 1), ("r2", 1, 1), ("r3", 0, 5)]
    assert shape(engine.step()) == [("r0", 2, 1), ("r1", 2, 1), ("r2", 2, 1), ("r3", 5, 5)]
    assert shape(engine.step())[3:] == [("r3", 10, 2)]


def test_a_short_prompt_behind_a_long_one_runs_in_the_same_step():
    """Catches starvation: 5,000 tokens at a budget of 2048 would take the whole of three steps."""
    engine = engine_of(num_blocks=400, block_size=16, budget=2048, max_model_len=8000)
    engine.add(range(5000), 2)
    short = engine.add(range(20), 2)
    plan = engine.step()
    assert shape(plan) == [("r0", 0, 1536), ("r1", 0, 20)]
    assert short.sequences[0].num_generated_tokens == 1


def test_a_decode_does_not_wait_for_an_earlier_prompt():
    """Catches a step whose decodes end at the first request that is still computing its prompt."""
    engine = engine_of(num_blocks=400, block_size=16, budget=2048, max_model_len=8000)
    engine.add(range(5000), 2)
    engine.add(range(20), 3)
    engine.step()
    assert shape(engine.step()) == [("r1", 20, 1), ("r0", 1536, 2047)]


def test_a_prompt_with_nobody_behind_it_takes_the_whole_budget():
    """Catches a cap that slows down a prompt for nobody's benefit."""
    engine = engine_of(num_blocks=400, block_size=16, budget=2048, max_model_len=8000)
    engine.add(range(5000), 2)
    assert [engine.step().num_tokens for _ in range(3)] == [2048, 2048, 904]


def test_a_prompt_that_has_begun_makes_room_for_a_newcomer():
    """Catches a long prompt that shares the budget only with those who waited when it was admitted."""
    engine = engine_of(num_blocks=400, block_size=16, budget=2048, max_model_len=8000)
    engine.add(range(5000), 2)
    engine.step()
    engine.add(range(20), 2)
    assert shape(engine.step()) == [("r0", 2048, 1536), ("r1", 0, 20)]


def test_two_long_prompts_both_move_in_every_step():
    """Catches a second prompt that gets nothing until the first is done."""
    engine = engine_of(budget=8)
    engine.add(range(30), 2)
    engine.add(range(30), 2)
    for _ in range(3):
        assert [name for name, _, _ in shape(engine.step())] == ["r0", "r1"]


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_the_budget_changes_nothing_in_the_tokens(budget, block_size):
    """Catches chunk edges that meet block edges badly."""
    engine = engine_of(num_blocks=80, block_size=block_size, budget=budget)
    for i, length in enumerate((3, 2, 5, 13, 1)):
        engine.add(range(i, i + length), 4)
    assert engine.run() == engine.alone()


def test_a_budget_of_one_token_moves_the_first_prompt():
    """Catches a share of the budget that is rounded down to nothing: with one seat, nobody would ever run."""
    engine = engine_of(budget=1, max_num_seqs=1)
    engine.add(range(3), 2)
    engine.add(range(2), 2)
    assert engine.run(max_steps=20) == engine.alone()


def test_a_group_waits_for_a_step_that_has_room_for_all_of_it():
    """Catches half a group being sampled: beams would be chosen from only some of the candidates."""
    engine = engine_of(budget=4)
    engine.add([1], 6, samples(3))
    engine.add([2], 6, samples(3))
    assert engine.run() == engine.alone()
    assert all(len(plan.sampling) == 1 for plan in engine.plans[2:])


def test_a_group_of_which_only_the_last_tokens_are_missing_is_a_decode():
    """Catches a recomputed group that stands still forever: its four last tokens are sampled together, but
    the cap on prompts lets it have three of a budget of five while somebody waits."""
    engine = engine_of(num_blocks=40, budget=5, max_num_seqs=4)
    engine.add([1], 12, samples(4))
    engine.add([2], 4)
    for _ in range(8):
        engine.step()
    engine.fail_step()
    assert engine.run(max_steps=100) == engine.alone()


def test_what_a_group_leaves_of_its_share_goes_to_those_behind_it():
    """Catches a token that is counted but not computed: two samples of three tokens may have five of the
    budget, and compute four of them now, because their last tokens have no room together."""
    engine = engine_of(budget=7)
    engine.add([1], 6, samples(2))
    engine.add([2] * 9, 4)
    for _ in range(2):
        engine.step()
    engine.fail_step()
    assert shape(engine.step()) == [("r0", 0, 2), ("r0", 0, 2), ("r1", 0, 3)]
    assert engine.run() == engine.alone()


def test_a_resumed_request_and_a_new_one_share_the_budget():
    """Catches a step that computes more than its budget: a prompt that is cut to the whole of it."""
    engine = engine_of(num_blocks=12, block_size=2, num_host_blocks=12, preemption=Swap(), budget=8)
    engine.add(range(6), 12)
    engine.add(range(6), 12)
    while not engine.scheduler.swapped:
        engine.step()
    engine.add(range(9), 1)
    while engine.scheduler.swapped:
        plan = engine.step()
    assert shape(plan)[0][0] == "r1"
    assert plan.num_tokens == 8
