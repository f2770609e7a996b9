"""Linear layers whose weights are read panel by panel (`kernels/cpp/panels.py`), quantized or not.

A step of few rows is memory-bound. Our kernel reads panels at the full memory bandwidth, oneDNN its own at
two thirds of it. With many rows, both are about as fast. Ours is batch-invariant: a row has the same result,
bit for bit, in any batch. And C++ can call it (`decode_runner.py`).

Where oneDNN is faster with many rows, it multiplies those. It packs weights in panels, too, so our kernel
reads the same bytes (`read_panels`).
"""

from __future__ import annotations

import logging
import platform
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minipaged.config import ConfigError
from minipaged.execution.accel.packed_linear import FEW_ROWS, PackedLinear, is_plain, linear_layers
from minipaged.kernels.cpp.panels import (
    WIDTH,
    ZERO_POINTS,
    Panels,
    dequantize,
    multiplies_by_amx,
    pack,
    panel_product,
    quantize,
    unpack,
)

logger = logging.getLogger(__name__)

MOST_BESIDE_AMX = 8
"""Rows that panels multiply where oneDNN has AMX and our kernel does not."""

MOST_LEFT = 0.1
"""Share of a model's matrices, embeddings aside, that may stay as they are when it is quantized."""


class PanelLinear(nn.Module):
    """`nn.Linear` on a CPU for any number of rows; `format` is the weight's own type, int8, int4 or w8a8."""

    def __init__(self, weight: Tensor, bias: Tensor | None, format: str) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._dtype, self._format = weight.dtype, format
        self._panels = quantize(weight, format) if format in ZERO_POINTS else pack(weight)

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], as it is multiplied."""
        shape = self.out_features, self.in_features
        if self._format in ZERO_POINTS:
            return dequantize(self._panels, self._format, *shape).to(self._dtype)
        return unpack(self._panels, self._dtype, *shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the panels, scales included."""
        return self._panels.nbytes

    @property
    def panels(self) -> Panels:
        """Where they lie, as long as the layer exists."""
        address, size = self._panels.data_ptr(), self._panels.shape[1]
        return Panels(address, size, self.out_features, self.in_features, self._format)

    def forward(self, rows: Tensor) -> Tensor:
        """rows [..., in_features] -> [..., out_features]."""
        return panel_product(rows, self.panels, self.bias)


def use_panels(model: nn.Module) -> None:
    """Pack the linear layers of a model: in panels, or for oneDNN where it is faster."""
    for parent, name, linear in linear_layers(model):
        dtype = linear.weight.dtype
        is_left = is_faster_by_onednn(dtype)
        if is_left and is_plain(linear):
            setattr(parent, name, pack_for_onednn(linear))
        elif dtype in (torch.float16, torch.bfloat16) or (dtype == torch.float32 and not is_left):
            format = str(dtype).removeprefix("torch.")
            setattr(parent, name, PanelLinear(linear.weight.detach(), linear.bias, format))


def is_faster_by_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies many rows faster: with AMX, and perhaps on Arm, where it was not measured."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    return has_amx(dtype)


def has_amx(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of the type by AMX. Our kernel uses it for few rows."""
    return dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()


def pack_for_onednn(linear: nn.Linear) -> PackedLinear:
    """Pack a layer so that our kernel can multiply few rows, if there is such a way."""
    packed = PackedLinear(linear)
    if not read_panels(packed) and has_amx(linear.weight.dtype):
        # On Granite Rapids, oneDNN's panels have 32 outputs unless packed for one row. With 64, our kernel
        # can read them: one sequence is decoded 1.6 times as fast (134 M parameters, one thread).
        for_one = PackedLinear(linear, num_rows=1)
        return for_one if read_panels(for_one) else packed
    return packed


def read_panels(layer: PackedLinear) -> bool:
    """Let a packed layer multiply few rows by panels, if oneDNN packed its weight so; return whether."""
    dtype, address = layer.packed.dtype, torch.ops.mkldnn.data_ptr(layer.packed)
    num_bytes = torch.ops.mkldnn._nbytes(layer.packed)
    num_panels = -(-layer.out_features // WIDTH)
    panel_bytes = num_bytes // num_panels
    least = -(-layer.in_features // 2) * 2 * WIDTH * dtype.itemsize  # (oneDNN rounds to 16 or 32 elements)
    if num_bytes % num_panels or panel_bytes < least or panel_bytes % (WIDTH * dtype.itemsize):
        return False
    format = str(dtype).removeprefix("torch.")
    panels = Panels(address, panel_bytes, layer.out_features, layer.in_features, format)
    # The layout is an internal of oneDNN, so we check that both compute the same.
    row = torch.linspace(-9, 9, layer.in_features).sin().to(dtype)[None]
    expected, actual = layer(row).float(), panel_product(row, panels, layer.bias).float()
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    if not (actual - expected).abs().max() <= tolerance * expected.abs().max():
        return False
    is_slow = has_amx(dtype) and not multiplies_by_amx(layer.in_features)
    most = MOST_BESIDE_AMX if is_slow else FEW_ROWS
    layer.multiply_few_rows_with(partial(panel_product, panels=panels, bias=layer.bias), most)
    return True


def panels_of(layer: nn.Module) -> Panels | None:
    """The panels that few rows are multiplied with, if there are any."""
    if isinstance(layer, PanelLinear):
        return layer.panels
    product = layer.few_rows if isinstance(layer, PackedLinear) else None
    return product.keywords["panels"] if isinstance(product, partial) else None


def quantize_linears(model: PreTrainedModel, format: str) -> None:
    """Quantize the linear layers of a model, int4's output layer to int8; embeddings and norms stay.

    Raises:
        ConfigError: too much of the model is not in linear layers.
    """
    heads = {model.get_output_embeddings()}
    num_quantized = 0
    for parent, name, linear in linear_layers(model):
        own = "int8" if format == "int4" and linear in heads else format
        setattr(parent, name, PanelLinear(linear.weight.detach(), linear.bias, own))
        num_quantized += linear.in_features * linear.out_features
    left = [
        (name, parameter)
        for parent in model.modules()
        if not isinstance(parent, nn.Embedding)
        for name, parameter in parent.named_parameters(type(parent).__name__, recurse=False)
        if parameter.ndim > 1
    ]
    if sum(parameter.numel() for _, parameter in left) > MOST_LEFT * num_quantized:
        name, largest = max(left, key=lambda item: item[1].numel())
        raise ConfigError(
            f"quantization is {format}, but {name} of {type(model).__name__}, {list(largest.shape)}, is "
            "not a linear layer, so it cannot be quantized; give another model, or drop quantization"
        )
