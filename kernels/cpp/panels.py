"""Matrix multiplications with weights packed in panels of 64 outputs; the source is `panel_product.cpp`.

    weights [N, K] -> panels [N / 64], each [K / S, 64, S]     S elements of an output share 32 bits

A panel is read sequentially, at the full memory bandwidth; a matrix row by row is not. Three formats are
quantized: each group of 64 outputs and 64 k begins with 64 scales in bfloat16, and its values are unsigned,
with a zero point. w8a8 is int8 with 8-bit activations, quantized 64 elements at a time. Formats: float32,
bfloat16, float16, int8, int4, w8a8. Rows have a float type.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
import time
from contextlib import suppress
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipaged.kernels.cpp.build import DTYPES, declare

WIDTH = 64
GROUP = 64
"""Elements along k that share a scale."""

TRIAL_BYTES = 1 << 26
"""Weights that one core reads in the micro-benchmark: more than most caches hold."""

ZERO_POINTS = {"int8": 128, "int4": 8, "w8a8": 128}
"""Quantized formats and their zero points."""

_PRODUCT = struct.Struct("4P 7q")  # the struct `Product` of calls.h
_ROW_TYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
_FORMATS = {f"{name}_{name}" for name in _ROW_TYPES.values()} | {
    f"{format}_{name}" for format in ZERO_POINTS for name in _ROW_TYPES.values()
}
_multiply = {name: declare(f"multiply_{name}", ctypes.c_char_p) for name in sorted(_FORMATS)}


class Prefetch(IntEnum):
    """How the weights of few rows, and the keys and values of decodes, are prefetched.

    Software prefetches go into L1, bypassing L2 so that other data stay there, or into L2. (With INTO_L2 and
    AVX-512, one row in float32 still leaves it to the hardware, which is faster.)
    """

    BY_HARDWARE = 0
    PAST_L2 = 1
    INTO_L2 = 2


class Panels(NamedTuple):
    """The panels of a weight [num_outputs, size] in memory."""

    address: int
    panel_bytes: int
    num_outputs: int
    size: int
    format: str

    @property
    def num_bytes(self) -> int:
        """Bytes of all panels."""
        return -(-self.num_outputs // WIDTH) * self.panel_bytes


def multiply_of(panels: Panels, dtype: torch.dtype) -> Any:
    """The C++ function for rows of that type."""
    return _multiply[f"{panels.format}_{_ROW_TYPES[dtype]}"]


def panel_product(rows: Tensor, panels: Panels, bias: Tensor | None = None) -> Tensor:
    """rows [..., size] -> rows x weights^T + bias [..., num_outputs], in the rows' type; sums are float32."""
    flat = rows.reshape(-1, panels.size)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    output = rows.new_empty(*rows.shape[:-1], panels.num_outputs)
    call = pack_product(panels, bias, best_prefetch(), flat, output, torch.get_num_threads())
    multiply_of(panels, rows.dtype)(call)
    return output


