"""Products of rows with weights that lie in panels of 64 outputs; the source is `panel_product.cpp`.

    weights [N, K] -> panels [N / 64], each [K / S, 64, S]     S elements of an output share 32 bits

A panel is read front to back, as fast as memory delivers it; a matrix row by row is not. Three formats are
quantized: to each 64 outputs and 64 k belong 64 scales in bfloat16, before the codes (a code of 0 stands for
-128 or -8). w8a8 is int8 whose rows are rounded to 8 bits, too, 64 elements at a time. Formats: float32,
bfloat16, float16, int8, int4, w8a8. Rows have a float type.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
import time
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipaged.kernels.cpp.build import DTYPES, declare

WIDTH = 64
GROUP = 64
"""Elements along k that share a scale."""

TRIAL_BYTES = 1 << 26
"""Weights that one core reads to find out which way is faster: more than most caches hold."""

CODES = {"int8": 128, "int4": 8, "w8a8": 128}
"""Quantized formats, and the code of zero in each."""

_PRODUCT = struct.Struct("4P 7q")  # the struct `Product` of calls.h
_ROW_TYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
_FORMATS = {f"{name}_{name}" for name in _ROW_TYPES.values()} | {
    f"{code}_{name}" for code in CODES for name in _ROW_TYPES.values()
}
_multiply = {name: declare(f"multiply_{name}", ctypes.c_char_p) for name in sorted(_FORMATS)}


class Panels(NamedTuple):
    """Where the panels of a weight [num_outputs, size] lie."""

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
    """The C++ function that multiplies rows of that type."""
    return _multiply[f"{panels.format}_{_ROW_TYPES[dtype]}"]


def panel_product(rows: Tensor, panels: Panels, bias: Tensor | None = None) -> Tensor:
    """rows [..., size] -> rows x weights^T + bias [..., num_outputs], of the rows' type; sums are float32."""
    flat = rows.reshape(-1, panels.size)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    output = rows.new_empty(*rows.shape[:-1], panels.num_outputs)
    call = pack_product(panels, bias, fetches_ahead(), flat, output, torch.get_num_threads())
    multiply_of(panels, rows.dtype)(call)
    return output


