"""Dynamic page growth: how many blocks at admission, how many later (text-generation-inference).

A policy is asked for `needed` blocks now and `remaining` until the last token, and says which counts to try:

                at admission             while running
                needed 3, remaining 50   needed 1, remaining 47
    OnDemand    3                        1
    Chunked     16, else 3               16, else 1
    Reserve     50, or wait              47, else 1 (only a fork asks, or who was swapped out)
"""

import pytest

from minipaged.memory import Chunked, OnDemand, Reserve
from minipaged.scheduling import Branch
from tests.toy import ToyEngine, beams, samples, toy_scheduler

POLICIES = [OnDemand, Chunked, Reserve]


def test_on_demand_asks_for_what_the_tokens_need():
    """Catches a policy that reserves: waste would exceed a block a sequence."""
    assert OnDemand().at_admission(3, 50) == (3,)
    assert OnDemand().while_running(1, 47) == (1,)


def test_chunked_asks_for_sixteen_pages_then_for_the_minimum():
    """Catches a refusal although one page is left: try min(remaining, 16) first, then what is needed."""
    assert Chunked().while_running(1, 50) == (16, 1)
    assert Chunked().at_admission(3, 50) == (16, 3)


def test_chunked_never_asks_for_more_than_remains():
    """Catches pages granted beyond the last token."""
    assert Chunked().while_running(1, 5)[0] == 5
    assert Chunked().at_admission(2, 2)[0] == 2


def test_chunked_gives_a_long_prompt_all_it_needs():
    """Catches a first grant smaller than the prompt."""
    assert set(Chunked().at_admission(40, 50)) == {40}


def test_reserve_takes_everything_at_admission_or_waits():
    """Catches a reservation that can be cut, and so promises nothing."""
    assert Reserve().at_admission(3, 50) == (50,)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_ends_with_what_it_cannot_do_without(policy):
    """Catches a request that is preempted although the block it needs is there, and one that gets less."""
    for remaining in range(1, 40):
        for needed in range(1, remaining + 1):
            for wishes in (
                policy().while_running(needed, remaining),
                policy().at_admission(needed, remaining),
            ):
                assert all(needed <= wish <= remaining for wish in wishes)
                assert list(wishes) == sorted(wishes, reverse=True), "the preferred first"
            assert policy().while_running(needed, remaining)[-1] == needed


# -- in the engine -----------------------------------------------------------------------------------------


def blocks_after(policy, num_steps, num_blocks=64, max_tokens=40):
    engine = ToyEngine(toy_scheduler(num_blocks, 2, growth=policy))
    request = engine.add(range(3), max_tokens)
    for _ in range(num_steps):
        engine.step()
    return len(request.sequences[0].table.blocks)


def test_the_policies_hold_what_they_promise():
    """Catches a policy that is asked but ignored. 3 tokens of prompt, 40 of output, blocks of 2."""
    assert [blocks_after(OnDemand(), n) for n in (1, 2, 3, 4)] == [2, 2, 3, 3]
    assert [blocks_after(Chunked(4), n) for n in (1, 6, 7, 14)] == [4, 4, 8, 8]
    assert [blocks_after(Chunked(), n) for n in (1, 30, 31)] == [16, 16, 22]
    assert [blocks_after(Reserve(), n) for n in (1, 39)] == [22, 22]


def test_chunked_takes_one_page_when_the_pool_has_no_grant():
    """Catches a preemption while there is still a free page."""
    assert [blocks_after(Chunked(), n, num_blocks=18) for n in (1, 30, 31, 33)] == [16, 16, 17, 18]


def test_reserve_admits_fewer_requests_than_on_demand():
    """Catches policies that make no difference, unlike what text-generation-inference measured."""

    def running(policy):
        engine = ToyEngine(toy_scheduler(16, 2, growth=policy))
        for i in range(5):
            engine.add([i] * 3, 12)
        engine.step()
        return len(engine.scheduler.running)

    assert (running(Reserve()), running(OnDemand())) == (2, 5)


