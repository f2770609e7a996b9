"""Whatever is raised, wherever: the engine goes on, no block is lost, and every other request is right."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import random
import signal
import time
from dataclasses import fields
from types import SimpleNamespace

import pytest

from minipaged import BeamSearchParams, SamplingParams
from minipaged.components import Components
from minipaged.config import ConfigError, EngineConfig
from minipaged.decoding.methods import SamplingMethod
from minipaged.engine import Engine
from minipaged.execution import attention, recurrent
from minipaged.execution.probe import ProbeContext
from minipaged.interrupts import DeferredInterrupts
from minipaged.memory import BlockTable
from tests.engine.ctrl_c import interrupted_at_line, may_be_swallowed
from tests.engine.toy_model import toy_engine
from tests.toy import ranked

PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(n=3, temperature=1, seed=1, max_tokens=9),
    BeamSearchParams(beam_width=3, max_tokens=8),
]
PROMPTS = [[i % 7, *range(i, i + 3 + 5 * (i % 3))] for i in range(9)]


class InjectedError(Exception):
    """Raised by the tests."""


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("minipaged").setLevel(logging.ERROR)  # thousands of preemptions


def tight_engine(**options) -> Engine:
    """Preempts often, by swap and by recompute."""
    return toy_engine(22, 8, max_num_batched_tokens=16, max_num_seqs=9, preemption_mode="swap", **options)


def add_all(engine: Engine) -> list:
    return [engine.add_request(str(i), p, PARAMS[i % 3]) for i, p in enumerate(PROMPTS)]


@functools.cache
def expected() -> list[list[list[int]]]:
    """What an engine says that nothing disturbs."""
    engine = toy_engine(200)
    requests = add_all(engine)
    while engine.has_unfinished:
        engine.step()
    return [ranked(request) for request in requests]


def check_end(engine: Engine, requests: list) -> int:
    """Nothing is held; requests are right or ended with "error". Returns how many did."""
    engine.check_invariants()
    assert not engine._requests, "ids of finished requests are kept"
    failed = 0
    for request, right in zip(requests, expected()):
        assert request.is_finished
        if any(completion.finish_reason == "error" for completion in request.completions):
            failed += 1
        else:
            assert ranked(request) == right
    return failed


def broken(owner, name: str, after: int, monkeypatch) -> None:
    """Let the method of a class or object raise at its call number `after`."""
    original, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(original)
    def method(*args, **kwargs):
        if next(calls) == after:
            raise InjectedError(f"{name}, call {after}")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, method)


def errors_until_the_end(engine: Engine) -> int:
    """Step to the end, checking the invariants. Returns how many steps raised the injected error."""
    raised = 0
    while engine.has_unfinished:
        try:
            engine.step()
        except InjectedError:
            raised += 1
        engine.check_invariants()
    return raised


PLACES = {
    "batch policy": lambda engine: (engine.scheduler.policy, "fill"),
    "victim": lambda engine: (engine.scheduler.preemption, "choose_victim"),
    "mode": lambda engine: (engine.scheduler.preemption, "choose_mode"),
    "can_admit": lambda engine: (engine.scheduler.kv, "can_admit"),
    "admit": lambda engine: (engine.scheduler.kv, "admit"),
    "grow": lambda engine: (engine.scheduler.kv, "grow"),
    "register": lambda engine: (engine.scheduler.kv, "register"),
    "swap_out": lambda engine: (engine.scheduler.kv, "swap_out"),
    "swap_in": lambda engine: (engine.scheduler.kv, "swap_in"),
    "observe_plan": lambda engine: (type(engine.metrics), "observe_plan"),
    "execute": lambda engine: (engine.executor, "execute"),
    "append": lambda engine: (BlockTable, "append"),
}
RARE = {"victim", "mode", "swap_out", "swap_in"}  # called fewer than 7 times


@pytest.mark.parametrize(
    ("place", "after"),
    [(place, after) for place in PLACES for after in (1, 2, 7) if after < 7 or place not in RARE],
)
def test_an_error_before_the_commit_is_raised_once_and_the_step_is_done_again(place, after, monkeypatch):
    """Catches a plan that stays in flight forever, blocks given to a request that is then forgotten, and a
    copy-on-write whose copy is lost."""
    engine = tight_engine()
    requests = add_all(engine)
    owner, name = PLACES[place](engine)
    broken(owner, name, after, monkeypatch)
    assert errors_until_the_end(engine) == 1
    assert check_end(engine, requests) == 0


@pytest.mark.parametrize("name", ["fork", "free", "new_table", "commit_registered"])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_an_error_inside_the_commit_ends_the_requests_of_that_step(name, after, monkeypatch):
    """Catches reference counts that are wrong, and a request that is neither running nor finished."""
    engine = tight_engine()
    requests = add_all(engine)
    kv = engine.scheduler.kv
    original = getattr(kv, name)
    in_commit = False
    commit = engine.scheduler.commit

    def marked_commit(plan, result):
        nonlocal in_commit
        in_commit = True
        try:
            return commit(plan, result)
        finally:
            in_commit = False

    calls = 0

    def method(*args):
        nonlocal calls
        calls += in_commit
        if in_commit and calls == after:
            raise InjectedError(name)
        return original(*args)

    monkeypatch.setattr(engine.scheduler, "commit", marked_commit)
    monkeypatch.setattr(kv, name, method)
    assert errors_until_the_end(engine) == 1
    assert check_end(engine, requests) > 0


def test_what_ended_in_a_failed_step_is_returned_by_the_next():
    """Catches a loop over `step` that waits for a request that outgrew the pool in a failed step, and one
    that is given requests that still wait."""
    engine = toy_engine(6, max_num_seqs=1)
    long = engine.add_request("long", range(5), SamplingParams(temperature=0, max_tokens=190))
    short, last = (
        engine.add_request(name, range(5), SamplingParams(temperature=0, max_tokens=2))
        for name in ("short", "last")
    )
    execute, fails = engine.executor.execute, [True]

    def fail_once(plan):
        if plan.finished and fails.pop():
            raise InjectedError
        return execute(plan)

    engine.executor.execute, returned, ended = fail_once, [], []
    while engine.has_unfinished:
        with contextlib.suppress(InjectedError):
            returned += (touched := engine.step())
            ended += [request for request in touched if request.is_finished]
    assert (ended, fails) == ([long, short, last], [])
    assert returned[returned.index(last) :] == [last, last]
    engine.check_invariants()


@pytest.mark.parametrize("is_running", [True, False])
def test_the_engines_check_finds_a_block_that_nobody_holds(is_running):
    """Catches a check that checks nothing: all other tests of the engine rely on it."""
    engine = toy_engine(20)
    if is_running:
        engine.add_request("0", PROMPTS[0], PARAMS[0])
        engine.step()
    engine.check_invariants()
    engine.scheduler.kv.pool.allocate()
    with pytest.raises(AssertionError):
        engine.check_invariants()


def test_a_hook_after_the_commit_that_fails_loses_nothing():
    """Catches ids that are never free again, and a step that is taken back after it was committed."""
    engine = tight_engine()
    requests = add_all(engine)

    def hook(*step):
        raise InjectedError

    engine.on_committed.append(hook)
    while engine.has_unfinished:
        with pytest.raises(InjectedError):
            engine.step()
    assert check_end(engine, requests) == 0


@may_be_swallowed
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer signal (not on Windows)")
def test_ctrl_c_at_any_moment_loses_nothing(interrupts: int, no_gc_callbacks: None):
    """Catches a plan left half made: every later step fails, or blocks are lost."""
    armed = False

    def alarm(*_):
        if armed:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, alarm)
    rng = random.Random(0)
    done = 0
    try:
        while done < interrupts:
            engine = tight_engine()
            requests = add_all(engine)
            while engine.has_unfinished:
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 + rng.random() * 0.002)
                    while engine.has_unfinished:
                        engine.step()
                    armed = False
                except KeyboardInterrupt:
                    armed = False
                    done += 1
            assert check_end(engine, requests) == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_ctrl_c_ends_the_computation_of_a_step_at_once():
    """Catches one that is held back until a long step is done."""
    engine = tight_engine()
    requests, execute, done = add_all(engine), engine.executor.execute, []

    def interrupt(plan):
        engine.executor.execute = execute
        signal.raise_signal(signal.SIGINT)
        done.append(plan)
        return execute(plan)

    engine.executor.execute = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert done == []
    assert errors_until_the_end(engine) == 0
    assert check_end(engine, requests) == 0


@pytest.fixture
def handled():
    """The signals that a handler got which raises nothing."""
    handled: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: handled.append(number))
    yield handled
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_held_back_but_where_it_is_let_through(handled):
    """Catches one that is lost or handled twice, and a handler that raises nothing and is asked only once."""
    with DeferredInterrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert len(handled) == 0
        with interrupts.let_through():
            assert len(handled) == 1
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            assert len(handled) == 3
        signal.raise_signal(signal.SIGINT)
        assert len(handled) == 3
    assert len(handled) == 4
    with DeferredInterrupts() as interrupts, interrupts.let_through():
        signal.raise_signal(signal.SIGINT)
    assert len(handled) == 5


def interrupted_twice(done):
    with DeferredInterrupts() as interrupts, interrupts.let_through():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            done.append("clean-up")


def test_a_second_ctrl_c_waits_until_the_first_is_handled():
    """Catches a clean-up that an impatient second Ctrl-C ends."""
    done = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_twice(done)
    assert done == ["clean-up"]


def test_a_later_ctrl_c_ends_a_block_that_does_not_end(handled):
    """Catches an endless loop in a class of one's own that no Ctrl-C ends, and two in a row taken for it."""
    with DeferredInterrupts(patience=0.2):
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert len(handled) == 0
        time.sleep(0.25)
        signal.raise_signal(signal.SIGINT)
        assert len(handled) == 1
        signal.raise_signal(signal.SIGINT)
        assert len(handled) == 1
    assert len(handled) == 2


