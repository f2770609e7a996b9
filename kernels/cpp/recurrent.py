"""What recurrent layers compute besides matrix multiplications; the source is `recurrent.cpp`.

For tensors on the CPU, rows in `build.DTYPES`.
"""

import ctypes
import struct

import torch
from torch import Tensor

from minipaged.kernels.cpp.build import INTEGER, POINTER, declare_by_dtype

_threads = torch.get_num_threads
_DELTA_RULE = struct.Struct("7P 10q")  # the struct `DeltaRule` of recurrent.cpp
_MAMBA2 = struct.Struct("8P 6q")  # the struct `Mamba2`
_convolve = declare_by_dtype("convolve", POINTER, POINTER, INTEGER, POINTER, POINTER, POINTER, *[INTEGER] * 4)
_convolve_tokens = declare_by_dtype("convolve_tokens", *[POINTER] * 4, *[INTEGER] * 5)
_delta_rule = declare_by_dtype("delta_rule", ctypes.c_char_p)
_mamba2 = declare_by_dtype("mamba2", ctypes.c_char_p)


def convolve_(states: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A causal convolution of each channel for one more token, [R, C].

    Args:
        states: each channel's last K elements, [R, C, K], contiguous; `rows` becomes the last of them.
        rows: [R, C], in the same type; a row is contiguous.
        weight: [C, K], contiguous.
        bias: [C], or None.
    """
    output = rows.new_empty(rows.shape)
    _convolve[rows.dtype](
        *(states.data_ptr(), rows.data_ptr(), rows.stride(0), weight.data_ptr()),
        *(None if bias is None else bias.data_ptr(), output.data_ptr(), *states.shape, _threads()),
    )
    return output


def convolve(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same for T tokens of each sequence, [R, T, C], before which there are zeros.

    Args:
        rows: [R, T, C], contiguous.
        weight: [C, K], contiguous, in the same type.
        bias: [C], or None.
    """
    output = torch.empty_like(rows)
    _convolve_tokens[rows.dtype](
        *(rows.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), output.data_ptr()),
        *(*rows.shape, weight.shape[1], _threads()),
    )
    return output


def delta_rule_(
    states: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """The gated delta rule for T more tokens, [R, T, H, Dv] (https://arxiv.org/abs/2412.06464, section 3.1).

    H / Hk heads of values share a head of queries and keys, which are normalized here. A token has the same
    result, bit for bit, however its sequence is cut.

    Args:
        states: [R, H, Dk, Dv] float32, contiguous, updated in place.
        query, key: [R, T, Hk, Dk].
        value: [R, T, H, Dv], in the same type.
        decay, beta: the logarithm of the decay, and the weight of the update, [R, T, H].
    """
    num_rows, num_heads, key_dim, value_dim = states.shape
    output = value.new_empty(value.shape)
    query, key, value = map(_tokens, (query, key, value))
    decay, beta = (part.float().contiguous() for part in (decay, beta))
    call = _DELTA_RULE.pack(
        *(part.data_ptr() for part in (states, query, key, value, decay, beta, output)),
        *(query.stride(0), key.stride(0), value.stride(0)),
        *(num_rows, output.shape[1], num_heads, query.shape[1], key_dim, value_dim, _threads()),
    )
    _delta_rule[query.dtype](call)
    return output


def _tokens(heads: Tensor) -> Tensor:
    """[R, T, H, D] -> [R * T, H, D], each token's heads contiguous; without a copy where possible."""
    tokens = heads.flatten(0, 1)
    return tokens if tokens.stride()[1:] == (tokens.shape[2], 1) else tokens.contiguous()


def mamba2_(states: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Mamba 2 for one more token, [R, H, P] (https://arxiv.org/abs/2405.21060, section 6).

    All are contiguous. H / G heads share B and C.

    Args:
        states: [R, H, P, N] float32, updated in place.
        x: [R, H, P].
        dt: [R, H] float32, the step sizes, after their bias and softplus.
        A: [H] float32; a state decays by exp(A dt).
        B, C: [R, G, N], in the type of `x`.
        D: [H] float32, what is added to the output for x.
    """
    num_rows, num_heads, width, size = states.shape
    output = torch.empty_like(x)
    call = _MAMBA2.pack(
        *(part.data_ptr() for part in (states, x, B, C, dt, A, D, output)),
        *(num_rows, num_heads, B.shape[1], width, size, _threads()),
    )
    _mamba2[x.dtype](call)
    return output
