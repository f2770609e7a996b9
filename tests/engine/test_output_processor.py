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
    """Catches a stream whose steps copy all that was said already: quadratic in its length."""
    params = SamplingParams(
        temperature=0, max_tokens=3000, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    request = engine.add_request("long", [1, 2, 3], params)
    progress = OutputProgress(request, None, None)
    told = 0
    for _ in range(2900):
        engine.step()
        told += len(progress.next().outputs[0].token_ids)
    engine.step()
    tracemalloc.start()
    (delta,) = progress.next().outputs
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert told == 2900
    assert len(delta.token_ids) == 1
    assert peak < 4096, f"{peak} bytes for one token after {told}"


def test_the_best_of_several_samples_are_numbered_by_their_rank(engine):
    """Catches two answers with the indices 3 and 1, which nobody asked for."""
    requests = [
        engine.add_request(f"r{i}", [i], SamplingParams(n=2, best_of=4, max_tokens=3)) for i in range(5)
    ]
    while engine.has_unfinished:
        engine.step()
    assert any([best.index for best in r.method.rank(r)] != [0, 1] for r in requests)
    for request in requests:
        assert [output.index for output in engine.output(request).outputs] == [0, 1]
