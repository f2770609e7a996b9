"""Decode attention in Triton: one query token a sequence, its context read once through the block table.

One program per (sequence, KV head, split of the context). All G query heads that share the KV head are rows
of one matrix product, so each K and V is read once, not G times. Decode moves bytes and little else: speed
means enough programs in flight, hence the splits, folded together by a second, small kernel (flash-decoding).
Paper: section 5.1 (the PagedAttention kernel). Does NOT know: prompts; those go to `prefill`.

    context of sequence s   |  block 5  |  block 2  |  block 7  |  block 0  |  block 9  |  3 |
    split_length = 2 blocks  [   program (s, h, 0)  ][   program (s, h, 1)  ][ program (s, h, 2) ]
                                  max, sum, mixed         max, sum, mixed        max, sum, mixed
                                              \\                  |                  /
    reduce                                       program (s, query head): output row

With a sliding window the splits are counted from the one that holds the window's first token. Where one split
is enough for everyone, its programs write the output themselves and there is no reduce.
"""

# Kernel arguments are Triton's own: pointers, numbers, compile-time constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from minipaged.kernels.layout import block_size_of, num_kv_heads_of
from minipaged.kernels.metadata import AttentionMetadata
from minipaged.kernels.triton.config import DecodeConfig
from minipaged.kernels.triton.tiles import LOG2_E, fold_sink, fold_tile, gather_tile, score_tile

