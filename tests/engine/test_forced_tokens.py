"""Tokens that a grammar forces are drafted, and always accepted: a JSON key takes one step."""

from __future__ import annotations

import json

import pytest

from minipaged import LLM, SamplingParams
from minipaged.decoding.structured import StructuredOutputsParams
from tests.engine.drafters import SCHEMA

pytest.importorskip("llguidance", reason="structured output needs llguidance")

SMALL = {"num_blocks": 256, "max_model_len": 512, "disable_log_stats": True}
KINDS = {
    "json": StructuredOutputsParams(json={**SCHEMA, "x-guidance": {"whitespace_pattern": ""}}),
    "regex": StructuredOutputsParams(regex="The answer is (yes|no), because [a-z]{3,8} said so\\."),
    "choice": StructuredOutputsParams(choice=["a small village", "a small valley", "the mountains"]),
    "grammar": StructuredOutputsParams(grammar='root ::= "one, two, " ("three" | "four") ", five"'),
}


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(**SMALL)


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return LLM(**SMALL, num_speculative_tokens=8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "how", [{"temperature": 0}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"]
)
def test_the_text_is_the_same_in_fewer_steps(plain, drafting, kind, how):
    """Catches a draft that changes what the grammar allows, and a key that is written token by token."""
    params = SamplingParams(max_tokens=80, structured_outputs=KINDS[kind], **how)
    steps = []
    for llm in (plain, drafting):
        llm.engine.reset_metrics()
        steps.append((llm.generate("Tell me: ", params)[0].outputs[0], llm.engine.metrics))
    (wanted, before), (got, after) = steps
    assert got.text == wanted.text
    assert got.token_ids == wanted.token_ids
    assert got.finish_reason == wanted.finish_reason == "stop"
    assert 0 < after.accepted_tokens == after.draft_tokens
    assert after.steps == before.steps - after.accepted_tokens
    if kind == "json":
        json.loads(got.text)
        assert after.steps < 0.6 * before.steps


def test_beside_others_and_in_a_small_pool(plain):
    """Catches a position in the grammar that a preemption, a batch or a swap mixes up."""
    params = [SamplingParams(max_tokens=80, temperature=0, structured_outputs=so) for so in KINDS.values()]
    params += [SamplingParams(max_tokens=60, temperature=0)] * 3
    prompts = [f"Tell me, number {i}: " for i in range(len(params))]
    wanted = plain.generate(prompts, params)
    tight = LLM(
        num_blocks=16, block_size=8, max_model_len=120, disable_log_stats=True, num_speculative_tokens=4
    )
    got = tight.generate(prompts, params)
    assert [o.outputs[0].text for o in got] == [o.outputs[0].text for o in wanted]
    assert tight.engine.metrics.num_preemptions > 0
    assert tight.engine.metrics.accepted_tokens > 0
    tight.engine.check_invariants()