def test_ctrl_c_that_is_ignored_stays_ignored(handled):
    """Catches a TypeError in a background job: its shell lets it ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with DeferredInterrupts() as interrupts, interrupts.let_through():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


INTERRUPTED = ("minipaged/engine.py", "minipaged/interrupts.py", "minipaged/memory/prefix_cache.py")


def call_add(engine):
    engine.add_request("late", PROMPTS[1], PARAMS[0])


def call_abort(engine):
    engine.abort("0")


def call_reset(engine):
    engine.reset_prefix_cache()


def call_step(engine):
    engine.step()


def call_failing_step(engine):
    engine.on_planned.append(fail)
    try:
        with contextlib.suppress(InjectedError):
            engine.step()
    finally:
        engine.on_planned.remove(fail)


def fail(*step):
    raise InjectedError


@pytest.mark.parametrize("call", [call_add, call_abort, call_reset, call_step, call_failing_step])
def test_ctrl_c_at_any_line_of_the_engine_loses_nothing(call):
    """Catches a request in the scheduler that the engine does not know, and a Ctrl-C on the way to the
    roll-back: the plan stayed in flight, and every later step failed."""
    handler = signal.getsignal(signal.SIGINT)
    number = 1
    while True:
        engine = toy_engine(14, 6, max_num_batched_tokens=16, preemption_mode="swap")
        engine.add_request("before", PROMPTS[8], SamplingParams(max_tokens=1))  # blocks for `call_reset`
        engine.step()
        requests = [engine.add_request(str(i), PROMPTS[i], PARAMS[i]) for i in range(3)]
        for _ in range(2):
            engine.step()
        found = interrupted_at_line(number, lambda engine=engine: call(engine), INTERRUPTED)
        assert signal.getsignal(signal.SIGINT) == handler, number
        queued = [*engine.scheduler.waiting, *engine.scheduler.running, *engine.scheduler.swapped]
        assert set(engine._requests) == {request.request_id for request in queued}, number
        while engine.has_unfinished:
            engine.step()
        engine.check_invariants()
        for request, right in zip(requests, expected()):
            assert request.completions[0].finish_reason == "abort" or ranked(request) == right, number
        if not found:
            break
        number += 1
    assert number > 5


@pytest.mark.parametrize(
    ("module", "name", "forward_pass"),
    [
        (attention, "_forward_context", lambda: attention.set_forward_context(ProbeContext(None, 1))),
        (recurrent, "_pieces", lambda: recurrent.set_pieces(recurrent.one_sequence(1, None).pieces)),
    ],
    ids=["attention", "recurrent"],
)
def test_ctrl_c_as_a_forward_pass_begins_leaves_it(module, name, forward_pass, monkeypatch):
    """Catches a pass that nothing ends: its pools stayed in memory, and a model called outside the engine
    crashed the process."""
    variable = getattr(module, name)

    def set_and_interrupt(value):
        monkeypatch.undo()
        variable.set(value)
        raise KeyboardInterrupt

    fake = SimpleNamespace(get=variable.get, set=set_and_interrupt)
    monkeypatch.setattr(module, name, fake)
    with pytest.raises(KeyboardInterrupt), forward_pass():
        pass
    assert variable.get(None) is None


@pytest.mark.parametrize("after", range(1, 6))
@pytest.mark.parametrize("num_blocks", [22, 8])
def test_blocks_that_cannot_be_freed_while_planning_stay_with_their_request(after, num_blocks, monkeypatch):
    """Catches a victim, or a request that outgrew the pool, in no queue: it never ends."""
    engine = toy_engine(num_blocks, preemption_mode="recompute")
    requests = add_all(engine)
    kv, scheduler = engine.scheduler.kv, engine.scheduler
    free, schedule = kv.free, scheduler.schedule
    calls = 0

    def fragile_free(sequences):
        nonlocal calls
        calls += scheduler.in_flight is not None
        if calls == after:
            calls += 1
            raise InjectedError
        free(sequences)

    def fragile_schedule():
        monkeypatch.setattr(kv, "free", fragile_free)
        try:
            return schedule()
        finally:
            monkeypatch.setattr(kv, "free", free)

    monkeypatch.setattr(scheduler, "schedule", fragile_schedule)
    raised = errors_until_the_end(engine)
    assert raised == 1
    assert not engine._requests
    for request, right in zip(requests, expected()):
        outgrown = request.completions[0].finish_reason == "length" and num_blocks == 8
        assert outgrown or ranked(request) == right


def second_fault(engine: Engine, place: str, after: int, monkeypatch) -> None:
    """Let freeing blocks fail once more while the engine takes care of an error: at call number `after`."""
    scheduler, kv = engine.scheduler, engine.scheduler.kv
    owner, name = {"all blocks of a request": (kv, "free"), "one block": (kv.pool, "free")}[place]
    free, calls, cares = getattr(owner, name), 0, False

    def caring(method):
        def wrapped(*args):
            nonlocal cares
            cares = True
            try:
                return method(*args)
            finally:
                cares = False

        return wrapped

    def fragile_free(blocks):
        nonlocal calls
        calls += cares
        if cares and calls == after:
            raise InjectedError("second")
        free(blocks)

    monkeypatch.setattr(owner, name, fragile_free)
    monkeypatch.setattr(scheduler, "roll_back", caring(scheduler.roll_back))
    monkeypatch.setattr(scheduler, "end", caring(scheduler.end))


@pytest.mark.parametrize("after", [1, 2, 3, 6])
@pytest.mark.parametrize("place", ["all blocks of a request", "one block"])
@pytest.mark.parametrize("step", [2, 5, 9])
def test_a_roll_back_that_fails_is_done_again(step, place, after, monkeypatch):
    """Catches requests that go on as if a step had run that never did: K/V of others are read in silence,
    and blocks that were freed before the error are freed twice."""
    engine = tight_engine()
    requests = add_all(engine)
    broken(engine.executor, "execute", step, monkeypatch)
    second_fault(engine, place, after, monkeypatch)
    raised = 0
    while engine.has_unfinished:
        try:
            engine.step()
        except InjectedError:
            raised += 1
    assert raised == 1, "the second error is that of the same step"
    assert check_end(engine, requests) == 0


def test_a_request_that_ends_before_its_roll_back_is_done_again_stays_ended(monkeypatch):
    """Catches a finished request that waits again, without a sequence."""
    engine = tight_engine()
    requests = add_all(engine)
    broken(engine.executor, "execute", 5, monkeypatch)
    second_fault(engine, "all blocks of a request", 2, monkeypatch)
    for _ in range(4):
        engine.step()
    with pytest.raises(InjectedError):
        engine.step()
    assert engine.scheduler.in_flight is not None
    for request in engine.scheduler.in_flight.touched:
        engine.scheduler.end(request, "error")  # as the thread of `AsyncLLM` does after three failures
        engine._forget(request)
    while engine.has_unfinished:
        engine.step()
    assert check_end(engine, requests) > 0


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("place", ["all blocks of a request", "one block"])
def test_requests_of_a_failed_commit_end_even_if_ending_them_fails(place, after, monkeypatch):
    """Catches a request that goes on with half of its samples."""
    engine = tight_engine()
    requests = add_all(engine)
    broken(engine.scheduler.kv, "fork", 2, monkeypatch)
    second_fault(engine, place, after, monkeypatch)
    while engine.has_unfinished:
        with contextlib.suppress(InjectedError):
            engine.step()
    assert check_end(engine, requests) > 0


def test_a_step_inside_a_step_is_refused_and_spoils_nothing():
    """Catches a hook that steps the engine: the plan that is being computed would be rolled back."""
    engine = tight_engine()
    requests = add_all(engine)
    engine.on_planned.append(lambda plan: engine.step())
    for _ in range(2):
        with pytest.raises(AssertionError, match="commit or roll back the last plan first"):
            engine.step()
    engine.on_planned.pop()
    errors_until_the_end(engine)
    assert check_end(engine, requests) == 0


def test_a_table_of_ones_own_keeps_its_class_when_it_forks():
    """Catches a fork that falls back to the project's own table."""

    class Mine(BlockTable):
        __slots__ = ()

    engine = toy_engine(components=Components(block_table=Mine))
    request = engine.add_request("a", [1, 2, 3], PARAMS[1])
    engine.step()
    assert {type(sequence.table) for sequence in request.sequences} == {Mine}


