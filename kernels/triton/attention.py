"""Paged attention in Triton: `decode` for steps of decodes alone, `prefill` for all others.

Paper: section 5.1. Does NOT know: what a tile is; `config` says how large, the kernels what for.
"""

import torch
from torch import Tensor

from minipaged.kernels.metadata import AttentionMetadata
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
    """Attention of query [T, Hq, Dk] over the pool; returns [T, Hq, Dv] in the query's dtype.

    See `reference.oracle.paged_attention` for what each argument means. Raises ValueError for bfloat16 on a
    CPU: Triton's interpreter adds its bit patterns as integers.
    """
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter computes bfloat16 wrongly: use float16 or float32 there")
    architecture = architecture_of(query.device)
    head_dim = max(query.shape[-1], value_cache.shape[-1])
    if metadata.is_decode_only:
        return paged_decode(
            query,
            key_cache,
            value_cache,
            metadata,
            scale=scale,
            config=decode_config(architecture, head_dim, query.dtype),
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )
    return paged_prefill(
        query,
        key_cache,
        value_cache,
        metadata,
        scale=scale,
        config=prefill_config(architecture, head_dim, query.dtype),
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
    )
