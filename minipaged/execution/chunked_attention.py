"""Chunked attention (Llama 4) as plain paged attention over more, shorter sequences.

A token sees only the tokens in its own chunk of positions. So a sequence whose rows touch several chunks is
cut at the chunk boundaries, and each piece becomes a separate sequence whose block table starts at the
chunk's first block:

    chunk size 8, block size 4      rows   . . . . . . 6 7 | 8 9 10           one sequence, table a b c
                                    pieces             6 7   context 8         table a b
                                                             8 9 10  context 3  table c

The kernels need no change.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from minipaged.execution.transfer import to_device
from minipaged.kernels.layout import block_size_of
from minipaged.kernels.metadata import AttentionMetadata


def split_at_chunks(metadata: AttentionMetadata, chunk_size: int, key_cache: Tensor) -> AttentionMetadata:
    """The metadata whose sequences are the pieces; rows and slots are unchanged.

    Args:
        metadata: the step's, S sequences.
        chunk_size: positions per chunk; a multiple of the block size.
        key_cache: [num_blocks, Hkv, block_size, Dk], for its block size.
    """
    if metadata.max_context_len <= chunk_size or not metadata.query_start_list[-1]:
        return metadata
    owners: list[int] = []
    first_tokens: list[int] = []
    query_start = [0]
    contexts: list[int] = []
    for sequence, context_len in enumerate(metadata.context_len_list):
        row, end_row = metadata.query_start_list[sequence : sequence + 2]
        while row < end_row:
            position = context_len - (end_row - row)
            chunk_start = position - position % chunk_size
            chunk_end = min(chunk_start + chunk_size, context_len)
            row += chunk_end - position
            owners.append(sequence)
            first_tokens.append(chunk_start)
            query_start.append(row)
            contexts.append(chunk_end - chunk_start)

    tables = metadata.block_tables
    device, block_size = tables.device, block_size_of(key_cache)
    of_sequences = [np.array(numbers, np.int64) for numbers in (owners, first_tokens)]
    counts = [np.array(numbers, np.int32) for numbers in (query_start, contexts)]
    rows, first_token, query_starts, context_lens = to_device([*of_sequences, *counts], device)
    first_block = first_token // block_size
    width = -(-max(contexts) // block_size)
    logical = first_block[:, None] + torch.arange(width, device=device)
    logical.clamp_(max=tables.shape[1] - 1)  # past the context: never read
    return AttentionMetadata(
        slot_mapping=metadata.slot_mapping,
        query_start=query_starts,
        context_len=context_lens,
        block_tables=tables[rows[:, None], logical],
        query_start_list=query_start,
        context_len_list=contexts,
        max_query_len=max(end - start for start, end in pairwise(query_start)),
        max_context_len=max(contexts),
    )
