"""Paged attention in PyTorch, for any mix of decodes, chunks and whole prompts: correct, then fast on a CPU.

One sequence at a time: gather the pages its rows can see (the block table is the index), then attend densely.
The G query heads that share a KV head are packed into the query-length dimension: K and V are read once.

    query [n, Hkv * G, D]  ->  [Hkv, G * n, D]    row g * n + i of KV head h: token i of query head h * G + g

Decodes over short contexts, where the calls cost more than the bytes, are padded and attended together.
Paper: section 4.1, 5.1. Does NOT know: how blocks were assigned, which layer this is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minipaged.kernels.layout import block_size_of, num_kv_heads_of
from minipaged.kernels.metadata import AttentionMetadata

# One CPU thread, 8 query / 4 KV heads of 64, fp32, milliseconds one by one -> together: 32 decodes of
# up to 64 tokens 1.0 -> 0.4, 200 of up to 60 tokens 6.7 -> 2.9, 64 of 64-380 tokens 4.5 -> 4.5.
SHORT_CONTEXT = 128
PADDED_ELEMENTS = 2**18  # of the keys gathered together: about 1 MB, the size of a core's L2 cache


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

    See `oracle.paged_attention` for what each argument means.
    """
    starts, context_lens = metadata.query_start_list, metadata.context_len_list
    tables = metadata.block_tables.long()
    output = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[-1])
    plain = softcap is None and sinks is None and (sliding_window is None or sliding_window >= SHORT_CONTEXT)
    short: list[int] = []
    for sequence, context_len in enumerate(context_lens):
        first_row, end_row = starts[sequence : sequence + 2]
        if plain and end_row - first_row == 1 and context_len <= SHORT_CONTEXT:
            short.append(sequence)
        elif end_row > first_row:
            output[first_row:end_row] = attend_sequence(
                query[first_row:end_row],
                key_cache,
                value_cache,
                tables[sequence],
                context_len,
                scale,
                sliding_window,
                softcap,
                sinks,
            )

    # alike lengths waste little padding
    short.sort(key=lambda sequence: context_lens[sequence], reverse=True)
    while short:
        longest = context_lens[short[0]]
        together = max(1, PADDED_ELEMENTS // (longest * key_cache.shape[1] * key_cache.shape[-1]))
        group, short = short[:together], short[together:]
        rows = torch.tensor([starts[sequence] for sequence in group], device=query.device)
        members = torch.tensor(group, device=query.device)
        output[rows] = attend_padded_decodes(
            query[rows],
            key_cache,
            value_cache,
            tables[members],
            metadata.context_len[members],
            longest,
            scale,
        )
    return output


def attend_sequence(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,
    context_len: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one sequence's rows [n, Hq, Dk], the last n of its `context_len` tokens; [n, Hq, Dv].

    `table` [B] int64 is the sequence's block table.
    """
    query_len, num_heads, _ = query.shape
    block_size, num_kv_heads = block_size_of(key_cache), num_kv_heads_of(key_cache)
    group = num_heads // num_kv_heads

    # The oldest position any row sees, and the blocks from there on:
    #   block    | 0 . . . | 1 . . . | 2 . . . |     block size 4, context 11, two rows, window 4:
    #   position             . . 6 7 | 8 9 10        row 9 sees 6..9, row 10 sees 7..10; block 0 is not read
    oldest = 0
    if sliding_window is not None:
        oldest = max(0, context_len - query_len - sliding_window + 1)
    first_block, end_block = oldest // block_size, -(-context_len // block_size)
    visible = slice(oldest - first_block * block_size, context_len - first_block * block_size)
    heads = torch.arange(num_kv_heads, device=query.device)
    # a page: a block of one head
    pages = (table[first_block:end_block] * num_kv_heads + heads[:, None]).view(-1)
    key = key_cache.view(-1, block_size, key_cache.shape[-1]).index_select(0, pages)
    value = value_cache.view(-1, block_size, value_cache.shape[-1]).index_select(0, pages)
    key = key.view(num_kv_heads, -1, key_cache.shape[-1])[:, visible]
    value = value.view(num_kv_heads, -1, value_cache.shape[-1])[:, visible]

    plain = softcap is None and sinks is None
    if plain and 1 < query_len == key.shape[1] and (sliding_window is None or sliding_window >= query_len):
        # A whole prompt: SDPA's own causal form skips half the work.
        rows = query.transpose(0, 1)[None]
        attended = F.scaled_dot_product_attention(
            rows, key[None], value[None], is_causal=True, scale=scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1)

    packed = query.view(query_len, num_kv_heads, group, -1).permute(1, 2, 0, 3)
    packed = packed.reshape(num_kv_heads, group * query_len, -1)
    mask = None  # a single row sees all that was gathered
    if query_len > 1:
        mask = causal_mask(query_len, key.shape[1], sliding_window, query.device).repeat(group, 1)
    if plain:
        attended = F.scaled_dot_product_attention(packed[None], key[None], value[None], mask, scale=scale)
    else:
        sink_of_row = None
        if sinks is not None:
            sink_of_row = sinks.view(num_kv_heads, group).repeat_interleave(query_len, dim=1)
        attended = explicit_attention(packed, key, value, mask, scale, softcap, sink_of_row)
    attended = attended.view(num_kv_heads, group, query_len, -1).permute(2, 0, 1, 3)
    return attended.reshape(query_len, num_heads, -1)


def attend_padded_decodes(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    context_len: Tensor,
    longest: int,
    scale: float,
) -> Tensor:
    """Attention of n decodes at once: query [n, Hq, Dk], tables [n, B], context_len [n]; returns [n, Hq, Dv].

    Shorter contexts are padded to `longest` by repeating their own last token, so that only real tokens
    is gathered; the mask then hides the repetitions.
    """
    batch, num_heads, key_dim = query.shape
    block_size, num_kv_heads, value_dim = (
        block_size_of(key_cache),
        num_kv_heads_of(key_cache),
        value_cache.shape[-1],
    )
    last = context_len.long()[:, None] - 1
    position = torch.arange(longest, device=query.device)
    token = torch.minimum(position, last)  # [n, longest]
    block = tables.gather(1, token // block_size)
    heads = torch.arange(num_kv_heads, device=query.device)[:, None]
    entries = ((block[:, None] * num_kv_heads + heads) * block_size + (token % block_size)[:, None]).view(-1)
    key = key_cache.view(-1, key_dim).index_select(0, entries).view(batch, num_kv_heads, longest, key_dim)
    value = (
        value_cache.view(-1, value_dim).index_select(0, entries).view(batch, num_kv_heads, longest, value_dim)
    )
    mask = (position <= last)[:, None, None]
    packed = query.view(batch, num_kv_heads, -1, key_dim)
    return F.scaled_dot_product_attention(packed, key, value, mask, scale=scale).reshape(batch, num_heads, -1)


def causal_mask(query_len: int, num_keys: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """Which of `num_keys` tokens each of the last `query_len` of them sees: bool [query_len, num_keys].

    num_keys = 5, query_len = 3            sliding_window = 3
        1 1 1 . .                              1 1 1 . .
        1 1 1 1 .                              . 1 1 1 .
        1 1 1 1 1                              . . 1 1 1
    """
    rows = torch.arange(num_keys - query_len, num_keys, device=device)[:, None]
    distance = rows - torch.arange(num_keys, device=device)
    mask = distance >= 0
    return mask if sliding_window is None else mask & (distance < sliding_window)


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Dense attention with what SDPA lacks: softcap, and sink logits [H, rows] in the softmax's denominator.

    query [H, rows, Dk], key [H, keys, Dk], value [H, keys, Dv], mask [rows, keys]; returns [H, rows, Dv].
    """
    scores = torch.matmul(query, key.transpose(1, 2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[..., None].float()], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[1]]
    return torch.matmul(weights.to(value.dtype), value)
