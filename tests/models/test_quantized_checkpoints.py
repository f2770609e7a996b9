"""Checkpoints in FP8 and MXFP4 compute what the floats compute that they stand for; others say what to do."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minipaged import LLM, SamplingParams
from minipaged.config import EngineConfig
from minipaged.execution.loading import load_model
from minipaged.execution.model_runner import ModelRunner
from tests.machine import skip_without_compiler
from tests.models.driver import random_tokens
from tests.models.quantized import change_config, write_fp8, write_mxfp4
from tests.models.refusal import refusal
from tests.models.survey import build_small
from tests.models.zoo import VOCAB_SIZE, build

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": random_tokens(length, VOCAB_SIZE, seed=length)} for length in (3, 9, 20)]
MAKE = {
    "fp8": lambda *paths: write_fp8(build("qwen3"), *paths),
    "fp8, matrices that end within a block": lambda *paths: write_fp8(
        build("qwen3", intermediate_size=40), *paths
    ),
    "fp8, one and a half blocks": lambda *paths: write_fp8(build("qwen3", intermediate_size=24), *paths),
    "fp8, experts": lambda *paths: write_fp8(build("qwen3_moe"), *paths),
    "fp8, routers in 32 bits": lambda *paths: write_fp8(build_small("ernie4_5_moe"), *paths),
    "fp8, layers made in 32 bits": lambda *paths: write_fp8(build_small("hunyuan_v1_moe"), *paths),
    "mxfp4": lambda *paths: write_mxfp4(build("gpt_oss", intermediate_size=64), *paths),
}


@pytest.fixture(params=MAKE)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A quantized checkpoint and the floats that it stands for."""
    quantized, floats = tmp_path / "quantized", tmp_path / "floats"
    MAKE[request.param](floats, quantized)
    return quantized, floats


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    write_fp8(build("qwen3"), tmp_path / "floats", tmp_path / "quantized")
    return tmp_path / "quantized"


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_weights_are_the_floats_that_they_stand_for(pair: tuple[Path, Path], dtype: str) -> None:
    """Catches scales of the wrong block, order or type, layers left quantized, and a mixture of types."""
    models = [load_model(str(path), EngineConfig(dtype=dtype), CPU) for path in pair]
    weights, expected = (dict(model.named_parameters()) for model in models)
    assert weights.keys() == expected.keys()
    assert models[1].dtype == (torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))
    for name, weight in weights.items():
        assert weight.dtype == expected[name].dtype, name
        assert torch.equal(weight, expected[name]), name
        assert weight.is_contiguous()
    assert not hasattr(models[0].config, "quantization_config")


def test_tokens_are_those_of_the_floats(pair: tuple[Path, Path]) -> None:
    """The whole way, from the files to the output."""
    settings = {"dtype": "float32", "num_blocks": 50, "disable_log_stats": True}
    quantized, floats = (LLM(path, **settings).generate(PROMPTS, GREEDY) for path in pair)
    assert [one.outputs[0].token_ids for one in quantized] == [one.outputs[0].token_ids for one in floats]


@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
def test_they_can_be_quantized_again(tmp_path: Path, quantization: str) -> None:
    """Catches layers that are no longer plain linear ones."""
    skip_without_compiler("cpp")
    quantized, floats = tmp_path / "quantized", tmp_path / "floats"
    write_fp8(build("qwen3"), floats, quantized)
    settings = {"quantization": quantization, "num_blocks": 50, "disable_log_stats": True}
    texts = [LLM(path, **settings).generate(PROMPTS, GREEDY) for path in (quantized, floats)]
    assert len({str([one.outputs[0].token_ids for one in text]) for text in texts}) == 1


def test_floats_beside_the_quantized_weights_get_the_models_type(fp8: Path) -> None:
    """A checkpoint that does not say its type: neither eight bits nor whatever the first tensor has."""
    change_config(fp8, dtype=None)
    model = load_model(str(fp8), EngineConfig(), CPU)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "weight", "change"),
    [
        ("qwen3", "model.layers.1.mlp.up_proj.weight", lambda weight, scale: {"": weight}),
        ("qwen3", "model.layers.1.mlp.up_proj.weight", lambda weight, scale: {"": weight, "_scale": scale}),
        (
            "qwen3",
            "model.layers.1.mlp.up_proj.weight",
            lambda weight, scale: {"": weight, "_scale_inv": torch.ones(len(weight))},
        ),
        (
            "gpt_oss",
            "model.layers.1.mlp.experts.down_proj",
            lambda weight, scale: {"": weight, "_scale_inv": scale},
        ),
    ],
)
def test_eight_bits_without_a_known_scale_are_not_weights(
    tmp_path: Path, name: str, weight: str, change
) -> None:
    """Other layouts of FP8: transformers takes the numbers for weights, and lists scales as unexpected."""
    directory = tmp_path / "quantized"
    write_fp8(build(name), tmp_path / "floats", directory)
    tensors = load_file(directory / "model.safetensors")
    scale = tensors.pop(f"{weight}_scale_inv", torch.ones(1))
    changed = change(tensors.pop(weight).to(torch.float8_e4m3fn), scale)
    tensors |= {weight + suffix: tensor for suffix, tensor in changed.items()}
    save_file(tensors, directory / "model.safetensors")
    assert f"{weight} is in 8 bits, without a scale that transformers knows" in refusal(directory)


