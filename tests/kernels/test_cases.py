"""The checker of every kernel test: what it lets through no kernel test can catch."""

import pytest
import torch

from minipaged.kernels.reference import oracle
from tests.kernels.cases import assert_close, make_case

LENGTHS = [(1, 1 + 97 * s % 500) for s in range(40)] + [(1, 3000), (30, 700)]
LONG = 40  # the row of the longest context, whose values are the smallest


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def checked(request):
    case = make_case(LENGTHS, head_dims=(16, 32), dtype=request.param)
    inputs = (case.query, case.key_cache, case.value_cache, case.metadata)
    return case, oracle.paged_attention(*inputs, scale=0.25).double()


def test_rounding_to_the_dtype_passes(checked):
    """Catches a bound that no kernel could keep."""
    case, expected = checked
    assert_close(expected.to(case.query.dtype), expected, case)


@pytest.mark.parametrize("row", [0, LONG, -1])
def test_one_wrong_row_and_head_of_many_is_noticed(checked, row):
    """Catches a norm over the whole output, in which one row of 1,259 disappears."""
    case, expected = checked
    actual = expected.clone()
    actual[row, 2] = expected[row - 1, 1]
    with pytest.raises(AssertionError, match=rf"row {row % len(expected)} .*, head 2:"):
        assert_close(actual, expected, case)


def test_a_long_context_that_is_8_percent_off_is_noticed(checked):
    """Catches an error measured against a fixed size: the mean of 3000 values is small."""
    case, expected = checked
    actual = expected.clone()
    actual[LONG] *= 1.08
    with pytest.raises(AssertionError, match=f"row {LONG} "):
        assert_close(actual, expected, case)


def test_a_single_nan_is_noticed(checked):
    """Catches a comparison that NaN passes."""
    case, expected = checked
    actual = expected.clone()
    actual[3, 1, 5] = float("nan")
    with pytest.raises(AssertionError, match=r"row 3 .*, head 1:"):
        assert_close(actual, expected, case)
