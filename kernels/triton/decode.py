"""Decode attention in Triton: one query token per sequence; the context is read once, by block table.

One program per (sequence, KV head, split of the context). All G query heads that share the KV head are rows
of one matrix multiplication, so each K and V is read once, not G times. Decoding is memory-bound, so it needs
enough programs in flight; hence the splits, which a second, small kernel combines (Flash-Decoding).
Pools are `[num_blocks, Hkv, block_size, Dk or Dv]`. Paper: section 5.1 (the PagedAttention kernel).

    context of sequence s   |  block 5  |  block 2  |  block 7  |  block 0  |  block 9  |  3 |
    split_length = 2 blocks  [   program (s, h, 0)  ][   program (s, h, 1)  ][ program (s, h, 2) ]
                                   m_i, l_i, acc           m_i, l_i, acc          m_i, l_i, acc
                                              \\                  |                  /
    reduce                                       program (s, query head): output row

The splits of a long context are longer, so that it has no more than `max_splits` (`DecodeConfig.num_splits`).
With a sliding window they are counted from the one that holds the window's first token. If all contexts fit
in one split, its programs write the output themselves and there is no reduce. Programs of one sequence are
numbered one after the other: they run at about the same time, and read blocks that all KV heads share.
"""

# Kernel arguments are Triton's own: pointers, numbers, compile-time constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from minipaged.kernels.layout import block_size_of, num_kv_heads_of
from minipaged.kernels.metadata import AttentionMetadata
from minipaged.kernels.triton.config import FEW_SPLITS, DecodeConfig
from minipaged.kernels.triton.tiles import (
    LOG2_E,
    find_entries,
    fold_sink,
    fold_tile,
    gather_tile,
    in_base_2,
    score_tile,
)

MIN_ROWS = 16  # tl.dot takes no fewer; the rest is padding
SPLITS_AT_ONCE = tl.constexpr(16)
FEW = tl.constexpr(FEW_SPLITS)


