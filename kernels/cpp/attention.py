"""Paged attention and cache writes in C++, called with the addresses of tensors.

The source is `paged_attention.cpp`; it is compiled on first use (`build`). Tensors go in as pointers and
strides: no copy, no dependency on torch's C++ interface. What the library does not do (float16, blocks
copied or swapped) the reference path does.
Paper: section 5.1. Does NOT know: models, steps, layers.
"""

import ctypes
import sys

import torch
from torch import Tensor

from minipaged.kernels.cpp.build import load_library
from minipaged.kernels.layout import block_size_of, num_kv_heads_of
from minipaged.kernels.metadata import AttentionMetadata
from minipaged.kernels.reference import attention as reference_attention

_POINTER, _INTEGER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Call(ctypes.Structure):
    """The arguments of one call; mirrors `Call` in paged_attention.cpp."""

    _fields_ = (
        ("query", _POINTER),
        ("key_cache", _POINTER),
        ("value_cache", _POINTER),
        ("output", _POINTER),
        ("block_tables", _POINTER),
        ("query_start", _POINTER),
        ("context_len", _POINTER),
        ("sinks", _POINTER),
        ("query_token_stride", _INTEGER),
        ("query_head_stride", _INTEGER),
        ("table_stride", _INTEGER),
        ("num_sequences", _INTEGER),
        ("num_heads", _INTEGER),
        ("num_kv_heads", _INTEGER),
        ("block_size", _INTEGER),
        ("key_dim", _INTEGER),
        ("value_dim", _INTEGER),
        ("sliding_window", _INTEGER),
        ("num_threads", _INTEGER),
        ("scale", _REAL),
        ("softcap", _REAL),
    )


_library = load_library()
_library.write_tokens.argtypes = (_POINTER, _INTEGER, _INTEGER, _POINTER, _POINTER, *[_INTEGER] * 4)
_library.write_tokens.restype = None
_attend_in = {
    torch.float32: _library.paged_attention_float32,
    torch.bfloat16: _library.paged_attention_bfloat16,
}
for _function in _attend_in.values():
    _function.argtypes = (ctypes.POINTER(Call),)
    _function.restype = None


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write key [T, Hkv, Dk] and value [T, Hkv, Dv] to the slots of slot_mapping [T] int64; -1 is skipped."""
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        tokens = _with_dense_rows(tokens.to(cache.dtype))
        size = cache.element_size()
        _library.write_tokens(
            tokens.data_ptr(),
            tokens.stride(0) * size,
            tokens.stride(1) * size,
            cache.data_ptr(),
            slot_mapping.data_ptr(),
            tokens.shape[0],
            tokens.shape[1],
            block_size_of(cache),
            tokens.shape[2] * size,
        )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of query [T, Hq, Dk] over the pool; returns [T, Hq, Dv] in the query's dtype.

    See `reference.oracle.paged_attention` for what each argument means.
    """
    attend = _attend_in.get(key_cache.dtype)
    if attend is None or query.dtype != key_cache.dtype:
        return reference_attention.paged_attention(
            query,
            key_cache,
            value_cache,
            metadata,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )
    query = _with_dense_rows(query)
    sinks = None if sinks is None else sinks.float().contiguous()
    num_tokens, num_heads, key_dim = query.shape
    value_dim = value_cache.shape[3]
    output = query.new_empty(num_tokens, num_heads, value_dim)
    tables = metadata.block_tables
    attend(
        Call(
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            output.data_ptr(),
            tables.data_ptr(),
            metadata.query_start.data_ptr(),
            metadata.context_len.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            query.stride(0),
            query.stride(1),
            tables.stride(0),
            metadata.num_sequences,
            num_heads,
            num_kv_heads_of(key_cache),
            block_size_of(key_cache),
            key_dim,
            value_dim,
            sliding_window or sys.maxsize,
            torch.get_num_threads(),
            scale,
            softcap or 0.0,
        )
    )
    return output


def _with_dense_rows(tensor: Tensor) -> Tensor:
    """The tensor itself if the elements of one head of one token lie side by side, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
