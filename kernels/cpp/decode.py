"""A decode step in one call; the source is `decode.cpp`."""

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
from minipaged.kernels.cpp.panels import Panels, best_prefetch, multiply_of, pack_product
from minipaged.kernels.metadata import AttentionMetadata, AttentionParameters

# The structs `DecodeStep` and `Norm`, and the first or last member of others in decode.cpp.
_STEP, _NORM, _ADDRESS = struct.Struct("8P 5q"), struct.Struct("P d q"), struct.Struct("P")
_LAYER_END, _ENDS_BEGIN = struct.Struct("d 2q"), struct.Struct("P d q")
_decode = declare_by_dtype("decode", ctypes.c_char_p, INTEGER, ctypes.c_char_p, ctypes.c_char_p)


class Linear(NamedTuple):
    """rows x weights^T + bias; the panels must live as long as they are read."""

    weights: Panels
    bias: Tensor | None


class Norm(NamedTuple):
    """rows / their root mean square * weight, which is of their type or float32."""

    weight: Tensor
    epsilon: float


class DecoderLayer(NamedTuple):
    """What a layer computes with. Query, key and value heads have the same size."""

    linears: Sequence[Linear]
    """Fused query, key and value; attention output; fused gate and up; MLP output."""
    norms: Sequence[Norm | None]
    """Before attention; on queries; on keys; before the MLP; on the attention's output; on the MLP's."""
    is_gelu: bool
    """The gate's function; else SiLU."""
    output_factor: float
    """Of the attention's and the MLP's output."""
    rotation: int | None
    """Which angles its heads are rotated by; None: none."""
    num_heads: int
    key_cache: Tensor
    """[num_blocks, Hkv, block_size, D]"""
    value_cache: Tensor
    parameters: AttentionParameters
    """Without sinks."""


class Decoder:
    """A whole model, in one type.

    Args:
        embeddings: [V, D], contiguous.
        layers: at least one.
        norm: the final norm.
        head: the output layer.
        embedding_scale: what embeddings are multiplied by.
    """

    def __init__(
        self,
        embeddings: Tensor,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        head: Linear,
        embedding_scale: float = 1.0,
    ) -> None:
        self._parts = embeddings, layers, norm, head  # keeps the tensors whose addresses are packed
        dtype = embeddings.dtype
        self._layers = b"".join(_pack(layer, dtype) for layer in layers)
        num_rotations = 1 + max(map(_rotation, layers))
        first = _ENDS_BEGIN.pack(embeddings.data_ptr(), embedding_scale, num_rotations)
        self._ends = first + _pack_norm(norm, dtype) + _pack_linear(*head, dtype)
        self._decode = _decode[dtype]

    def __call__(
        self, token_ids: Tensor, positions: Tensor, angles: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Logits [T, V]; K/V are written to the pools.

        Args:
            token_ids, positions: [1, T] int64, one for each sequence of `metadata`.
            angles: of each rotation cosines and sines of every position, [rotations, 2, P, rotated elements
                of a head], contiguous.
            metadata: of a decode step.
        """
        embeddings, layers, _, head = self._parts
        logits = embeddings.new_empty(token_ids.shape[1], head.weights.num_outputs)
        tables = metadata.block_tables
        step = _STEP.pack(
            *(token_ids.data_ptr(), positions.data_ptr(), metadata.slot_mapping.data_ptr()),
            *(angles.data_ptr(), logits.data_ptr()),
            *(tables.data_ptr(), metadata.query_start.data_ptr(), metadata.context_len.data_ptr()),
            *(angles.shape[2], angles.shape[3], tables.stride(0), len(logits), torch.get_num_threads()),
        )
        self._decode(self._layers, len(layers), self._ends, step)
        return logits


def _pack(layer: DecoderLayer, dtype: torch.dtype) -> bytes:
    """The struct `DecoderLayer`; what decode.cpp fills in for each step is 0."""
    _, num_kv_heads, block_size, head_dim = layer.key_cache.shape
    scale, sliding_window, softcap, _ = layer.parameters
    linears = [_pack_linear(*linear, dtype) for linear in layer.linears]
    attention = ATTENTION_CALL.pack(
        *(0, layer.key_cache.data_ptr(), layer.value_cache.data_ptr(), 0),
        *(0, 0, 0, 0),
        *(0, 0, 0),
        *(0, layer.num_heads, num_kv_heads, block_size),
        *(head_dim, head_dim, sliding_window or sys.maxsize, 0, best_prefetch()),
        *(scale, softcap or 0.0),
    )
    norms = [_pack_norm(norm, dtype) for norm in layer.norms]
    return b"".join(
        [*linears, attention, *norms, _LAYER_END.pack(layer.output_factor, layer.is_gelu, _rotation(layer))]
    )


def _rotation(layer: DecoderLayer) -> int:
    return -1 if layer.rotation is None else layer.rotation


def _pack_linear(weights: Panels, bias: Tensor | None, dtype: torch.dtype) -> bytes:
    product = pack_product(weights, bias, best_prefetch())
    return product + _ADDRESS.pack(ctypes.cast(multiply_of(weights, dtype), POINTER).value)


def _pack_norm(norm: Norm | None, dtype: torch.dtype) -> bytes:
    if norm is None:
        return _NORM.pack(0, 0.0, 0)
    return _NORM.pack(norm.weight.data_ptr(), norm.epsilon, norm.weight.dtype != dtype)
