"""What comes back beside the text: why it ended, how likely its tokens were, how long it took."""

from __future__ import annotations

import itertools

import pytest

from minipaged import LLM, BeamSearchParams, Logprob, RequestMetrics, SamplingParams
from minipaged.components import Components
from minipaged.config import EngineConfig
from minipaged.engine import Engine
from minipaged.execution.executor import Executor
from tests.engine.toy_model import ToyModel, toy_engine


def completion(llm: LLM, **options):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 40, **options})
    return llm.generate("Once upon a time", params)[0].outputs[0]


def test_the_stop_reason_is_the_string_or_token_that_ended_it(llm):
    """Catches the first string of the list in place of the one that was met."""
    plain = completion(llm, ignore_eos=True)
    assert (plain.finish_reason, plain.stop_reason) == ("length", None)
    word = plain.text.split()[5]
    for kept in (False, True):
        ended = completion(llm, stop=("never seen", " " + word), include_stop_str_in_output=kept)
        assert (ended.finish_reason, ended.stop_reason) == ("stop", " " + word)
        assert ended.text.endswith(word) == kept
    token_id = plain.token_ids[3]
    assert token_id not in plain.token_ids[:3]
    ended = completion(llm, stop_token_ids=[token_id], stop=("never seen",))
    assert (ended.finish_reason, ended.stop_reason, len(ended.token_ids)) == ("stop", token_id, 4)


def test_eos_is_not_a_stop_reason():
    """Catches EOS reported as a stop token, and a stop token that is not reported without a tokenizer."""
    engine = toy_engine()
    first = engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=9))
    while engine.has_unfinished:
        engine.step()
    token_id = engine.output(first).outputs[0].token_ids[0]
    params = SamplingParams(temperature=0, max_tokens=9)
    for eos, stop, wanted in [((token_id,), (), None), ((), (token_id,), token_id)]:
        model = ToyModel()
        model.eos_token_ids = eos
        engine = Engine(model, EngineConfig(block_size=4, disable_log_stats=True))
        own = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=stop) if stop else params
        request = engine.add_request("a", [1, 2, 3], own)
        while engine.has_unfinished:
            engine.step()
        (ended,) = engine.output(request).outputs
        assert (ended.finish_reason, ended.stop_reason) == ("stop", wanted)


def test_logprobs_have_their_rank_and_text(llm):
    """Catches ranks by place in the report: the sampled token may be anywhere in the vocabulary."""
    params = SamplingParams(temperature=5.0, seed=3, logprobs=2, prompt_logprobs=2, max_tokens=20)
    output = llm.generate("The little robot", params)[0]
    (done,) = output.outputs
    everything = SamplingParams(prompt_logprobs=llm.engine.executor.vocab_size, max_tokens=1)
    whole = llm.generate({"prompt_token_ids": output.prompt_token_ids + done.token_ids}, everything)[0]
    reports = zip(
        [*output.prompt_token_ids, *done.token_ids], [*output.prompt_logprobs, *done.logprobs], strict=True
    )
    ranks = []
    for position, (token_id, report) in enumerate(reports):
        if report is None:
            assert position == 0
            continue
        assert next(iter(report)) == token_id
        assert sorted(entry.rank for entry in report.values())[:2] == [1, 2]
        ranks.append(report[token_id].rank)
        for other, entry in report.items():
            assert isinstance(entry, Logprob)
            right = whole.prompt_logprobs[position][other]
            assert entry.logprob == pytest.approx(right.logprob, abs=1e-4)
            assert abs(entry.rank - right.rank) <= 1 + entry.rank // 100  # (neighbours in the last bits)
            assert entry.decoded_token == llm.tokenizer.decode([other], clean_up_tokenization_spaces=False)
    assert max(ranks) > 3


def test_without_a_tokenizer_tokens_have_no_text(model):
    """Catches an error in place of None."""
    from tests.engine.conftest import make_llm

    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=1)
    output = make_llm(model).generate({"prompt_token_ids": [5, 6, 7]}, params)[0]
    entries = [e for report in output.outputs[0].logprobs for e in report.values()]
    entries += [e for report in output.prompt_logprobs[1:] for e in report.values()]
    assert len(entries) >= 4
    assert {entry.decoded_token for entry in entries} == {None}
    assert {entry.rank for entry in output.outputs[0].logprobs[0].values()} == {1}


def test_the_times_of_a_request_are_those_of_its_steps():
    """Catches the time in the queue that includes the first step, and rates over the wrong span."""
    ticks = itertools.count(1.0)
    config = EngineConfig(block_size=4, max_num_seqs=1, disable_log_stats=True)
    executor: Executor = ToyModel()
    engine = Engine(executor, config, components=Components(), clock=lambda: next(ticks))
    start = next(ticks)
    params = SamplingParams(temperature=0, max_tokens=4)
    first, second = (engine.add_request(name, [1, 2, 3], params) for name in "ab")
    waiting = engine.output(second).metrics
    assert waiting == RequestMetrics(start + 2, None, None, None, None, 0)
    assert (waiting.time_in_queue, waiting.time_to_first_token, waiting.tokens_per_second) == (None,) * 3
    while engine.has_unfinished:
        engine.step()
    # A step ends a second after the one before. The second request waits for the 4 steps of the first.
    metrics = engine.output(first).metrics
    assert metrics == RequestMetrics(start + 1, start + 1, start + 3, start + 6, start + 6, 4)
    assert (metrics.time_in_queue, metrics.time_to_first_token) == (0.0, 2.0)
    metrics = engine.output(second).metrics
    assert metrics == RequestMetrics(start + 2, start + 6, start + 7, start + 10, start + 10, 4)
    assert (metrics.time_in_queue, metrics.time_to_first_token) == (4.0, 5.0)
    assert metrics.tokens_per_second == 1.0


def test_metrics_of_all_completions_and_of_a_preempted_request():
    """Catches a first token that comes a second time after a preemption, or after the counts were reset."""
    engine = toy_engine(12, max_num_seqs=8, preemption_mode="recompute")
    params = [SamplingParams(n=3, temperature=1, seed=1, max_tokens=9), BeamSearchParams(beam_width=3)]
    requests = [engine.add_request(str(i), [i, 2, 3, 4, 5], params[i % 2]) for i in range(4)]
    firsts: dict[str, float] = {}
    num_first = 0
    while engine.has_unfinished:
        engine.step()
        num_first += len(engine.metrics.time_to_first_token)
        engine.reset_metrics()
        for request in requests:
            first = engine.output(request).metrics.first_token_time
            assert firsts.setdefault(request.request_id, first) in (first, None)
            firsts[request.request_id] = first
    assert engine.scheduler.num_preemptions > 0
    assert num_first == 4
    for request in requests:
        metrics = engine.output(request).metrics
        times = (metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time)
        assert list(times) == sorted(times)
        assert metrics.first_token_time < metrics.last_token_time <= metrics.finished_time
    assert engine.output(requests[0]).metrics.num_generation_tokens == 27