def test_a_reservation_is_for_one_sequence():
    """Catches pages that promise more: one completion is never preempted, but forks take blocks later."""

    def preemptions(method):
        engine = ToyEngine(toy_scheduler(24, 2, growth=Reserve()))
        for i in range(5):
            engine.add([i] * 3, 12, method)
        engine.run()
        return engine.scheduler.num_preemptions

    assert preemptions(samples()) == 0
    assert preemptions(samples(3)) > 0


def test_a_reservation_that_never_fits_is_refused_at_once():
    """Catches a request that waits forever, and everybody behind it."""
    engine = ToyEngine(toy_scheduler(8, 2, growth=Reserve()))
    with pytest.raises(ValueError, match=r"needs 9 KV blocks of 2 tokens .* the pool has 8"):
        engine.add(range(3), 14)


def test_a_request_without_a_page_is_preempted_and_not_ended():
    """Catches a request cut short because others hold the pages, as in text-generation-inference's change."""
    engine = ToyEngine(toy_scheduler(10, 2, growth=Chunked()))
    engine.add(range(5), 8)  # a grant of 7 blocks, all that it can use
    engine.add(range(5), 8)  # the minimum, 3 blocks; the fourth is not there
    assert engine.run() == engine.alone()
    assert [request.num_preemptions for request in engine.requests] == [0, 1]


@pytest.mark.parametrize("num_blocks", [7, 9, 64])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_policies_give_the_same_tokens(policy, num_blocks):
    """Catches preallocated blocks that are written by two sequences, or a grant that moves tokens."""
    engine = ToyEngine(toy_scheduler(num_blocks, 3, growth=policy()))
    methods = [samples(), samples(2), beams(2), samples(1, stop=7)]
    for i, method in enumerate(methods):
        engine.add([i] * (i + 1), 6, method)
    assert engine.run() == engine.alone()


def test_waste_is_below_a_block_a_sequence_under_on_demand_growth():
    """Catches a preallocated block, which on-demand growth must never have, even with forks."""
    engine = ToyEngine(toy_scheduler(64, 4))
    for i in range(4):
        engine.add([i] * (i + 3), 20, samples(3) if i % 2 else beams(3))
    while engine.scheduler.has_unfinished:
        engine.step()
        tables = [s.table for request in engine.scheduler.running for s in request.sequences]
        held = len({block for table in tables for block in table.blocks})
        filled = len({(t.blocks[p // 4], p % 4) for t in tables for p in range(t.num_tokens)})
        assert held * 4 - filled < 4 * max(1, len(tables))
        assert all(table.capacity - table.num_tokens < 4 for table in tables)


@pytest.mark.parametrize("policy", [Chunked(8), Reserve()])
def test_a_lone_group_uses_its_own_preallocated_blocks_before_it_is_cut(policy):
    """Catches a request that ends with `length` while its first sample holds blocks that none uses."""

    def cut(growth):
        engine = ToyEngine(toy_scheduler(8, 2, growth=growth))
        engine.add(range(3), 9, samples(2))
        engine.run()
        assert [plan.finished for plan in engine.plans if plan.finished] == [engine.requests]
        assert engine.requests[0].num_preemptions == 0, "nobody else needs its blocks"
        return [c.output_token_ids for c in engine.requests[0].completions]

    assert cut(policy) == cut(OnDemand())
    assert len(cut(policy)[0]) == 6


def test_a_beam_that_ends_one_text_and_goes_on_keeps_its_reserved_blocks():
    """Catches a reservation that goes to the text that has ended."""
    engine = ToyEngine(toy_scheduler(growth=Reserve()))
    request = engine.add(range(3), 20, beams(2))
    engine.step()
    beam = request.sequences[0]
    held = beam.table.blocks[:]
    assert len(held) == 6
    engine.scheduler.apply_branches(request, [Branch(beam, 1, -1.0, "stop"), Branch(beam, 2, -1.0)])
    assert (request.sequences, beam.table.blocks) == ([beam], held)
