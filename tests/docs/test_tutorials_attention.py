"""First steps of lessons 03 and 10: one window, one block, then several."""

import pytest

from minipaged.kernels.reference import oracle
from minipaged.kernels.reference.attention import paged_attention
from tests.kernels.cases import assert_close, make_case


def check(lengths, scale=0.3, sign=None, **shape):
    case = make_case(lengths, **shape)
    query, keys = case.query, case.key_cache
    if sign is not None:  # of all scores
        query, keys = query.abs(), sign * keys.abs()
    inputs = (query, keys, case.value_cache, case.metadata)
    options = {"scale": scale}
    if "sliding_window" in shape:
        options["sliding_window"] = shape["sliding_window"]
    assert_close(paged_attention(*inputs, **options), oracle.paged_attention(*inputs, **options), case)


# -- lesson 03, task 3 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [3, 4, 5, 9])
def test_a_window_ends_at_its_edge(context):
    """Catches a window one too wide or too narrow, and slots before it that are gathered (NaN)."""
    check([(1, context)], sliding_window=4)


def test_every_row_has_a_window_of_its_own():
    """Catches keys gathered for the last row alone: an earlier row sees older ones."""
    check([(4, 9)], sliding_window=4)


# -- lesson 10 -----------------------------------------------------------------------------------------------


def test_rows_that_see_one_block():
    """Catches a block found without the table, and slots of the block that nobody wrote (NaN)."""
    check([(1, 2), (1, 3), (1, 4)], block_size=4)


def test_the_first_token_sees_itself():
    """Catches a row at position 0 that sees no block."""
    check([(1, 1)], block_size=4)


def test_scores_far_below_zero_have_weights():
    """Catches a largest score that begins at 0: the weights would all be 0."""
    check([(1, 3)], scale=50.0, sign=-1, block_size=4)


def test_rows_that_see_several_blocks():
    """Catches sums and values of earlier blocks that are not rescaled, or are dropped."""
    check([(1, 7), (1, 12)], block_size=4)


@pytest.mark.parametrize("context", [5, 9])
def test_the_first_token_of_a_block_sees_that_block(context):
    """Catches one block too few: in blocks of 4, position 4 is in block 1."""
    check([(1, context)], block_size=4)


def test_a_row_does_not_see_the_one_after_it():
    """Catches a mask that is off by one: the rows of a prompt are in the same block."""
    check([(4, 4), (2, 3)], block_size=4)


@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (4, 1)])
def test_heads_of_a_group_read_one_kv_head(heads):
    """Catches h % Hkv instead of h // G."""
    check([(1, 3), (1, 4)], block_size=4, heads=heads)


@pytest.mark.parametrize("block_size", [3, 5])
def test_a_block_need_not_be_a_power_of_two(block_size):
    """Catches the padding of tl.arange taken for slots of the block: it belongs to the next head."""
    check([(1, 3), (2, 3)], block_size=block_size)
