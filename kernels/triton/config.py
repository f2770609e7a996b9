"""The tiling of the attention kernels on each chip.

The tilings compile without register spills for the chips in the tests. For sm_90, 16 bits and head sizes up
to 128, that of decodes was chosen from a sweep on an H200 at head sizes 64 and 128, and one at 128 confirmed
that of prompts (docs/benchmarks/gpu.md). The speed of the others is **not yet measured**. Nothing is tuned at
import or at run time: the same inputs run the same code.
"""

from dataclasses import dataclass

import torch

MAX_SPLITS = 32
"""Of one context: a batch of long ones has enough programs, and each split's partial result takes memory."""

FEW_SPLITS = 4
"""So many splits of each context in a large batch are enough programs for a chip."""

# Every tile costs milliseconds there, and small shapes must still span several tiles.
INTERPRETER = "interpreter"

ROOMY = ("sm_90", "sm_100", "sm_103")
"""227 KB of shared memory, which the tensor cores read instead of registers."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tiling of `paged_decode`."""

    tile: int
    """Tokens whose K/V a program holds at once; a power of two, at least 16."""
    split_length: int
    """Tokens of a context one program attends to, a multiple of `tile`; more in long contexts (`num_splits`).

    A length, not a fixed count: ragged batches stay balanced, and how long the other contexts are does not
    change a sequence's result.
    """
    num_warps: int
    num_stages: int
    """Depth of the load pipeline, in which K and V wait for the block ids.

    5 (or 6) gives them two buffers each: a tile is loaded while the one before is computed. 3 (or 4) gives
    them one: only the block ids come early.
    """
    long_split_length: int = 0
    """If it is larger: what `split_length` grows to in contexts that would have more than `FEW_SPLITS`; also
    a multiple of `tile`."""
    max_splits: int = MAX_SPLITS
    early_reduce: bool = False
    """Whether the programs that combine the splits start before the last split ends, and wait for it
    (programmatic dependent launch)."""

    def num_splits(self, max_context_len: int, sliding_window: int | None = None) -> int:
        """The most splits that a context of up to so many tokens has.

        split_length          512 512 512 512 |  576 ...  1,024 | 1,024 1,024 ... | longer and longer
        splits                  1   2   3   4 |    4          4 |     5     6 ... |      32
        tokens                          2,048 |           4,096 |          32,768 |
        """
        span = max_context_len if sliding_window is None else min(max_context_len, sliding_window)
        longest = max(self.split_length, self.long_split_length)
        filled = min(-(-span // self.split_length), max(FEW_SPLITS, -(-span // longest)), self.max_splits)
        # A window touches one more than it fills, however it lies.
        return min(filled + (span < max_context_len), -(-max_context_len // self.split_length))


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tiling of `paged_prefill`."""

    rows: int
    """Rows of a program, query tokens times query heads of its KV head; a power of two, at least 16."""
    tile: int
    """Tokens whose K/V a program holds at once; a power of two, at least 16."""
    num_warps: int
    num_stages: int


def architecture_of(device: torch.device) -> str:
    """The name of the device's chip: "sm_90", "gfx942", or "interpreter" for a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def decode_config(architecture: str, head_dim: int, dtype: torch.dtype, num_pairs: int) -> DecodeConfig:
    """The tiling of `paged_decode` for the larger of the two head sizes and `num_pairs` pairs of sequence and
    KV head."""
    if architecture == INTERPRETER:
        return DecodeConfig(tile=16, split_length=32, num_warps=1, num_stages=1, long_split_length=64)
    if architecture == "sm_90" and head_dim <= 128 and dtype != torch.float32:
        # While one program of a multiprocessor waits for its only buffer, the others compute: three, or four
        # if the buffer is half as large. Few pairs fill the 132 multiprocessors only in short splits.
        if num_pairs < 128:
            return DecodeConfig(128, 256, num_warps=4, num_stages=3, early_reduce=True)
        tile = 128 if head_dim <= 64 else 64
        return DecodeConfig(tile, 512, num_warps=4, num_stages=3, long_split_length=1024, early_reduce=True)
    if dtype == torch.float32:
        tile = 32 if head_dim <= 64 else 16
    else:
        tile = 64 if head_dim <= 128 else 32 if head_dim <= 256 else 16
    num_stages = 5 if architecture in ROOMY else 3
    num_warps = 8 if dtype == torch.float32 and head_dim > 128 else 4  # (four spill with triton 3.6)
    return DecodeConfig(tile, 512, num_warps, num_stages)


def split_bytes(
    config: DecodeConfig, num_sequences: int, num_heads: int, value_dim: int, max_context_len: int
) -> int:
    """Bytes of the partial results of a decode in splits: maximum, sum and accumulator of each, in fp32."""
    num_splits = config.num_splits(max_context_len)
    return num_sequences * num_heads * num_splits * (value_dim + 2) * 4 if num_splits > 1 else 0


def prefill_config(architecture: str, head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """The tiling of `paged_prefill` for the larger of the two head sizes."""
    if architecture == INTERPRETER:
        return PrefillConfig(rows=16, tile=16, num_warps=1, num_stages=1)
    if dtype == torch.float32:
        rows, tile = (32, 32) if head_dim <= 64 else (32, 16) if head_dim <= 128 else (16, 16)
        return PrefillConfig(rows=rows, tile=tile, num_warps=8, num_stages=2)
    roomy = architecture in ROOMY
    if head_dim > 256:  # more rows spill
        rows, tile, num_stages = 32, 32 if roomy else 16, 2
    elif head_dim > 128:
        rows, tile, num_stages = 128 if roomy else 64, 32, 2
    else:
        rows, tile, num_stages = 128, 64 if roomy or head_dim <= 64 else 32, 3
    if architecture == "sm_90":  # later chips spill
        num_stages = 5
    return PrefillConfig(rows=rows, tile=tile, num_warps=8, num_stages=num_stages)
