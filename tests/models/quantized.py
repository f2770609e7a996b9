"""Quantized checkpoints, laid out as the published ones are; beside each, the floats that it stands for."""

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def write(
    model: nn.Module,
    floats: Path,
    quantized: Path,
    described: dict[str, Any],
    convert: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor] | None],
) -> None:
    """Write it twice. `convert`: what is stored instead of a tensor, and the floats that it stands for."""
    model.to(torch.bfloat16).save_pretrained(floats)
    shutil.copytree(floats, quantized)
    stored, meant = {}, {}
    for name, tensor in load_file(floats / "model.safetensors").items():
        tensors, values = convert(name, tensor.float()) or ({name: tensor}, tensor)
        stored |= tensors
        meant[name] = values
    for directory, tensors in ((quantized, stored), (floats, meant)):
        in_order = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(in_order, directory / "model.safetensors")
    change_config(quantized, quantization_config=described)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_fp8(model: nn.Module, floats: Path, quantized: Path, block: int = 16) -> None:
    """As DeepSeek V3 and Qwen3-FP8 do, but in smaller blocks than 128 x 128."""
    kept = ("lm_head", "*embed_tokens", "model.layers.0.self_attn.o_proj", "*.mlp.gate")

    def convert(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        module = name.removesuffix(".weight")
        if module == name or weight.dim() < 2 or any(fnmatch(module, pattern) for pattern in kept):
            return None
        rows, columns = weight.shape
        scales = torch.tensor([[p.abs().max() / 448 for p in s.split(block, 1)] for s in weight.split(block)])
        each = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
        eighths = (weight / each).to(torch.float8_e4m3fn)
        return {name: eighths, f"{name}_scale_inv": scales}, eighths.float() * each

    described = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.gate"],
    }
    write(model, floats, quantized, described, convert)


def write_mxfp4(model: nn.Module, floats: Path, quantized: Path) -> None:
    """As gpt-oss does: experts transposed, two values of 4 bits in a byte, a power of two for each 32."""

    def convert(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return None
        groups = weight.mT.unflatten(-1, (-1, 32))
        exponents = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True))) - 2
        scaled = groups / exponents.exp2()
        codes = (scaled.abs()[..., None] - _FP4).abs().argmin(-1)
        values = _FP4[codes].copysign(scaled) * exponents.exp2()
        codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
        blocks, scales = codes[..., ::2] | codes[..., 1::2] << 4, (exponents[..., 0] + 127).to(torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, values.flatten(-2).mT

    described = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    write(model, floats, quantized, described, convert)
