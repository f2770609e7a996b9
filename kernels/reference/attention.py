"""Paged attention in PyTorch, for any mix of decodes, chunks and whole prompts.

For each sequence, gather the blocks its rows can see (the block table is the index) and attend densely. The G
query heads that share a KV head are packed into the query-length dimension, so K and V are read once.

    query [n, Hkv * G, D]  ->  [Hkv, G * n, D]    row g * n + i of KV head h: token i of query head h * G + g

Decodes over short contexts are attended together (`short_decodes.py`). Paper: sections 4.1 and 5.1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minipaged.kernels.layout import block_size_of, num_kv_heads_of
from minipaged.kernels.metadata import AttentionMetadata, AttentionParameters
from minipaged.kernels.reference.short_decodes import attend_short_decodes

# Of keys [num_blocks, Hkv, block_size, Dk] and values [num_blocks, Hkv, block_size, Dv].
Pools = tuple[Tensor, Tensor]


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
    parameters = AttentionParameters(scale, sliding_window, softcap, sinks)
    pools = key_cache, value_cache
    starts, tables = metadata.query_start_list, metadata.block_tables.long()
    output = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    done = attend_short_decodes(output, query, pools, tables, metadata, parameters)
    for sequence, context_len in enumerate(metadata.context_len_list):
        first_row, end_row = starts[sequence : sequence + 2]
        if end_row > first_row and sequence not in done:
            rows = slice(first_row, end_row)
            output[rows] = attend_sequence(query[rows], pools, tables[sequence], context_len, parameters)
    return output


def attend_sequence(
    query: Tensor, pools: Pools, table: Tensor, context_len: int, parameters: AttentionParameters
) -> Tensor:
    """Attention of query [n, Hq, Dk], a sequence's last n tokens, by its block table [B] -> [n, Hq, Dv]."""
    scale, sliding_window, softcap, sinks = parameters
    query_len, num_heads, _ = query.shape
    block_size, num_kv_heads = block_size_of(pools[0]), num_kv_heads_of(pools[0])
    group = num_heads // num_kv_heads

    # The oldest position any row sees, and the blocks from there on:
    #   block    | 0 . . . | 1 . . . | 2 . . . |     block size 4, context 11, two rows, window 4:
    #   position             . . 6 7 | 8 9 10        row 9 sees 6..9, row 10 sees 7..10; block 0 is not read
    oldest = 0 if sliding_window is None else max(0, context_len - query_len - sliding_window + 1)
    first_block, end_block = oldest // block_size, -(-context_len // block_size)
    visible = slice(oldest - first_block * block_size, context_len - first_block * block_size)
    heads = torch.arange(num_kv_heads, device=query.device)
    # Of the pools viewed as [num_blocks * Hkv, block_size, D]: per head, the sequence's blocks.
    entries = (table[first_block:end_block] * num_kv_heads + heads[:, None]).view(-1)
    key, value = (
        cache.view(-1, *cache.shape[2:]).index_select(0, entries).view(num_kv_heads, -1, cache.shape[-1])
        for cache in pools
    )
    key, value = key[:, visible], value[:, visible]  # [Hkv, keys, D]

    plain = softcap is None and sinks is None
    if plain and 1 < query_len == key.shape[1] and (sliding_window is None or sliding_window >= query_len):
        # A whole prompt: SDPA's own causal mode skips half the work.
        inputs = query.transpose(0, 1)[None], key[None], value[None]
        attended = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=scale, enable_gqa=True)
        return attended[0].transpose(0, 1)

    packed = query.view(query_len, num_kv_heads, group, -1).permute(1, 2, 0, 3)
    packed = packed.reshape(num_kv_heads, group * query_len, -1)
    mask = None  # a single row sees all that was gathered
    if query_len > 1:
        mask = causal_mask(query_len, key.shape[1], sliding_window, query.device).repeat(group, 1)
    if plain:
        attended = F.scaled_dot_product_attention(packed[None], key[None], value[None], mask, scale=scale)[0]
    else:
        if sinks is not None:  # one for each row
            sinks = sinks.view(num_kv_heads, group).repeat_interleave(query_len, dim=1)
        attended = attend_explicitly(packed, key, value, mask, parameters._replace(sinks=sinks))
    attended = attended.view(num_kv_heads, group, query_len, -1)
    return attended.permute(2, 0, 1, 3).reshape(query_len, num_heads, -1)


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


def attend_explicitly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, parameters: AttentionParameters
) -> Tensor:
    """Dense attention with what SDPA lacks: softcap, and sink logits [H, rows] in the softmax's denominator.

    query [H, rows, Dk], key [H, keys, Dk], value [H, keys, Dv], mask [rows, keys]; returns [H, rows, Dv].
    """
    scale, _, softcap, sinks = parameters
    scores = torch.matmul(query.float(), key.float().transpose(1, 2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[..., None].float()], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[1]]
    return torch.matmul(weights.to(value.dtype), value)
