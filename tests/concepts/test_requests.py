"""Requests and sequences: tokens and computed tokens carry prefill, decode and recomputation."""

import gc
import weakref
from functools import partial

import pytest

from minipaged.memory import BlockAllocator, BlockTable
from minipaged.scheduling import Branch, Request, RequestState, Swap
from tests.toy import ToyEngine, alone, samples, toy_scheduler


def request_of(*prompt, max_num_tokens=20):
    table = BlockTable(BlockAllocator(8), 2)
    return Request("r", list(prompt), samples(), None, max_num_tokens, table)


def test_a_request_starts_as_one_sequence_of_its_prompt():
    """Catches samples that each compute the prompt."""
    request = request_of(1, 2, 3)
    (sequence,) = request.sequences
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (3, 0)
    assert sequence.num_uncomputed_tokens == request.num_uncomputed_tokens == 3
    assert request.state is RequestState.WAITING
    assert (request.num_cached_tokens, request.num_preemptions, request.has_run) == (0, 0, False)


def test_a_generated_token_is_one_more_uncomputed_token():
    """Catches a count of generated tokens that includes the prompt."""
    (sequence,) = request_of(1, 2, 3).sequences
    sequence.num_computed_tokens = 3
    sequence.append(Branch(sequence, 7, -0.5))
    sequence.append(Branch(sequence, 8, -0.25, "stop"))
    assert (sequence.num_uncomputed_tokens, sequence.num_generated_tokens) == (2, 2)
    assert sequence.output_token_ids == [7, 8]
    assert (sequence.cumulative_logprob, sequence.finish_reason) == (-0.75, "stop")


def test_a_branch_goes_its_own_way():
    """Catches two samples that append to one list."""
    (parent,) = request_of(1, 2, 3).sequences
    parent.table.append(3)
    parent.num_computed_tokens = 3
    child = parent.fork(parent.table.fork())
    child.append(Branch(parent, 9, -1.0, sample_index=4))
    assert (parent.num_tokens, parent.cumulative_logprob, parent.index) == (3, 0.0, 0)
    assert (child.num_tokens, child.num_computed_tokens, child.index) == (4, 3, 4)
    assert child.table.blocks == parent.table.blocks


def test_a_request_counts_the_uncomputed_tokens_of_all_its_sequences():
    """Catches a budget that counts a group as one token."""
    request = request_of(1, 2, 3)
    (parent,) = request.sequences
    request.sequences.append(parent.fork(parent.table.fork()))
    assert request.num_uncomputed_tokens == 6


def test_every_step_computes_what_is_uncomputed():
    """Catches a request that is scheduled and does not move: prompt in chunks of 4, 4 and 2, then decodes."""
    engine = ToyEngine(toy_scheduler(budget=4))
    request = engine.add(range(10), 3)
    gaps = []
    while engine.scheduler.has_unfinished:
        gaps.append(request.num_uncomputed_tokens)
        engine.step()
    assert gaps == [10, 6, 2, 1, 1]
    assert request.is_finished


# -- refused when added ------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_model_allows_is_refused_with_the_numbers():
    """Catches a prompt that waits forever, or dies in the model."""
    engine = ToyEngine(toy_scheduler(max_model_len=10))
    with pytest.raises(ValueError, match=r"prompt has 10 tokens.* 10 \(max_model_len\)"):
        engine.add(range(10))
    engine.add(range(9), 5)
    assert engine.run() == [alone(range(9), 1, samples())]


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers():
    """Catches the assertion that kills an engine and everybody in it."""
    engine = ToyEngine(toy_scheduler(num_blocks=4, block_size=4))
    with pytest.raises(ValueError, match=r"needs 5 KV blocks of 4 tokens .*17 tokens.* the pool has 4"):
        engine.add(range(17), 1)
    assert not engine.scheduler.has_unfinished


def test_more_sequences_than_max_num_seqs_are_refused_with_the_numbers():
    """Catches a group that can never be admitted and blocks the queue."""
    engine = ToyEngine(toy_scheduler(max_num_seqs=3))
    with pytest.raises(
        ValueError, match=r"4 sequences at once, more than max_num_seqs 3 allows; raise it, or"
    ):
        engine.add([1], 4, samples(4))


