"""Decodes over short contexts, padded and attended together: alone, their calls cost more than the reads."""

import torch
import torch.nn.functional as F
from torch import Tensor

from minipaged.kernels.layout import block_size_of, num_kv_heads_of
from minipaged.kernels.metadata import AttentionMetadata, AttentionParameters

# One CPU thread, 8 query / 4 KV heads of 64, fp32, milliseconds one by one -> together: 32 decodes of
# up to 64 tokens 1.0 -> 0.4, 200 of up to 60 tokens 6.7 -> 2.9, 64 of 64-380 tokens 4.5 -> 4.5.
SHORT_CONTEXT = 128
PADDED_ELEMENTS = 2**18  # of the keys gathered together: about 1 MB, the size of a core's L2 cache


def attend_short_decodes(
    output: Tensor,
    query: Tensor,
    pools: tuple[Tensor, Tensor],
    tables: Tensor,
    metadata: AttentionMetadata,
    parameters: AttentionParameters,
) -> set[int]:
    """Write the rows of output [T, Hq, Dv] that are decodes over short contexts; returns their sequences.

    `tables`: the block tables of `metadata` as int64, to index with.
    """
    scale, sliding_window, softcap, sinks = parameters
    sees_all = sliding_window is None or sliding_window >= SHORT_CONTEXT
    if not (sees_all and softcap is None and sinks is None):
        return set()
    starts, context_lens = metadata.query_start_list, metadata.context_len_list
    short = [
        sequence
        for sequence, context_len in enumerate(context_lens)
        if starts[sequence + 1] - starts[sequence] == 1 and context_len <= SHORT_CONTEXT
    ]
    done = set(short)
    num_kv_heads, head_size = num_kv_heads_of(pools[0]), pools[0].shape[-1]
    # Sorted, because similar lengths waste little padding.
    short.sort(key=lambda sequence: context_lens[sequence], reverse=True)
    while short:
        longest = context_lens[short[0]]
        count = max(1, PADDED_ELEMENTS // (longest * num_kv_heads * head_size))
        row_of = torch.tensor([starts[sequence] for sequence in short[:count]], device=query.device)
        batch = torch.tensor(short[:count], device=query.device)
        output[row_of] = attend_padded_decodes(
            query[row_of], pools, tables[batch], metadata.context_len[batch], longest, scale
        )
        short = short[count:]
    return done


def attend_padded_decodes(
    query: Tensor,
    pools: tuple[Tensor, Tensor],
    tables: Tensor,
    context_len: Tensor,
    longest: int,
    scale: float,
) -> Tensor:
    """Attention of n decodes at once: query [n, Hq, Dk], tables [n, B], context_len [n]; returns [n, Hq, Dv].

    Shorter contexts are padded to `longest` with their own last token, so that nothing unwritten is gathered;
    the mask hides the padding.
    """
    n, num_heads, _ = query.shape
    block_size, num_kv_heads = block_size_of(pools[0]), num_kv_heads_of(pools[0])
    last = context_len.long()[:, None] - 1
    position = torch.arange(longest, device=query.device)
    token = torch.minimum(position, last)  # [n, longest]
    block = tables.gather(1, token // block_size)
    heads = torch.arange(num_kv_heads, device=query.device)[:, None]
    entries = ((block[:, None] * num_kv_heads + heads) * block_size + (token % block_size)[:, None]).view(-1)
    key, value = (
        cache.view(-1, cache.shape[-1]).index_select(0, entries).view(n, num_kv_heads, longest, -1)
        for cache in pools
    )
    mask = (position <= last)[:, None, None]
    packed = query.view(n, num_kv_heads, num_heads // num_kv_heads, -1)
    return F.scaled_dot_product_attention(packed, key, value, mask, scale=scale).reshape(n, num_heads, -1)
