"""The decoder layers of a step of decodes in one call; the source is `decode_layers.cpp`."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minipaged.kernels.cpp.attention import ATTENTION_CALL
from minipaged.kernels.cpp.build import INTEGER, POINTER, declare_by_dtype
from minipaged.kernels.cpp.panels import PRODUCT, Panels, multiply_of
from minipaged.kernels.metadata import AttentionMetadata, AttentionParameters

# The structs `DecodeStep`, `Norm` and the end of `Linear` of decode_layers.cpp.
_STEP, _NORM, _MULTIPLY = struct.Struct("7P 3q"), struct.Struct("P d"), struct.Struct("P")
_decode_layers = declare_by_dtype("decode_layers", ctypes.c_char_p, INTEGER, ctypes.c_char_p)


class Linear(NamedTuple):
    """rows x weights^T + bias; the panels must live as long as they are read."""

    weights: Panels
    bias: Tensor | None


class Norm(NamedTuple):
    """rows / their root mean square * weight."""

    weight: Tensor
    epsilon: float


class DecoderLayer(NamedTuple):
    """What a layer computes with. Query, key and value heads have the same size."""

    linears: Sequence[Linear]
    """Query, key and value in one; attention output; gate and up in one; MLP output."""
    norms: Sequence[Norm | None]
    """Before attention; of queries; of keys; before the MLP."""
    num_heads: int
    key_cache: Tensor
    """[num_blocks, Hkv, block_size, D]"""
    value_cache: Tensor
    parameters: AttentionParameters
    """Without sinks."""


class DecoderLayers:
    """All layers of a model, for rows of one type."""

    def __init__(self, layers: Sequence[DecoderLayer], dtype: torch.dtype) -> None:
        self._layers = layers  # keeps the tensors whose addresses are packed
        self._packed = b"".join(_pack(layer, dtype) for layer in layers)
        self._decode = _decode_layers[dtype]

    def __call__(self, rows: Tensor, cosines: Tensor, sines: Tensor, metadata: AttentionMetadata) -> None:
        """Run all layers on rows [T, D], in place, and write their K/V to the pools.

        Args:
            rows: contiguous, one for each sequence of `metadata`.
            cosines, sines: contiguous, [1, T, head_dim].
            metadata: of a step of decodes.
        """
        tables = metadata.block_tables
        step = _STEP.pack(
            *(rows.data_ptr(), cosines.data_ptr(), sines.data_ptr(), metadata.slot_mapping.data_ptr()),
            *(tables.data_ptr(), metadata.query_start.data_ptr(), metadata.context_len.data_ptr()),
            *(tables.stride(0), rows.shape[0], torch.get_num_threads()),
        )
        self._decode(self._packed, len(self._layers), step)


def _pack(layer: DecoderLayer, dtype: torch.dtype) -> bytes:
    """The struct `DecoderLayer`; what decode_layers.cpp fills in at each step is 0."""
    _, num_kv_heads, block_size, head_dim = layer.key_cache.shape
    scale, sliding_window, softcap, _ = layer.parameters
    linears = [_pack_linear(*linear, dtype) for linear in layer.linears]
    attention = ATTENTION_CALL.pack(
        *(0, layer.key_cache.data_ptr(), layer.value_cache.data_ptr(), 0),
        *(0, 0, 0, 0),
        *(0, 0, 0),
        *(0, layer.num_heads, num_kv_heads, block_size),
        *(head_dim, head_dim, sliding_window or sys.maxsize, 0),
        *(scale, softcap or 0.0),
    )
    return b"".join([*linears, attention, *map(_pack_norm, layer.norms)])


def _pack_linear(weights: Panels, bias: Tensor | None, dtype: torch.dtype) -> bytes:
    product = PRODUCT.pack(
        *(weights.address, 0, 0 if bias is None else bias.data_ptr(), 0),
        *(0, 0, weights.num_outputs, weights.size, weights.panel_bytes, 0),
    )
    return product + _MULTIPLY.pack(ctypes.cast(multiply_of(weights, dtype), POINTER).value)


def _pack_norm(norm: Norm | None) -> bytes:
    return _NORM.pack(0, 0.0) if norm is None else _NORM.pack(norm.weight.data_ptr(), norm.epsilon)
