"""First steps of lessons 03 and 10: one window, one block, then several."""

import math

import pytest
import torch

from minipaged.kernels.reference import oracle
from minipaged.kernels.reference.attention import paged_attention
from tests.kernels.cases import UNWRITTEN, assert_close, make_case


@pytest.fixture(autouse=True)
def unwritten(monkeypatch):
    """New memory holds the same number each time: whatever is in it by chance may look like a result."""
    empty = torch.empty

    def filled(*shape, **options):
        memory = empty(*shape, **options)
        return memory.fill_(UNWRITTEN) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", filled)


def check(lengths, scale=0.3, sign=None, softcap=None, with_sinks=False, **shape):
    case = make_case(lengths, **shape)
    query, keys = case.query, case.key_cache
    if sign is not None:  # of all scores
        query, keys = query.abs(), sign * keys.abs()
    inputs = (query, keys, case.value_cache, case.metadata)
    options = {"scale": scale}
    if softcap is not None:
        options["softcap"] = softcap
    if with_sinks:
        options["sinks"] = case.sinks
    if "sliding_window" in shape:
        options["sliding_window"] = shape["sliding_window"]
    assert_close(paged_attention(*inputs, **options), oracle.paged_attention(*inputs, **options), case)


# -- lesson 03, task 1 ---------------------------------------------------------------------------------------


def test_attention_changes_none_of_its_inputs():
    """Catches a query scaled in place (float32's `.float()` is the same tensor), or a cache tidied up."""
    case = make_case([(1, 5), (1, 9)])
    inputs = {"query": case.query, "key_cache": case.key_cache, "value_cache": case.value_cache}
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    tables = case.metadata.block_tables.clone()
    lists = case.metadata.query_start_list[:], case.metadata.context_len_list[:]
    paged_attention(**inputs, metadata=case.metadata, scale=0.3)
    for name, tensor in inputs.items():
        same = tensor.nan_to_num(7.0).equal(before[name].nan_to_num(7.0)) and (
            tensor.isnan().equal(before[name].isnan())
        )
        assert same, f"{name} is not what it was before the call"
    assert case.metadata.block_tables.equal(tables), "the block tables are not what they were before the call"
    after = case.metadata.query_start_list, case.metadata.context_len_list
    assert after == lists, f"query_start_list and context_len_list were {lists}, after the call {after}"


def test_the_weights_of_a_row_sum_to_one():
    """Catches a softmax over rows or heads, not over the keys: where all values are 1, so is the result."""
    case = make_case([(1, 5), (1, 3)])
    case.value_cache[~case.value_cache.isnan()] = 1.0
    output = paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, scale=0.3)
    assert_close(output, torch.ones(2, 4, 32), case)


def test_a_decode_sees_its_context_and_itself():
    """Catches a row that does not see itself, another block than the table's, and slots that nobody wrote."""
    check([(1, 5)], scale=1.0, heads=(1, 1), head_dims=(1, 1))  # of size 1, so that no scale is missed


def test_a_decode_uses_the_scale_it_is_given():
    """Catches a hidden 1 / sqrt(Dk): some models have another scale."""
    check([(1, 5)], scale=0.7, heads=(1, 1))


@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (4, 1)])
def test_a_decodes_heads_read_the_kv_head_of_their_group(heads):
    """Catches h % Hkv instead of h // (Hq // Hkv): `repeat` where `repeat_interleave` is needed."""
    check([(1, 5)], heads=heads)


def test_a_result_has_the_size_of_a_value():
    """Catches an output as wide as the query: keys of 8 numbers, values of 5."""
    check([(1, 5)], heads=(1, 1), head_dims=(8, 5))


def test_table_entries_past_the_context_are_not_looked_up():
    """Catches context // block_size + 1 blocks: where the last block is full, that is one too many."""
    case = make_case([(1, 8)], block_size=4)
    case.metadata.block_tables[0, 2:] = 10**6
    inputs = (case.query, case.key_cache, case.value_cache, case.metadata)
    assert_close(paged_attention(*inputs, scale=0.3), oracle.paged_attention(*inputs, scale=0.3), case)


HALF = [torch.float16, torch.bfloat16]


def difference_of_two_weights(query, keys, scale, dtype):
    """What attention returns for two keys with the values 1 and -1, in 16 bits."""
    case = make_case([(1, 2)], heads=(1, 1), head_dims=(2, 1), dtype=dtype)
    block = case.metadata.block_tables[0, 0]
    case.query[0, 0] = torch.tensor(query)
    case.key_cache[block, 0, :2] = torch.tensor(keys, dtype=dtype)
    case.value_cache[block, 0, :2] = torch.tensor([[1.0], [-1.0]], dtype=dtype)
    inputs = (case.query, case.key_cache, case.value_cache, case.metadata)
    return paged_attention(*inputs, scale=scale).item()


