"""A row without a valid token fails its own request, with the reason; the others go on."""

from __future__ import annotations

import pytest

from minipaged import BeamSearchParams, SamplingParams
from minipaged.decoding.params import ParamsError
from tests.engine.conftest import make_llm
from tests.models.zoo import VOCAB_SIZE, build

PROMPTS = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8, 9]}]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
METHODS = [
    GREEDY,
    SamplingParams(temperature=1, seed=3, n=2, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True),
    BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=list(range(5, 20))),
    SamplingParams(temperature=0, max_tokens=6, bad_words=[[3]], ignore_eos=True),
]


def llm_with(bad: float):
    """The second row's logits are spoilt from its third token on."""
    model = build("llama")
    llm = make_llm(model)
    forward = llm.engine.executor.forward

    def spoilt(batch):
        logits = forward(batch)
        for row, scheduled in enumerate(batch.sampling):
            sequence = scheduled.sequence
            if sequence.request.prompt_token_ids == [8, 9] and sequence.num_generated_tokens >= 2:
                logits[row, 3] = bad
        return logits

    llm.engine.executor.forward = spoilt
    return llm


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params", METHODS, ids=["greedy", "samples", "logprobs", "beams", "allowed", "bad words"]
)
def test_logits_that_are_not_finite_fail_their_request_alone(params, bad, caplog):
    """Catches text made of nothing ("airoairoairo") that is returned as if it were an answer."""
    llm = llm_with(bad)
    good, failed = llm.generate(PROMPTS, [GREEDY, params])
    assert good.error is None
    assert len(good.outputs[0].token_ids) == 6
    assert "not finite" in failed.error
    assert {completion.finish_reason for completion in failed.outputs} == {"error"}
    assert llm.engine.scheduler.kv.num_used == 0
    assert "not finite" in caplog.text


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"allowed_token_ids": [7], "bad_words": [[7]]}, "allowed_token_ids with bad_words leaves no token"),
        ({"bad_words": [[i] for i in range(VOCAB_SIZE)]}, "bad_words leaves no token of the vocabulary"),
        ({"allowed_token_ids": [7], "logit_bias": {7: float("-inf")}}, "allowed_token_ids"),
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 3}, "min_tokens is 3"),
    ],
)
def test_parameters_that_forbid_every_token_are_refused(options, match):
    """Catches a forbidden token that is emitted because all are forbidden."""
    llm = make_llm(build("llama"))
    with pytest.raises(ParamsError, match=match):
        llm.generate(PROMPTS, SamplingParams(max_tokens=4, **options))


def test_a_bias_that_forbids_the_whole_vocabulary_is_refused():
    """Catches token 0, which nobody allowed."""
    llm = make_llm(build("llama"))
    forbidden = dict.fromkeys(range(llm.engine.executor.vocab_size), float("-inf"))
    with pytest.raises(ParamsError, match="logit_bias"):
        llm.generate(PROMPTS, SamplingParams(logit_bias=forbidden))


def test_tokens_that_are_forbidden_one_after_the_other_fail_the_request():
    """Catches what cannot be known before: a bad word of two tokens, whose first is the only one allowed."""
    llm = make_llm(build("llama"))
    params = SamplingParams(temperature=0, allowed_token_ids=[7], bad_words=[[7, 7]], max_tokens=5)
    (output,) = llm.generate(PROMPTS[1], params)
    assert output.outputs[0].token_ids == [7]
    assert output.error == "allowed_token_ids and bad_words forbid every token; relax one of them"
