"""Many users in an event loop: each gets what `LLM.generate` would return, leaves at will, and waits for
nobody's step."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import logging
import os
import random
import signal
import statistics
import threading
import time
import weakref
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minipaged import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    EngineStoppedError,
    QueueFullError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from minipaged.async_llm import together
from minipaged.decoding.params import ParamsError
from minipaged.engine import RequestError
from minipaged.engine_thread import Reader
from minipaged.execution.distributed import RankError
from minipaged.scheduling import RequestTooLongError
from tests.checked import checked
from tests.engine.toy_model import SlowModel, ToyModel, toy_engine

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
PROMPT = {"prompt_token_ids": [1, 2, 3]}
LONG = SamplingParams(temperature=0, max_tokens=150)
SHORT = SamplingParams(temperature=0, max_tokens=10)


class Slow(SlowModel):
    """Leaves time to leave in the middle."""

    seconds = 0.005


def toy(model: ToyModel | None = None, **options) -> AsyncLLM:
    """An AsyncLLM over a toy."""
    return checked(AsyncLLM(executor=model or Slow(), block_size=4, disable_log_stats=True, **options))


def in_event_loop(test):
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(test(**fixtures))

    return run


async def read(outputs) -> list:
    return [output async for output in outputs]


async def until(condition) -> None:
    """Wait for what the thread does soon; a minute is for the slowest of machines."""
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it never happened")


@pytest.fixture(autouse=True)
def no_leftovers():
    logging.getLogger("minipaged").setLevel(logging.CRITICAL)  # thousands of preemptions, failures on purpose
    yield
    if is_left():
        gc.collect()  # (half a second, after all that the tests import)
        assert not is_left()


def is_left() -> bool:
    return "minipaged-engine" in {thread.name for thread in threading.enumerate()}


# -- what is sent --------------------------------------------------------------------------------

TEXT_PARAMS = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=15),
    SamplingParams(temperature=0, max_tokens=40, stop=(" the ", "was")),
    BeamSearchParams(beam_width=3, max_tokens=10),
    SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=1),
]
TEXTS = ["Once upon a time", "The little robot", "One day Tom", "The fox", "Mia saw a bird"]
OPTIONS = {"num_blocks": 256, "max_model_len": 512, "disable_log_stats": True}


@functools.cache
def loaded() -> LLM:
    """The embedded model."""
    return LLM(**OPTIONS)


def pocket() -> AsyncLLM:
    """An AsyncLLM over the embedded model, which is loaded once."""
    return AsyncLLM(executor=loaded().engine.executor, tokenizer=loaded().tokenizer, **OPTIONS)


def contents(output) -> list[tuple]:
    """All but the times; log-probabilities depend on who else is in the batch, in their last bits."""
    fields = ("index", "text", "token_ids", "finish_reason", "stop_reason")
    completions = [tuple(getattr(done, name) for name in fields) for done in output.outputs]
    return [output.prompt, output.prompt_token_ids, output.finished, completions]


@in_event_loop
async def test_outputs_are_those_of_generate():
    """Catches an output lost, of somebody else, or other than the blocking door's."""
    expected = [loaded().generate(*pair)[0] for pair in zip(TEXTS, TEXT_PARAMS)]
    async with pocket() as llm:
        assert llm.get_tokenizer().encode("a")
        found = await asyncio.gather(*(read(llm.generate(*pair)) for pair in zip(TEXTS, TEXT_PARAMS)))
    for outputs, right in zip(found, expected):
        assert contents(outputs[-1]) == contents(right)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        if right.prompt_logprobs is not None:
            assert all(outputs[-1].prompt_logprobs[1:])
            assert len(outputs[-1].outputs[0].logprobs) == len(right.outputs[0].logprobs)


@in_event_loop
async def test_cumulative_outputs_grow_and_deltas_join_to_the_whole():
    """Catches a token sent twice, a half character, a stop string that was shown and taken back, outputs
    without their completions, log-probabilities of the last token alone."""
    params = [
        {"temperature": 1.0, "seed": 5, "n": 2, "max_tokens": 30, "logprobs": 1, "stop": (" the ", ".")},
        {"temperature": 0, "max_tokens": 30},
    ]
    async with pocket() as llm:
        # Outputs that wait are joined: each step gives the loop time to take the last one's.
        llm.engine.on_committed.append(lambda *step: time.sleep(0.002))
        for options in params:
            prompt = "The little robot"
            whole = await read(llm.generate(prompt, SamplingParams(**options)))
            deltas = await read(llm.generate(prompt, SamplingParams(**options, output_kind=DELTA)))
            (final,) = await read(llm.generate(prompt, SamplingParams(**options, output_kind=FINAL)))
            assert contents(whole[-1]) == contents(final)
            for index, right in enumerate(final.outputs):
                parts = [o for output in deltas for o in output.outputs if o.index == index]
                assert len(parts) > 3
                assert "".join(part.text for part in parts) == right.text
                assert [t for part in parts for t in part.token_ids] == right.token_ids
                if right.logprobs is not None:
                    assert sum(len(part.logprobs) for part in parts) == len(right.token_ids)
                assert (parts[-1].finish_reason, parts[-1].stop_reason) == (
                    right.finish_reason,
                    right.stop_reason,
                )
                shown = [o.outputs[index] for o in whole if len(o.outputs) > index]
                assert len(shown) > 3
                for before, after in itertools.pairwise(shown):
                    assert after.text.startswith(before.text)
                    assert after.token_ids[: len(before.token_ids)] == before.token_ids
                    if right.logprobs is not None:
                        assert after.logprobs == right.logprobs[: len(after.token_ids)]