def pack_product(
    panels: Panels,
    bias: Tensor | None,
    prefetch: Prefetch,
    rows: Tensor | None = None,
    output: Tensor | None = None,
    num_threads: int = 0,
) -> bytes:
    """The struct `Product`. Without rows [T, size], their fields are 0; C++ fills them in."""
    return _PRODUCT.pack(
        *(panels.address, _address(rows), _address(bias), _address(output)),
        *((0, 0) if rows is None else (len(rows), rows.stride(0))),
        *(panels.num_outputs, panels.size, panels.panel_bytes, num_threads, prefetch),
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@cache
def best_prefetch() -> Prefetch:
    """What is fastest on this CPU with few rows.

    Two rows in bfloat16 read 34 GB/s on Zen 4 with software prefetching past L2 and 41 without; four rows in
    float32 on Granite Rapids, 6 past L2, 12 into L2 and 11 without. On Zen 5, past L2 is fastest. Without
    AVX-512, rows that do not prefetch read several panels alternately, which is faster on Zen 3. Past L2 must
    be clearly faster than the hardware: in other runs on Zen 4, it came within 2 % in this trial, but models
    then decoded up to a third slower. Results are bit-identical. Measured once in a process, in 0.1 to 0.3 s.
    """
    try:  # (not a tensor's memory: the allocator may keep what is freed)
        memory = mmap.mmap(-1, TRIAL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return Prefetch.BY_HARDWARE
    if sys.platform == "linux":  # weights are in huge pages, too, if the kernel has them
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    size = 1024
    # (AMX, which multiplies bfloat16, prefetches in its own way.)
    dtype, num_rows = (torch.float32, 4) if torch.cpu._is_amx_tile_supported() else (torch.bfloat16, 2)
    weights = torch.frombuffer(memory, dtype=dtype).fill_(1).view(-1, size)
    panels = Panels(weights.data_ptr(), weights[:WIDTH].nbytes, len(weights), size, _ROW_TYPES[dtype])
    rows, output = weights[:num_rows], weights.new_empty(num_rows, len(weights))
    calls = [pack_product(panels, None, prefetch, rows, output, num_threads=1) for prefetch in Prefetch]
    multiply = multiply_of(panels, dtype)
    trials = [[_seconds(multiply, call) for call in calls] for _ in range(12)]
    hardware, past_l2, into_l2 = (min(seconds) for seconds in zip(*trials, strict=True))
    if into_l2 < hardware and 1.3 * into_l2 < past_l2:
        return Prefetch.INTO_L2
    return Prefetch.PAST_L2 if past_l2 < 0.9 * hardware else Prefetch.BY_HARDWARE


def _seconds(function: Any, call: bytes) -> float:
    start = time.perf_counter()
    function(call)
    return time.perf_counter() - start


def pack(weight: Tensor) -> Tensor:
    """Pack a weight [N, K] of a float type; the panels as bytes [N / 64, bytes of a panel]."""
    panels = _padded(weight).unflatten(0, (-1, WIDTH)).unflatten(2, (-1, 4 // weight.itemsize))
    return panels.transpose(1, 2).contiguous().flatten(1).view(torch.uint8)


def quantize(weight: Tensor, format: str) -> Tensor:
    """The same for the quantized formats; of a few scales per group, the one with the least error."""
    rows_at_once = 16 * WIDTH
    return torch.cat([_quantize(part, format) for part in weight.split(rows_at_once)])


def _quantize(weight: Tensor, format: str) -> Tensor:
    zero = ZERO_POINTS[format]
    groups = _padded(weight.float()).unflatten(1, (-1, GROUP))  # [N, K / 64, 64]
    absmax = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best_scale = torch.full_like(absmax, torch.nan)  # stays NaN where a weight is not finite
    least_error = torch.full_like(absmax, torch.inf)
    # int4 reaches from -8 to 7: the absmax becomes -8, or less if that suits the others.
    for steps in (8, 7.6, 7.2, 6.8, -7, -7.5) if format == "int4" else (128, 127):
        scale = (absmax / -steps).bfloat16().float()
        error = (
            (_quantized(groups, scale, zero) - zero).mul_(scale).sub_(groups).square_().sum(2, keepdim=True)
        )
        best_scale = torch.where(error < least_error, scale, best_scale)
        least_error = torch.minimum(error, least_error)
    values = _quantized(groups, best_scale, zero).to(torch.uint8)  # [N, groups, 64]
    values = values.unflatten(0, (-1, WIDTH)).transpose(1, 2)  # [panels, groups, 64 outputs, 64 k]
    if format == "int4":
        lower, upper = values.unflatten(3, (-1, 2, 4)).unbind(4)
        values = (lower | upper << 4).flatten(3)
    lanes = values.unflatten(3, (-1, 4)).transpose(2, 3)  # [panels, groups, lanes, 64 outputs, 4 bytes]
    scales = best_scale.squeeze(2).unflatten(0, (-1, WIDTH)).transpose(1, 2)  # [panels, groups, 64]
    scale_bytes = scales.bfloat16().contiguous().view(torch.uint8)
    return torch.cat([scale_bytes, lanes.flatten(2)], dim=2).flatten(1)


def _quantized(groups: Tensor, scale: Tensor, zero: int) -> Tensor:
    safe = torch.where(scale == 0, 1.0, scale)
    return (groups / safe).round_().add_(zero).clamp_(0, 2 * zero - 1)


def dequantize(panels: Tensor, format: str, num_outputs: int, size: int) -> Tensor:
    """The weight [num_outputs, size] of panels in a quantized format, in float32."""
    zero, scale_bytes = ZERO_POINTS[format], 2 * WIDTH
    groups = panels.unflatten(1, (-1, scale_bytes + GROUP * WIDTH // (2 if format == "int4" else 1)))
    scales = groups[..., :scale_bytes].contiguous().view(torch.bfloat16).float()  # [panels, groups, 64]
    values = groups[..., scale_bytes:].unflatten(2, (-1, WIDTH, 4)).transpose(2, 3).flatten(3)
    if format == "int4":
        fours = values.unflatten(3, (-1, 4))
        values = torch.stack([fours & 15, fours >> 4], dim=-2).flatten(3)
    weight = (values.float() - zero) * scales[..., None]  # [panels, groups, 64 outputs, 64 k]
    return weight.transpose(1, 2).flatten(2).flatten(0, 1)[:num_outputs, :size]


def unpack(panels: Tensor, dtype: torch.dtype, num_outputs: int, size: int) -> Tensor:
    """The weight [num_outputs, size] whose panels `pack` made."""
    lanes = panels.view(dtype).unflatten(1, (-1, WIDTH, 4 // dtype.itemsize))
    return lanes.transpose(1, 2).flatten(2).flatten(0, 1)[:num_outputs, :size]


def _padded(weight: Tensor) -> Tensor:
    """Padded with zeros below and at the right to whole panels and groups."""
    right, below = -weight.shape[1] % GROUP, -weight.shape[0] % WIDTH
    return nn.functional.pad(weight, (0, right, 0, below)) if right or below else weight
