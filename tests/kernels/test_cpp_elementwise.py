"""The operations between matrix multiplications against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from minipaged.kernels.cpp.build import DTYPES
from minipaged.kernels.dispatch import why_not_cpp

if missing := why_not_cpp(torch.device("cpu")):
    pytest.skip(missing, allow_module_level=True)

from minipaged.kernels.cpp.elementwise import (
    gelu_gate,
    greedy_tokens,
    rms_norm,
    rms_norm_heads_,
    rotate_heads_,
    silu_gate,
)
from tests.kernels.layer_formulas import (
    assert_near,
    exact_gate,
    exact_gelu_gate,
    exact_norm,
    exact_rotation,
    random_angles,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 33, 256, 688])
def test_norm(dtype, size):
    """The end of a row that fills no vector, a mean over padding, epsilon outside the root."""
    rows, weight = torch.randn(2, 3, size).to(dtype), torch.randn(size).to(dtype)
    assert_near(rms_norm(rows, weight, 0.1), exact_norm(rows, weight, 0.1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_with_a_weight_in_float32_is_rounded_once(dtype):
    """As in Gemma; rounded before the weight, too, its last bit differs in many elements."""
    rows, weight = torch.randn(7, 96).to(dtype), 1 + torch.randn(96)
    normed = rms_norm(rows, weight, 1e-5)
    assert (normed != exact_norm(rows, weight, 1e-5).to(dtype)).float().mean() < 0.01
    heads = rows.clone()[:, None]
    rms_norm_heads_(heads, weight, 1e-5)
    assert heads[:, 0].equal(normed)


def test_norm_of_rows_of_zeros_is_zero():
    """Division by the root of nothing."""
    assert rms_norm(torch.zeros(2, 20), torch.ones(20), 1e-6).eq(0).all()


def test_norm_accepts_rows_that_do_not_lie_side_by_side():
    """Every second row taken for the next."""
    rows = torch.randn(8, 40)
    assert_near(rms_norm(rows[::2], torch.ones(40), 1e-5), exact_norm(rows[::2], torch.ones(40), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [6, 32, 80])
def test_norm_of_heads_leaves_their_neighbours_alone(dtype, size):
    """The keys' norm written over values: they share the output of one matrix multiplication."""
    product = torch.randn(5, 7, size).to(dtype)
    weight, before = torch.randn(size).to(dtype), product.clone()
    rms_norm_heads_(product[:, 2:4], weight, 1e-5)
    assert_near(product[:, 2:4], exact_norm(before[:, 2:4], weight, 1e-5))
    assert product[:, :2].equal(before[:, :2])
    assert product[:, 4:].equal(before[:, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 30, 32, 64, 80])
def test_rotation(dtype, size):
    """Pairs of neighbours turned (the other convention), a sign, the half that was already overwritten."""
    product = torch.randn(5, 7, size).to(dtype)
    before, angles = product.clone(), random_angles(5, size, dtype)
    rotate_heads_(product[:, :4], *angles)
    assert_near(product[:, :4], exact_rotation(before[:, :4], *angles))
    assert product[:, 4:].equal(before[:, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rotary"), [(64, 32), (80, 20), (128, 96), (6, 2)])
def test_with_fewer_angles_only_the_beginning_of_a_head_is_rotated(dtype, size, rotary):
    """Catches halves of the head taken for halves of its rotated part, and a remainder that is touched."""
    product = torch.randn(3, 5, size).to(dtype)
    before, angles = product.clone(), random_angles(3, rotary, dtype)
    rotate_heads_(product, *angles)
    assert_near(product[..., :rotary], exact_rotation(before[..., :rotary], *angles))
    assert product[..., rotary:].equal(before[..., rotary:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 40, 688])
def test_gate(dtype, size):
    """Up taken for gate, the end of a row that fills no vector."""
    rows = (4 * torch.randn(6, 2 * size)).to(dtype)
    assert_near(silu_gate(rows), exact_gate(rows))
    assert_near(gelu_gate(rows), exact_gelu_gate(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_far_from_zero(dtype):
    """e^-x overflows below -88; the product is 0 there, never NaN."""
    most = min(1e30, torch.finfo(dtype).max)
    gates = torch.tensor([-most, -1000.0, -88.5, -87.0, 87.0, 1000.0, most]).to(dtype)
    rows = torch.cat([gates, torch.ones_like(gates)])[None]
    assert_near(silu_gate(rows), exact_gate(rows))
    assert_near(gelu_gate(rows), exact_gelu_gate(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 7, 16, 1000, 1024])
def test_greedy(vocab_size, dtype):
    """A maximum in the last few tokens, a log-probability of another distribution or in 16 bits."""
    logits = 5 * torch.randn(vocab_size.bit_length() + 20, vocab_size)
    for row in range(logits.shape[0]):
        logits[row, -1 - row % vocab_size] += 20  # every place near the end is a maximum once
    logits = logits.to(dtype)
    tokens, logprobs = greedy_tokens(logits).unbind(1)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert_near(logprobs, logits.double().log_softmax(-1).amax(-1))


@pytest.mark.parametrize("vocab_size", [5, 100])
def test_greedy_among_negative_logits(vocab_size):
    """Zeros behind the end of a row are larger than all of it."""
    logits = -torch.arange(1.0, vocab_size + 1).flip(0)[None] - 50
    tokens, logprobs = greedy_tokens(logits).unbind(1)
    assert tokens.tolist() == [vocab_size - 1]
    assert_near(logprobs, logits.double().log_softmax(-1).amax(-1))


def test_of_equal_logits_greedy_takes_the_first():
    """What `argmax` gives, so that both paths choose alike."""
    logits = torch.zeros(1, 100)
    logits[0, [37, 38, 99]] = 2.5
    assert greedy_tokens(logits)[0][0] == 37


def test_greedy_among_forbidden_tokens():
    """-inf beside a number: no NaN; and only NaN: still a token of the vocabulary."""
    logits = torch.full((2, 50), -torch.inf)
    logits[0, 20] = -3.0
    logits[1] = torch.nan
    tokens, logprobs = greedy_tokens(logits).unbind(1)
    assert tokens[0] == 20
    assert logprobs[0] == 0
    assert 0 <= tokens[1] < 50
    assert logprobs[1].isnan()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_two_threads_share_the_rows_of_a_large_batch(num_threads):
    """Rows computed by nobody, or by both in place."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        rows, weight = torch.randn(301, 512), torch.randn(512)
        assert_near(rms_norm(rows, weight, 1e-5), exact_norm(rows, weight, 1e-5))
        heads, angles = rows.view(301, 8, 64).clone(), torch.randn(301, 64)
        rotate_heads_(heads, angles.cos(), angles.sin())
        alone = rows.view(301, 8, 64)[300:].clone()
        rotate_heads_(alone, angles[300:].cos(), angles[300:].sin())
        assert heads[300:].equal(alone)
        assert_near(silu_gate(rows)[300:], silu_gate(rows[300:]).double())
        assert greedy_tokens(rows)[:, 0].tolist() == rows.argmax(-1).tolist()
    finally:
        torch.set_num_threads(before)