@in_event_loop
async def test_of_more_samples_than_are_returned_only_the_end_is_reported():
    """Catches running outputs with three completions of which two are dropped at the end."""
    with toy() as llm:
        params = SamplingParams(n=1, best_of=3, max_tokens=8, seed=1)
        (final,) = await read(llm.generate(PROMPT, params))
        assert final.finished
        assert len(final.outputs) == 1


@in_event_loop
async def test_a_reader_who_falls_behind_gets_the_newest_output_or_every_delta():
    """Catches a queue of outputs that grows with each step, and deltas that are lost."""
    with toy() as llm:
        late = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30))
        deltas = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30, output_kind=DELTA))
        await until(lambda: not llm.engine.has_unfinished and llm.engine.metrics.request_success)
        await asyncio.sleep(0.05)
        (output,) = await read(late)
        parts = await read(deltas)
        assert [t for part in parts for t in part.outputs[0].token_ids] == output.outputs[0].token_ids
        assert len(output.outputs[0].token_ids) == 30


@in_event_loop
async def test_several_requests_are_read_together_to_their_ends():
    """Catches a request whose end hides another's outputs, outputs that an error behind them takes away."""
    with toy() as llm:
        counts = [5, 30, 1]
        params = [SamplingParams(temperature=0, max_tokens=n, output_kind=DELTA) for n in counts]
        found = [0, 0, 0]
        async for position, output in together([llm.generate(PROMPT, each) for each in params]):
            found[position] += len(output.outputs[0].token_ids)
        assert found == counts
        late = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=150, output_kind=DELTA))
        steps = llm.engine.metrics.steps
        await until(lambda: llm.engine.metrics.steps > steps + 3)
        llm.shutdown()
        await asyncio.sleep(0.05)
        outputs = together([late])
        assert [(await anext(outputs))[0] for _ in range(3)] == [0, 0, 0]
        with pytest.raises(EngineStoppedError):
            await read(outputs)


@in_event_loop
async def test_others_have_a_turn_between_the_outputs_of_many_requests_that_are_read_together():
    """Catches the outputs of 256 prompts of one body that all go out before anybody else's next token."""
    with toy() as llm:
        streams = [llm.generate(PROMPT, SamplingParams(max_tokens=1)) for _ in range(100)]
        await until(lambda: all(stream._reader.done for stream in streams))
        turns, seen = [], []
        async for _ in together(streams):
            asyncio.get_running_loop().call_soon(turns.append, None)
            seen.append(len(turns))
    assert max(after - before for before, after in itertools.pairwise([*seen, 100])) <= 16


@in_event_loop
async def test_a_long_text_is_read_together_with_others():
    """Catches waiting for a request that nobody has handed over: its text is still to be tokenized."""
    async with pocket() as llm:
        params = SamplingParams(temperature=0, max_tokens=3, output_kind=FINAL)
        texts = ["The fox. " * 20, "a " * 2100]
        outputs = together([llm.generate({"prompt": text}, params) for text in texts])
        with pytest.raises(RequestTooLongError):
            await asyncio.wait_for(read(outputs), 60)


@in_event_loop
async def test_text_that_was_held_back_comes_with_the_end():
    """Catches deltas without the beginning of a stop string that never was completed."""
    async with pocket() as llm:
        options = {"temperature": 0, "max_tokens": 8}
        (whole,) = await read(llm.generate("The fox", SamplingParams(**options, output_kind=FINAL)))
        text = whole.outputs[0].text
        params = SamplingParams(**options, stop=(text[-3:] + "@@",), output_kind=DELTA)
        parts = await read(llm.generate("The fox", params))
        assert "".join(part.outputs[0].text for part in parts) == text