def test_a_request_without_completions_is_counted_and_forgotten():
    """Catches a decoding method that returns no branch: metrics failed, and the id was never free again."""

    class Nothing(SamplingMethod):
        def advance(self, request, samples):
            return []

    engine = toy_engine(components=Components(parallel_sampling=Nothing))
    for _ in range(2):
        request = engine.add_request("a", [1, 2, 3], PARAMS[0])
        while engine.has_unfinished:
            engine.step()
        assert request.is_finished
    assert engine.metrics.request_success.total() == 2


def test_aborted_and_failed_requests_leave_nothing_in_the_metrics(monkeypatch):
    """Catches a dictionary that grows with every request that ended early."""
    engine = tight_engine()
    add_all(engine)
    for _ in range(4):
        engine.step()
    engine.on_planned.append(lambda plan: engine.abort("3"))  # while a step is in flight
    engine.step()
    engine.on_planned.pop()
    engine.abort("4")
    broken(engine.scheduler.kv, "commit_registered", 1, monkeypatch)
    with pytest.raises(InjectedError):
        engine.step()
    while engine.has_unfinished:
        engine.step()
    assert not engine._requests
    kept = [getattr(engine.metrics, entry.name) for entry in fields(engine.metrics)]
    assert not any(isinstance(value, dict) and set("012345678") & set(value) for value in kept)
    assert engine.metrics.request_success.total() == len(PROMPTS)
    assert engine.metrics.request_success["abort"] == 2


