"""One LLM, several users at a time: whoever steps the engine, every output reaches the one who asked."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from minipaged import LLM, SamplingParams
from minipaged.engine_turns import EngineTurns
from tests.engine.ctrl_c import interrupted_after_call, interrupted_at_line, may_be_swallowed
from tests.engine.toy_model import toy_engine
from tests.processes import started

PARAMS = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["The little robot", "Once upon a time", "One day Tom", "The fox"]


@pytest.fixture(scope="module")
def texts(llm) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, PARAMS)]


def test_a_stream_keeps_its_text_while_somebody_else_generates(llm, texts):
    """Catches tokens that `generate` computed for an open stream, and that nobody got."""
    stream = llm.stream(PROMPTS[0], PARAMS)
    pieces = [next(stream)]
    llm.generate(PROMPTS[1], PARAMS)
    assert "".join(pieces + list(stream)) == texts[0]


def test_two_streams_read_in_turn_are_both_complete(llm, texts):
    """Catches a last token that came in the other stream's step."""
    streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS[:2]]
    pieces: list[list[str]] = [[], []]
    while streams[0] or streams[1]:
        for i, stream in enumerate(streams):
            piece = next(stream, None) if stream else None
            if piece is None:
                streams[i] = None
            else:
                pieces[i].append(piece)
    assert ["".join(parts) for parts in pieces] == texts[:2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_is_told_to_build_its_own(llm):
    """Catches a child that waits forever for threads which only its parent has."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            llm.generate(PROMPTS[0], PARAMS)
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reader, 1000).startswith(
        b"RequestError: this process is a fork of the one that built the LLM"
    )
    os.close(reader)
    os.close(writer)


def test_threads_may_call_generate_at_the_same_time(llm, texts):
    """Catches a plan that two threads commit."""
    results: dict[int, list[str]] = {}

    def work(number: int) -> None:
        outputs = [llm.generate(PROMPTS[(number + i) % 4], PARAMS)[0].outputs[0].text for i in range(4)]
        results[number] = outputs[-number:] + outputs[:-number] if number else outputs

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert results == dict.fromkeys(range(4), texts)
    assert llm.engine.scheduler.kv.num_used == 0


def test_a_stream_that_is_dropped_while_a_step_runs_is_aborted_after_it(llm, texts):
    """Catches a deadlock: the garbage collector ends a stream inside a step of the same thread, and the abort
    waits for the lock that this step holds."""

    def drop_and_collect(plan):
        if dropped:
            dropped.clear()
            gc.collect()

    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    cycle: list = [stream]
    cycle.append(cycle)
    dropped = [True]
    del stream, cycle
    llm.engine.on_planned.append(drop_and_collect)
    results: list = []
    thread = threading.Thread(target=lambda: results.append(llm.generate(PROMPTS[1], PARAMS)), daemon=True)
    try:
        thread.start()
        thread.join(20)
    finally:
        llm.engine.on_planned.remove(drop_and_collect)
    assert results, "it waits for itself"
    assert results[0][0].outputs[0].text == texts[1]
    assert not llm.engine.has_unfinished
    assert not dropped


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_call_from_inside_a_step_is_refused(llm, texts, call):
    """Catches a logits processor that uses its own LLM: it waited forever for the step to end."""

    def ask(token_ids, logits):
        list(getattr(llm, call)(PROMPTS[0], PARAMS))
        return logits

    params = PARAMS.clone(logits_processors=[ask], max_tokens=2)
    outputs: list = []
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate(PROMPTS[1], params)), daemon=True)
    thread.start()
    thread.join(20)
    assert outputs, "it waits for itself"
    assert "inside one of its own steps" in outputs[0].error
    assert not llm.engine.has_unfinished
    assert llm.generate(PROMPTS[0], PARAMS)[0].outputs[0].text == texts[0]


@may_be_swallowed
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer signal (not on Windows)")
def test_ctrl_c_while_requests_are_added_leaves_none_behind(llm, no_gc_callbacks):
    """Catches a request that the engine has and `generate` does not know yet: it ran with the next call."""
    rng = random.Random(0)
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    hits = 0
    try:
        for _ in range(100):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + rng.random() * 0.004)
                llm.generate(PROMPTS * 8, PARAMS, use_tqdm=False)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
            assert not llm.engine.has_unfinished
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits > 30


def test_ctrl_c_at_any_line_while_a_stream_is_dropped_leaves_the_engine_free():
    """Catches a lock that nobody releases: every later call waited forever."""

    number = 1
    while True:
        engine = toy_engine()
        turns = EngineTurns(engine)
        request = engine.add_request("0", [1, 2, 3], PARAMS)
        leave = functools.partial(turns.leave, [request])
        if not interrupted_at_line(number, leave, ("minipaged/engine_turns.py",)):
            break
        assert not turns._lock.locked(), number
        number += 1
    assert number > 5


@pytest.mark.parametrize("call", ["generate", "stream", "reset_prefix_cache"])
def test_ctrl_c_after_any_call_leaves_an_engine_that_can_be_used(llm, texts, call):
    """Catches a thread that has the engine as long as an interactive session keeps the traceback: every later
    call was refused. And a request that `stream` had added and did not know yet: it ran with the next one."""
    calls = {
        "generate": lambda: llm.generate(PROMPTS[1], PARAMS.clone(max_tokens=1)),
        "stream": lambda: list(llm.stream(PROMPTS[1], PARAMS.clone(max_tokens=1))),
        "reset_prefix_cache": llm.reset_prefix_cache,
    }
    modules = ("engine.py", "engine_turns.py", "interrupts.py", "llm.py", "/contextlib.py")
    number, found = 1, True
    while found:
        kept = None  # like sys.last_exc
        try:
            found = interrupted_after_call(number, calls[call], modules)
        except KeyboardInterrupt as error:
            kept = error
        assert not llm.engine.has_unfinished, number
        llm.reset_prefix_cache()
        del kept
        number += 1
    assert number > 20
    assert llm.generate(PROMPTS[0], PARAMS)[0].outputs[0].text == texts[0]


LEFT = """
import atexit, threading
atexit.register(lambda: print(len(llm.generate("The fox", SamplingParams(max_tokens=3)))))
from minipaged import LLM, SamplingParams

llm = LLM(num_blocks=256, disable_log_stats=True)
begun = threading.Event()
llm.engine.on_committed.append(lambda *step: begun.set())

def work():
    while True:
        llm.generate(["Once upon a time"] * 8, SamplingParams(max_tokens=50, ignore_eos=True))

threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


@pytest.mark.slow
def test_a_process_may_end_while_its_daemon_thread_generates():
    """Catches an abort (exit code 134, in most runs), because the interpreter ended the thread inside a step,
    and a main thread that uses the LLM as it ends, and waits forever."""
    with started("-c", LEFT) as process:
        streams = process.communicate(timeout=60)
        assert (process.returncode, *streams) == (0, "1\n", "")


FORKED = """
import os, signal, sys, threading
from minipaged import engine_turns

engine_turns.TO_FINISH = 1000
turns, inside, is_over = engine_turns.EngineTurns(None), threading.Event(), threading.Event()

def work():
    turns.take(lambda engine: (inside.set(), is_over.wait()))

threading.Thread(target=work).start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    sys.exit()
status = os.waitpid(child, 0)[1]
is_over.set()
sys.exit(status != 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_ends_without_waiting_for_a_step_of_its_parent():
    """Catches ten seconds at the end of each child, for a thread that only its parent has."""
    with started("-c", FORKED) as process:
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_models_may_be_loaded_by_several_threads():
    """Catches two calls of transformers' loading at once: it replaces functions of its classes meanwhile, so
    `tie_weights` stayed empty, and every later model lacked its tied weights."""
    with ThreadPoolExecutor(4) as threads:
        for _ in range(2):
            built = [threads.submit(LLM, num_blocks=8, max_model_len=64) for _ in range(4)]
            llms = [one.result() for one in built]
    llms.append(LLM(num_blocks=8, max_model_len=64))
    texts = {llm.generate("Once", PARAMS)[0].outputs[0].text for llm in llms}
    assert len(texts) == 1
