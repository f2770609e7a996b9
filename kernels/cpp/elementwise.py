"""What a decoder layer does between its matrix products, one call each; the source is `elementwise.cpp`.

For 32 rows of a model of 3 million parameters, on one core of an AMD EPYC, in microseconds (in brackets
PyTorch's operations): a norm 3.6 (13), rotating queries and keys 4.7 (20), a gate 6.6 (7.8), the greedy
choice 13 (55). For tensors on the CPU in float32 or bfloat16.
Does NOT know: models, layers, paging.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from minipaged.kernels.cpp.build import load_library

DTYPES = (torch.float32, torch.bfloat16)

_POINTER, _INTEGER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_library = load_library()
_threads = torch.get_num_threads


def _declared(name: str, *arguments: type) -> dict[torch.dtype, Callable[..., None]]:
    """The function of that name for each type of rows."""
    functions = {}
    for dtype in DTYPES:
        function = getattr(_library, f"{name}_{str(dtype).removeprefix('torch.')}")
        function.argtypes, function.restype = arguments, None
        functions[dtype] = function
    return functions


_norm = _declared("norm", _POINTER, _INTEGER, _POINTER, *[_INTEGER] * 4, _POINTER, _REAL, _INTEGER)
_rotate = _declared("rotate", _POINTER, _INTEGER, _POINTER, _POINTER, *[_INTEGER] * 4)
_gate = _declared("gate", _POINTER, _POINTER, *[_INTEGER] * 3)
_library.greedy_tokens.argtypes = (_POINTER, _INTEGER, _INTEGER, _POINTER, _POINTER, _INTEGER)
_library.greedy_tokens.restype = None


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """rows [..., D] / their root mean square * weight [D], as a new tensor."""
    rows = rows.contiguous()
    output = torch.empty_like(rows)
    size = rows.shape[-1]
    num_rows = rows.numel() // size
    _norm[rows.dtype](
        rows.data_ptr(),
        size,
        output.data_ptr(),
        size,
        num_rows,
        1,
        size,
        weight.data_ptr(),
        epsilon,
        _threads(),
    )
    return output


def rms_norm_heads_(heads: Tensor, weight: Tensor, epsilon: float) -> None:
    """As `rms_norm`, of each head of heads [T, H, D], in place; a token's heads lie side by side."""
    start, stride = heads.data_ptr(), heads.stride(0)
    _norm[heads.dtype](start, stride, start, stride, *heads.shape, weight.data_ptr(), epsilon, _threads())


def rotate_heads_(heads: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Rotary embedding of heads [T, H, D] in place; a token's heads lie side by side.

    Element d of a head turns with element d + D/2, by the angle whose cosine and sine stand at both places of
    cosines and sines [T, D].
    """
    _rotate[heads.dtype](
        heads.data_ptr(), heads.stride(0), cosines.data_ptr(), sines.data_ptr(), *heads.shape, _threads()
    )


def silu_gate(rows: Tensor) -> Tensor:
    """silu(gate) * up of contiguous rows [T, 2 * D], gate before up -> [T, D]."""
    num_rows, size = rows.shape[0], rows.shape[1] // 2
    output = rows.new_empty(num_rows, size)
    _gate[rows.dtype](rows.data_ptr(), output.data_ptr(), num_rows, size, _threads())
    return output


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first largest of each row of float32 logits [R, V] and its log-probability: ([R] int64, [R])."""
    logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    tokens, logprobs = logits.new_empty(num_rows, dtype=torch.int64), logits.new_empty(num_rows)
    _library.greedy_tokens(
        logits.data_ptr(), num_rows, vocab_size, tokens.data_ptr(), logprobs.data_ptr(), _threads()
    )
    return tokens, logprobs
