"""How the attention kernels tile their work on each chip.

The tilings compile without register spills for the chips in the tests; their speed is **not yet measured**.
Nothing is tuned at import or at run time: the same inputs run the same code.
"""

from dataclasses import dataclass

import torch

# Every tile costs milliseconds there, and small shapes must still span several tiles.
INTERPRETER = "interpreter"


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tiling of `paged_decode`."""

    tile: int
    """Tokens whose K/V a program holds at once; a power of two, at least 16."""
    split_length: int
    """Tokens of a context one program attends to, a multiple of `tile`.

    A fixed length, not a fixed count: ragged batches stay balanced, and a sequence's result does not depend
    on who else is in the batch.
    """
    num_warps: int
    num_stages: int
    """Depth of the load pipeline; the block-table lookup takes one level of it."""


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


def decode_config(architecture: str, head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """The tiling of `paged_decode` for the larger of the two head sizes."""
    if architecture == INTERPRETER:
        return DecodeConfig(tile=16, split_length=32, num_warps=1, num_stages=1)
    if dtype == torch.float32:
        tile = 32 if head_dim <= 64 else 16
    else:
        tile = 64 if head_dim <= 128 else 32
    return DecodeConfig(tile=tile, split_length=512, num_warps=4, num_stages=3)


def split_bytes(
    config: DecodeConfig, num_sequences: int, num_heads: int, value_dim: int, max_context_len: int
) -> int:
    """Bytes of the partial results of a decode in splits: maximum, sum and accumulator of each, in fp32."""
    num_splits = -(-max_context_len // config.split_length)
    return num_sequences * num_heads * num_splits * (value_dim + 2) * 4 if num_splits > 1 else 0


def prefill_config(architecture: str, head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """The tiling of `paged_prefill` for the larger of the two head sizes."""
    if architecture == INTERPRETER:
        return PrefillConfig(rows=16, tile=16, num_warps=1, num_stages=1)
    if dtype == torch.float32:
        rows, tile = (32, 32) if head_dim <= 64 else (32, 16) if head_dim <= 128 else (16, 16)
        return PrefillConfig(rows=rows, tile=tile, num_warps=8, num_stages=2)
    roomy = architecture in ("sm_90", "sm_100")  # the matrix units read shared memory, not registers
    if head_dim > 128:
        return PrefillConfig(rows=128 if roomy else 64, tile=32, num_warps=8, num_stages=2)
    return PrefillConfig(rows=128, tile=64 if roomy or head_dim <= 64 else 32, num_warps=8, num_stages=3)