@pytest.mark.parametrize("dtype", HALF)
def test_scores_are_not_rounded(dtype):
    """Catches scores in 16 bits, where these two are equal; the keys and queries are exact there."""
    least = 2**-11 if dtype == torch.float16 else 2**-8  # the least step below 1
    found = difference_of_two_weights([1.0, 1.0], [[1.0, 1.0], [1.0, 1.0 - least]], 1 / least, dtype)
    message = (
        f"scores {2 / least:.0f} and {2 / least - 1:.0f}, values 1 and -1: expected 0.46, got {found:.2f}"
    )
    assert found == pytest.approx(math.tanh(0.5), rel=0.02), message


@pytest.mark.parametrize("dtype", HALF)
def test_a_scaled_query_is_not_rounded(dtype):
    """Catches `query * scale` before `.float()`: the product needs more digits than 16 bits have."""
    least = 2**-11 if dtype == torch.float16 else 2**-8  # the least step below 1
    found = difference_of_two_weights([1.0, 1.0 - least], [[1.0, 0.0], [0.0, 1.0]], 1.25 / least, dtype)
    message = f"two scores that differ by 1.25, values 1 and -1: expected 0.55, got {found:.2f}"
    assert found == pytest.approx(math.tanh(0.625), rel=0.02), message


@pytest.mark.parametrize("dtype", HALF)
def test_weights_are_not_rounded(dtype):
    """Catches weights in 16 bits, where 0.5001 and 0.4999 are both 0.5: round the result alone."""
    found = difference_of_two_weights([1.0, 0.0], [[1.0, 0.0], [0.0, 0.0]], 0.0004, dtype)
    message = f"weights 0.5001 and 0.4999, values 1 and -1: expected 0.0002, got {found:.4f}"
    assert found == pytest.approx(0.0002, rel=0.02), message


# -- lesson 03, task 2 ---------------------------------------------------------------------------------------


def test_a_hidden_key_is_hidden_from_scores_far_below_zero():
    """Catches -10000 or -1e9 in place of -inf for a hidden score: here every visible one is lower."""
    check([(3, 3), (2, 5)], scale=1e10, sign=-1)


# -- lesson 03, task 3 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [3, 4, 5, 9])
def test_a_window_ends_at_its_edge(context):
    """Catches a window one too wide or too narrow, and slots before it that are gathered (NaN)."""
    check([(1, context)], sliding_window=4)


def test_every_row_has_a_window_of_its_own():
    """Catches keys gathered for the last row alone (an earlier row sees older ones), and a mask that is
    one too wide, or lacks the window, where they are gathered for the first."""
    check([(4, 9)], sliding_window=4)


@pytest.mark.parametrize("query_len", [1, 3])
def test_blocks_before_the_window_are_not_looked_up(query_len):
    """Catches a window that is cut out after the gather: table entries before it may be any number."""
    case = make_case([(query_len, 11)], sliding_window=2)
    case.metadata.block_tables[0, 0] = 10**6
    inputs = (case.query, case.key_cache, case.value_cache, case.metadata)
    options = {"scale": 0.3, "sliding_window": 2}
    assert_close(paged_attention(*inputs, **options), oracle.paged_attention(*inputs, **options), case)


def test_a_hidden_key_stays_hidden_under_a_cap():
    """Catches a cap after the mask: softcap * tanh(-inf) is -softcap, a score like any other."""
    case = make_case([(3, 3)])
    inputs = (case.query, case.key_cache, case.value_cache, case.metadata)
    first = paged_attention(*inputs, scale=0.3, softcap=2.0)[:2].clone()
    block = case.metadata.block_tables[0, 0]
    case.value_cache[block, :, 2] += 100.0  # of the last token, which rows 0 and 1 do not see
    second = paged_attention(*inputs, scale=0.3, softcap=2.0)[:2]
    assert not first.isnan().any(), (
        "rows 0 and 1 have NaN: they read a slot that nobody wrote, or see no key at all (0 / 0)"
    )
    assert first.equal(second), "rows 0 and 1 changed with the value of a token behind them"


@pytest.mark.parametrize("lengths", [[(1, 7)], [(3, 6)]], ids=["a decode", "a chunk"])
def test_a_soft_cap_alone(lengths):
    """Catches a cap before the scale, or one that is not multiplied back."""
    check(lengths, softcap=2.0)


@pytest.mark.parametrize("lengths", [[(1, 7)], [(3, 6)]], ids=["a decode", "a chunk"])
def test_sinks_alone(lengths):
    """Catches a sink that is scaled or has a value, and one head's sink for all heads."""
    check(lengths, with_sinks=True)


def test_a_cap_and_sinks_together():
    """Catches one option that excludes the other, and sinks that are capped."""
    check([(1, 7), (3, 6)], softcap=2.0, with_sinks=True)


def test_large_scores_beside_a_sink_do_not_overflow():
    """Catches exp(score) without the largest score subtracted: exp(100) is inf in float32."""
    check([(1, 3)], scale=50.0, sign=1, with_sinks=True)


# -- lesson 10 -----------------------------------------------------------------------------------------------