@in_event_loop
async def test_prompt_logprobs_of_equal_prompts_that_come_together_are_complete():
    """Catches a prefix hit, which has no logits, of a request built before the other was queued."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, output_kind=FINAL)
    async with pocket() as llm:
        many = [llm.generate("Once upon a time. " * 8, params) for _ in range(4)]
        for outputs in many:
            (output,) = await read(outputs)
            assert all(output.prompt_logprobs[1:])


def test_nobody_can_guess_the_salt_of_a_request_for_prompt_logprobs():
    """Catches a prefix hit on the blocks of somebody who chose the salt that the engine would choose."""
    params = SamplingParams(prompt_logprobs=0)
    salts = {toy_engine().make_request("a", [1, 2], params, own).cache_salt for own in ("", "own")}
    assert len(salts) == 2
    assert min(map(len, salts)) >= 32


# -- leaving -------------------------------------------------------------------------------------


@in_event_loop
async def test_leaving_the_iterator_frees_its_blocks():
    """Catches a client who is gone and whose text is generated to its end."""
    with toy() as llm:
        kv = llm.engine.scheduler.kv
        async for output in llm.generate(PROMPT, LONG, request_id="a"):
            if len(output.outputs[0].token_ids) >= 3:
                steps = llm.engine.metrics.steps
                break
        await until(lambda: kv.num_used == 0)
        assert llm.engine.metrics.steps <= steps + 3
        outputs = llm.generate(PROMPT, LONG)
        await anext(outputs)
        await outputs.aclose()
        assert await read(outputs) == []
        dropped = llm.generate(PROMPT, LONG)
        del dropped  # (never read)
        await until(lambda: llm.engine.metrics.request_success == {"abort": 3})
        assert kv.num_used == 0
        assert not llm.engine.has_unfinished


@in_event_loop
async def test_an_idle_engine_keeps_no_request_alive():
    """Catches the requests of the last step, with their tokens and whatever else hangs on a sequence."""

    def are_dropped(requests) -> bool:
        gc.collect()
        return not requests

    with toy() as llm:
        requests = weakref.WeakSet()
        llm.engine.on_planned.append(lambda plan: requests.update(plan.sampling))
        params = SamplingParams(temperature=0, max_tokens=4)
        await asyncio.gather(*(read(llm.generate(PROMPT, params, str(i))) for i in range(5)))
        assert len(llm.engine._requests) == 0
        await until(lambda: are_dropped(requests))


@in_event_loop
async def test_a_request_aborted_by_its_id_ends_with_what_there_is():
    """Catches a reader who waits forever, and an id whose letters are looked for."""
    with toy() as llm:
        outputs = llm.generate(PROMPT, LONG, request_id="one")
        await anext(outputs)
        await llm.abort("one")
        await llm.abort("nobody")
        last = (await read(outputs))[-1]
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        assert len(await read(llm.generate(PROMPT, SHORT, request_id="one"))) > 0


@in_event_loop
async def test_several_requests_are_aborted_by_their_ids():
    """Catches a list of ids that is looked for as one id."""
    with toy() as llm:
        streams = [llm.generate(PROMPT, LONG, request_id=name) for name in "abc"]
        await llm.abort(name for name in "ab")
        ends = [(await read(outputs))[-1].outputs[0].finish_reason for outputs in streams]
        assert ends == ["abort", "abort", "length"]


@pytest.mark.parametrize("wrong", [3, None, b"a", ["a", 3], [["a"]]])
@in_event_loop
async def test_an_invalid_id_is_refused_and_aborts_nothing(wrong):
    """Catches a TypeError about iterables, and a list of which the first half is aborted."""
    with toy() as llm:
        outputs = llm.generate(PROMPT, SHORT, request_id="a")
        with pytest.raises(RequestError, match=r"^request_id is .*; give a string, or several$"):
            await llm.abort(wrong)
        assert (await read(outputs))[-1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("hooks", ["on_planned", "on_committed"])
@in_event_loop
async def test_a_request_that_waits_while_a_hook_aborts_it_is_reported(hooks):
    """Catches a reader who waits forever: the step has not touched the request."""
    with toy(max_num_seqs=1) as llm:
        runs, waits = (llm.generate(PROMPT, LONG, request_id=name) for name in ("runs", "waits"))
        await anext(runs)
        getattr(llm.engine, hooks).append(lambda *step: llm.engine.abort("waits", "too late"))
        last = (await asyncio.wait_for(read(waits), 60))[-1]
        assert (last.outputs[0].finish_reason, last.error) == ("error", "too late")
        assert (await read(runs))[-1].outputs[0].finish_reason == "length"


@in_event_loop
async def test_an_output_that_its_reader_changes_is_not_part_of_the_request():
    """Catches the request's own list of prompt tokens: extended, it hides generated tokens."""
    with toy() as llm:
        expected = (await read(llm.generate(PROMPT, SHORT)))[-1].outputs[0].token_ids
        last = None
        async for output in llm.generate(PROMPT, SHORT):
            output.prompt_token_ids.extend(output.outputs[0].token_ids)
            last = output
        assert last.outputs[0].token_ids == expected
        assert last.outputs[0].finish_reason == "length"


@in_event_loop
async def test_prefixes_are_forgotten_between_two_steps():
    """Catches vLLM's method missing, and a cache that is cleared while a step uses it."""
    with toy() as llm:
        prompt = {"prompt_token_ids": list(range(1, 30))}
        short = SamplingParams(temperature=0, max_tokens=2)
        await read(llm.generate(prompt, short))
        assert (await read(llm.generate(prompt, short)))[-1].num_cached_tokens > 0
        assert await llm.reset_prefix_cache()
        assert (await read(llm.generate(prompt, short)))[-1].num_cached_tokens == 0
    with pytest.raises(EngineStoppedError):
        await llm.reset_prefix_cache()


