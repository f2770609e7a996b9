"""Matrix multiplications on a CPU with oneDNN, whose weights are packed once.

PyTorch's `linear` hands float32 to a BLAS that uses half of the vector width of such CPUs, and packs bfloat16
weights in each call. Packed at load time, they gave 180-240 GFLOP/s instead of 95-105 (float32,
8 to 256 rows, one core of an AMD EPYC with AVX-512), and 1.1 to 2 times the speed in bfloat16.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import TypeGuard

import torch
from torch import Tensor, nn

from minipaged.execution.accel.own_memory import return_freed_memory

SMALL = 1 << 20
"""Weights with fewer elements are kept unpacked, too: for a single row, that is faster (7 instead of 16 us at
256 x 512), and they take little memory."""

ROWS_TO_PACK_FOR = 32
"""oneDNN chooses the order of a weight by the number of rows, but then multiplies any number."""

FEW_ROWS = 64
"""Most decode steps have no more. Rows are padded only beyond it (see `rounded_up`)."""


class PackedLinear(nn.Module):
    """`nn.Linear` on a CPU in float32 or bfloat16, its weight packed for oneDNN; the layer can be freed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.out_features, self.in_features = weight.shape
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_TO_PACK_FOR)
        self._plain = weight.clone() if weight.numel() < SMALL else None

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], unpacked: routers and adapters read the weights of others' layers."""
        return self.packed.to_dense() if self._plain is None else self._plain

    def forward(self, rows: Tensor) -> Tensor:
        """rows [..., in_features] -> [..., out_features]."""
        if self._plain is not None and rows.numel() == self.in_features:
            return nn.functional.linear(rows, self._plain, self.bias)
        num_rows = rows.numel() // self.in_features
        spare = rounded_up(num_rows) - num_rows
        if not spare:
            return self._multiply(rows)
        padded = torch.constant_pad_nd(rows.reshape(num_rows, self.in_features), (0, 0, 0, spare))
        return self._multiply(padded)[:num_rows].view(*rows.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")


def rounded_up(num_rows: int) -> int:
    """The number itself up to `FEW_ROWS`, then the next of 16 numbers between a power of 2 and its double.

    oneDNN 3.12 compiles a kernel for each number of rows, in half a millisecond, and never frees its memory:
    2,000 different numbers of rows, as on a server, took 6 GB for one layer of 256 x 768.
    """
    if num_rows <= FEW_ROWS:
        return num_rows
    step = 1 << (num_rows - 1).bit_length() - 5
    return -(-num_rows // step) * step


def can_pack(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this build of PyTorch can pack weights of the type with oneDNN on this CPU."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # (AVX-512, AVX-NE-CONVERT)
    )


def is_left_to_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this type even beside C++ kernels: on Arm, where ours is unmeasured."""
    return dtype != torch.float16 and platform.machine() not in ("x86_64", "AMD64")


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module is a linear layer and nothing more."""
    # (Subclasses may do more than multiply; Falcon's only adds the bias in a second operation.)
    return type(module) is nn.Linear or type(module).__name__ == "FalconLinear"


def linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Each linear layer of a model, with its parent and its name there, to be replaced one at a time."""
    for module in model.modules():  # (not a list, which would keep every replaced layer alive)
        names = [name for name, child in module.named_children() if is_linear(child)]
        for name in names:
            yield module, name, getattr(module, name)
        if names:
            return_freed_memory()


def pack_linears(model: nn.Module) -> None:
    """Replace every linear layer of a CPU model whose weight can be packed."""
    for parent, name, linear in linear_layers(model):
        if can_pack(linear.weight.dtype):
            setattr(parent, name, PackedLinear(linear))
