"""A structured answer after thoughts: the same tokens whatever happens to the request, and always valid."""

from __future__ import annotations

import json

import pytest

from minipaged import LLM, SamplingParams, StructuredOutputsParams
from minipaged.decoding.checks import ParamsError
from minipaged.decoding.reasoning import ReasoningTags
from tests.checked import checked
from tests.tagged_tokenizer import write_tokenizer

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WANTED = StructuredOutputsParams(json=SCHEMA, after_reasoning=True)


def answers(llm: LLM, prompts: list[str]) -> list[list[int]]:
    """Token ids of three samples of each prompt; every text that ends is valid."""
    tags = ReasoningTags.of(llm.tokenizer, skip_special_tokens=False)
    params = SamplingParams(
        n=3,
        seed=5,
        max_tokens=120,
        logit_bias={tags.begin: 3, tags.end: 6},
        skip_special_tokens=False,
        structured_outputs=WANTED,
    )
    found = []
    for output in llm.generate(prompts, params):
        for completion in output.outputs:
            if completion.finish_reason == "stop":
                assert json.loads(completion.text.rpartition("</think>")[2])["city"] in ("Rome", "Oslo")
            found.append(completion.token_ids)
    return found


PROMPTS = ["Once upon a time", "The river", "A cat<think>", "The sun<think>\n", "A cat<think></think>\n\n"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "think")


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 110, "preemption_mode": "recompute"},
        {"num_blocks": 110, "preemption_mode": "swap"},
        {"num_blocks": 400, "num_speculative_tokens": 4},
        {"num_blocks": 400, "max_num_seqs": 3},
    ],
    ids=str,
)
def test_thoughts_and_answers_do_not_depend_on_what_happens(folder, options, caplog):
    """Catches a grammar that loses its place behind the thoughts, and drafts that it forces among them."""
    common = {"tokenizer": folder, "block_size": 4, "max_model_len": 256, "disable_log_stats": True}
    expected = answers(checked(LLM(num_blocks=400, **common)), PROMPTS)
    llm = checked(LLM(**common, **options))
    assert answers(llm, PROMPTS) == expected
    assert ("preempt" in caplog.text) == (options["num_blocks"] < 400)
    lengths = [len(token_ids) for token_ids in expected]
    assert min(lengths) < 20 < 40 < max(lengths)


def test_a_tokenizer_without_tags_has_no_thoughts():
    """Catches a text that may be anything."""
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=WANTED)
    [output] = LLM(num_blocks=400, disable_log_stats=True).generate("Once upon a time", params)
    assert json.loads(output.outputs[0].text)["city"] in ("Rome", "Oslo")


def test_where_thoughts_begin_is_checked():
    """Catches a typing error that means True."""
    with pytest.raises(ParamsError, match=r"after_reasoning is 'Inside'; give True, False or 'inside'"):
        StructuredOutputsParams(json=SCHEMA, after_reasoning="Inside")