def test_rows_that_see_one_block():
    """Catches a forgotten scale, a row that does not see itself, a block found without the table, and slots
    that nobody wrote (NaN)."""
    check([(1, 2), (1, 3), (1, 4)], block_size=4, heads=(1, 1))


def test_a_key_ends_at_its_size():
    """Catches padding of tl.arange taken for numbers of a key: behind them the next slot begins."""
    check([(1, 3)], block_size=4, heads=(1, 1), head_dims=(5, 5))
    check([(1, 3), (2, 4)], block_size=4, head_dims=(5, 5))


def test_a_query_ends_at_its_size():
    """Catches a query loaded without a mask: what is behind it in memory, here NaN, times 0 is not 0."""
    case = make_case([(1, 3), (2, 4)], block_size=4, head_dims=(5, 5))
    memory = torch.full((3, 4, 8), math.nan)
    memory[..., :5] = case.query
    inputs = (case.key_cache, case.value_cache, case.metadata)
    expected = oracle.paged_attention(case.query, *inputs, scale=0.3)
    assert_close(paged_attention(memory[..., :5], *inputs, scale=0.3), expected, case)


@pytest.mark.parametrize("head_dims", [(8, 5), (5, 8)])
def test_values_may_have_another_size_than_keys(head_dims):
    """Catches the keys' size in the address of a value: entry e begins at e * Dv, not at e * Dk."""
    check([(1, 3), (1, 4)], block_size=4, head_dims=head_dims)


def test_the_first_token_sees_itself():
    """Catches a row at position 0 that sees no block."""
    check([(1, 1)], block_size=4, heads=(1, 1))


@pytest.mark.parametrize("scale", [50.0, 5000.0])
def test_scores_far_below_zero_have_weights(scale):
    """Catches `exp` without subtracting the row's largest score, a largest score that begins at 0 or -10,000,
    and hidden slots with such a score: the weights of what is seen would all be 0."""
    check([(1, 3)], scale=scale, sign=-1, block_size=4)


def test_rows_that_see_several_blocks():
    """Catches sums and values of earlier blocks that are not rescaled, or are dropped."""
    check([(1, 7), (1, 12)], block_size=4, heads=(1, 1))


@pytest.mark.parametrize("context", [5, 9])
def test_the_first_token_of_a_block_sees_that_block(context):
    """Catches one block too few: in blocks of 4, position 4 is in block 1."""
    check([(1, context)], block_size=4)


def test_a_row_does_not_see_the_one_after_it():
    """Catches a mask that is off by one: the rows of a prompt are in the same block."""
    check([(4, 4), (2, 3)], block_size=4)


@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (4, 1), (8, 4), (3, 3)])
def test_heads_of_a_group_read_one_kv_head(heads):
    """Catches h % Hkv instead of h // G, and a group of two, or two groups, taken for granted."""
    check([(1, 3), (1, 4)], block_size=4, heads=heads)


def test_a_query_is_read_by_its_strides():
    """Catches an address computed from the sizes: in memory, the rows of a head may lie side by side."""
    case = make_case([(1, 3), (1, 4)], block_size=4)
    strided = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    inputs = (case.key_cache, case.value_cache, case.metadata)
    expected = oracle.paged_attention(strided, *inputs, scale=0.3)
    assert_close(paged_attention(strided, *inputs, scale=0.3), expected, case)


@pytest.mark.parametrize("block_size", [3, 5])
def test_a_block_need_not_be_a_power_of_two(block_size):
    """Catches the padding of tl.arange taken for slots of the block: it belongs to the next head."""
    check([(1, 3), (2, 3)], block_size=block_size)


@pytest.mark.parametrize("block_size", [3, 5])
def test_padded_slots_are_not_slots_in_a_full_block_either(block_size):
    """Catches the padding of a row's earlier blocks, which is the next head's: `x and y` is `y` alone."""
    check([(1, 3 * block_size - 1), (2, 2 * block_size)], block_size=block_size)


@pytest.mark.parametrize("seed", range(4))
def test_a_smaller_score_in_a_later_block_overflows_nothing(seed):
    """Catches the largest score of the block in place of the largest so far: exp(largest - new) is inf."""
    check([(1, 12)], scale=50.0, sign=1, block_size=4, seed=seed)


def test_nothing_is_written_past_the_result(monkeypatch):
    """Catches a store without a mask, or with a padded size in its address: it writes behind the last row."""
    empty, behind = torch.empty, []

    def with_a_guard(*shape, **options):
        if shape != (3, 4, 5):
            return empty(*shape, **options)
        memory = torch.full((math.prod(shape) + 64,), 123.0, dtype=options["dtype"])
        behind.append(memory[-64:])
        return memory[:-64].view(shape)

    monkeypatch.setattr(torch, "empty", with_a_guard)
    case = make_case([(1, 3), (2, 4)], block_size=4, head_dims=(5, 5))
    paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, scale=0.3)
    changed = [place for guard in behind for place in (guard != 123.0).nonzero().flatten().tolist()]
    cause = "a store has no mask, or a padded size in its address"
    assert not changed, f"{len(changed)} numbers behind the last row were overwritten: {cause}"