def test_an_unfinished_request_has_an_output():
    """Catches a division by zero in the score of a beam without a token, and samples that ended already."""
    engine = toy_engine()
    beams = engine.add_request("a", [1, 2, 3], PARAMS[2])
    assert engine.output(beams).outputs[0].token_ids == []
    params = SamplingParams(n=3, temperature=1, seed=1, max_tokens=30, stop_token_ids=list(range(10)))
    samples = engine.add_request("b", [1, 2, 3], params)
    while not samples.completions:
        engine.step()
    shown = engine.output(samples)
    assert not shown.finished
    assert [completion.index for completion in shown.outputs] == [0, 1, 2]
    engine.abort("a")
    assert engine.output(beams).outputs[0].finish_reason == "abort"


def test_an_output_ends_where_the_model_ends():
    """Catches `max_tokens` that lead past the last position that the model knows."""
    engine = toy_engine()
    request = engine.add_request("a", range(44), SamplingParams(temperature=0, max_tokens=1000))
    while engine.has_unfinished:
        engine.step()
    assert request.completions[0].num_tokens == engine.executor.max_model_len


def test_an_executor_with_blocks_of_another_size_is_refused():
    """Catches tokens that are silently wrong: slots computed for one size, tables for another."""
    with pytest.raises(ConfigError, match="block_size is 8, but the executor's blocks have 4 tokens"):
        Engine(toy_engine().executor, EngineConfig(block_size=8))


