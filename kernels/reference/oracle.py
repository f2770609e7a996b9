"""Paged attention, computed exactly as it is defined: one query row at a time, in float64.

For each row: look up every visible token through the block table, score it, softmax, mix the values. Nothing
is batched, packed or skipped; the fast paths are tested against it. Paper: equations 2 and 3 (section 2.1)
and 4 (section 4.1).
"""

import torch
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
    """Attention of query [T, Hq, Dk] over the pools -> [T, Hq, Dv] float64; see `AttentionParameters`."""
    num_rows, num_heads, _ = query.shape
    block_size, num_kv_heads = block_size_of(key_cache), num_kv_heads_of(key_cache)
    group = num_heads // num_kv_heads
    output = torch.zeros(num_rows, num_heads, value_cache.shape[-1], dtype=torch.float64)
    for sequence, context_len in enumerate(metadata.context_len_list):
        first_row, end_row = metadata.query_start_list[sequence : sequence + 2]
        table = metadata.block_tables[sequence].tolist()
        for row in range(first_row, end_row):
            position = context_len - (end_row - row)
            oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            seen = [(table[k // block_size], k % block_size) for k in range(oldest, position + 1)]
            # [visible, Hkv, Dk] and [visible, Hkv, Dv]
            keys = torch.stack([key_cache[block, :, offset] for block, offset in seen])
            values = torch.stack([value_cache[block, :, offset] for block, offset in seen])
            for head in range(num_heads):
                scores = keys[:, head // group].double() @ query[row, head].double() * scale
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                weights = torch.softmax(scores, dim=0)[: len(seen)]
                output[row, head] = weights @ values[:, head // group].double()
    return output