@pytest.mark.parametrize("begun", [False, True])
@in_event_loop
async def test_abort_ends_a_long_prompt_like_a_short_one(begun):
    """Catches an error in place of the output, as the prompt is not tokenized yet."""
    with AsyncLLM(**OPTIONS | {"max_model_len": 2048}) as llm:
        outputs = llm.generate("hello world " * 380, LONG, request_id="a")
        reading = asyncio.create_task(read(outputs)) if begun else None
        await asyncio.sleep(0)
        await llm.abort("a")
        (last,) = await (reading or read(outputs))
        assert last.finished
        assert last.prompt.startswith("hello")
        assert [done.finish_reason for done in last.outputs] == ["abort"]
        assert not llm._thread._readers


@in_event_loop
async def test_a_long_prompt_may_begin_with_what_is_not_a_token():
    """Catches a check of its beginning alone: some tokenizers drop spaces."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    with AsyncLLM(tokenizer=tokenizer, disable_log_stats=True) as llm:
        (*_, last) = await read(llm.generate(" " * 5000 + "a b", SamplingParams(max_tokens=3)))
        assert last.prompt_token_ids == [0, 1]


@in_event_loop
async def test_who_waits_for_an_output_hears_that_another_task_closed_the_iterator():
    """Catches a task that waits forever."""
    with toy() as llm:
        outputs = llm.generate(PROMPT, LONG)
        await anext(outputs)
        reading = asyncio.create_task(read(outputs))
        await asyncio.sleep(0.02)
        await outputs.aclose()
        seen = await asyncio.wait_for(reading, 60)
        assert not any(output.finished for output in seen)
        await until(lambda: not llm._thread._readers)


@pytest.mark.parametrize("seed", range(3))
@in_event_loop
async def test_sixty_tasks_a_third_of_them_cancelled_at_random(seed):
    """Catches blocks, threads, tasks or ids that are left, and texts that a neighbour's end disturbs."""
    rng = random.Random(seed)
    params = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(n=3, temperature=1, seed=1, max_tokens=9),
        BeamSearchParams(beam_width=3, max_tokens=8),
        SamplingParams(temperature=0, max_tokens=12, output_kind=DELTA),
    ]
    prompts = [{"prompt_token_ids": [i % 7, *range(i % 9, i % 9 + 3 + 5 * (i % 3))]} for i in range(60)]
    wanted = [params[i % 4] for i in range(60)]
    reference = LLM(executor=ToyModel(500), block_size=4, disable_log_stats=True)
    expected = [[o.token_ids for o in r.outputs] for r in reference.generate(prompts, wanted)]

    class Tight(Slow):
        seconds = 0.0005

    async def client(llm, number):
        tokens: dict[int, list[int]] = {}
        async for output in llm.generate(prompts[number], wanted[number], request_id=str(number)):
            for place, completion in enumerate(output.outputs):
                if wanted[number] is params[3]:
                    tokens.setdefault(completion.index, []).extend(completion.token_ids)
                else:
                    tokens[place] = completion.token_ids
            if number % 5 == 0:
                await asyncio.sleep(rng.random() * 0.01)
        assert list(tokens.values()) == expected[number]
        return number

    model = Tight(22, 8)
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 9, "preemption_mode": "swap"}
    async with toy(model, **limits) as llm:
        tasks = [asyncio.create_task(client(llm, number)) for number in range(60)]
        for number in rng.sample(range(60), 20):
            await asyncio.sleep(rng.random() * 0.002)
            tasks[number].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        cancelled = [r for r in results if isinstance(r, asyncio.CancelledError)]
        assert len(cancelled) >= 10
        assert len([r for r in results if isinstance(r, int)]) + len(cancelled) == 60
        await until(lambda: not llm.engine.has_unfinished)
        llm.engine.check_invariants()
        assert llm.engine.metrics.num_preemptions > 5
        assert not llm.engine._requests
        assert not llm._thread._readers
    assert asyncio.all_tasks() == {asyncio.current_task()}


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("", None, RequestError, "prompt is empty"),
        (17, None, RequestError, "the prompt is 17"),
        (PROMPT, {"max_tokens": 3}, RequestError, "give SamplingParams"),
        ({"prompt_token_ids": [3] * 512}, None, RequestTooLongError, "512 tokens.*max_model_len"),
        (
            {"prompt_token_ids": [3] * 512, "prompt": "hi " * 2000},
            *(None, RequestTooLongError, "512 tokens.*max_model_len"),
        ),
        (
            *("hi", SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))),
            *(ParamsError, "regex of structured_outputs is"),
        ),
        ("hi", SamplingParams(logprobs=10**6), ParamsError, "logprobs is 1000000"),
        ("hi " * 10_000, SamplingParams(logprobs=10**6), ParamsError, "logprobs is 1000000"),
        ("hi", SamplingParams(n=300), RequestTooLongError, "300 sequences"),
        ("a " * 2000, None, RequestTooLongError, "max_model_len"),
        # (Planned with it, every step failed, and with that all other requests.)
        ({"prompt": "hi", "cache_salt": "\ud800"}, None, RequestError, "cache_salt has"),
        (bytearray(b"hi"), None, RequestError, "the prompt is bytearray"),
    ],
)
@in_event_loop
async def test_a_bad_request_is_refused_at_the_call(prompt, params, error, message):
    """Catches an error that comes when the answer has begun already, and an id that stays in use."""
    with pocket() as llm:
        for _ in range(2):
            with pytest.raises(error, match=message):
                llm.generate(prompt, params, request_id="a")
        assert not llm._thread._readers


