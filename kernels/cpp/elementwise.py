"""The operations between two matrix multiplications of a decoder layer; the source is `elementwise.cpp`.

For 32 rows of a model of 3 million parameters, on one core of an AMD EPYC, in microseconds (in brackets
PyTorch's operations): a norm 3.6 (13), RoPE for queries and keys 4.7 (20), a gate 6.6 (7.8), greedy
sampling 13 (55). For tensors on the CPU in `build.DTYPES`.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from minipaged.kernels.cpp.build import INTEGER, POINTER, REAL, declare_by_dtype

_threads = torch.get_num_threads
_NORM = POINTER, INTEGER, POINTER, *[INTEGER] * 4, POINTER, REAL, INTEGER
_norm = declare_by_dtype("norm", *_NORM)
_wide_norm = declare_by_dtype("wide_norm", *_NORM)
_rotate = declare_by_dtype("rotate", POINTER, INTEGER, POINTER, POINTER, *[INTEGER] * 5)
_gate = declare_by_dtype("gate", POINTER, POINTER, *[INTEGER] * 3)
_gelu_gate = declare_by_dtype("gelu_gate", POINTER, POINTER, *[INTEGER] * 3)
_greedy = declare_by_dtype("greedy", POINTER, INTEGER, INTEGER, POINTER, INTEGER)


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """rows [..., D] / their root mean square * weight [D], as a new tensor.

    They are rounded before a weight of their own type, and only after one of float32.
    """
    rows = rows.contiguous()
    output = torch.empty_like(rows)
    size = rows.shape[-1]
    shape = rows.numel() // size, 1, size
    source, destination = rows.data_ptr(), output.data_ptr()
    norm = _norm if weight.dtype == rows.dtype else _wide_norm
    norm[rows.dtype](source, size, destination, size, *shape, weight.data_ptr(), epsilon, _threads())
    return output


def add_rms_norm_(rows: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Add residual [T, D] to rows [T, D] in place; return the `rms_norm` of the sum."""
    return rms_norm(rows.add_(residual), weight, epsilon)


def rms_norm_heads_(heads: Tensor, weight: Tensor, epsilon: float) -> None:
    """As `rms_norm`, of each head of heads [T, H, D], in place; a token's heads are contiguous."""
    start, stride = heads.data_ptr(), heads.stride(0)
    norm = _norm if weight.dtype == heads.dtype else _wide_norm
    norm[heads.dtype](start, stride, start, stride, *heads.shape, weight.data_ptr(), epsilon, _threads())


def rotate_heads_(heads: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Rotary embedding of heads [T, H, D] in place; a token's heads are contiguous.

    Element d of a head is rotated with element d + R/2; contiguous cosines and sines [T, R] have the angle at
    both. The elements of a head after the first R stay as they are.
    """
    angles = cosines.data_ptr(), sines.data_ptr()
    sizes = *heads.shape, cosines.shape[1]
    _rotate[heads.dtype](heads.data_ptr(), heads.stride(0), *angles, *sizes, _threads())


def silu_gate(rows: Tensor) -> Tensor:
    """silu(gate) * up of contiguous rows [T, 2 * D], gate before up -> [T, D]."""
    return _gated(rows, _gate)


def gelu_gate(rows: Tensor) -> Tensor:
    """As `silu_gate`, with GELU by its tanh approximation."""
    return _gated(rows, _gelu_gate)


def _gated(rows: Tensor, gate: Mapping[torch.dtype, Callable[..., None]]) -> Tensor:
    num_rows, size = rows.shape[0], rows.shape[1] // 2
    output = rows.new_empty(num_rows, size)
    gate[rows.dtype](rows.data_ptr(), output.data_ptr(), num_rows, size, _threads())
    return output


def greedy_tokens(logits: Tensor) -> Tensor:
    """Each row's argmax of logits [R, V] (the first, if several are equal) and its log-probability,
    [R, 2] float32."""
    logits = (logits if logits.dtype in _greedy else logits.float()).contiguous()
    num_rows, vocab_size = logits.shape
    found = torch.empty((num_rows, 2), dtype=torch.float32)
    _greedy[logits.dtype](logits.data_ptr(), num_rows, vocab_size, found.data_ptr(), _threads())
    return found
