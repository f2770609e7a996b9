"""Outputs while a request is generated."""

from __future__ import annotations

import tracemalloc

import pytest

from minipaged import SamplingParams
from minipaged.config import EngineConfig
from minipaged.decoding.params import RequestOutputKind
from minipaged.engine import Engine
from minipaged.output_processor import OutputProgress
from tests.engine.toy_model import ToyModel


@pytest.fixture
def engine():
    model = ToyModel(num_blocks=1024, max_model_len=4096)
    return Engine(model, EngineConfig(block_size=4, num_blocks=1024, disable_log_stats=True))


def test_a_delta_costs_its_own_tokens_and_not_those_before_it(engine):
    """Catches a stream whose steps copy all that was sent already: quadratic in its length."""
    params = SamplingParams(
        temperature=0, max_tokens=3000, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    request = engine.add_request("long", [1, 2, 3], params)
    progress = OutputProgress(request, None, None)
    num_tokens = 0
    for _ in range(2900):
        engine.step()
        num_tokens += len(progress.next().outputs[0].token_ids)
    engine.step()
    tracemalloc.start()
    (delta,) = progress.next().outputs
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_tokens == 2900
    assert len(delta.token_ids) == 1
    assert peak < 4096, f"{peak} bytes for one token after {num_tokens}"


def test_the_best_of_several_samples_come_likeliest_first_and_are_numbered_so(engine):
    """Catches outputs in the order of the samples, and indices 3 and 1, which nobody asked for."""
    requests = [
        engine.add_request(f"r{i}", [i], SamplingParams(n=2, best_of=4, max_tokens=3)) for i in range(5)
    ]
    while engine.has_unfinished:
        engine.step()
    assert any([best.index for best in r.method.rank(r)] != [0, 1] for r in requests)
    for request in requests:
        best, second = engine.output(request).outputs
        assert [best.index, second.index] == [0, 1]
        assert best.cumulative_logprob >= second.cumulative_logprob


def test_deltas_say_how_a_request_without_a_token_ended(engine):
    """Catches a stream that ends without a reason, and an output while there is nothing to say."""
    request = engine.add_request("r", [1, 2], SamplingParams(output_kind=RequestOutputKind.DELTA))
    progress = OutputProgress(request, None, None)
    assert progress.next() is None
    engine.abort("r")
    output = progress.next()
    assert output.finished
    assert [(delta.token_ids, delta.finish_reason) for delta in output.outputs] == [([], "abort")]


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_samples_are_in_their_order_whichever_ends_first(engine, kind):
    """Catches outputs without the samples that still run, or with those first that have ended."""
    params = SamplingParams(n=3, seed=0, max_tokens=6, ignore_eos=True, output_kind=kind)
    tried = engine.add_request("tried", [1, 2], params)
    while engine.has_unfinished:
        engine.step()
    firsts = [output.token_ids[0] for output in engine.output(tried).outputs]
    assert len({*firsts}) == 3
    request = engine.add_request("r", [1, 2], params.clone(stop_token_ids=[firsts[1]]))
    progress = OutputProgress(request, None, None)
    engine.step()
    assert [sequence.index for sequence in (*request.completions, *request.sequences)] == [1, 0, 2]
    for output in (progress.next(), engine.output(request)):
        assert [one.index for one in output.outputs] == [0, 1, 2]
        assert [one.token_ids for one in output.outputs] == [[first] for first in firsts]
        assert [one.finish_reason for one in output.outputs] == [None, "stop", None]
    assert progress.next() is None  # nothing is new


@pytest.mark.parametrize("count", [None, 1])
def test_every_output_has_the_logprobs_of_the_prompt_if_they_were_asked_for(engine, count):
    """Catches a stream without them, and a list of None where nobody asked."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=count)
    request = engine.add_request("r", [1, 2, 3], params)
    request.prompt_logprobs = {1: {2: (-1.0, 1)}, 2: {3: (-2.0, 4)}}
    progress = OutputProgress(request, None, None)
    while engine.has_unfinished:
        engine.step()
        found = progress.next().prompt_logprobs
        assert found == engine.output(request).prompt_logprobs
        assert (found is None) == (count is None)
        assert found is None or [top is None for top in found] == [True, False, False]