@in_event_loop
async def test_without_a_tokenizer_a_text_of_any_length_is_refused_at_the_call():
    """Catches a long one that is refused only when its first output is read."""
    with toy() as llm:
        for text in ("hi", "hi " * 10_000):
            with pytest.raises(RequestError, match="the model has no tokenizer"):
                llm.generate(text, LONG)
        assert not llm._thread._readers


@in_event_loop
async def test_a_long_text_is_tokenized_in_another_thread(monkeypatch):
    """Catches an event loop that stands still for a book, and its refusal lost on the way."""
    with pocket() as llm:
        tokenizer, threads = llm.get_tokenizer(), []
        encode = tokenizer.encode

        def noted(text, **options):
            threads.append((len(text) > 4096, threading.current_thread() is threading.main_thread()))
            return encode(text, **options)

        monkeypatch.setattr(tokenizer, "encode", noted)
        outputs = llm.generate("Once upon a time. " * 1000)
        with pytest.raises(RequestTooLongError, match="max_model_len"):
            await anext(outputs)
        assert (True, False) in threads
        assert (True, True) not in threads
        for begun in (False, True):  # left before and while it is tokenized
            outputs = llm.generate("Once upon a time. " * 1000)
            task = asyncio.create_task(anext(outputs)) if begun else None
            await asyncio.sleep(0)
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await outputs.aclose()
        assert not llm._thread._readers


@in_event_loop
async def test_an_iterator_that_is_closed_twice_does_not_take_the_next_request_of_its_id_with_it():
    """Catches a wait without an end: closed and then dropped, it is aborted twice."""
    with toy() as llm:
        outputs = llm.generate(PROMPT, LONG, request_id="a")
        may_begin, has_ended, may_go_on = (threading.Event() for _ in range(3))
        llm.between_steps(may_begin.wait)
        await outputs.aclose()
        llm.between_steps(has_ended.set)
        llm.between_steps(may_go_on.wait)
        await outputs.aclose()
        may_begin.set()
        await until(has_ended.is_set)
        again = llm.generate(PROMPT, SHORT, request_id="a")
        may_go_on.set()
        assert (await asyncio.wait_for(read(again), 60))[-1].outputs[0].finish_reason == "length"


@in_event_loop
async def test_a_long_grammar_is_compiled_in_another_thread(monkeypatch):
    """Catches an event loop that stands still for thousands of choices, and a refusal lost or too late."""
    compile_it, threads = StructuredOutputsParams.compile, []

    def noted(params, *options):
        threads.append(threading.current_thread() is threading.main_thread())
        return compile_it(params, *options)

    monkeypatch.setattr(StructuredOutputsParams, "compile", noted)
    options = [f"the answer number {i}" for i in range(1000)]
    choice = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputsParams(choice=options))
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(" * 5000))
    with pocket() as llm:
        (*_, last) = await read(llm.generate("Once upon a time", choice))
        assert last.outputs[0].text in options
        with pytest.raises(ParamsError, match="regex of structured_outputs is"):
            await anext(llm.generate("Once upon a time", wrong))
        with pytest.raises(ParamsError, match="logprobs is 1000000"):
            llm.generate("Once upon a time", replace(choice, logprobs=10**6))
        assert threads == [False, False]
        assert not llm._thread._readers


@in_event_loop
async def test_an_id_is_refused_while_it_is_in_use():
    """Catches an answer that goes to another reader."""
    with toy() as llm:
        first = llm.generate(PROMPT, LONG, request_id="a")
        with pytest.raises(RequestError, match="request_id 'a' is in use"):
            llm.generate(PROMPT, LONG, request_id="a")
        with pytest.raises(RequestError, match="request_id is 3"):
            llm.generate(PROMPT, LONG, request_id=3)
        await read(first)
        await read(llm.generate(PROMPT, SHORT, request_id="a"))


@in_event_loop
async def test_a_prompt_that_is_not_tokenized_yet_has_its_place_in_the_queue():
    """Catches a queue that overflows, or fails, while long texts become tokens."""
    with toy(max_waiting=1) as llm:
        early = Reader("early", None)
        llm._thread.register(early, 1)
        with pytest.raises(QueueFullError, match="1 requests are already waiting"):
            llm.generate(PROMPT, LONG)
        llm._thread.close(early)
        assert await read(llm.generate(PROMPT, SHORT))


@in_event_loop
async def test_a_wait_that_is_cancelled_ends_its_request():
    """Catches a request that goes on until somebody lets go of the iterator."""
    with toy() as llm:
        outputs = llm.generate(PROMPT, replace(LONG, output_kind=FINAL))
        task = asyncio.create_task(anext(outputs))
        await until(lambda: llm.engine.has_unfinished)
        task.cancel()
        await until(lambda: not llm.engine.has_unfinished)
        assert llm.engine.scheduler.num_generated_tokens < LONG.max_tokens
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)


