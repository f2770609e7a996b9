"""Layer fusion: layers are replaced where the fused form computes the same, and only there."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from minipaged import SamplingParams
from minipaged.execution.accel.packed_linear import PackedLinear, can_pack
from minipaged.execution.attention import set_forward_context
from minipaged.kernels.cpp.build import BuildError, load_library
from minipaged.kernels.metadata import AttentionParameters
from tests.models.driver import Driver, random_tokens
from tests.models.zoo import build

try:
    load_library()
except BuildError as reason:
    pytest.skip(f"C++ kernels: {reason}", allow_module_level=True)
if not can_pack():
    pytest.skip("this PyTorch has no packed oneDNN products", allow_module_level=True)

from minipaged.execution.accel.fused_layer import FusedLayer, FusedNorm
from minipaged.execution.accel.layer_fusion import EquivalenceContext


def rebuilt(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model, rebuilt, and the kinds of its fused modules."""
    Driver(model).runner.optimize()
    kinds = [type(m).__name__ for m in model.modules() if isinstance(m, (FusedLayer, FusedNorm))]
    return model, kinds


@pytest.mark.parametrize("name", ["llama", "llama_yarn_rope", "mistral_sliding", "qwen2", "qwen3"])
def test_every_layer_of_the_common_shape_is_fused(name):
    """A speed-up that quietly stopped to happen: attributes renamed by a new version of transformers."""
    model, kinds = rebuilt(build(name))
    assert kinds.count("FusedLayer") == model.config.num_hidden_layers
    assert isinstance(model.model.norm, FusedNorm)
    assert not any(isinstance(module, (LlamaDecoderLayer, LlamaRMSNorm)) for module in model.modules())


@pytest.mark.parametrize(
    "changes", [{"attention_bias": True}, {"mlp_bias": True}, {"num_key_value_heads": 4}]
)
def test_biases_and_heads_of_their_own_are_kept(changes):
    """A bias lost where products are stacked; a model that trains without is no evidence."""
    torch.manual_seed(1)
    models = [build("llama", **changes) for _ in range(2)]
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data = torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(len(name))
                )
    plain, (fused, kinds) = models[0], rebuilt(models[1])
    assert "FusedLayer" in kinds
    rows, positions = torch.arange(9)[None], torch.arange(9)[None]
    answers = []
    for model in (plain, fused):
        # Both with the same simple attention: what is compared is all the rest.
        model.set_attn_implementation("minipaged")
        with torch.inference_mode(), set_forward_context(EquivalenceContext()):
            answers.append(model(input_ids=rows, position_ids=positions, use_cache=False).logits)
    torch.testing.assert_close(answers[1], answers[0], atol=1e-4, rtol=1e-4)


class Impostors:
    """Layers that bear a known name and compute something else."""

    def louder(self, layer: Any) -> None:
        forward = layer.forward
        layer.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 1.01

    def other_activation(self, layer: Any) -> None:
        layer.mlp.act_fn = nn.GELU()

    def other_keys(self, layer: Any) -> None:
        # Shows in what attention is asked alone: the equivalence check answers with the values.
        keys = layer.self_attn.k_proj
        keys.register_forward_hook(lambda module, arguments, output: output * 1.01)

    def norm_of_another_kind(self, layer: Any) -> None:
        norm = layer.input_layernorm
        norm.forward = lambda rows: nn.functional.layer_norm(rows, rows.shape[-1:], norm.weight)


@pytest.mark.parametrize("trick", [name for name in vars(Impostors) if not name.startswith("_")])
def test_a_layer_that_computes_something_else_stays(trick, caplog):
    """Wrong numbers because of a name."""
    model = build("llama")
    impostor = model.model.layers[1]
    getattr(Impostors(), trick)(impostor)
    with caplog.at_level(logging.INFO, logger="minipaged.execution.accel.layer_fusion"):
        rebuilt(model)
    assert model.model.layers[1] is impostor
    assert isinstance(model.model.layers[0], FusedLayer)
    assert "LlamaDecoderLayer is not equivalent to its fused form" in caplog.text


class Elsewhere(nn.Linear):
    """Weights that only it can read, such as quantized ones."""

    @property
    def out_features(self) -> int:
        raise RuntimeError("not a plain layer")

    @out_features.setter
    def out_features(self, value: int) -> None: ...


def test_a_layer_over_products_of_another_kind_stays():
    """A model with quantized or adapted products that cannot be loaded because of a speed-up."""
    model = build("llama")
    unusual = model.model.layers[1]
    other = Elsewhere(32, 32, bias=False)
    other.weight = unusual.self_attn.q_proj.weight
    unusual.self_attn.q_proj = other
    rebuilt(model)
    assert model.model.layers[1] is unusual
    assert isinstance(model.model.layers[0], FusedLayer)


def test_layers_of_other_names_stay():
    """Gemma's norm multiplies by 1 + weight and its layers have four of them."""
    _, kinds = rebuilt(build("gemma2"))
    assert kinds == []


def test_bfloat16_is_fused_too():
    """Half of the models there are left behind."""
    _, kinds = rebuilt(build("llama").bfloat16())
    assert kinds.count("FusedLayer") == 2


def test_the_last_layer_computes_only_rows_that_matter():
    """A quarter of a prompt's work in four layers wasted; log-probabilities of rows never computed."""
    driver = Driver(build("llama"))
    driver.runner.optimize()
    num_rows: list[list[int]] = []
    for layer in driver.runner.model.model.layers:
        num_rows.append([])
        layer.mlp_output.register_forward_hook(
            lambda module, arguments, output, seen=num_rows[-1]: seen.append(len(output))
        )
    prompt, other, asking = (driver.add(random_tokens(9, 101, seed)) for seed in range(3))
    asking.request.params = SamplingParams(prompt_logprobs=2)
    driver.execute([(prompt, 9)])
    driver.execute([(prompt, 1), (other, 4)])  # a decode, and a prompt that goes on
    driver.execute([(other, 3)])
    driver.execute([(prompt, 1)])
    driver.execute([(prompt, 1), (asking, 9)])
    assert num_rows == [[9, 5, 3, 1, 10], [1, 1, 0, 1, 10]]


def test_tokens_do_not_depend_on_where_prompts_are_cut():
    """A last row taken from another sequence, keys and values of the last layer not written."""
    prompts = [random_tokens(length, 101, seed=length) for length in (11, 6, 17)]
    answers = []
    for cuts in ([11, 6, 17], [4, 4, 4], [5, 1, 8]):
        driver = Driver(build("qwen3"))
        driver.runner.optimize()
        sequences = [driver.add(prompt) for prompt in prompts]
        while any(sequence.num_generated_tokens < 6 for sequence in sequences):
            driver.execute([(s, min(s.num_uncomputed_tokens, cut)) for s, cut in zip(sequences, cuts)])
        answers.append([s.output_token_ids[:6] for s in sequences])
    assert answers[1:] == answers[:1] * 2


def test_the_check_records_queries_and_keys_before_they_are_overwritten():
    """Keys and queries are views into a buffer that the layer goes on to use."""
    context, rows = EquivalenceContext(), torch.ones(2, 3, 4)
    module = nn.Module()
    module.layer_idx = 0
    context.attend(module, rows, rows, rows, AttentionParameters(1.0))
    rows.zero_()
    assert context.calls[0][0].eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 1100])
def test_a_packed_layer_still_tells_its_weight(width, dtype):
    """Routers and adapters read it, or its type: no attribute `weight` at the first token."""
    linear = nn.Linear(width, 1000, dtype=dtype)
    assert torch.equal(PackedLinear(linear).weight, linear.weight)
