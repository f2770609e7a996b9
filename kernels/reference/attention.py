"""Paged attention in PyTorch, for any mix of decodes, chunks and whole prompts: correct, then fast on a CPU.

One sequence at a time: gather the pages its rows can see (the block table is the index), then attend densely.
The G query heads that share a KV head are packed into the query-length dimension: K and V are read once.

    query [n, Hkv * G, D]  ->  [Hkv, G * n, D]    row g * n + i of KV head h: token i of query head h * G + g

Paper: section 4.1, 5.1. Does NOT know: how blocks were assigned, which layer this is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minipaged.kernels.layout import block_size_of, num_kv_heads_of
from minipaged.kernels.metadata import AttentionMetadata


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
    num_heads = query.shape[1]
    block_size, num_kv_heads = block_size_of(key_cache), num_kv_heads_of(key_cache)
    group = num_heads // num_kv_heads
    # A page is one block of one head, a dense tile; [S, Hkv, B]: each head's pages in logical order.
    key_pages = key_cache.view(-1, block_size, key_cache.shape[-1])
    value_pages = value_cache.view(-1, block_size, value_cache.shape[-1])
    heads = torch.arange(num_kv_heads, device=query.device)
    pages = metadata.block_tables.long()[:, None, :] * num_kv_heads + heads[:, None]
    output = query.new_empty(query.shape[0], num_heads, value_cache.shape[-1])

    for sequence, context_len in enumerate(metadata.context_len_list):
        first_row, end_row = metadata.query_start_list[sequence : sequence + 2]
        query_len = end_row - first_row
        if query_len == 0:
            continue
        oldest = 0  # the oldest position any row of this sequence sees
        if sliding_window is not None:
            oldest = max(0, context_len - query_len - sliding_window + 1)
        first_block, end_block = oldest // block_size, -(-context_len // block_size)
        seen = pages[sequence, :, first_block:end_block].reshape(-1)
        visible = slice(oldest - first_block * block_size, context_len - first_block * block_size)
        key = key_pages.index_select(0, seen).view(num_kv_heads, -1, key_cache.shape[-1])[:, visible]
        value = value_pages.index_select(0, seen).view(num_kv_heads, -1, value_cache.shape[-1])[:, visible]

        rows = query[first_row:end_row].view(query_len, num_kv_heads, group, -1).permute(1, 2, 0, 3)
        packed = rows.reshape(num_kv_heads, group * query_len, -1)
        mask = None  # a single row sees everything that was gathered
        if query_len > 1:
            mask = causal_mask(query_len, key.shape[1], sliding_window, query.device).repeat(group, 1)
        if softcap is None and sinks is None:
            attended = F.scaled_dot_product_attention(
                packed[None], key[None], value[None], mask, scale=scale
            ).squeeze(0)
        else:
            sink_of_row = None
            if sinks is not None:
                sink_of_row = sinks.view(num_kv_heads, group).repeat_interleave(query_len, dim=1)
            attended = explicit_attention(packed, key, value, mask, scale, softcap, sink_of_row)
        attended = attended.view(num_kv_heads, group, query_len, -1).permute(2, 0, 1, 3)
        output[first_row:end_row] = attended.reshape(query_len, num_heads, -1)
    return output


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
