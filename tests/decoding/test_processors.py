"""Functions of the user that edit the logits: what they get, when, and what happens when one fails."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LogitsProcessorList

from minipaged import LLM, SamplingParams
from tests.checked import checked

GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def llm():
    return checked(LLM(num_blocks=64, max_model_len=256, disable_log_stats=True))


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


def test_a_value_bound_by_default_is_not_a_third_argument(llm):
    """Catches the prompt in the place of the tokens, for a lambda that binds a loop's variable."""
    keep = [lambda generated, logits, factor=factor: logits * factor for factor in (2.0, 0.5)]
    [output] = llm.generate("The sun", SamplingParams(**GREEDY, logits_processors=keep))
    [plain] = llm.generate("The sun", SamplingParams(**GREEDY))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids


class Module(torch.nn.Module):
    """A processor with weights."""

    def forward(self, prompt, generated, logits):
        assert isinstance(prompt, list)
        assert isinstance(generated, list)
        return logits


def with_options(prompt, generated, logits, **options):
    assert not options
    return logits


def with_a_rest(generated, logits, *rest):
    assert not rest
    return logits


@pytest.mark.parametrize(
    "processor",
    [
        lambda generated, logits, **options: logits,
        lambda generated, logits, *, factor=2: logits,
        LogitsProcessorList([]),
        with_options,
        with_a_rest,
        Module(),
    ],
)
def test_only_arguments_that_must_be_given_by_place_count(llm, processor):
    """Catches the prompt as a third argument because of `**options`, and a module's forward not asked."""
    params = SamplingParams(**GREEDY)
    [output] = llm.generate("The sun", params.clone(logits_processors=[processor]))
    assert output.error is None
    assert output.outputs[0].token_ids == llm.generate("The sun", params)[0].outputs[0].token_ids


def test_what_a_processor_does_to_its_logits_reaches_no_other_row(llm):
    """Catches a view of the whole step's logits that is made longer: behind it are those of others."""

    def greedy_for_memory(generated, logits):
        logits.resize_(2 * len(logits)).zero_()
        return logits

    params = SamplingParams(**GREEDY)
    wide = params.clone(logits_processors=[greedy_for_memory])
    same = params.clone(logits_processors=[lambda generated, logits: logits])
    failed, fine = llm.generate(["The sun", "The moon"], [wide, same])
    assert "returned a tensor of shape" in failed.error
    assert fine.outputs[0].token_ids == llm.generate("The moon", params)[0].outputs[0].token_ids


def test_an_interrupt_ends_the_call(llm):
    """Catches Ctrl-C reported as a mistake of the processor; afterwards everything goes on."""
    params = SamplingParams(**GREEDY)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("The sun", params.clone(logits_processors=[raising(KeyboardInterrupt())]))
    assert llm.generate("The sun", params)[0].error is None
    assert not llm.engine.has_unfinished


def test_an_interrupt_that_no_keyboard_sent_fails_its_request_alone(llm):
    """Catches an engine's thread that a request of one user ends; Ctrl-C goes to the main thread."""
    params = SamplingParams(**GREEDY, logits_processors=[raising(KeyboardInterrupt())])
    with ThreadPoolExecutor(1) as another:
        [failed] = another.submit(llm.generate, "The sun", params).result()
    assert "raised KeyboardInterrupt" in failed.error


def test_each_of_several_processors_gets_float32(llm):
    """Catches the second failing, because the first computes in double precision."""
    seen = []

    def watch(generated, logits):
        seen.append(logits.dtype)
        return logits

    params = SamplingParams(**GREEDY, logits_processors=[lambda generated, logits: logits.double(), watch])
    assert llm.generate("The sun", params)[0].error is None
    assert set(seen) == {torch.float32}


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


class OwnError(BaseException):
    """Cannot even say what is wrong."""

    def __str__(self):
        raise ValueError


def raising(error):
    """A processor that raises `error`."""

    def hopeless(generated, logits):
        raise error

    return hopeless


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (lambda generated, logits: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda generated, logits: None, "returned None"),
        (lambda generated, logits: logits[:5], "returned a tensor of shape [5]"),
        (lambda generated, logits: logits * math.nan, "returned NaN"),
        (lambda generated, logits: logits + math.inf, "returned NaN or infinity"),
        (lambda generated, logits: logits - math.inf, "logits_processors"),
        (lambda generated, logits: logits.double() - 1e300, "logits_processors"),
        (lambda generated, logits: logits.double() + 1e300, "returned NaN or infinity"),
        (lambda generated: generated, "raised TypeError"),
        (raising(SystemExit("enough")), "hopeless of logits_processors raised SystemExit: enough"),
        (raising(asyncio.CancelledError()), "raised asyncio.exceptions.CancelledError; return"),
        (raising(GeneratorExit()), "raised GeneratorExit; return"),
        (raising(OwnError()), "OwnError: <exception str() failed>"),
        (lambda generated, logits: logits.resize_(10), "returned a tensor of shape [10]"),
        (lambda generated, logits: logits.unsqueeze_(1), "returned a tensor of shape"),
        (lambda generated, logits: logits.resize_(3) and None, "raised RuntimeError"),
        (lambda generated, logits: logits.unsqueeze_(1).fill_(1.0)[0], "returned a tensor of shape [1]"),
        (lambda generated, logits: logits.to_sparse(), "returned a tensor of layout torch.sparse_coo"),
        (lambda generated, logits: logits.to("meta"), "raised"),
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