def paged_decode(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    config: DecodeConfig,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attention over the pools of all sequences with one row of query [T, Hq, Dk], to output [T, Hq, Dv]."""
    num_sequences, (_, num_heads, key_dim) = metadata.num_sequences, query.shape
    num_kv_heads, value_dim = num_kv_heads_of(key_cache), value_cache.shape[-1]
    num_splits = config.num_splits(metadata.max_decode_len, sliding_window)
    m_splits = l_splits = None
    acc_splits = output
    if num_splits > 1:
        shape = (num_sequences, num_heads, num_splits)
        m_splits = query.new_empty(shape, dtype=torch.float32)
        l_splits = query.new_empty(shape, dtype=torch.float32)
        acc_splits = query.new_empty((*shape, value_dim), dtype=torch.float32)
    group = num_heads // num_kv_heads
    value_dim_padded = max(16, triton.next_power_of_2(value_dim))
    splitting = {
        "WINDOW": sliding_window,
        "TILE": config.tile,
        "SPLIT_LENGTH": config.split_length,
        "LONG_SPLIT_LENGTH": config.long_split_length,
        "MAX_SPLITS": config.max_splits,
        "EARLY_REDUCE": config.early_reduce and num_splits > 1,
    }
    decode_kernel[(num_splits, num_kv_heads, num_sequences)](
        *(acc_splits, m_splits, l_splits, query, key_cache, value_cache),
        *(metadata.block_tables, metadata.query_start, metadata.context_len, sinks),
        *in_base_2(scale, softcap),
        *(query.stride(0), query.stride(1), metadata.block_tables.stride(0)),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(group)),
        BLOCK_SIZE=block_size_of(key_cache),
        KEY_DIM=key_dim,
        KEY_DIM_PADDED=max(16, triton.next_power_of_2(key_dim)),
        VALUE_DIM=value_dim,
        VALUE_DIM_PADDED=value_dim_padded,
        **splitting,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        reduce_kernel[(num_sequences, num_heads)](
            *(output, acc_splits, m_splits, l_splits),
            *(metadata.query_start, metadata.context_len, sinks, num_splits),
            VALUE_DIM=value_dim,
            VALUE_DIM_PADDED=value_dim_padded,
            **splitting,
            num_warps=max(1, value_dim_padded // 128),  # so that sums over splits stay within a warp
            **({"launch_pdl": True} if config.early_reduce else {}),  # (unknown to ROCm)
        )


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    acc_out,
    m_out,
    l_out,
    query,
    key_cache,
    value_cache,
    block_tables,
    query_starts,
    context_lens,
    sinks,
    scale,
    softcap,
    query_stride_row,
    query_stride_head,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_LENGTH: tl.constexpr,
    LONG_SPLIT_LENGTH: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    EARLY_REDUCE: tl.constexpr,
):
    """Attend one split for all query heads of a KV head; without `m_out`, there is only one split."""
    if EARLY_REDUCE:
        tl.extra.cuda.gdc_launch_dependents()
    split, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(0)
    query_start = tl.load(query_starts + sequence)
    context_len = tl.load(context_lens + sequence)  # (before the branch, so that it waits for no other load)
    if tl.load(query_starts + sequence + 1) - query_start != 1:
        return
    oldest, split_length, first_split, _ = find_splits(
        context_len, WINDOW, TILE, SPLIT_LENGTH, LONG_SPLIT_LENGTH, MAX_SPLITS
    )
    start, end = oldest // TILE * TILE, context_len
    if m_out is not None:
        split_start = (first_split + split) * split_length
        start, end = tl.maximum(start, split_start), tl.minimum(split_start + split_length, end)
        if start >= end:
            return

    row = tl.arange(0, ROWS)
    real = row < GROUP
    head = kv_head * GROUP + row
    place = query_start if m_out is None else sequence
    result = place.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head  # [ROWS]
    if m_out is not None:
        result = result * num_splits + split

    key_dim = tl.arange(0, KEY_DIM_PADDED)
    query_row = (
        query + query_start.to(tl.int64) * query_stride_row + head[:, None].to(tl.int64) * query_stride_head
    )
    q = tl.load(query_row + key_dim[None, :], mask=real[:, None] & (key_dim[None, :] < KEY_DIM), other=0.0)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_DIM_PADDED], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    for tile_start in range(start, end, TILE):
        position = tile_start + tl.arange(0, TILE)
        seen = (position >= oldest) & (position < end)
        entry = find_entries(table, position, seen, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
        k = gather_tile(key_cache, entry, seen, KEY_DIM, KEY_DIM_PADDED)
        v = gather_tile(value_cache, entry, seen, VALUE_DIM, VALUE_DIM_PADDED)
        scores = tl.where(seen[None, :], score_tile(q, k, scale, softcap), float("-inf"))
        m_i, l_i, acc = fold_tile(scores, v, m_i, l_i, acc)

    if m_out is not None:
        tl.store(m_out + result, m_i, mask=real)
        tl.store(l_out + result, l_i, mask=real)
    else:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
            l_i, acc = fold_sink(sink, m_i, l_i, acc)
        acc = acc / l_i[:, None]
    value_dim = tl.arange(0, VALUE_DIM_PADDED)
    tl.store(
        acc_out + result[:, None] * VALUE_DIM + value_dim[None, :],
        acc,
        mask=real[:, None] & (value_dim[None, :] < VALUE_DIM),
    )


@triton.jit
def find_splits(
    context_len,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_LENGTH: tl.constexpr,
    LONG_SPLIT_LENGTH: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """The oldest token in the window, the length of the splits, the first of them and their number."""
    oldest = 0
    if WINDOW is not None:
        oldest = tl.maximum(context_len - WINDOW, 0)
    span = context_len - oldest
    num_tiles = tl.minimum(tl.cdiv(span, FEW * TILE), LONG_SPLIT_LENGTH // TILE)
    num_tiles = tl.maximum(tl.maximum(num_tiles, SPLIT_LENGTH // TILE), tl.cdiv(span, MAX_SPLITS * TILE))
    length = num_tiles * TILE  # (last, so that the compiler knows the factor)
    first = oldest // length
    return oldest, length, first, tl.cdiv(context_len, length) - first


@triton.jit(do_not_specialize=["num_splits"])
def reduce_kernel(
    output,
    acc_in,
    m_in,
    l_in,
    query_starts,
    context_lens,
    sinks,
    num_splits,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_LENGTH: tl.constexpr,
    LONG_SPLIT_LENGTH: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    EARLY_REDUCE: tl.constexpr,
):
    """Fold the splits of one (sequence, query head) into its output row."""
    sequence, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    query_start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_start
    context_len = tl.load(context_lens + sequence)
    if EARLY_REDUCE:
        # All partial results are there, and the kernel that writes them has ended.
        tl.extra.cuda.gdc_wait()
    if query_len != 1:
        return
    _, _, _, count = find_splits(context_len, WINDOW, TILE, SPLIT_LENGTH, LONG_SPLIT_LENGTH, MAX_SPLITS)
    result = sequence.to(tl.int64) * num_heads + head
    value_dim = tl.arange(0, VALUE_DIM_PADDED)
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, VALUE_DIM_PADDED], tl.float32)
    for first in range(0, count, SPLITS_AT_ONCE):
        split = first + tl.arange(0, SPLITS_AT_ONCE)
        partial = result * num_splits + split
        m_j = tl.load(m_in + partial, mask=split < count, other=float("-inf"))
        l_j = tl.load(l_in + partial, mask=split < count, other=0.0)
        inside = (split < count)[:, None] & (value_dim[None, :] < VALUE_DIM)
        acc_j = tl.load(acc_in + partial[:, None] * VALUE_DIM + value_dim[None, :], mask=inside, other=0.0)
        m_new = tl.maximum(m_i, tl.max(m_j, 0))
        weight = tl.exp2(m_j - m_new)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(l_j * weight, 0)
        acc = acc * alpha[:, None] + tl.sum(acc_j * weight[:, None], 0)[None, :]
        m_i = m_new
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        l_i, acc = fold_sink(sink, m_i, l_i, acc)
    row = tl.reshape(acc / l_i[:, None], [VALUE_DIM_PADDED])
    place = query_start.to(tl.int64) * num_heads + head
    tl.store(output + place * VALUE_DIM + value_dim, row, mask=value_dim < VALUE_DIM)
