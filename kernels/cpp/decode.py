"""The decoder layers of a step of decodes in one call; the source is `decode_layers.cpp`."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from minipaged.kernels.cpp.build import INTEGER, POINTER, REAL, declare_by_dtype
from minipaged.kernels.cpp.panels import Panels, multiply_of
from minipaged.kernels.metadata import AttentionMetadata, AttentionParameters

_STEP = struct.Struct("7P 3q")  # the struct `DecodeStep` of decode_layers.cpp
_decode_layers = declare_by_dtype("decode_layers", POINTER, INTEGER, ctypes.c_char_p)


class Linear(NamedTuple):
    """rows x weights^T + bias."""

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


Fields = list[tuple[str, Any]]


class _Linear(ctypes.Structure):
    """The struct `Linear` of decode_layers.cpp; so are those that follow."""

    _fields_: ClassVar[Fields] = [
        *[(name, POINTER) for name in ("panels", "rows", "bias", "output")],
        *[(name, INTEGER) for name in ("num_rows", "row_stride", "num_outputs", "size")],
        *[("panel_bytes", INTEGER), ("num_threads", INTEGER), ("multiply", POINTER)],
    ]


class _AttentionCall(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        *[(name, POINTER) for name in ("query", "key_cache", "value_cache", "output")],
        *[(name, POINTER) for name in ("block_tables", "query_start", "context_len", "sinks")],
        *[(name, INTEGER) for name in ("query_token_stride", "query_head_stride", "table_stride")],
        *[(name, INTEGER) for name in ("num_sequences", "num_heads", "num_kv_heads", "block_size")],
        *[(name, INTEGER) for name in ("key_dim", "value_dim", "sliding_window", "num_threads")],
        *[("scale", REAL), ("softcap", REAL)],
    ]


class _Norm(ctypes.Structure):
    _fields_ = [("weight", POINTER), ("epsilon", REAL)]


class _DecoderLayer(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        *[(name, _Linear) for name in ("query_key_value", "attention_output", "gate_up", "mlp_output")],
        ("attention", _AttentionCall),
        *[(name, _Norm) for name in ("attention_norm", "query_norm", "key_norm", "mlp_norm")],
    ]


class DecoderLayers:
    """All layers of a model, for rows of one type."""

    def __init__(self, layers: Sequence[DecoderLayer], dtype: torch.dtype) -> None:
        self._tensors = layers  # the structs have their addresses only
        self._packed = (_DecoderLayer * len(layers))(*(_pack(layer, dtype) for layer in layers))
        self._decode = _decode_layers[dtype]

    def __call__(self, rows: Tensor, cosines: Tensor, sines: Tensor, metadata: AttentionMetadata) -> None:
        """Change rows [T, D] in place, with cosines and sines [T, head_dim]; K/V are in the pools then.

        Every sequence of `metadata` has one query token.
        """
        tables = metadata.block_tables
        step = _STEP.pack(
            *(rows.data_ptr(), cosines.data_ptr(), sines.data_ptr(), metadata.slot_mapping.data_ptr()),
            *(tables.data_ptr(), metadata.query_start.data_ptr(), metadata.context_len.data_ptr()),
            *(tables.stride(0), rows.shape[0], torch.get_num_threads()),
        )
        self._decode(ctypes.addressof(self._packed), len(self._packed), step)


def _pack(layer: DecoderLayer, dtype: torch.dtype) -> _DecoderLayer:
    _, num_kv_heads, block_size, head_dim = layer.key_cache.shape
    scale, sliding_window, softcap, _ = layer.parameters
    attention = _AttentionCall(
        key_cache=layer.key_cache.data_ptr(),
        value_cache=layer.value_cache.data_ptr(),
        num_heads=layer.num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        key_dim=head_dim,
        value_dim=head_dim,
        sliding_window=sliding_window or sys.maxsize,
        scale=scale,
        softcap=softcap or 0.0,
    )
    linears = (_pack_linear(*linear, dtype) for linear in layer.linears)
    return _DecoderLayer(*linears, attention, *map(_pack_norm, layer.norms))


def _pack_linear(weights: Panels, bias: Tensor | None, dtype: torch.dtype) -> _Linear:
    return _Linear(
        panels=weights.address,
        bias=None if bias is None else bias.data_ptr(),
        num_outputs=weights.num_outputs,
        size=weights.size,
        panel_bytes=weights.panel_bytes,
        multiply=ctypes.cast(multiply_of(weights, dtype), POINTER).value,
    )


def _pack_norm(norm: Norm | None) -> _Norm:
    return _Norm() if norm is None else _Norm(norm.weight.data_ptr(), norm.epsilon)
