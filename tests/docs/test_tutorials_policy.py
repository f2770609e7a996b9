"""The policy of lesson 13: the worked one, or the one that `--use scheduler=...` puts in its place."""

from pathlib import Path

import pytest

from minipaged.learn.overrides import load_override
from minipaged.scheduling import FCFSScheduler, StepPlan
from tests.toy import ToyEngine, toy_scheduler

WORKED = Path(__file__).parent / "worked/13_your_policy.py"


@pytest.fixture
def make(monkeypatch):
    """Makes toy engines on the policy, prompts of the given lengths queued."""
    worked = (
        load_override(f"{WORKED}:ShortestFirst")
        if FCFSScheduler.__module__.startswith("minipaged.")
        else None
    )

    def engine_of(lengths, patience=100, **options):
        if worked is not None:
            monkeypatch.setattr("tests.toy.FCFSScheduler", worked)
        engine = ToyEngine(toy_scheduler(**{"max_num_seqs": 1, **options}))
        monkeypatch.setattr(type(engine.scheduler), "patience", patience, raising=False)
        if "patience" in vars(engine.scheduler):  # set by its __init__
            engine.scheduler.patience = patience
        for number, length in enumerate(lengths):
            engine.add([number] * length, 2)
        return engine

    return engine_of


def order(engine):
    """Run to the end; who was admitted when."""
    engine.run()
    return [e.request_id for plan in engine.plans for e in plan.events if e.kind == "admitted"]


def test_the_shortest_prompt_is_admitted_first(make):
    """Catches arrival order, the longest first, and the shortest output instead of the shortest prompt."""
    assert order(make([9, 3, 6, 12])) == ["r1", "r2", "r0", "r3"]
    assert order(make([40, 30, 20])) == ["r2", "r1", "r0"]


def test_whoever_is_admitted_leaves_the_queue(make):
    """Catches a copy of the queue put back whole: the request would be running and waiting."""
    engine = make([3])  # alone, for its order is what other tests look at
    engine.scheduler.admit_waiting(StepPlan(0), 64)
    assert [request.request_id for request in engine.scheduler.waiting] == []


def test_the_last_of_many_may_be_the_shortest(make):
    """Catches an order among the first of the queue alone."""
    assert order(make([5] * 12 + [3]))[0] == "r12"


def test_every_admission_is_sorted(make):
    """Catches an order that is made only while nobody runs, or only if prompts may be cut."""
    engine = make([2], max_num_seqs=2)
    engine.step()
    engine.add([1] * 9, 2)
    engine.add([2] * 3, 2)
    assert [s.sequence.request.request_id for s in engine.step().scheduled] == ["r0", "r2"]
    plan = StepPlan(0)
    make([9, 3]).scheduler.admit_waiting(plan, 64, True)
    assert [s.sequence.request.request_id for s in plan.scheduled] == ["r1"]


def test_of_equal_prompts_the_earlier_is_admitted_first(make):
    """Catches an order that changes from step to step."""
    assert order(make([5, 3, 5, 3, 5])) == ["r1", "r3", "r0", "r2", "r4"]


def test_equal_prompts_by_the_dozen_keep_their_order(make):
    """Catches an order by name: r10 is not before r2."""
    assert order(make([5] * 12)) == [f"r{number}" for number in range(12)]


def test_the_length_of_the_answer_does_not_count(make):
    """Catches prompt + max_tokens: nobody knows how long an answer will be."""
    engine = make([])
    engine.add([0] * 3, 9)
    engine.add([1] * 5, 1)
    assert order(engine) == ["r0", "r1"]


def test_a_preempted_request_is_as_long_as_its_prompt(make):
    """Catches the tokens that it had generated counted in: 5 + 5 come before 7."""
    engine = make([5, 7])
    engine.requests[0].sequences[0].token_ids.extend([1] * 5)
    assert [s.sequence.request.request_id for s in engine.step().scheduled] == ["r0"]


def test_all_that_fit_are_admitted_shortest_first(make):
    """Catches only the shortest one being moved: the others in the step are sorted, too."""
    engine = make([9, 6, 3, 5], max_num_seqs=4)
    assert [s.sequence.request.request_id for s in engine.step().scheduled] == ["r2", "r3", "r1", "r0"]


def test_an_admission_reports_what_it_spent_and_keeps_to_its_limits(make):
    """Catches a result that is not returned, and `whole` or `share` not passed on."""
    assert make([6, 6], max_num_seqs=4).scheduler.admit_waiting(StepPlan(0), 10) == 10
    assert make([6, 6], max_num_seqs=4).scheduler.admit_waiting(StepPlan(0), 10, True) == 6
    plan = StepPlan(0)
    make([10, 10], max_num_seqs=4).scheduler.admit_waiting(plan, 6, False, 2)
    assert [s.num_tokens for s in plan.scheduled] == [2, 4]
    assert [s.sequence.request.request_id for s in plan.scheduled] == ["r0", "r1"]


