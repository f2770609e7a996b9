"""Paged attention and cache writes in C++, called with the addresses of tensors.

The source is `paged_attention.cpp`, compiled on first use (`build`). Tensors are passed as pointers and
strides: no copy, no dependency on torch's C++ API. The reference computes whatever the library does not
support (other types, copies and swaps of blocks). Pools are `[num_blocks, Hkv, block_size, D]`.
Paper: section 5.1.
"""

import ctypes
import struct
import sys

import torch
from torch import Tensor

from minipaged.kernels.cpp.build import INTEGER, POINTER, declare, declare_by_dtype
from minipaged.kernels.cpp.panels import best_prefetch
from minipaged.kernels.layout import block_size_of
from minipaged.kernels.metadata import AttentionMetadata, AttentionParameters
from minipaged.kernels.reference import attention as reference_attention

ATTENTION_CALL = struct.Struct("8P 12q 2d")  # the struct `AttentionCall` of calls.h
_attend = declare_by_dtype("paged_attention", ctypes.c_char_p)
_write_tokens = declare("write_tokens", POINTER, INTEGER, INTEGER, POINTER, POINTER, *[INTEGER] * 4)


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write key [T, Hkv, Dk] and value [T, Hkv, Dv] to the slots of slot_mapping [T] int64; -1 is skipped."""
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        tokens = _with_dense_rows(tokens.to(cache.dtype))
        size = cache.element_size()
        _write_tokens(
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
    """Attention of query [T, Hq, Dk] over the pools -> [T, Hq, Dv]; see `AttentionParameters`."""
    attend = _attend.get(key_cache.dtype)
    if attend is None or query.dtype != key_cache.dtype:
        parameters = AttentionParameters(scale, sliding_window, softcap, sinks)
        return reference_attention.paged_attention(
            query, key_cache, value_cache, metadata, **parameters._asdict()
        )
    query = _with_dense_rows(query)
    sinks = None if sinks is None else sinks.float().contiguous()
    num_tokens, num_heads, key_dim = query.shape
    _, num_kv_heads, block_size, value_dim = value_cache.shape
    output = query.new_empty(num_tokens, num_heads, value_dim)
    tables = metadata.block_tables
    call = ATTENTION_CALL.pack(
        *(query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), output.data_ptr()),
        *(tables.data_ptr(), metadata.query_start.data_ptr(), metadata.context_len.data_ptr()),
        0 if sinks is None else sinks.data_ptr(),
        *(query.stride(0), query.stride(1), tables.stride(0)),
        *(metadata.num_sequences, num_heads, num_kv_heads, block_size),
        *(key_dim, value_dim, sliding_window or sys.maxsize, torch.get_num_threads()),
        best_prefetch(),
        *(scale, softcap or 0.0),
    )
    attend(call)
    return output


def _with_dense_rows(tensor: Tensor) -> Tensor:
    """The tensor itself if the elements of a token's head are contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