def pack_product(
    panels: Panels,
    bias: Tensor | None,
    fetches: bool,
    rows: Tensor | None = None,
    output: Tensor | None = None,
    num_threads: int = 0,
) -> bytes:
    """The struct `Product`. Without rows [T, size], their fields are 0; C++ fills them in."""
    return _PRODUCT.pack(
        *(panels.address, _address(rows), _address(bias), _address(output)),
        *((0, 0) if rows is None else (len(rows), rows.stride(0))),
        *(panels.num_outputs, panels.size, panels.panel_bytes, num_threads, fetches),
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@cache
def fetches_ahead() -> bool:
    """Whether products of few rows fetch weights ahead, or leave that to the processor: what is faster here.

    On an AMD EPYC of Zen 4, two rows in bfloat16 read 19 GB/s with fetching and 28 without; one of Zen 5 is
    faster the more it fetches. Without AVX-512, rows that do not fetch read several panels in turn, which is
    faster on Zen 3. The results are the same bits. Measured once in a process, in about 0.1 s.
    """
    try:  # (not a tensor's own memory: the allocator may keep what is freed)
        memory = mmap.mmap(-1, TRIAL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return True
    if sys.platform == "linux":  # the weights lie in huge pages, too, if the kernel has them
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    size = 1024
    weights = torch.frombuffer(memory, dtype=torch.bfloat16).fill_(1).view(-1, size)
    panels = Panels(weights.data_ptr(), 2 * size * WIDTH, len(weights), size, "bfloat16")
    rows, output = weights[:2], weights.new_empty(2, len(weights))
    calls = [pack_product(panels, None, fetches, rows, output, num_threads=1) for fetches in (False, True)]
    multiply = multiply_of(panels, torch.bfloat16)
    trials = [[_seconds(multiply, call) for call in calls] for _ in range(12)]
    left_alone, fetched = (min(seconds) for seconds in zip(*trials, strict=True))
    return fetched <= 1.2 * left_alone


def _seconds(function: Any, call: bytes) -> float:
    start = time.perf_counter()
    function(call)
    return time.perf_counter() - start


def pack(weight: Tensor) -> Tensor:
    """The panels of a weight [N, K] in a float type, as bytes [N / 64, bytes of a panel]."""
    panels = _padded(weight, GROUP).unflatten(0, (-1, WIDTH)).unflatten(2, (-1, 4 // weight.itemsize))
    return panels.transpose(1, 2).contiguous().view(torch.uint8).flatten(1)


def quantize(weight: Tensor, format: str) -> Tensor:
    """The same for the quantized formats; each scale is the one of a few that errs least."""
    rows_at_once = 16 * WIDTH
    parts = [_quantize(part, format) for part in weight.split(rows_at_once)]
    return torch.cat(parts)


def _quantize(weight: Tensor, format: str) -> Tensor:
    zero = CODES[format]
    groups = _padded(weight.float(), GROUP).unflatten(1, (-1, GROUP))  # [N, K / 64, 64]
    furthest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best_scale = torch.full_like(furthest, torch.nan)  # stays where a weight is not finite
    least_error = torch.full_like(furthest, torch.inf)
    # The furthest is -8 steps away, or less if that serves the others: there is no step 8.
    for steps in (8, 7.6, 7.2, 6.8, -7, -7.5) if format == "int4" else (128, 127):
        scale = (furthest / -steps).bfloat16().float()
        error = (_codes(groups, scale, zero) - zero).mul_(scale).sub_(groups).square_().sum(2, keepdim=True)
        best_scale = torch.where(error < least_error, scale, best_scale)
        least_error = torch.minimum(error, least_error)
    codes = _codes(groups, best_scale, zero).to(torch.uint8)  # [N, groups, 64]
    codes = codes.unflatten(0, (-1, WIDTH)).transpose(1, 2)  # [panels, groups, 64 outputs, 64 k]
    if format == "int4":
        lower, upper = codes.unflatten(3, (-1, 2, 4)).unbind(4)
        codes = (lower | upper << 4).flatten(3)
    lanes = codes.unflatten(3, (-1, 4)).transpose(2, 3)  # [panels, groups, lanes, 64 outputs, 4 bytes]
    scales = best_scale.squeeze(2).unflatten(0, (-1, WIDTH)).transpose(1, 2)  # [panels, groups, 64]
    scale_bytes = scales.bfloat16().contiguous().view(torch.uint8)
    return torch.cat([scale_bytes, lanes.flatten(2)], dim=2).flatten(1)


def _codes(groups: Tensor, scale: Tensor, zero: int) -> Tensor:
    safe = torch.where(scale == 0, 1.0, scale)
    return (groups / safe).round_().add_(zero).clamp_(0, 2 * zero - 1)


def dequantize(panels: Tensor, format: str, num_outputs: int, size: int) -> Tensor:
    """The weight [num_outputs, size] that the panels of a quantized format stand for, in float32."""
    zero, scale_bytes = CODES[format], 2 * WIDTH
    groups = panels.unflatten(1, (-1, scale_bytes + GROUP * WIDTH // (2 if format == "int4" else 1)))
    scales = groups[..., :scale_bytes].contiguous().view(torch.bfloat16).float()  # [panels, groups, 64]
    codes = groups[..., scale_bytes:].unflatten(2, (-1, WIDTH, 4)).transpose(2, 3).flatten(3)
    if format == "int4":
        fours = codes.unflatten(3, (-1, 4))
        codes = torch.stack([fours & 15, fours >> 4], dim=-2).flatten(3)
    weight = (codes.float() - zero) * scales[..., None]  # [panels, groups, 64 outputs, 64 k]
    return weight.transpose(1, 2).flatten(2).flatten(0, 1)[:num_outputs, :size]


def unpack(panels: Tensor, dtype: torch.dtype, num_outputs: int, size: int) -> Tensor:
    """The weight [num_outputs, size] whose panels `pack` made."""
    lanes = panels.view(dtype).unflatten(1, (-1, WIDTH, 4 // dtype.itemsize))
    return lanes.transpose(1, 2).flatten(2).flatten(0, 1)[:num_outputs, :size]


def _padded(weight: Tensor, multiple: int) -> Tensor:
    """With zeros below and at the right, so that panels and groups are whole."""
    return nn.functional.pad(weight, (0, -weight.shape[1] % multiple, 0, -weight.shape[0] % WIDTH))
