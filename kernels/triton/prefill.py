"""Attention in Triton for whole prompts and chunks, with or without decodes beside them: ragged, one launch.

One program per (query tile, KV head). A tile is a run of consecutive query tokens of one sequence, times the
G query heads that share the KV head: `rows` rows of one GEMM. Tiles are numbered without a list of
them: sequence s starts at tile `query_start[s] // tokens + s`, which leaves each sequence at least as many
tiles as it needs; a program finds its sequence by binary search, and the few left over return at once.
Pools are `[num_blocks, Hkv, block_size, Dk or Dv]`. Paper: section 5.1.

    keys     0          tile          2 * tile
             | . . . . . . . | . . . . . . . | x - - |   the rows of one program, a prompt's last chunk:
             | . . . . . . . | . . . . . . . | x x - |   . seen by every row, so no mask and no bound to check
             | . . . . . . . | . . . . . . . | x x x |   x masked row by row: the diagonal, a window's edge
"""

# Kernel arguments are Triton's own: pointers, numbers, compile-time constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl
from torch import Tensor

from minipaged.kernels.layout import block_size_of, num_kv_heads_of
from minipaged.kernels.metadata import AttentionMetadata
from minipaged.kernels.triton.config import PrefillConfig
from minipaged.kernels.triton.tiles import (
    LOG2_E,
    find_entries,
    fold_sink,
    fold_tile,
    gather_tile,
    in_base_2,
    score_tile,
)


def paged_prefill(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    config: PrefillConfig,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """As `paged_decode`, for all sequences with more than one row."""
    num_rows, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = num_kv_heads_of(key_cache), value_cache.shape[-1]
    group = num_heads // num_kv_heads
    rows = max(config.rows, triton.next_power_of_2(group))  # a token's heads stay together
    tokens = rows // group
    prefill_kernel[(num_rows // tokens + metadata.num_sequences, num_kv_heads)](
        *(output, query, key_cache, value_cache),
        *(metadata.block_tables, metadata.query_start, metadata.context_len, sinks),
        *in_base_2(scale, softcap),
        *(query.stride(0), query.stride(1), metadata.block_tables.stride(0), metadata.num_sequences),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size_of(key_cache),
        KEY_DIM=key_dim,
        KEY_DIM_PADDED=max(16, triton.next_power_of_2(key_dim)),
        VALUE_DIM=value_dim,
        VALUE_DIM_PADDED=max(16, triton.next_power_of_2(value_dim)),
        WINDOW=sliding_window,
        ROWS=rows,
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def find_sequence(query_start, tile, num_sequences, TOKENS: tl.constexpr):
    """The last sequence whose first tile, `query_start[s] // TOKENS + s`, is not beyond `tile`."""
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["table_stride", "num_sequences"])
def prefill_kernel(
    output,
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
    num_sequences,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend one query tile of one sequence for all query heads of a KV head."""
    TOKENS: tl.constexpr = ROWS // GROUP
    # Tiles late in a sequence see the most keys: they start first, so that the last to start are short.
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    sequence = find_sequence(query_starts, tile, num_sequences, TOKENS)
    query_start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_start
    first_token = (tile - (query_start // TOKENS + sequence)) * TOKENS
    if (first_token >= query_len) | (query_len == 1):
        return
    context_len = tl.load(context_lens + sequence)

    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (row < TOKENS * GROUP) & (token < query_len)
    first_position = context_len - query_len + first_token
    end = tl.minimum(first_position + TOKENS, context_len)  # one past the newest key any row sees
    row_position = tl.minimum(context_len - query_len + token, end - 1)  # rows of padding repeat the last
    oldest = 0
    if WINDOW is not None:
        oldest = tl.maximum(first_position - WINDOW + 1, 0)
    start = oldest // TILE * TILE

    key_dim = tl.arange(0, KEY_DIM_PADDED)
    query_row = query + (query_start + token)[:, None].to(tl.int64) * query_stride_row
    query_row += head[:, None].to(tl.int64) * query_stride_head
    q = tl.load(query_row + key_dim[None, :], mask=real[:, None] & (key_dim[None, :] < KEY_DIM), other=0.0)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_DIM_PADDED], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride

    # First the tiles that every row sees whole. (A window's edge crosses too many tiles to tell them apart.)
    if WINDOW is None:
        all_seen = (first_position + 1) // TILE * TILE
        for tile_start in range(0, all_seen, TILE):
            position = tile_start + tl.arange(0, TILE)
            readable = position >= 0
            entry = find_entries(table, position, None, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
            k = gather_tile(key_cache, entry, readable, KEY_DIM, KEY_DIM_PADDED)
            v = gather_tile(value_cache, entry, readable, VALUE_DIM, VALUE_DIM_PADDED)
            m_i, l_i, acc = fold_tile(score_tile(q, k, scale, softcap), v, m_i, l_i, acc)
        start = all_seen

    for tile_start in range(start, end, TILE):
        position = tile_start + tl.arange(0, TILE)
        readable = (position >= oldest) & (position < end)
        entry = find_entries(table, position, readable, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
        k = gather_tile(key_cache, entry, readable, KEY_DIM, KEY_DIM_PADDED)
        v = gather_tile(value_cache, entry, readable, VALUE_DIM, VALUE_DIM_PADDED)
        distance = row_position[:, None] - position[None, :]
        seen = (distance >= 0) & (position < end)[None, :]
        if WINDOW is not None:
            seen &= distance < WINDOW
        scores = tl.where(seen, score_tile(q, k, scale, softcap), float("-inf"))
        m_i, l_i, acc = fold_tile(scores, v, m_i, l_i, acc)

    if sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
        l_i, acc = fold_sink(sink, m_i, l_i, acc)
    value_dim = tl.arange(0, VALUE_DIM_PADDED)
    result = (query_start + token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
    tl.store(
        output + result[:, None] * VALUE_DIM + value_dim[None, :],
        acc / l_i[:, None],
        mask=real[:, None] & (value_dim[None, :] < VALUE_DIM),
    )
