"""Paged attention in Triton: `decode` for sequences with one query row, `prefill` for those with more.

In a mixed step, both are launched for all sequences, and each skips the other's (the lengths are on the
device). What the other sequences of the step are does not change a decode's result. On some chips, how many
there are does: a large batch has other tiles and splits than a small one.
Pools are `[num_blocks, Hkv, block_size, Dk or Dv]`. Paper: section 5.1.
"""

import torch
from torch import Tensor

from minipaged.kernels.layout import num_kv_heads_of
from minipaged.kernels.metadata import AttentionMetadata, AttentionParameters
from minipaged.kernels.triton.config import architecture_of, decode_config, prefill_config
from minipaged.kernels.triton.decode import paged_decode
from minipaged.kernels.triton.prefill import paged_prefill


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
    """Attention of query [T, Hq, Dk] over the pools -> [T, Hq, Dv]; see `AttentionParameters`.

    Raises ValueError for bfloat16 on a CPU: Triton's interpreter adds its bit patterns as integers.
    """
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter computes bfloat16 wrongly: use float16 or float32 there")
    architecture = architecture_of(query.device)
    head_dim = max(query.shape[-1], value_cache.shape[-1])
    output = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    inputs = output, query, key_cache, value_cache, metadata
    parameters = AttentionParameters(scale, sliding_window, softcap, sinks)
    if metadata.max_decode_len:
        num_pairs = metadata.num_sequences * num_kv_heads_of(key_cache)
        paged_decode(*inputs, decode_config(architecture, head_dim, query.dtype, num_pairs), *parameters)
    if metadata.max_query_len > 1:
        paged_prefill(*inputs, prefill_config(architecture, head_dim, query.dtype), *parameters)
    return output