@in_event_loop
async def test_after_its_error_a_stream_is_at_its_end():
    """Catches a reader that handles the error, reads on, and waits forever."""
    llm = toy()
    outputs = llm.generate(PROMPT, LONG)
    await anext(outputs)
    llm.shutdown()
    with pytest.raises(EngineStoppedError):
        await read(outputs)
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(outputs), 10)


@in_event_loop
async def test_more_waiting_requests_than_allowed_are_refused_and_taken_later():
    """Catches a queue that grows until the memory is gone, and a place that is never free again."""
    with toy(max_waiting=3, max_num_seqs=1) as llm:
        running = llm.generate(PROMPT, LONG)
        await anext(running)
        waiting = [llm.generate(PROMPT, LONG) for _ in range(3)]
        with pytest.raises(QueueFullError, match="3 requests are already waiting"):
            llm.generate(PROMPT, LONG)
        await waiting.pop().aclose()
        await until(lambda: llm._thread._num_waiting() < 3)
        short = SamplingParams(temperature=0, max_tokens=2)
        waiting.append(llm.generate(PROMPT, short))
        await running.aclose()
        await waiting[0].aclose()
        await waiting[1].aclose()
        assert (await read(waiting[2]))[-1].finished
    with pytest.raises(RequestError, match="max_waiting is 0"):
        toy(max_waiting=0)


# -- faults --------------------------------------------------------------------------------------


@in_event_loop
async def test_a_step_that_fails_twice_is_computed_again():
    """Catches a thread that dies of the first error, or requests that pay for it."""
    right = LLM(executor=ToyModel(), block_size=4).generate(PROMPT, LONG)[0].outputs[0].token_ids
    model = Slow()
    with toy(model) as llm:
        outputs = llm.generate(PROMPT, LONG)
        for _ in range(3):
            await anext(outputs)
            model.num_broken, model.broken = 2, OSError("a cable")
            await until(lambda: not model.num_broken)
        assert (await read(outputs))[-1].outputs[0].token_ids == right


@pytest.mark.parametrize("place", ["execute", "schedule"])
@in_event_loop
async def test_requests_whose_step_fails_again_and_again_end_with_the_reason(place):
    """Catches a loop that never ends, and requests of later steps that fail with these."""
    model = Slow()
    with toy(model, max_num_seqs=2) as llm:
        first, second, waits = (llm.generate(PROMPT, LONG) for _ in range(3))
        await anext(first)
        await anext(second)
        if place == "execute":
            model.num_broken, model.broken = 3, OSError("a cable")
        else:
            policy = llm.engine.scheduler.policy
            policy.fill, fill = None, policy.fill  # not callable, until all have failed
        failed = [(await read(outputs))[-1] for outputs in (first, second)]
        for output in failed:
            assert output.finished
            assert output.outputs[0].finish_reason == "error"
            assert ("OSError: a cable" if place == "execute" else "TypeError") in output.error
        if place == "schedule":
            policy.fill = fill
            waits = llm.generate(PROMPT, LONG)
        assert (await read(waits))[-1].outputs[0].finish_reason == "length"
        assert not llm._thread._failures


@in_event_loop
async def test_a_prompt_that_is_still_tokenized_does_not_fail_with_the_steps_of_others():
    """Catches a thread that dies, because it counts the failure for a request that is not built yet."""
    with AsyncLLM(**OPTIONS | {"max_model_len": 2048}) as llm:
        long = llm.generate("hello world " * 380, SamplingParams(max_tokens=2, ignore_eos=True))
        outputs = llm.generate(TEXTS[0], LONG.clone(ignore_eos=True))
        await anext(outputs)
        policy = llm.engine.scheduler.policy
        policy.fill, fill = None, policy.fill  # not callable
        assert (await read(outputs))[-1].outputs[0].finish_reason == "error"
        policy.fill = fill
        assert (await read(long))[-1].outputs[0].finish_reason == "length"