@pytest.mark.parametrize("scale", [None, torch.ones(7)], ids=["none", "misshapen"])
def test_eight_bits_are_found_where_transformers_does_not_ask_for_their_type(
    fp8: Path, monkeypatch: pytest.MonkeyPatch, scale: torch.Tensor | None
) -> None:
    """transformers 5.17 makes floats of 8 bits before it looks for their scale; their size showed nothing."""
    reader = "minipaged.execution.float_readers._Fp8Reader.get_new_dtype"
    monkeypatch.setattr(reader, lambda self, converter, weight, dtype: dtype)
    tensors = load_file(fp8 / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    del tensors[f"{name}_scale_inv"]
    changed = {} if scale is None else {f"{name}_scale_inv": scale}
    save_file(tensors | changed, fp8 / "model.safetensors")
    assert f"{name} is in 8 bits, without a scale that transformers knows" in refusal(fp8)


@pytest.mark.parametrize("scale", [None, torch.ones(7, 1)], ids=["none", "misshapen"])
def test_an_expert_without_its_scale_is_found(tmp_path: Path, scale: torch.Tensor | None) -> None:
    """transformers joins a layer's experts; what it says about it is a page with a traceback."""
    directory = tmp_path / "quantized"
    write_fp8(build("qwen3_moe"), tmp_path / "floats", directory)
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.up_proj.weight_scale_inv"
    del tensors[name]
    save_file(tensors if scale is None else tensors | {name: scale}, directory / "model.safetensors")
    message = refusal(directory)
    assert (
        "model.layers.0.mlp.experts.gate_up_proj is in 8 bits, without a scale that transformers" in message
    )


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_scales_that_the_configuration_does_not_mention_are_named(tmp_path: Path, name: str) -> None:
    """A config.json from elsewhere, or older than its layout: all numbers in 8 bits would be weights."""
    write_fp8(build(name), tmp_path / "floats", tmp_path / "quantized")
    shutil.copy(tmp_path / "floats" / "config.json", tmp_path / "quantized")
    message = refusal(tmp_path / "quantized")
    assert "down_proj.weight_scale_inv, which quantized weights have, but its config.json has no" in message


def test_bytes_that_hold_eight_bits_are_not_numbers(fp8: Path) -> None:
    """Tools older than FP8 in safetensors wrote bytes."""
    tensors = load_file(fp8 / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].view(torch.uint8)
    save_file(tensors, fp8 / "model.safetensors")
    assert f"{name} is in 8 bits, without a scale that transformers knows" in refusal(fp8)


@pytest.mark.parametrize("part", ["weight", "weight_scale_inv"])
def test_a_weight_that_is_not_a_number_is_named(fp8: Path, part: str) -> None:
    """Logits of NaN differ from one another: the model was refused for mixing tokens in another way."""
    tensors = load_file(fp8 / "model.safetensors")
    tensors[f"model.layers.1.mlp.up_proj.{part}"][0, 0] = float("nan")
    save_file(tensors, fp8 / "model.safetensors")
    reason = "model.layers.1.mlp.up_proj.weight holds NaN, in itself or its scale; the checkpoint is damaged"
    assert reason in refusal(fp8)


def test_no_package_is_needed_beyond_our_own(fp8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks for accelerate before it reads FP8, and does not use it."""
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert ModelRunner.load(str(fp8), EngineConfig(num_blocks=5)).model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "requires optimum"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "requires gptqmodel"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "pip install compressed-tensors",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "pip install"),
    ],
)
def test_other_kinds_are_named_with_what_they_need(fp8: Path, described: dict, reason: str) -> None:
    """transformers names the package, often not the kind; and that another checkpoint would do."""
    change_config(fp8, quantization_config=described)
    message = refusal(fp8)
    assert reason in message
    kind = described["quant_method"]
    assert f"; its weights are quantized ({kind}): do what this says, or give the model in floats" in message


@pytest.mark.parametrize("described", [["fp8"], "fp8", 8, [], {}, {"quant_method": ["fp8"]}])
def test_an_invalid_configuration_is_shown(fp8: Path, described: object) -> None:
    """Edited by hand: AttributeError, TypeError, or transformers' words on "arguments" that nobody gave."""
    change_config(fp8, quantization_config=described)
    reason = f"has quantization_config = {described!r} in its config.json, which names no quant_method; add"
    assert reason in refusal(fp8)


def test_a_kind_that_transformers_does_not_know_is_refused(fp8: Path) -> None:
    """transformers reads the quantized numbers as if they were weights, and warns."""
    change_config(fp8, quantization_config={"quant_method": "modelopt"})
    message = refusal(fp8)
    assert "quantized weights (modelopt), which transformers cannot read; give the model in floats" in message