def test_more_sequences_than_the_budget_are_refused_with_the_numbers():
    """Catches a group that can never take a step together."""
    engine = ToyEngine(toy_scheduler(budget=3))
    with pytest.raises(ValueError, match=r"4 sequences at once, more than max_num_batched_tokens 3 allows; "):
        engine.add([1], 4, samples(4))


def test_what_just_fits_the_pool_and_the_limits_runs():
    """Catches a refusal one block or one sequence too early."""
    engine = ToyEngine(toy_scheduler(num_blocks=4, block_size=4, max_num_seqs=3, budget=3))
    engine.add(range(16), 1)
    engine.add([1], 4, samples(3))
    assert engine.run() == engine.alone()


# -- abort at any moment -----------------------------------------------------------------------------------


def engine_with(state):
    """An engine whose request r1 is in the given state; r0 goes on beside it."""
    options = {
        "waiting": {"max_num_seqs": 1},
        "half prefilled": {"budget": 6},
        "preempted": {"num_blocks": 8, "block_size": 2},
        "swapped": {"num_blocks": 8, "block_size": 2, "num_host_blocks": 8, "preemption": Swap()},
    }.get(state, {})
    engine = ToyEngine(toy_scheduler(**options))
    engine.add(range(5), 8)
    engine.step()
    request = engine.add(range(20, 40) if state == "half prefilled" else range(20, 25), 8)
    if state != "fresh":
        engine.step()
    while state in ("preempted", "swapped") and not request.num_preemptions:
        engine.step()
    if state == "finished":
        while not request.is_finished:
            engine.step()
    return engine, request


