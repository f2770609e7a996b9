"""Layer 1: the fast PyTorch path against the float64 oracle, over poisoned pools."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from minipaged.kernels.reference import oracle, short_decodes
from minipaged.kernels.reference.attention import causal_mask, paged_attention
from tests.kernels.cases import check_attention, make_case
from tests.kernels.random_shapes import LENGTHS, options_of_a_case

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DECODES = [(1, 1), (1, 4), (1, 5), (1, 23)]
LONG_DECODES = [(1, 130), (1, 9), (1, 200)]  # beyond SHORT_CONTEXT: attended one by one
MIXED = [(1, 9), (7, 7), (3, 12), (1, 1), (5, 6)]


def check(lengths, **options):
    """(Not a `partial`: an override takes the place of the name.)"""
    check_attention(paged_attention, lengths, **options)


def test_oracle_equals_dense_attention_on_a_contiguous_prompt():
    """Catches an oracle that is wrong the same way as the path it checks: SDPA knows nothing of pages."""
    case = make_case([(11, 11)], heads=(4, 4), block_size=3)
    key = case.new_key.transpose(0, 1).double()
    value = case.new_value.transpose(0, 1).double()
    query = case.query.transpose(0, 1).double()
    dense = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.2).transpose(0, 1)
    paged = oracle.paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, scale=0.2)
    torch.testing.assert_close(paged, dense, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [DECODES, LONG_DECODES, MIXED], ids=["short", "long", "mixed"])
def test_any_mix_of_query_lengths_equals_the_oracle(lengths, dtype):
    """Catches a wrong sequence or KV head, a mask off by one; in 16 bits only: sums not in float32."""
    check(lengths, dtype=dtype)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 64, 256])
def test_block_size_changes_nothing(block_size):
    """Catches slot arithmetic that is right for one block size only."""
    check([*MIXED, (2, 35)], block_size=block_size)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 1), (6, 2), (16, 1)])
def test_query_heads_share_the_kv_head_of_their_group(heads):
    """Catches heads packed in the wrong order (h % Hkv instead of h // G)."""
    check(MIXED, heads=heads)


@pytest.mark.parametrize("head_dims", [(64, 64), (48, 32), (8, 24), (1, 1)])
def test_keys_and_values_may_differ_in_head_size(head_dims):
    """Catches a value pool indexed with the key's strides (multi-head latent attention)."""
    check(MIXED, head_dims=head_dims)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 100])
@pytest.mark.parametrize("lengths", [DECODES, MIXED], ids=["decode", "mixed"])
def test_a_window_reads_only_what_it_can_see(lengths, window):
    """Catches an off-by-one at the window's edge, and gathered pages that no row can see (poison)."""
    check(lengths, sliding_window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.7, False), (None, True), (0.7, True)])
def test_softcap_and_sinks_equal_the_oracle(softcap, with_sinks, window, dtype):
    """Catches a softcap before the scale, a sink that is scaled or capped, or one that has a value."""
    check(MIXED, softcap=softcap, with_sinks=with_sinks, sliding_window=window, dtype=dtype, scale=1.0)


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_the_scale_is_the_callers(scale):
    """Catches a hidden 1/sqrt(D): OPT sends 1.0."""
    check(MIXED, scale=scale)


def test_a_sequence_without_query_rows_is_skipped():
    """Catches an empty chunk that shifts everyone behind it."""
    check([(2, 5), (0, 6), (1, 3)])


@pytest.mark.parametrize("lengths", [DECODES, LONG_DECODES, MIXED], ids=["short", "long", "mixed"])
def test_strided_queries_are_read_by_their_strides(lengths):
    """Catches strides computed as if the query were contiguous, or a view that scrambles a transposed one."""
    case = make_case(lengths)
    strided = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    inputs = (case.key_cache, case.value_cache, case.metadata)
    expected = paged_attention(case.query, *inputs, scale=0.3)
    message = (
        "the same query gives another result where the heads of a row do not lie side by side "
        f"(strides {strided.stride()} instead of {case.query.stride()})"
    )
    torch.testing.assert_close(paged_attention(strided, *inputs, scale=0.3), expected, msg=message)


def test_many_short_decodes_are_attended_in_several_groups(monkeypatch):
    """Catches a group that loses its last members, or answers written to another group's rows."""
    # two sequences of 20 tokens, 2 heads of 32
    monkeypatch.setattr(short_decodes, "PADDED_ELEMENTS", 2 * 32 * 40)
    check([(1, 3), (2, 9), (1, 20), (1, 17), (1, 19), (1, 1), (0, 4), (1, 2)])


def test_a_decode_whose_keys_fill_more_than_a_group_is_attended_alone(monkeypatch):
    """Catches a group of none: wide heads, and a step that never ends."""
    monkeypatch.setattr(short_decodes, "PADDED_ELEMENTS", 1)
    check(DECODES)


def test_causal_mask_by_hand():
    """Catches a mask aligned to the first key instead of the last."""
    assert causal_mask(2, 4, None, torch.device("cpu")).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert causal_mask(2, 4, 2, torch.device("cpu")).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, options=options_of_a_case(DTYPES))
def test_random_shapes_equal_the_oracle(lengths, options):
    """Catches what no table of cases covers: random combinations of features and shapes."""
    check(lengths, **options)
