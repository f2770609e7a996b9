"""First come, first served (paper, section 4.5): the earliest arrival comes first, and nobody overtakes.

Who is preempted is in test_preemption.py, how a step is composed in test_chunked_prefill.py.
"""

import pytest

from minipaged.memory import BlockCopy
from minipaged.scheduling import ChunkedPrefill, PrefillFirst, StepPlan
from tests.toy import ToyEngine, beams, samples, toy_scheduler

POLICIES = [ChunkedPrefill, PrefillFirst]


def names(requests):
    return [request.request_id for request in requests]


def events(plan):
    return [(event.kind, event.request_id) for event in plan.events]


# -- in order of arrival -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_are_admitted_in_the_order_of_arrival(policy):
    """Catches a scheduler that prefers short prompts."""
    engine = ToyEngine(toy_scheduler(policy=policy(), budget=16))
    for length in (14, 9, 3, 12, 1):
        engine.add(range(length), 4)
    engine.run()
    admitted = [r for plan in engine.plans for kind, r in events(plan) if kind == "admitted"]
    assert admitted == names(engine.requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_that_does_not_fit_stops_the_scan(policy):
    """Catches small requests that overtake a large one forever."""
    engine = ToyEngine(toy_scheduler(6, 4, policy=policy()))
    engine.add(range(12), 4)  # 3 blocks
    engine.add(range(16), 4)  # 4 blocks, one too many
    engine.add(range(2), 4)  # 1 block
    engine.step()
    assert names(engine.scheduler.running) == ["r0"]
    assert names(engine.scheduler.waiting) == ["r1", "r2"]


def test_no_decode_overtakes_a_group_that_the_rest_of_the_budget_is_too_small_for():
    """Catches later requests that decode while an earlier one waits, in every step until its turn comes."""
    engine = ToyEngine(toy_scheduler(budget=4))
    for n in (2, 3, 1):
        engine.add([n], 6, samples(n))
    engine.step()
    assert names(engine.step().sampling) == ["r0"]
    assert engine.run() == engine.alone()


def test_after_a_failed_step_arrivals_keep_their_order():
    """Catches a request that lost its place because a step failed."""
    engine = ToyEngine(toy_scheduler(budget=8, max_num_seqs=4))
    engine.add(range(1), 6, samples(2))
    engine.add(range(30), 6)
    engine.add(range(50, 60), 6)
    engine.step()
    engine.fail_step()
    assert names(engine.scheduler.waiting) == ["r0", "r1"]
    while engine.scheduler.waiting:
        engine.step()
    assert names(engine.scheduler.running) == ["r0", "r1", "r2"]


# -- how much runs at once: sequences, blocks, tokens ------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_num_seqs", [1, 2, 5])
def test_max_num_seqs_bounds_the_sequences_that_hold_blocks(policy, max_num_seqs):
    """Catches six requests holding blocks while only two may decode."""
    engine = ToyEngine(toy_scheduler(policy=policy(), max_num_seqs=max_num_seqs))
    for i in range(6):
        engine.add([i] * 9, 4)
    while engine.scheduler.has_unfinished:
        engine.step()
        holders = [r for r in engine.requests if any(s.table.blocks for s in r.sequences)]
        assert len(holders) <= max_num_seqs
    assert max(len(plan.sampling) for plan in engine.plans) == max_num_seqs


@pytest.mark.parametrize("method", [samples(3), beams(3)])
def test_a_group_reserves_as_many_sequences_as_it_will_have(method):
    """Catches one reserved sequence for the prompt that becomes three after the first step."""
    engine = ToyEngine(toy_scheduler(max_num_seqs=4))
    engine.add(range(3), 4, method)  # 3 of 4 sequences
    engine.add(range(3), 4, samples(2))  # 2, one too many
    engine.add(range(3), 4)
    engine.step()
    assert names(engine.scheduler.running) == ["r0"]
    assert engine.run() == engine.alone()


def test_reserved_sequences_come_free_when_a_request_ends():
    """Catches reserved sequences that leak with groups, aborts or preemption until nobody is admitted."""
    engine = ToyEngine(toy_scheduler(max_num_seqs=3))
    for i in range(9):
        engine.add([i], 3, samples(1 + i % 3))
    engine.step()
    engine.scheduler.abort(engine.scheduler.running[0])
    engine.fail_step()
    assert engine.run()[1:] == engine.alone()[1:]


def test_the_watermark_holds_back_admission_but_not_growth():
    """Catches a newcomer that makes the running ones preempt each other, and a pool that is never full."""
    engine = ToyEngine(toy_scheduler(10, 4, watermark=0.2))
    engine.add(range(20), 20)  # 5 of 10 blocks
    engine.add(range(12), 4)  # 3 blocks, which leaves the watermark: 2
    engine.add(range(2), 1)
    plan = engine.step()
    assert events(plan) == [("admitted", "r0"), ("admitted", "r1")]
    least = engine.scheduler.kv.num_free
    assert least == 2
    while engine.scheduler.has_unfinished:
        engine.step()
        least = min(least, engine.scheduler.kv.num_free)
    assert least == 0


def test_the_watermark_does_not_lock_out_a_request_when_nothing_runs():
    """Catches a prompt of nearly the whole pool that waits forever."""
    engine = ToyEngine(toy_scheduler(10, 4, watermark=0.5))
    engine.add(range(36), 4)
    assert engine.run() == engine.alone()


def test_no_step_computes_more_than_its_budget():
    """Catches a step that computes more tokens than its budget, or a phase that misreports what it spent."""
    engine = ToyEngine(toy_scheduler(budget=7))
    for i in range(12):
        engine.add([i] * (3 * i + 1), 5, samples(1 + i % 3))
    assert engine.run() == engine.alone()
    assert max(plan.num_tokens for plan in engine.plans) == 7


class WholePromptsFirst:
    """A policy that admits twice: the prompts that fit as they are, then a piece of the one that does not."""

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.plan_decodes(plan, budget)
        budget -= scheduler.continue_prefills(plan, budget)
        budget -= scheduler.admit_waiting(plan, budget, whole=True)
        scheduler.admit_waiting(plan, budget)


def test_admission_tells_a_policy_what_it_spent():
    """Catches a wrong count that nobody notices, because the policies of the project call it last."""
    engine = ToyEngine(toy_scheduler(budget=10, policy=WholePromptsFirst()))
    for i in range(3):
        engine.add([i] * 4, 6)
    assert [s.num_tokens for s in engine.step().scheduled] == [4, 4, 2]
    assert engine.run() == engine.alone()


def test_a_step_without_budget_left_admits_nobody():
    """Catches a request that holds blocks while no step has room for any of its tokens."""
    engine = ToyEngine(toy_scheduler(budget=2))
    for token in (1, 2):
        engine.add([token], 6)
    engine.step()
    engine.add([3] * 4, 2)
    plan = engine.step()
    assert [s.sequence.request.request_id for s in plan.scheduled] == ["r0", "r1"]
    assert names(engine.scheduler.waiting) == ["r2"]
    assert engine.run() == engine.alone()


@pytest.mark.parametrize("limits", [{"max_num_seqs": 1}, {"num_blocks": 4}], ids=["seats", "blocks"])
def test_a_request_that_does_not_fit_uses_none_of_the_budget(limits):
    """Catches tokens that are counted but not computed: a policy would give the next phase less."""
    engine = ToyEngine(toy_scheduler(**limits))
    engine.add(range(9), 4)
    engine.step()
    engine.add(range(10, 19), 4)
    assert engine.scheduler.admit_waiting(StepPlan(1), 8) == 0
    assert names(engine.scheduler.waiting) == ["r1"]


# -- steps -------------------------------------------------------------------------------------------------


def test_every_output_is_that_of_the_request_alone():
    """Catches neighbours that change each other's tokens."""
    engine = ToyEngine(toy_scheduler(40, 3, budget=12, max_num_seqs=7))
    for i in range(15):
        engine.add(range(i, i + 1 + i % 9), 2 + i, [samples(), samples(3), beams(2)][i % 3])
    assert engine.run() == engine.alone()


def test_steps_are_numbered():
    """Catches a clock that stands still, or skips the number of a step that failed."""
    engine = ToyEngine(toy_scheduler())
    engine.add(range(3), 4)
    engine.step()
    engine.fail_step()
    engine.run()
    assert [plan.step for plan in engine.plans] == list(range(5))


@pytest.mark.parametrize("moves", ["swap_out", "swap_in", "copies"])
def test_a_step_that_only_moves_blocks_has_work(moves):
    """Catches a move that the executor never hears of: a group may get its copies in one step and be computed
    in the next."""
    assert not StepPlan(0).has_work
    assert StepPlan(0, **{moves: [BlockCopy(0, 1)]}).has_work


def test_the_waiting_queue_costs_nothing_until_its_turn():
    """Catches a scan of everybody who waits in every step."""
    engine = ToyEngine(toy_scheduler(max_num_seqs=1))
    engine.add(range(3), 6)
    waiting = [engine.add([1], 1) for _ in range(3)]
    engine.step()
    for request in waiting[1:]:
        del request.sequences[0].token_ids  # an error for whoever looks
    for _ in range(4):
        plan = engine.scheduler.schedule()
        engine.scheduler.commit(plan, engine.executor.execute(plan))
    assert names(engine.scheduler.waiting) == ["r1", "r2", "r3"]


FAULTS = {
    "a queue out of order": lambda scheduler: scheduler.running.reverse(),
    "more sequences than max_num_seqs": lambda scheduler: setattr(scheduler, "max_num_seqs", 1),
    "blocks of a request that waits": lambda scheduler: scheduler.waiting.append(scheduler.running.pop()),
    "more sequences than were reserved": lambda scheduler: scheduler.running[0].sequences.append(
        scheduler.running[0].sequences[0].fork(scheduler.kv.new_table())
    ),
    "a block that nobody holds": lambda scheduler: scheduler.running[0].sequences[0].table.blocks.clear(),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_check_invariants_sees_every_fault(fault):
    """Catches a check that checks nothing: the tests of the engine rely on it after every step."""
    engine = ToyEngine(toy_scheduler())
    for _ in range(2):
        engine.add(range(3), 4)
    engine.step()
    engine.scheduler.check_invariants()
    fault(engine.scheduler)
    with pytest.raises(AssertionError):
        engine.scheduler.check_invariants()
