"""Models with attention of their own that is replaced; `test_parity.py` compares their logits and tokens."""

import copy
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from minipaged import LLM, SamplingParams
from minipaged.config import EngineConfig
from minipaged.execution.attention import UnsupportedModelError
from minipaged.execution.model_runner import ModelRunner
from tests.models.driver import Driver, greedy, own_logits, own_tokens, random_tokens
from tests.models.zoo import VOCAB_SIZE, build

KINDS = [
    *("codegen", "falcon", "falcon_all_heads", "falcon_multi_query"),
    *("gpt_neo", "gpt_neox_japanese", "gptj", "openai_gpt", "xglm"),
    *("bloom", "bloom_six_heads", "mpt", "mpt_six_heads"),
    *("falcon_alibi", "falcon_alibi_grouped", "falcon_alibi_multi_query"),
]

pytestmark = pytest.mark.usefixtures("one_thread")


def run(model: nn.Module) -> ModelRunner:
    return ModelRunner(model, EngineConfig(num_blocks=16, block_size=4), greedy)


def refuse(model: nn.Module, **options: object) -> None:
    raise UnsupportedModelError("of this test")


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_model_generates_what_transformers_does(name: str, tmp_path: Path) -> None:
    """The whole way, with chunks and decodes in a step and contexts far longer than GPT-Neo's window."""
    model = build(name)
    model.save_pretrained(tmp_path)
    prompts = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (1, 9, 30, 44)]
    llm = LLM(tmp_path, block_size=4, num_blocks=80, max_num_batched_tokens=24, disable_log_stats=True)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16))
    for prompt, output in zip(prompts, outputs):
        assert list(output.outputs[0].token_ids) == own_tokens(model, prompt, 16)


def test_the_window_of_gpt_neo_is_felt() -> None:
    """Or its parity would hold with a window that is forgotten."""
    token_ids = random_tokens(20, VOCAB_SIZE, seed=1)
    local = own_logits(build("gpt_neo"), token_ids)
    wide = own_logits(build("gpt_neo", window_size=20), token_ids)
    torch.testing.assert_close(local[:6], wide[:6], atol=1e-4, rtol=0)
    assert (local[6:] - wide[6:]).abs().max(dim=-1).values.min() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    [
        *("gpt_neo", "gptj", "codegen", "falcon", "openai_gpt", "xglm"),
        *("bloom_six_heads", "mpt_six_heads", "falcon_alibi"),
    ],
)
def test_half_precision_runs(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """CodeGen rotates in float32, so that its keys come in another type than its values."""
    build(name).save_pretrained(tmp_path)
    reference, model = (AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval() for _ in range(2))
    token_ids = random_tokens(20, VOCAB_SIZE, seed=1)
    driver = Driver(model)
    assert {spec.dtype for spec, _, _ in driver.runner.cache.pools.values()} == {dtype}
    sequence = driver.add(token_ids)
    computed = torch.cat([driver.logits([(sequence, count)])[0] for count in (13, 6, 1)])
    rounded = own_logits(reference, token_ids)
    exact = own_logits(reference.float(), token_ids)
    assert (computed - exact).abs().mean() < 1.5 * (rounded - exact).abs().mean()


def test_keys_that_falcon_repeats_are_stored_once() -> None:
    """Falcon 40B repeats each of 8 K/V heads for 16 query heads: the pool would be 16 times as large."""
    heads = {name: set() for name in ("falcon", "falcon_multi_query", "falcon_all_heads")}
    for name, found in heads.items():
        found.update(spec.num_kv_heads for spec, _, _ in run(build(name)).cache.pools.values())
    assert heads == {"falcon": {2}, "falcon_multi_query": {1}, "falcon_all_heads": {4}}


@pytest.mark.parametrize("name", KINDS)
def test_a_refused_model_attends_by_itself_again(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its modules would go on asking for a pool; transformers itself cannot switch them back."""
    token_ids, model = random_tokens(9, VOCAB_SIZE, seed=1), build(name)
    expected, kinds = own_logits(model, token_ids), [type(module) for module in model.modules()]
    monkeypatch.setattr("minipaged.execution.adoption.prepare", refuse)
    with caplog.at_level(logging.WARNING), pytest.raises(UnsupportedModelError, match="of this test"):
        run(model)
    assert not caplog.records
    assert [type(module) for module in model.modules()] == kinds
    torch.testing.assert_close(own_logits(model, token_ids), expected, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["gptj", "falcon"])
def test_only_the_model_that_is_run_is_changed(name: str) -> None:
    """A class of transformers that is patched changes every other model of the process."""
    token_ids, other, model = random_tokens(9, VOCAB_SIZE, seed=1), build(name), build(name)
    expected = own_logits(other, token_ids)
    run(model)
    torch.testing.assert_close(own_logits(other, token_ids), expected, atol=0, rtol=0)
    for same in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match="set_forward_context"):
            same(torch.tensor([token_ids]))
        run(same)  # as with other models, a second runner may follow


def test_a_second_runner_that_is_refused_leaves_the_first_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would give back the modules that the first one runs."""
    model = build("gptj")
    driver = Driver(model)
    monkeypatch.setattr("minipaged.execution.adoption.prepare", refuse)
    with pytest.raises(UnsupportedModelError, match="of this test"):
        run(model)
    token_ids = random_tokens(9, VOCAB_SIZE, seed=1)
    computed = driver.logits([(driver.add(token_ids), 9)])[0]
    torch.testing.assert_close(computed, own_logits(build("gptj"), token_ids), atol=1e-4, rtol=0)


def test_a_method_that_is_not_there_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that renames it would keep its own attention, and see one token in every decode."""
    model = build("gpt_neo")
    own = type(model.transformer.h[0].attn.attention)
    monkeypatch.setattr(own, "_attend", own._attn, raising=False)
    monkeypatch.delattr(own, "_attn")
    with pytest.raises(UnsupportedModelError, match="attention interface"):
        run(model)
    assert type(model.transformer.h[0].attn.attention) is own


def test_code_that_came_with_a_model_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon's first models bring a class of the same name, whose `forward` takes other arguments."""
    model = build("falcon")
    monkeypatch.setattr(type(model.transformer.h[0].self_attention), "__module__", "transformers_modules.x")
    with pytest.raises(UnsupportedModelError, match="attention interface"):
        run(model)
