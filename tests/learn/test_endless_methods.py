"""A decoding method must end a sequence at its length: behind it are no positions that the model knows."""

import pytest

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.decoding.beam_search import BeamSearch
from minipaged.decoding.methods import SamplingMethod
from minipaged.learn.contracts import ContractError


class Endless(SamplingMethod):
    """Never ends a sequence."""

    def advance(self, request, samples):
        branches = super().advance(request, samples)
        for branch in branches:
            branch.finish_reason = None
        return branches


class EndlessBeams(BeamSearch):
    """Lets its beams live past their length."""

    def advance(self, request, samples):
        return Endless(SamplingParams(), self.stop).advance(request, samples)


@pytest.mark.parametrize(
    ("concept", "method", "params"),
    [
        ("parallel_sampling", Endless, SamplingParams(max_tokens=8, ignore_eos=True)),
        ("parallel_sampling", Endless, SamplingParams(n=2, max_tokens=8, ignore_eos=True)),
        ("beam_search", EndlessBeams, BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True)),
    ],
)
def test_a_sequence_that_is_to_live_past_its_length_is_reported(concept, method, params):
    """Catches 255 tokens for max_tokens=8, and angles read behind the end of their table."""
    llm = LLM(use={concept: method}, num_blocks=64, max_model_len=64, disable_log_stats=True)
    message = rf"^{concept}: advance\(0\) continues .* is token 11 of at most 11; give it a finish_reason$"
    with pytest.raises(ContractError, match=message):
        llm.generate({"prompt_token_ids": [5, 6, 7]}, params)
    assert not llm.engine.has_unfinished
    assert llm.engine.scheduler.kv.num_used == 0
