"""Lesson 10: paged attention as a GPU kernel. Write the kernel; the lesson is in lesson.md beside this file.

Check with    minipaged learn check 10        (on a CPU, in Triton's interpreter)
Stuck?        minipaged learn hint 10
"""

import torch
from torch import Tensor

import triton
import triton.language as tl
from minipaged.kernels.dispatch import why_not_triton
from minipaged.kernels.metadata import AttentionMetadata


@triton.jit
def attend_kernel(
    output, query, key_cache, value_cache, block_tables, row_sequence, row_position, scale,
    output_stride, query_stride_row, query_stride_head, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_PADDED: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
):
    """One query row of one head: program (row, head).

    output [T, Hq, Dv], contiguous: element (row, head, d) is at row * output_stride + head * VALUE_DIM + d.
    query: element (row, head, d) is at row * query_stride_row + head * query_stride_head + d.
    key_cache [blocks, Hkv, block_size, Dk] and value_cache [blocks, Hkv, block_size, Dv], contiguous.
    block_tables: entry (sequence, logical) is at sequence * table_stride + logical.
    row_sequence, row_position [T]: a row's sequence and its position there; it sees positions up to its own.

    Sizes that end in _PADDED are powers of two, as tl.arange requires: mask whatever is beyond the real size.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    # Task 1: rows that see one block. Task 2: as many blocks as the row sees, one after the other.
    tl.static_assert(False, "Lesson 10, task 1: score the keys of the row's first block, softmax, mix the values")


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
    """Launch the kernel, one program per row and head. Given; window, softcap and sinks are for the brave."""
    if sliding_window is not None or softcap is not None or sinks is not None:
        raise ValueError("this kernel has no sliding window, softcap or sinks; use a plain model")
    if (missing := why_not_triton(query.device)) is not None:
        raise ValueError(missing)
    num_rows, num_heads, key_dim = query.shape
    num_kv_heads, block_size, value_dim = *key_cache.shape[1:3], value_cache.shape[-1]
    sequences, positions = [], []
    for sequence, context in enumerate(metadata.context_len_list):
        first, end = metadata.query_start_list[sequence : sequence + 2]
        sequences += [sequence] * (end - first)
        positions += range(context - (end - first), context)
    output = torch.empty(num_rows, num_heads, value_dim, dtype=query.dtype, device=query.device)
    row_sequence, row_position = (
        torch.tensor(numbers, dtype=torch.int32, device=query.device) for numbers in (sequences, positions)
    )
    attend_kernel[(num_rows, num_heads)](
        output, query, key_cache, value_cache, metadata.block_tables, row_sequence, row_position, scale,
        output.stride(0), query.stride(0), query.stride(1), metadata.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size, BLOCK_PADDED=triton.next_power_of_2(block_size),
        KEY_DIM=key_dim, KEY_PADDED=triton.next_power_of_2(key_dim),
        VALUE_DIM=value_dim, VALUE_PADDED=triton.next_power_of_2(value_dim),
    )
    return output
