"""Layer 2: the operations between matrix multiplications, in Triton's interpreter, against float64.

bfloat16, too: the kernels convert what they load and compute in float32. (The interpreter cuts off the last
bits of what is stored in it, where a device rounds.)
"""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is used where there is no GPU", allow_module_level=True)
pytest.importorskip("triton", reason="needs the package triton")

from minipaged.kernels.dispatch import select_backend
from tests.kernels.layer_formulas import (
    assert_near,
    exact_gate,
    exact_gelu_gate,
    exact_norm,
    exact_rotation,
    random_angles,
)

pytestmark = pytest.mark.interpreter

LAYER = select_backend("triton", "cpu").layer
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 33, 256, 688])
def test_a_norm_is_that_of_its_row(size, dtype):
    """Catches a mean over the padding, epsilon outside the root, a row's tail not written."""
    rows, weight = torch.randn(2, 3, size).to(dtype), torch.randn(size).to(dtype)
    before = rows.clone()
    assert_near(LAYER.rms_norm(rows, weight, 0.1), exact_norm(rows, weight, 0.1))
    assert rows.equal(before)


def test_a_norm_rounds_as_the_model_does():
    """Catches one rounding in place of two: greedy tokens would drift from the model's in half precision."""
    rows, weight = torch.randn(7, 96).half(), torch.randn(96).half()
    exact = rows.float()
    expected = weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)).half()
    different = LAYER.rms_norm(rows, weight, 1e-5) != expected
    assert different.float().mean() < 0.01  # (sums in another order may move a last bit)


def test_a_norm_with_a_weight_in_float32_is_rounded_once():
    """As in Gemma; rounded before the weight, too, its last bit differs in many elements."""
    rows, weight = torch.randn(7, 96).half(), 1 + torch.randn(96)
    different = LAYER.rms_norm(rows, weight, 1e-5) != exact_norm(rows, weight, 1e-5).half()
    assert different.float().mean() < 0.01


def test_the_norm_of_rows_of_zeros_is_zero():
    """Catches a division by the root of nothing."""
    assert LAYER.rms_norm(torch.zeros(2, 20), torch.ones(20), 1e-6).eq(0).all()


def test_a_norm_accepts_rows_that_do_not_lie_side_by_side():
    """Catches every second row taken for the next."""
    rows = torch.randn(8, 40)
    assert_near(LAYER.rms_norm(rows[::2], torch.ones(40), 1e-5), exact_norm(rows[::2], torch.ones(40), 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [15, 64, 300])
def test_a_sum_is_written_in_place_and_normed_as_it_was_rounded(size, dtype):
    """Catches a residual that is lost, added twice, or normed before it was rounded."""
    rows, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((5, size), (5, size), (size,)))
    total = rows + residual
    kept = residual.clone()
    normed = LAYER.add_rms_norm_(rows, residual, weight, 1e-5)
    assert rows.equal(total)
    assert residual.equal(kept)
    assert normed.equal(LAYER.rms_norm(total, weight, 1e-5))


def test_the_residual_may_be_rows_of_a_wider_tensor():
    """Catches the stride of one of the two used for both."""
    residual = torch.randn(5, 80)[:, :40]
    rows, weight = torch.randn(5, 40), torch.randn(40)
    total = rows + residual
    assert_near(LAYER.add_rms_norm_(rows, residual, weight, 1e-5), exact_norm(total, weight, 1e-5))
    assert rows.equal(total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [6, 64, 80, 128, 256])
def test_the_norm_of_heads_leaves_their_neighbours_alone(size, dtype):
    """Catches the keys' norm written over values: they share the output of one GEMM."""
    product = torch.randn(3, 13, size).to(dtype)
    weight, before = torch.randn(size).to(dtype), product.clone()
    LAYER.rms_norm_heads_(product[:, 2:12], weight, 1e-5)
    assert_near(product[:, 2:12], exact_norm(before[:, 2:12], weight, 1e-5))
    assert product[:, :2].equal(before[:, :2])
    assert product[:, 12:].equal(before[:, 12:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 30, 64, 80, 128, 256])
def test_heads_are_rotated_in_place(size, dtype):
    """Catches pairs of neighbours turned (the other convention), a sign, heads behind the last one turned."""
    product = torch.randn(3, 23, size).to(dtype)
    before, angles = product.clone(), random_angles(3, size, dtype)
    LAYER.rotate_heads_(product[:, :19], *angles)
    assert_near(product[:, :19], exact_rotation(before[:, :19], *angles))
    assert product[:, 19:].equal(before[:, 19:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rotary"), [(64, 32), (80, 20), (128, 64), (6, 2)])
def test_only_the_beginning_of_a_head_is_rotated_if_there_are_fewer_angles(size, rotary, dtype):
    """Catches halves of the head taken for halves of its rotated part, and a remainder that is touched."""
    product = torch.randn(3, 5, size).to(dtype)
    before, angles = product.clone(), random_angles(3, rotary, dtype)
    LAYER.rotate_heads_(product, *angles)
    assert_near(product[..., :rotary], exact_rotation(before[..., :rotary], *angles))
    assert product[..., rotary:].equal(before[..., rotary:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 40, 688, 1500])
def test_a_gate_is_the_first_half_of_its_row(size, dtype):
    """Catches up taken for gate, and the tail of a row that fills no piece."""
    rows = (4 * torch.randn(3, 2 * size)).to(dtype)
    before = rows.clone()
    assert_near(LAYER.silu_gate(rows), exact_gate(rows))
    assert_near(LAYER.gelu_gate(rows), exact_gelu_gate(rows))
    assert rows.equal(before)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_far_from_zero_is_zero_or_the_identity(dtype):
    """Catches e^-x that overflows to NaN."""
    gates = torch.tensor([-1e30, -1000.0, -88.5, -87.0, 87.0, 1000.0, 1e30]).clamp(-6e4, 6e4).to(dtype)
    rows = torch.cat([gates, torch.ones_like(gates)])[None]
    assert_near(LAYER.silu_gate(rows), exact_gate(rows))
    assert_near(LAYER.gelu_gate(rows), exact_gelu_gate(rows))


def test_no_rows_are_no_work():
    """Catches a launch of nothing: the last layer of a chunk in the middle of a prompt has no rows."""
    nothing, weight = torch.empty(0, 32), torch.ones(32)
    assert LAYER.rms_norm(nothing, weight, 1e-5).shape == (0, 32)
    assert LAYER.add_rms_norm_(nothing, nothing.clone(), weight, 1e-5).shape == (0, 32)
    assert LAYER.silu_gate(nothing).shape == (0, 16)
