"""Lesson 03: paged attention in PyTorch. Write the function that raises; the lesson is in lesson.md.

Check with    minipaged learn check 03
Stuck?        minipaged learn hint 03
"""

import torch
from torch import Tensor

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
    """Attention of a ragged batch over the KV pool.

    Args:
        query: [T, Hq, Dk], T rows of Hq heads. Of S sequences, sequence s owns the rows query_start_list[s] to
            query_start_list[s + 1]; they are the last of its context_len_list[s] tokens.
        key_cache: [num_blocks, Hkv, block_size, Dk]; query head h reads KV head h // (Hq // Hkv).
        value_cache: [num_blocks, Hkv, block_size, Dv].
        metadata: `query_start_list` and `context_len_list` are lists of ints, `block_tables` is a tensor [S, B]
            that lists the blocks of each sequence in order. Entries past its context are garbage. So is every
            slot that was never written and, with a window, everything older than what the first row sees.
        scale: the scores are multiplied by it.
        sliding_window: a row at position q sees positions k with 0 <= q - k < sliding_window (task 3).
        softcap: a score x becomes softcap * tanh(x / softcap) (task 3).
        sinks: [Hq], one extra score per head in the denominator of the softmax, without a value (task 3).

    Returns:
        [T, Hq, Dv] in the query's dtype.

    Task 1: sequences with one row (decodes). Task 2: any number of rows. Task 3: the three options.
    """
    raise NotImplementedError("Lesson 3, task 1: gather each sequence's keys and values, then attend")
