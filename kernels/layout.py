"""The shape of a KV pool: the one place that decides how a block is laid out in memory.

A layer has two, `[num_blocks, num_kv_heads, block_size, head_dim]` for keys and for values (their head sizes
may differ). A head's tokens are contiguous within a block, so attention reads one dense tile per block. A
token is addressed by its slot, `block_id * block_size + offset`.
Paper: sections 4.2 (KV blocks) and 5.1 (kernels).

Measured on one CPU thread: decode of 32 sequences, context 512-1024, 8 query / 4 KV heads of 64, block size
16, blocks gathered and attended one sequence at a time; milliseconds per layer (fp32 / bf16), three runs:

    [blocks, block_size, kv_heads, head_dim]     9.7-11.4 / 4.8-5.4      (tokens of a head are strided)
    [blocks, kv_heads, block_size, head_dim]     5.9-7.5  / 5.0-5.1      (chosen)
"""

import torch

MAX_BLOCK_SIZE = 256


def cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int]:
    """The shape of one layer's key (or value) pool.

    Raises ValueError for a block size outside 1..256 and for any other count below 1.
    """
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"block_size {block_size} is outside 1..{MAX_BLOCK_SIZE}: choose for example 16")
    for name, count in (("num_blocks", num_blocks), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        if count < 1:
            raise ValueError(f"{name} is {count}: a KV pool needs at least 1")
    return num_blocks, num_kv_heads, block_size, head_dim


def block_size_of(cache: torch.Tensor) -> int:
    """Tokens per block of this pool."""
    return cache.shape[2]


def num_kv_heads_of(cache: torch.Tensor) -> int:
    """KV heads of this pool."""
    return cache.shape[1]