def test_an_admission_counts_its_own_tokens(make):
    """Catches the tokens of the whole plan: decodes, and prompts that go on, are in it already."""
    plan, scheduler = StepPlan(0), make([6, 6], max_num_seqs=4).scheduler
    assert scheduler.admit_waiting(plan, 6) == 6
    assert scheduler.admit_waiting(plan, 6) == 6


def test_the_queue_is_back_in_order_of_arrival_after_each_step(make):
    """Catches a queue left sorted by length: rollback, preemption and swapping rely on arrival order."""
    engine = make([9, 3, 6, 12])
    engine.step()
    assert [r.arrival for r in engine.scheduler.waiting] == [0, 2, 3]


def test_the_queue_is_back_in_order_when_nobody_fits(make):
    """Catches a queue put back only after an admission: in many steps nobody is admitted."""
    engine = make([9, 3, 6])
    engine.step()
    assert engine.scheduler.admit_waiting(StepPlan(1), 10) == 0
    arrivals = [request.arrival for request in engine.scheduler.waiting]
    assert arrivals == sorted(arrivals)


def test_the_order_changes_nothing_in_the_tokens(make):
    """Catches a request that is lost or served twice, and a prompt that was sorted instead of the queue."""
    engine = make([9, 3, 6, 12, 1])
    prompt = list(engine.add([7, 2, 5, 1], 2).prompt_token_ids)
    assert engine.run() == engine.alone()
    assert list(engine.requests[-1].prompt_token_ids) == prompt


def test_whoever_waited_too_long_goes_first(make):
    """Catches starvation: with a patience of 4, the long prompt goes before the four short ones behind it."""
    assert order(make([9, 1, 1, 1, 1], patience=4)) == ["r0", "r1", "r2", "r3", "r4"]
    assert order(make([9, 1, 1, 1, 1], patience=100)) == ["r1", "r2", "r3", "r4", "r0"]


def test_patience_ends_after_as_many_arrivals_as_it_says(make):
    """Catches >= instead of >, and patience measured by who is waiting rather than who has arrived."""
    assert order(make([9, 1, 1], patience=3)) == ["r1", "r2", "r0"]
    engine = make([9, 1, 1], patience=3)
    engine.step()
    engine.add([3])
    assert order(engine) == ["r1", "r0", "r2", "r3"]


def test_whoever_arrived_and_went_is_counted(make):
    """Catches patience measured by the last in the queue: r2 was aborted, and has arrived all the same."""
    engine = make([9, 5], patience=2)
    engine.scheduler.abort(engine.add([2] * 3))
    assert order(engine) == ["r0", "r1"]


def test_the_impatient_go_in_order_of_arrival(make):
    """Catches requests that have waited too long being sorted by length again."""
    assert order(make([9, 1, 1, 1, 1], patience=3)) == ["r0", "r1", "r2", "r3", "r4"]
    assert order(make([9, 7, 1, 1, 1, 1], patience=3))[:2] == ["r0", "r1"]


def test_all_who_waited_too_long_go_first_in_one_step(make):
    """Catches only the first of the queue put ahead of shorter ones: r0 and r1 have both waited too long."""
    engine = make([9, 7, 1, 1, 1], patience=3, max_num_seqs=4)
    assert [s.sequence.request.request_id for s in engine.step().scheduled] == ["r0", "r1", "r2", "r3"]


def test_behind_those_who_waited_too_long_the_shortest_is_first(make):
    """Catches patience that ends for all at once: r0, r1 and r2 have waited too long, r3 and r4 have not."""
    engine = make([9, 8, 7, 5, 3], patience=2, max_num_seqs=5)
    admitted = [s.sequence.request.request_id for s in engine.step().scheduled]
    assert admitted == ["r0", "r1", "r2", "r4", "r3"]


def test_nobody_overtakes_an_impatient_request_that_does_not_fit(make):
    """Catches two admissions, one for those who waited too long and one for the others: r2 would fit."""
    engine = make([13, 12, 4], patience=1, num_blocks=6, max_num_seqs=4)
    assert [s.sequence.request.request_id for s in engine.step().scheduled] == ["r0"]
    assert [request.request_id for request in engine.scheduler.waiting] == ["r1", "r2"]


def test_patience_is_that_of_the_scheduler_itself(make, monkeypatch):
    """Catches `ShortestFirst.patience` for `self.patience`: a subclass or an object may have its own."""
    engine = make([9, 1, 1, 1, 1], patience=100)
    monkeypatch.setattr(engine.scheduler, "patience", 3, raising=False)
    assert order(engine) == ["r0", "r1", "r2", "r3", "r4"]
