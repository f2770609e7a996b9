"""A `paged_attention` of one's own in the running engine: errors are reported, and what is right runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from minipaged.kernels.reference.attention import paged_attention
from minipaged.learn.contracts import CONCEPTS, ContractError
from tests.kernels.cases import make_case


def watched(override):
    return CONCEPTS["paged_attention"].watch(override)


def attend(override, case, **options):
    return watched(override)(
        case.query, case.key_cache, case.value_cache, case.metadata, scale=0.3, **options
    )


def of_its_own_layout(*inputs, **options):
    return paged_attention(*inputs, **options).transpose(0, 1).contiguous().transpose(0, 1)


def scaling_in_place(query, *others, scale, **options):
    return paged_attention(query.mul_(2 * scale), *others, scale=0.5, **options)


class AsObject:
    def __call__(self, *inputs, **options):
        return paged_attention(*inputs, **options)


@pytest.mark.parametrize("override", [paged_attention, of_its_own_layout, scaling_in_place, AsObject])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_right_runs(override, dtype):
    """Catches a row looked for at another position, and a tolerance below what 16 bits round."""
    lengths = [(1, 1), (1, 40), (5, 5), (3, 17), (2, 100)]
    for options in ({}, {"sliding_window": 4}, {"softcap": 2.0}):
        case = make_case(lengths, dtype=dtype, sliding_window=options.get("sliding_window"))
        function = watched(override)
        inputs = case.key_cache, case.value_cache, case.metadata
        expected = paged_attention(case.query, *inputs, scale=0.3, **options)
        for _ in range(7):  # each call looks at other rows
            attended = function(case.query.clone(), *inputs, scale=0.3, **options)
            torch.testing.assert_close(attended, expected, rtol=0.05, atol=0.05)
            assert attended.shape == expected.shape


def without_mask(query, key_cache, value_cache, metadata, **options):
    """Every row of a chunk sees the whole context."""
    rows = []
    for sequence, (first, end) in enumerate(
        zip(metadata.query_start_list, metadata.query_start_list[1:], strict=False)
    ):
        for row in range(first, end):
            alone = replace(
                metadata,
                query_start_list=[0, 1],
                query_start=torch.tensor([0, 1], dtype=torch.int32),
                context_len_list=[metadata.context_len_list[sequence]],
                context_len=metadata.context_len[sequence : sequence + 1],
                block_tables=metadata.block_tables[sequence : sequence + 1],
                max_query_len=1,
            )
            rows.append(paged_attention(query[row : row + 1], key_cache, value_cache, alone, **options))
    return torch.cat(rows)


def writes_to_the_pool(query, key_cache, *others, **options):
    key_cache.mul_(0.5)
    return paged_attention(query, key_cache, *others, **options)


def tidies_tables(query, key_cache, value_cache, metadata, **options):
    attended = paged_attention(query, key_cache, value_cache, metadata, **options)
    metadata.block_tables[0, 0] += 1
    return attended


def with_a_row_of_nan(query, *others, **options):
    attended = paged_attention(query, *others, **options)
    attended[1] = math.nan  # (not a row that the first call compares)
    return attended


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (without_mask, r"row \d, which is at position \d of sequence 0, is \d+% off; compare with"),
        (lambda query, *others, **options: 2 * paged_attention(query, *others, **options), "is 100% off"),
        (lambda query, *others, **options: 1.03 * paged_attention(query, *others, **options), "is 3% off"),
        (lambda query, *others, **options: torch.full_like(query, math.inf), "is (inf|nan)% off"),
        (with_a_row_of_nan, "the result has NaN; a row read a slot that nobody wrote"),
        (lambda query, *others, **options: query[:, :1], r"is \[4, 1, 32\]; give \[T, Hq, Dv\] = \[4, 4"),
        (lambda query, *others, **options: query.numpy(), "the result is ndarray; give a tensor of torch"),
        (lambda query, *others, **options: None, "the result is NoneType; give a tensor"),
        (lambda query, *others, **options: query.double(), "float64; give the type of the query, torch.flo"),
        (writes_to_the_pool, "a pool was changed; attention only reads"),
        (tidies_tables, "the block tables were changed"),
    ],
)
def test_what_is_wrong_is_reported(override, message):
    """Catches another text without a reason."""
    case = make_case([(4, 6)])
    with pytest.raises(ContractError, match=f"paged_attention: .*{message}"):
        attend(override, case)


def test_a_class_that_needs_arguments_is_reported():
    """Catches a TypeError of the engine's own."""

    class Needy(AsObject):
        def __init__(self, window):
            self.window = window

    with pytest.raises(ContractError, match=r"paged_attention: the engine calls Needy\(\), but .*'window'"):
        watched(Needy)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (3, "3 cannot be called"),
        (type("Silent", (), {}), "Silent cannot be called"),
        (lambda query: query, r"the contract calls <lambda>\(query, .*\), but it is declared with \(query\)"),
        (type("Short", (), {"__call__": lambda self, query: query}), r"declared with \(self, query\)"),
    ],
)
def test_what_cannot_be_called_like_it_is_reported_when_it_is_loaded(override, message):
    """Catches a TypeError in the middle of a model."""
    with pytest.raises(ContractError, match=f"^paged_attention: .*{message}"):
        CONCEPTS["paged_attention"].check(override)