def test_an_abort_from_a_step_hook_keeps_its_reason():
    """Catches a reason that the commit forgets, so that the request ends as if somebody had left."""
    engine = toy_engine()
    request = engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=20))
    engine.step()
    engine.on_planned.append(lambda plan: engine.abort("a", "too slow"))
    engine.step()
    assert (request.completions[0].finish_reason, request.error) == ("error", "too slow")


@pytest.mark.parametrize("hooks", ["on_planned", "on_committed"])
def test_a_step_returns_what_its_hooks_have_aborted(hooks):
    """Catches a stream that waits forever for a request which ended in the queue."""
    engine = toy_engine(max_num_seqs=1)
    requests = [engine.add_request(name, [1, 2], SamplingParams(temperature=0)) for name in "ab"]
    getattr(engine, hooks).append(lambda *step: engine.abort("b"))
    assert engine.step() == requests
    assert engine.step() == requests[:1]


def test_of_two_aborts_in_a_step_the_first_one_counts():
    """Catches a second one without a reason that takes the first one's away."""
    engine = toy_engine()
    request = engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=20))
    engine.step()
    engine.on_planned += [lambda plan: engine.abort("a", "too slow"), lambda plan: engine.abort("a")]
    engine.step()
    assert (request.completions[0].finish_reason, request.error) == ("error", "too slow")