@in_event_loop
async def test_a_commit_that_fails_and_a_hook_that_fails(monkeypatch):
    """Catches an error without its reason, and requests that fail because of somebody's statistics."""
    with toy() as llm:
        outputs = llm.generate(PROMPT, LONG)
        await anext(outputs)

        def hook(*step):
            raise OSError("the disk is full")

        llm.engine.on_committed.append(hook)
        assert (await read(outputs))[-1].outputs[0].finish_reason == "length"
        llm.engine.on_committed.remove(hook)

        outputs = llm.generate(PROMPT, LONG)
        await anext(outputs)

        def commit_registered():
            monkeypatch.undo()
            raise OSError("half done")

        monkeypatch.setattr(llm.engine.scheduler.kv, "commit_registered", commit_registered)
        last = (await read(outputs))[-1]
        assert last.outputs[0].finish_reason == "error"
        assert last.error == "OSError: half done"


@in_event_loop
async def test_after_shutdown_nobody_waits():
    """Catches an iterator that waits forever for a thread that has ended."""
    llm = toy(max_num_seqs=1)
    running, waiting = llm.generate(PROMPT, LONG), llm.generate(PROMPT, LONG)
    await anext(running)
    tasks = [asyncio.create_task(read(outputs)) for outputs in (running, waiting)]
    await asyncio.sleep(0.02)
    assert llm.is_running
    llm.shutdown()
    llm.shutdown()
    assert not llm.is_running
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineStoppedError)
        assert "is shut down" in str(result)
    with pytest.raises(EngineStoppedError, match="shut down"):
        llm.generate(PROMPT, LONG)
    assert llm.engine.scheduler.kv.num_used == 0


@in_event_loop
async def test_a_processor_that_raises_what_ctrl_c_does_fails_its_request_alone():
    """Catches a KeyboardInterrupt that ends the engine's thread, which no signal reaches."""

    def interrupted(generated, logits):
        raise KeyboardInterrupt("of its own")

    async with AsyncLLM(disable_log_stats=True, num_blocks=64, max_model_len=128) as llm:
        wrong = SamplingParams(max_tokens=5, logits_processors=[interrupted])
        streams = [llm.generate("The sun", params) for params in (wrong, LONG.clone(max_tokens=5))]
        ends = [(await read(outputs))[-1] for outputs in streams]
        assert "raised KeyboardInterrupt" in ends[0].error
        assert ends[1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("what", ["generate", "reset_prefix_cache"])
@in_event_loop
async def test_a_processor_that_asks_its_own_engine_is_refused(what):
    """Catches a step that waits for a later one, and every request with it, forever."""
    async with AsyncLLM(disable_log_stats=True, num_blocks=64, max_model_len=128) as llm:

        async def another():
            async with asyncio.timeout(1):
                await (
                    read(llm.generate("The moon", SHORT)) if what == "generate" else llm.reset_prefix_cache()
                )

        def ask(generated, logits):
            asyncio.run(another())
            return logits

        wrong = SamplingParams(max_tokens=5, logits_processors=[ask])
        ends = [(await read(llm.generate("The sun", params)))[-1] for params in (wrong, SHORT)]
        assert "is called from inside one of its own steps" in ends[0].error
        assert ends[1].outputs[0].finish_reason == "length"


@in_event_loop
async def test_a_thread_that_dies_tells_everybody():
    """Catches readers of a dead engine, and an answer to those who come later."""
    model = Slow()
    model.num_broken, model.broken = 1, SystemExit("of a component of one's own")
    message = "died of SystemExit.*; restart the server or build a new AsyncLLM$"
    with toy(model) as llm:
        with pytest.raises(EngineStoppedError, match=message):
            await read(llm.generate(PROMPT, LONG))
        with pytest.raises(EngineStoppedError, match=message):
            llm.generate(PROMPT, LONG)


@in_event_loop
async def test_a_lost_executor_ends_the_engine_at_once():
    """Catches a step without hope that is tried three times, for one request after the other."""
    model = Slow()
    with toy(model) as llm:
        outputs = llm.generate(PROMPT, LONG)
        await anext(outputs)
        model.num_broken, model.broken = 3, RankError("rank 1 was killed by SIGKILL; create a new LLM")
        with pytest.raises(EngineStoppedError, match=r"^rank 1 was killed"):
            await read(outputs)
        assert model.num_broken == 2, "it was tried again"
        with pytest.raises(EngineStoppedError, match=r"^rank 1 was killed"):
            llm.generate(PROMPT, LONG)


@in_event_loop
async def test_an_executor_that_is_lost_while_nothing_runs_is_noticed():
    """Catches an engine that says it runs, and a request that has to find out."""
    model = Slow()
    with toy(model) as llm:
        await read(llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=2)))
        assert llm.is_running
        model.loss = "rank 1 was killed by SIGKILL; create a new LLM"
        assert llm.stopped == model.loss
        assert not llm.is_running
        with pytest.raises(EngineStoppedError, match="rank 1 was killed"):
            llm.generate(PROMPT, LONG)
        await until(lambda: not llm._thread._thread.is_alive())