MIN_ROWS = 16  # tl.dot takes no fewer; further rows are padding
REDUCE_CHUNK = tl.constexpr(16)


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    config: DecodeConfig,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a decode-only batch: query [S, Hq, Dk], one row a sequence; returns [S, Hq, Dv].

    Arguments as `reference.oracle.paged_attention`, plus the tiling.
    """
    num_sequences, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = num_kv_heads_of(key_cache), value_cache.shape[-1]
    num_splits = triton.cdiv(metadata.max_context_len, config.split_length)
    if sliding_window is not None:  # a window touches this many splits, however it lies
        num_splits = min(num_splits, triton.cdiv(sliding_window, config.split_length) + 1)
    output = query.new_empty(num_sequences, num_heads, value_dim)
    maximum = total = None
    mixed = output
    if num_splits > 1:
        shape = (num_sequences, num_heads, num_splits)
        maximum = query.new_empty(shape, dtype=torch.float32)
        total = query.new_empty(shape, dtype=torch.float32)
        mixed = query.new_empty((*shape, value_dim), dtype=torch.float32)
    group = num_heads // num_kv_heads
    value_dim_padded = max(16, triton.next_power_of_2(value_dim))
    decode_kernel[(num_sequences, num_kv_heads, num_splits)](
        mixed,
        maximum,
        total,
        query,
        key_cache,
        value_cache,
        metadata.block_tables,
        metadata.context_len,
        sinks,
        scale,
        softcap,
        query.stride(0),
        query.stride(1),
        metadata.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(group)),
        BLOCK_SIZE=block_size_of(key_cache),
        KEY_DIM=key_dim,
        KEY_DIM_PADDED=max(16, triton.next_power_of_2(key_dim)),
        VALUE_DIM=value_dim,
        VALUE_DIM_PADDED=value_dim_padded,
        WINDOW=sliding_window,
        TILE=config.tile,
        SPLIT_LENGTH=config.split_length,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        reduce_kernel[(num_sequences, num_heads)](
            output,
            mixed,
            maximum,
            total,
            sinks,
            num_splits,
            VALUE_DIM=value_dim,
            VALUE_DIM_PADDED=value_dim_padded,
            num_warps=4,
        )
    return output


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    mixed_out,
    maximum_out,
    total_out,
    query,
    key_cache,
    value_cache,
    block_tables,
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
):
    """Attend one split for all query heads of a KV head; without `maximum_out`, the split is all there is."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    context_len = tl.load(context_lens + sequence)
    oldest = 0
    if WINDOW is not None:
        oldest = tl.maximum(context_len - WINDOW, 0)
    split_start = (oldest // SPLIT_LENGTH + split) * SPLIT_LENGTH
    start = tl.maximum(split_start, oldest // TILE * TILE)
    end = tl.minimum(split_start + SPLIT_LENGTH, context_len)

    row = tl.arange(0, ROWS)
    real = row < GROUP
    head = kv_head * GROUP + row
    result = (sequence.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * num_splits + split  # [ROWS]
    if maximum_out is not None and start >= end:  # an empty split: the reduce reads no more than this
        tl.store(maximum_out + result, float("-inf"), mask=real)
        tl.store(total_out + result, 0.0, mask=real)
        return

    key_dim = tl.arange(0, KEY_DIM_PADDED)
    query_row = (
        query + sequence.to(tl.int64) * query_stride_row + head[:, None].to(tl.int64) * query_stride_head
    )
    q = tl.load(query_row + key_dim[None, :], mask=real[:, None] & (key_dim[None, :] < KEY_DIM), other=0.0)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_DIM_PADDED], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    for tile_start in range(start, end, TILE):
        position = tile_start + tl.arange(0, TILE)
        seen = (position >= oldest) & (position < end)
        blocks = tl.load(table + position // BLOCK_SIZE, mask=seen, other=0)
        offsets = position % BLOCK_SIZE
        k = gather_tile(
            key_cache, blocks, offsets, kv_head, seen, NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM, KEY_DIM_PADDED
        )
        v = gather_tile(
            value_cache, blocks, offsets, kv_head, seen, NUM_KV_HEADS, BLOCK_SIZE, VALUE_DIM, VALUE_DIM_PADDED
        )
        scores = tl.where(seen[None, :], score_tile(q, k, scale, softcap), float("-inf"))
        maximum, total, mixed = fold_tile(scores, v, maximum, total, mixed)

    if maximum_out is not None:
        tl.store(maximum_out + result, maximum, mask=real)
        tl.store(total_out + result, total, mask=real)
    else:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
            total, mixed = fold_sink(sink, maximum, total, mixed)
        mixed = mixed / total[:, None]
    value_dim = tl.arange(0, VALUE_DIM_PADDED)
    tl.store(
        mixed_out + result[:, None] * VALUE_DIM + value_dim[None, :],
        mixed,
        mask=real[:, None] & (value_dim[None, :] < VALUE_DIM),
    )


@triton.jit(do_not_specialize=["num_splits"])
def reduce_kernel(
    output,
    mixed_in,
    maximum_in,
    total_in,
    sinks,
    num_splits,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
):
    """Fold the splits of one (sequence, query head) into its output row."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    result = tl.program_id(0).to(tl.int64) * num_heads + head
    value_dim = tl.arange(0, VALUE_DIM_PADDED)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([1, VALUE_DIM_PADDED], tl.float32)
    for first in range(0, num_splits, REDUCE_CHUNK):
        split = first + tl.arange(0, REDUCE_CHUNK)
        partial = result * num_splits + split
        their_maximum = tl.load(maximum_in + partial, mask=split < num_splits, other=float("-inf"))
        their_total = tl.load(total_in + partial, mask=split < num_splits, other=0.0)
        # An empty split, its sum zero, has written no values.
        theirs = tl.load(
            mixed_in + partial[:, None] * VALUE_DIM + value_dim[None, :],
            mask=(their_total > 0)[:, None] & (value_dim[None, :] < VALUE_DIM),
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, tl.max(their_maximum, 0))
        weight = tl.exp2(their_maximum - new_maximum)
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(their_total * weight, 0)
        mixed = mixed * shrink[:, None] + tl.sum(theirs * weight[:, None], 0)[None, :]
        maximum = new_maximum
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total, mixed = fold_sink(sink, maximum, total, mixed)
    row = tl.reshape(mixed / total[:, None], [VALUE_DIM_PADDED])
    tl.store(output + result * VALUE_DIM + value_dim, row, mask=value_dim < VALUE_DIM)
