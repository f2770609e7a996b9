"""Linear layers whose weights are read panel by panel (`kernels/cpp/panels.py`), quantized or not.

A step of few rows is memory-bound. Our kernel reads panels at the full memory bandwidth, oneDNN its own at
two thirds of it. With many rows, both are about as fast. Ours is batch-invariant: a row has the same result,
bit for bit, in any batch. And C++ can call it (`decode_runner.py`).
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minipaged.config import ConfigError
from minipaged.execution.accel.packed_linear import PackedLinear, can_pack, is_left_to_onednn, linear_layers
from minipaged.kernels.cpp.panels import (
    ZERO_POINTS,
    Panels,
    dequantize,
    pack,
    panel_product,
    quantize,
    unpack,
)

logger = logging.getLogger(__name__)

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
    """Pack the linear layers of a model: in panels, or for oneDNN where that may be faster."""
    for parent, name, linear in linear_layers(model):
        dtype = linear.weight.dtype
        is_left = is_left_to_onednn(dtype)
        if is_left and can_pack(dtype):
            setattr(parent, name, PackedLinear(linear))
        elif dtype in (torch.float16, torch.bfloat16) or (dtype == torch.float32 and not is_left):
            format = str(dtype).removeprefix("torch.")
            setattr(parent, name, PanelLinear(linear.weight.detach(), linear.bias, format))


def panels_of(layer: nn.Module) -> Panels | None:
    """The panels of a layer, if it has any."""
    return layer.panels if isinstance(layer, PanelLinear) else None


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