def test_a_request_that_ends_in_the_step_that_aborts_it_has_not_failed():
    """Catches the reason of the abort left at a whole text: a stream would raise it at the end."""
    engine = toy_engine()
    request = engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=1))
    engine.on_planned.append(lambda plan: engine.abort("a", "quota exceeded"))
    engine.step()
    assert (request.completions[0].finish_reason, request.error) == ("length", None)


def test_an_abort_of_what_has_just_failed_changes_nothing():
    """Catches a hook that clears the reason of a request which the same step has ended."""
    engine = toy_engine()
    request = engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=20))
    execute = engine.executor.execute
    engine.executor.execute = lambda plan: execute(plan)._replace(errors={"a": "not finite"})
    engine.on_committed.append(lambda plan, result, touched: engine.abort("a"))
    engine.step()
    assert (request.completions[0].finish_reason, request.error) == ("error", "not finite")


def test_an_abort_from_a_step_hook_leaves_ctrl_c_as_it_was():
    """Catches a Ctrl-C that nobody hears any more: blocks that hold it back were nested."""
    engine = tight_engine()
    requests = add_all(engine)
    before = signal.getsignal(signal.SIGINT)
    engine.on_committed.append(lambda *step: engine.abort("3"))
    engine.on_committed.append(lambda *step: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.on_committed.pop()
    assert signal.getsignal(signal.SIGINT) == before
    assert requests[3].is_finished
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
