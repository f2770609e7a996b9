"""Batches for the attention benchmarks: one random storage, viewed as pools of any block size."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minipaged.kernels.layout import cache_shape
from minipaged.kernels.metadata import AttentionMetadata
from tests.kernels.cases import metadata_of

KV_HEADS, HEAD_DIM = 8, 128


def storage_bytes(tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of so many tokens."""
    return 2 * tokens * KV_HEADS * HEAD_DIM * dtype.itemsize


@dataclass
class Storage:
    """Random keys and values [elements], filled once; a batch takes slices of them as its pools."""

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, tokens: int, dtype: torch.dtype, device: torch.device) -> "Storage":
        elements = tokens * KV_HEADS * HEAD_DIM
        return cls(*(torch.empty(elements, dtype=dtype, device=device).normal_() for _ in range(2)))

    @property
    def tokens(self) -> int:
        return self.keys.numel() // (KV_HEADS * HEAD_DIM)

    def pools(self, num_blocks: int, block_size: int, index: int) -> tuple[Tensor, Tensor]:
        """The index-th key and value pool of this size; they wrap around at the end of the storage."""
        shape = cache_shape(num_blocks, block_size, KV_HEADS, HEAD_DIM)
        elements = num_blocks * block_size * KV_HEADS * HEAD_DIM
        first = index % (self.keys.numel() // elements) * elements
        return tuple(flat[first : first + elements].view(shape) for flat in (self.keys, self.values))


def metadata(
    lengths: list[tuple[int, int]], block_size: int, device: torch.device, *, consecutive: bool = False
) -> AttentionMetadata:
    """Metadata of (query length, context length) a sequence; blocks at random, or one behind the other."""
    blocks = [-(-context // block_size) for _, context in lengths]
    order = torch.arange(sum(blocks)) if consecutive else torch.randperm(sum(blocks))
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    first = 0
    for sequence, count in enumerate(blocks):
        tables[sequence, :count] = order[first : first + count]
        first += count
    return metadata_of(lengths, torch.empty(0, dtype=torch.int64), tables, device)
