"""First steps of lesson 10: attention within one block, before a softmax over several is needed."""

import pytest

from minipaged.kernels.reference import oracle
from minipaged.kernels.reference.attention import paged_attention
from tests.kernels.cases import assert_close, make_case


def check(lengths, **shape):
    case = make_case(lengths, **shape)
    inputs = (case.query, case.key_cache, case.value_cache, case.metadata)
    assert_close(paged_attention(*inputs, scale=0.3), oracle.paged_attention(*inputs, scale=0.3), case)


def test_rows_that_see_one_block():
    """Catches a block found without the table, and slots of the block that nobody wrote (NaN)."""
    check([(1, 1), (1, 3), (1, 4)], block_size=4)


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
