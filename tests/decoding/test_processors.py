"""Functions of the user that edit the logits: what they get, when, and what happens when one fails."""

import math

import pytest
import torch

from minipaged import LLM, SamplingParams

GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def llm():
    llm = LLM(num_blocks=64, max_model_len=256, disable_log_stats=True)
    llm.engine.on_committed.append(lambda *step: llm.engine.check_invariants())
    return llm


def test_a_processor_gets_the_generated_tokens_and_decides(llm):
    """Catches tokens of the prompt among the generated ones, a row too many, an answer that is dropped."""
    seen = []

    def next_one(generated, logits):
        seen.append(list(generated))
        assert logits.shape == (llm.engine.executor.vocab_size,)
        assert logits.dtype == torch.float32
        logits[:] = -math.inf
        logits[50 + len(generated)] = 0.0
        return logits

    [output] = llm.generate("The sun", SamplingParams(**GREEDY, logits_processors=[next_one]))
    assert output.outputs[0].token_ids == list(range(50, 58))
    assert seen == [list(range(50, 50 + n)) for n in range(8)]


def test_a_processor_with_three_arguments_gets_the_prompt_too(llm):
    """Catches vLLM's other form, called with two arguments."""
    prompts = []

    def watch(prompt, generated, logits):
        prompts.append(list(prompt))
        return logits

    [output] = llm.generate("The sun", SamplingParams(**GREEDY, logits_processors=[watch]))
    [plain] = llm.generate("The sun", SamplingParams(**GREEDY))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert prompts == [output.prompt_token_ids] * len(plain.outputs[0].token_ids)


def test_a_value_bound_by_default_is_no_third_argument(llm):
    """Catches the prompt in the place of the tokens, for a lambda that binds a loop's variable."""
    keep = [lambda generated, logits, factor=factor: logits * factor for factor in (2.0, 0.5)]
    [output] = llm.generate("The sun", SamplingParams(**GREEDY, logits_processors=keep))
    [plain] = llm.generate("The sun", SamplingParams(**GREEDY))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_masks_hold_whatever_a_processor_wants(llm):
    """Catches a processor that brings back a token which another parameter forbids."""
    wish = [lambda generated, logits: logits.index_fill(0, torch.tensor([60]), 1e4)]
    params = SamplingParams(**GREEDY, ignore_eos=True, logits_processors=wish)
    assert llm.generate("The sun", params)[0].outputs[0].token_ids == [60] * 8
    once = llm.generate("The sun", params.clone(no_repeat_ngram_size=1))[0].outputs[0].token_ids
    assert once.count(60) == 1


def test_log_probabilities_are_those_before_the_processors(llm):
    """Catches logits that are edited in place, and reported."""
    wish = [lambda generated, logits: logits.zero_()]
    plain, edited = (
        llm.generate("The sun", SamplingParams(temperature=0, max_tokens=1, logprobs=5, logits_processors=p))
        for p in ((), wish)
    )
    first, second = plain[0].outputs[0].logprobs[0], edited[0].outputs[0].logprobs[0]
    assert {token: value for token, value in second.items() if token in first} == first


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (lambda generated, logits: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda generated, logits: None, "returned None"),
        (lambda generated, logits: logits[:5], "returned a tensor of shape [5]"),
        (lambda generated, logits: logits * math.nan, "returned NaN"),
        (lambda generated, logits: logits + math.inf, "returned NaN or infinity"),
        (lambda generated, logits: logits - math.inf, "logits_processors"),
        (lambda generated: generated, "raised TypeError"),
    ],
)
def test_a_processor_that_fails_fails_its_request_alone(llm, processor, reason):
    """Catches a mistake of one user that ends the step of all."""
    mine = SamplingParams(temperature=1, max_tokens=8, logits_processors=[processor])
    greedy = SamplingParams(**GREEDY)
    failed, fine = llm.generate(["The sun", "The moon"], [mine, greedy])
    assert failed.outputs[0].finish_reason == "error"
    assert reason in failed.error
    assert "\n" not in failed.error
    assert "; " in failed.error or "forbid" in failed.error
    assert fine.outputs[0].token_ids == llm.generate("The moon", greedy)[0].outputs[0].token_ids
    assert not llm.engine.has_unfinished
