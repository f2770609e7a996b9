"""Move the arrays of a step to the device in one copy.

    pinned host memory   | token ids .. | positions | slots | query start . | ...     each aligned
              one asynchronous copy                                                   to 16 bytes
    device memory        | token ids .. | positions | slots | query start . | ...     the tensors are views

Seven small copies would be seven launches before anything is computed. Kernels are compiled for addresses
divisible by 16; for others they would be recompiled, with slower loads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device; on a CPU they share the arrays' memory."""
    if device.type == "cpu":
        return list(map(torch.from_numpy, arrays))
    if device.type == "mps":  # (views of another type are untested there)
        return [torch.from_numpy(array).to(device) for array in arrays]
    packed = pack(arrays, pinned=device.type == "cuda")
    return unpack(packed.to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[np.ndarray], pinned: bool) -> Tensor:
    """All of them in one tensor of bytes; pinned memory is not reused before its copy is done."""
    buffer = torch.empty(sum(room(array.nbytes) for array in arrays), dtype=torch.uint8, pin_memory=pinned)
    target, first = buffer.numpy(), 0  # NumPy's views take a third of the time of PyTorch's
    for array in arrays:
        target[first : first + array.nbytes] = array.ravel().view(np.uint8)
        first += room(array.nbytes)
    return buffer


def unpack(buffer: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Views of the bytes of `buffer`, of the arrays' types and shapes."""
    whole: dict[np.dtype, Tensor] = {}  # the buffer as numbers of each type
    views, first = [], 0
    for array in arrays:
        if array.dtype not in whole:
            whole[array.dtype] = buffer.view(torch.from_numpy(array[:0]).dtype)
        start = first // array.itemsize
        views.append(whole[array.dtype][start : start + array.size].view(array.shape))
        first += room(array.nbytes)
    return views


def room(num_bytes: int) -> int:
    """Bytes that an array of `num_bytes` takes, so that the next one is aligned."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