STATES = ["fresh", "waiting", "half prefilled", "running", "preempted", "swapped", "finished"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("times", [1, 2])
def test_an_abort_between_steps_frees_exactly_once(state, times):
    """Catches blocks freed twice, never, or of a request that holds none."""
    engine, request = engine_with(state)
    for _ in range(times):
        engine.scheduler.abort(request)
        engine.scheduler.check_invariants()
    assert request.is_finished
    assert request.completions[0].finish_reason == ("length" if state == "finished" else "abort")
    assert request.sequences == []  # a sequence lives or has ended: its tokens would be counted twice
    assert engine.run()[0] == engine.alone()[0]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("times", [1, 2])
def test_an_abort_between_plan_and_commit_frees_exactly_once(state, times):
    """Catches blocks that are given to somebody else while the step still writes to them, then freed again
    by its commit."""
    engine, request = engine_with(state)

    def abort():
        for _ in range(times):
            engine.scheduler.abort(request)

    engine.step(meanwhile=abort)
    assert request.is_finished
    assert len(request.completions) == 1
    assert engine.run()[0] == engine.alone()[0]


@pytest.mark.parametrize("state", STATES)
def test_an_abort_in_a_step_that_fails_frees_exactly_once(state):
    """Catches a request that the rollback puts back into the queue after it was aborted."""
    engine, request = engine_with(state)
    engine.fail_step(meanwhile=lambda: engine.scheduler.abort(request))
    assert request.is_finished
    assert engine.run()[0] == engine.alone()[0]


def test_a_request_that_waits_ends_at_once_even_while_a_step_is_computed():
    """Catches a client that waits for the end of a step in which it has no part."""
    engine = ToyEngine(toy_scheduler(max_num_seqs=1))
    engine.add(range(3))
    waits = engine.add(range(3))
    plan = engine.scheduler.schedule()
    engine.scheduler.abort(waits)
    assert waits.is_finished
    engine.scheduler.commit(plan, engine.executor.execute(plan))
    assert not engine.scheduler.waiting


def test_the_scheduler_lets_go_of_an_aborted_request():
    """Catches a server whose memory grows with every client that leaves."""
    engine, request = engine_with("running")
    engine.step(meanwhile=partial(engine.scheduler.abort, request))
    engine.requests.clear()
    engine.plans.clear()
    ended = weakref.ref(request)
    del request
    gc.collect()
    assert ended() is None


def test_what_an_aborted_request_had_is_kept():
    """Catches a user who stops a generation and gets nothing."""
    engine, request = engine_with("running")
    engine.step()
    engine.scheduler.abort(request)
    (completion,) = request.completions
    assert completion.output_token_ids == alone(range(20, 25), 8, samples())[0][:2]


def test_a_request_that_fails_is_in_the_log_with_its_reason(caplog):
    """Catches a server on which requests fail and nothing shows why; an abort is no failure."""
    engine, request = engine_with("running")
    engine.scheduler.abort(request, "no valid token")
    engine.scheduler.abort(engine.requests[0])
    assert caplog.messages == ["Request r1 ends with finish reason error: no valid token"]


def test_commit_reports_every_request_that_got_tokens_or_ended():
    """Catches a server that never tells a client its request is over: one aborted while the step that
    computes a part of its prompt is in flight gets no token, but it ended."""
    for state in ("half prefilled", "running"):
        engine, request = engine_with(state)
        plan = engine.scheduler.schedule()
        result = engine.executor.execute(plan)
        engine.scheduler.abort(request)
        reported = engine.scheduler.commit(plan, result)
        assert sorted(r.request_id for r in reported) == ["r0", "r1"]


# -- a failed step -----------------------------------------------------------------------------------------


def test_a_request_has_run_once_a_step_with_it_is_committed():
    """Catches one that is admitted anew after a step that failed, or resumed though it never ran."""
    engine = ToyEngine(toy_scheduler())
    request = engine.add(range(5), 4)
    for step, has_run, kind in (
        (engine.fail_step, False, "admitted"),
        (engine.step, True, "admitted"),
        (engine.fail_step, True, None),
        (engine.step, True, "resumed"),
    ):
        assert [event.kind for event in step().events] == [kind] * (kind is not None)
        assert request.has_run is has_run


def test_a_failed_step_is_recomputed():
    """Catches a request that hangs, or trusts what the step was to write."""
    engine = ToyEngine(toy_scheduler())
    for i in range(3):
        engine.add(range(i, i + 5), 6)
    for _ in range(3):
        engine.step()
        engine.fail_step()
    assert engine.run() == engine.alone()


def test_a_failed_step_leaves_the_others_their_blocks():
    """Catches an engine that throws away everything: here the last request was not in the step."""
    engine = ToyEngine(toy_scheduler(budget=8, max_num_seqs=4))
    first = engine.add(range(1), 6, samples(2))
    middle = engine.add(range(30), 6)
    last = engine.add(range(50, 60), 6)
    engine.step()
    plan = engine.fail_step()
    assert {chunk.sequence.request for chunk in plan.scheduled} == {first, middle}
    assert last.sequences[0].table.blocks
    assert not first.sequences[0].table.blocks
    assert engine.run() == engine.alone()


@pytest.mark.parametrize("name", ["admit", "grow", "swap_out", "swap_in"])
def test_a_step_that_dies_while_it_moves_blocks_is_recomputed(name, monkeypatch):
    """Catches a table of blocks whose content was never copied there."""
    engine = ToyEngine(toy_scheduler(12, 2, num_host_blocks=12, preemption=Swap()))
    engine.add(range(5), 8)
    engine.add(range(20, 25), 8, samples(2))
    move = getattr(engine.scheduler.kv, name)

    def die(*args):
        if move(*args) or name == "admit":
            raise RuntimeError("no")
        return []

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler.kv, name, die)
        with pytest.raises(RuntimeError, match="no"):
            engine.run()
    engine.scheduler.roll_back(engine.scheduler.in_flight)
    assert engine.run() == engine.alone()


def test_a_request_that_is_aborted_between_two_tries_of_a_rollback_stays_ended(monkeypatch):
    """Catches a request that comes back to life: the next step begins with another try. It also ends at once,
    because nothing is being computed any more."""
    engine, request = engine_with("running")
    roll_back = engine.scheduler.kv.roll_back_registered
    failures = iter([RuntimeError("no")])

    def fail_once():
        for failure in failures:
            raise failure
        roll_back()

    monkeypatch.setattr(engine.scheduler.kv, "roll_back_registered", fail_once)
    with pytest.raises(RuntimeError, match="no"):
        engine.fail_step()
    engine.scheduler.abort(request)
    assert request.is_finished
    assert engine.run()[0] == engine.alone()[0]
    assert (request.is_finished, len(request.completions)) == (True, 1)