@pytest.mark.parametrize("in_time", [True, False])
@in_event_loop
async def test_the_end_closes_the_executor_once_the_thread_has_ended(in_time):
    """Catches ranks that outlive their engine, and ones that end in the middle of a step."""
    model = Slow()
    closed = []
    async with toy(model) as llm:
        model.close = lambda: closed.append(llm._thread._thread.is_alive())
        if not in_time:
            model.num_broken, model.broken = 1, SystemExit()
        outputs = llm.generate(PROMPT, LONG)
        if in_time:
            await anext(outputs)
        else:
            await until(lambda: not llm.is_running)
    assert closed == [False]


@in_event_loop
async def test_a_step_hook_may_shut_the_engine_down():
    """Catches a thread that is told to wait for its own end."""
    llm, errors = toy(), []

    def shut_down(*step):
        try:
            llm.shutdown()
        except RuntimeError as error:
            errors.append(error)

    llm.engine.on_committed.append(shut_down)
    with pytest.raises(EngineStoppedError, match="is shut down"):
        await read(llm.generate(PROMPT, LONG))
    llm._thread._thread.join(60)
    assert errors == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_is_told_to_build_its_own():
    """Catches a child that waits forever for a thread of its parent."""
    reader, writer = os.pipe()
    with toy() as llm:
        child = os.fork()
        if child == 0:
            signal.alarm(20)

            async def main():
                assert not llm.is_running
                llm.generate(PROMPT, LONG)

            try:
                asyncio.run(main())
            except BaseException as error:
                os.write(writer, f"{type(error).__name__}: {error}".encode())
            llm.shutdown()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert llm.is_running
    assert os.read(reader, 1000).startswith(b"EngineStoppedError: this process is a fork")
    os.close(reader)
    os.close(writer)


def test_outside_a_coroutine_generate_says_where_to_call_it():
    """Catches an error about event loops that names neither the call nor the fix."""
    with toy() as llm:
        with pytest.raises(RequestError, match=r"AsyncLLM\.generate .* call it in a coroutine"):
            llm.generate(PROMPT, LONG)
        assert not llm._thread._readers


@in_event_loop
async def test_an_engine_that_is_dropped_ends_its_thread():
    """Catches a thread, and the model with it, that outlives its last user."""
    llm = AsyncLLM(executor=Slow(), block_size=4, disable_log_stats=True)
    outputs = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3))
    del llm
    assert (await read(outputs))[-1].finished  # (its reader keeps it alive)


def test_a_closed_event_loop_leaves_no_request_behind():
    """Catches a thread that dies of "event loop is closed", and the blocks of those who were in it."""
    with toy() as llm:
        kept = []

        async def leave():
            kept.append(llm.generate(PROMPT, LONG))
            await anext(kept[0])

        asyncio.run(leave())

        async def come():
            await until(lambda: not llm.engine.has_unfinished)
            return await read(llm.generate(PROMPT, LONG))

        assert asyncio.run(come())[-1].finished
        assert kept[0]._reader.request.completions[0].finish_reason == "abort"
        assert llm.engine.scheduler.kv.num_used == 0


def test_outputs_that_are_read_in_another_event_loop_are_refused():
    """Catches a wait without an end: outputs go to the loop in which generate was called."""

    async def begin():
        return llm.generate(PROMPT, LONG, request_id="x")

    async def go_on():
        with pytest.raises(RequestError, match=r"^the outputs of request 'x' go to .*; read them there$"):
            await asyncio.wait_for(anext(outputs), 20)

    with toy() as llm:
        outputs = asyncio.run(begin())
        asyncio.run(go_on())


# -- the event loop is free ----------------------------------------------------------------------


@in_event_loop
async def test_the_event_loop_runs_on_while_steps_are_computed():
    """Catches an event loop that waits for a step, or a step for the event loop: with steps of 50 ms a ticker
    gets many ticks in each."""
    model = Slow()
    model.seconds = 0.05
    ticks_of_step: list[int] = []
    ticks = 0

    async def ticker():
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    with toy(model) as llm:

        def count(*step):
            nonlocal ticks
            ticks_of_step.append(ticks)
            ticks = 0

        llm.engine.on_committed.append(count)
        task = asyncio.create_task(ticker())
        clients = [read(llm.generate(PROMPT, SamplingParams(max_tokens=10))) for _ in range(20)]
        await asyncio.gather(*clients)
        task.cancel()
    assert len(ticks_of_step) >= 10
    assert statistics.median(ticks_of_step[1:]) >= 5  # not min: a busy machine halts it at times


@in_event_loop
async def test_an_idle_engine_does_nothing():
    """Catches busy waiting."""
    with toy() as llm:
        await read(llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=2)))
        inbox, asked = llm._thread._read_inbox, []
        llm._thread._read_inbox = lambda: asked.append(1) or inbox()
        used = time.thread_time(), time.process_time()
        await asyncio.sleep(0.3)
        busy = (time.process_time() - used[1]) - (time.thread_time() - used[0])
        assert len(asked) <= 1  # on its way there when the last output came
        assert busy < 0.15
