"""A layer's operations between matrix multiplications in Triton: one launch and one trip to memory each.

    QKV      [ q0 | q1 | q2 | q3 | k0 | k1 | v0 | v1 ]    a token's heads, from one matrix multiplication
    norm       q0   q1   q2   q3 , k0   k1                in place: a program has a token's next few heads,
    rotation   q0   q1   q2   q3   k0   k1                (a, b) -> (a cos - b sin, b cos + a sin)
    residual + output -> sum, in place -> norm            one program per row
    [ gate | up ] -> silu(gate) * up, or gelu             one program per piece of a row

With PyTorch's operations, a norm alone takes six to eight launches, each with a trip to memory. Rows are
converted to float32 when they are loaded and rounded when they are stored; a norm is also rounded before its
weight, as in the models. On an H200, each takes 1.3 to 3.1 us in a step of up to 256 decodes; other grid
sizes and numbers of warps are **not yet measured**. For CPUs: `kernels/cpp/elementwise.py`.
"""

# Kernel arguments are Triton's own: pointers, numbers, compile-time constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of the rows that the kernels read and write."""

TILE = 1024  # elements per program, of several heads or of a piece of a row
ROW_PER_THREAD = 16  # elements of a row per thread


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """rows [..., D] / their root mean square * weight [D], as a new tensor.

    They are rounded before a weight of their own type, and only after one of float32.
    """
    rows = rows.contiguous()
    output = torch.empty_like(rows)
    heads = rows.view(-1, 1, rows.shape[-1])
    _norm(heads, None, output.view_as(heads), weight, epsilon)
    return output


def add_rms_norm_(rows: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Add residual [T, D] to rows [T, D] in place; return the `rms_norm` of the sum."""
    output = torch.empty_like(rows)
    _norm(rows[:, None], residual[:, None], output[:, None], weight, epsilon)
    return output


def rms_norm_heads_(heads: Tensor, weight: Tensor, epsilon: float) -> None:
    """As `rms_norm`, of each head of heads [T, H, D], in place; a token's heads are contiguous."""
    _norm(heads, None, heads, weight, epsilon)


def rotate_heads_(heads: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """RoPE on heads [T, H, D] in place; a token's heads are contiguous.

    Element d of a head is rotated with element d + R/2; cosines and sines [T, R] have the angle at both. The
    elements of a head after the first R stay as they are.
    """
    num_tokens, num_heads, head_dim = heads.shape
    half = cosines.shape[-1] // 2
    half_padded = triton.next_power_of_2(half)
    heads_at_once = min(max(1, TILE // 2 // half_padded), triton.next_power_of_2(num_heads))
    rotate_kernel[(num_tokens, triton.cdiv(num_heads, heads_at_once))](
        *(heads, cosines, sines, heads.stride(0), cosines.stride(0), sines.stride(0)),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HEADS_AT_ONCE=heads_at_once,
        HALF_PADDED=half_padded,
        num_warps=2,
    )


def silu_gate(rows: Tensor) -> Tensor:
    """silu(gate) * up of contiguous rows [T, 2 * D], gate before up -> [T, D]."""
    return _gated(rows, is_gelu=False)


def gelu_gate(rows: Tensor) -> Tensor:
    """As `silu_gate`, with GELU by its tanh approximation."""
    return _gated(rows, is_gelu=True)


def _gated(rows: Tensor, is_gelu: bool) -> Tensor:
    num_rows, size = rows.shape[0], rows.shape[1] // 2
    output = rows.new_empty(num_rows, size)
    grid = num_rows, triton.cdiv(size, TILE)
    gate_kernel[grid](rows, output, SIZE=size, IS_GELU=is_gelu, TILE=TILE, num_warps=4)
    return output


def _norm(heads: Tensor, residual: Tensor | None, output: Tensor, weight: Tensor, epsilon: float) -> None:
    num_tokens, num_heads, head_dim = heads.shape
    dim_padded = triton.next_power_of_2(head_dim)
    heads_at_once = min(max(1, TILE // dim_padded), triton.next_power_of_2(num_heads))
    num_warps = heads_at_once * dim_padded // (32 * ROW_PER_THREAD)
    norm_kernel[(num_tokens, triton.cdiv(num_heads, heads_at_once))](
        *(heads, residual, output, weight, epsilon, heads.stride(0)),
        *(heads.stride(0) if residual is None else residual.stride(0), output.stride(0)),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS_AT_ONCE=heads_at_once,
        DIM_PADDED=dim_padded,
        num_warps=min(max(1, num_warps), 16),
    )


@triton.jit
def norm_kernel(
    heads,
    residual,
    output,
    weight,
    epsilon,
    stride,
    residual_stride,
    output_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Norm of a few heads of one token; with a residual, of their sum, which replaces the heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    dim = tl.arange(0, DIM_PADDED)
    place = head[:, None] * HEAD_DIM + dim[None, :]
    inside = (head[:, None] < NUM_HEADS) & (dim[None, :] < HEAD_DIM)
    dtype = heads.dtype.element_ty

    x = tl.load(heads + token * stride + place, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        x += tl.load(residual + token * residual_stride + place, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
        tl.store(heads + token * stride + place, x.to(dtype), mask=inside)
    factor = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + epsilon)
    normed = (x * factor[:, None]).to(weight.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    result = (normed * scale[None, :]).to(dtype)
    tl.store(output + token * output_stride + place, result, mask=inside)


@triton.jit
def rotate_kernel(
    heads,
    cosines,
    sines,
    stride,
    cosine_stride,
    sine_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """RoPE on a few heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    dim = tl.arange(0, HALF_PADDED)
    inside = (head[:, None] < NUM_HEADS) & (dim[None, :] < HALF)
    dtype = heads.dtype.element_ty

    cosine = cosines + token * cosine_stride + dim
    sine = sines + token * sine_stride + dim
    first_cosine = tl.load(cosine, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
    second_cosine = tl.load(cosine + HALF, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
    first_sine = tl.load(sine, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
    second_sine = tl.load(sine + HALF, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]

    place = heads + token * stride + head[:, None] * HEAD_DIM + dim[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (first * first_cosine - second * first_sine).to(dtype), mask=inside)
    tl.store(place + HALF, (second * second_cosine + first * second_sine).to(dtype), mask=inside)


@triton.jit
def gate_kernel(rows, output, SIZE: tl.constexpr, IS_GELU: tl.constexpr, TILE: tl.constexpr):
    """silu(gate) * up, or gelu(gate) * up, of one piece of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    place = rows + row * (2 * SIZE) + column
    gate = tl.load(place, mask=column < SIZE, other=0.0).to(tl.float32)
    up = tl.load(place + SIZE, mask=column < SIZE, other=0.0).to(tl.float32)
    z = gate
    if IS_GELU:  # gate / 2 * (1 + tanh(z / 2))
        z = 1.5957691216 * (gate + 0.044715 * gate * gate * gate)
    result = gate / (1.0 + tl.exp(-z)) * up
    tl.store(output + row * SIZE + column, result.to(output.dtype.element_ty), mask=column < SIZE)
