"""Layer 2: greedy tokens in Triton's interpreter, against PyTorch's operations."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is used where there is no GPU", allow_module_level=True)
pytest.importorskip("triton", reason="needs the package triton")

from minipaged.kernels.dispatch import greedy_tokens as expected_tokens
from minipaged.kernels.dispatch import select_backend

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")]

greedy_tokens = select_backend("triton", "cpu").greedy_tokens


def assert_as_expected(logits):
    found, expected = greedy_tokens(logits), expected_tokens(logits)
    assert found[:, 0].tolist() == expected[:, 0].tolist()
    torch.testing.assert_close(found[:, 1], expected[:, 1], atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 4096, 9001])
def test_the_token_and_its_log_probability_are_those_of_torch(vocab_size, dtype):
    """Catches a piece of the vocabulary left out, sums that are not rescaled when a later
    piece has a larger logit."""
    logits = 5 * torch.randn(6, vocab_size)
    for row, place in enumerate((0, vocab_size // 2, vocab_size - 1)):
        logits[row, place] += 30
    assert_as_expected(logits.to(dtype))


def test_of_equal_logits_the_first_is_taken():
    """Catches the first of a later piece, or of a later lane."""
    logits = torch.zeros(2, 10_000)
    logits[0, [5000, 5001, 9000]] = 2.5
    logits[1, [4095, 4096, 8190]] = 2.5
    assert greedy_tokens(logits)[:, 0].tolist() == [5000, 4095]


def test_rows_may_be_views_of_wider_ones():
    """Catches the width taken for the distance of two rows."""
    wide = torch.randn(4, 300)
    assert_as_expected(wide[:, 100:200])
    assert_as_expected(wide.T[:5])


def test_rows_without_a_valid_token_are_recognized_by_their_log_probability():
    """Catches NaN taken for a number; -inf beside a number is a token that is forbidden, nothing worse."""
    logits = torch.full((5, 5000), -torch.inf)
    logits[0, 4500] = -3.0
    logits[1, 4500] = torch.nan
    logits[2, 100] = torch.inf
    logits[4] = torch.nan
    tokens, logprobs = greedy_tokens(logits).unbind(1)
    assert (tokens[0], logprobs[0]) == (4500, 0)
    assert logprobs[1:].isnan().all()
    assert ((tokens >= 0) & (tokens < 5000)).all()
