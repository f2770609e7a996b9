"""What attention knows of a step."""

import pytest
import torch

from minipaged.kernels.metadata import AttentionMetadata
from tests.kernels.cases import make_case


def test_queries_that_nobody_wants_are_left_out_and_see_what_they_saw():
    """Catches a prompt that goes on and still asks, and a row that is counted to its neighbour."""
    metadata = AttentionMetadata(
        slot_mapping=torch.arange(8),
        query_start=torch.tensor([0, 5, 6, 8], dtype=torch.int32),
        context_len=torch.tensor([5, 9, 7], dtype=torch.int32),
        block_tables=torch.zeros(3, 3, dtype=torch.int32),
        query_start_list=[0, 5, 6, 8],
        context_len_list=[5, 9, 7],
        max_query_len=5,
        max_context_len=9,
    )
    assert metadata.max_decode_len == 9
    fewer = metadata.select_queries(torch.tensor([5, 7]), [5, 7])
    assert fewer.query_start_list == fewer.query_start.tolist() == [0, 0, 1, 2]
    assert fewer.query_start.dtype == torch.int32
    assert fewer.max_query_len == 1
    assert fewer.max_decode_len == 9
    assert fewer.context_len_list == [5, 9, 7]
    none = metadata.select_queries(torch.tensor([], dtype=torch.int64), [])
    assert none.query_start_list == none.query_start.tolist() == [0, 0, 0, 0]
    assert none.max_decode_len == 0


def test_metadata_refuses_lists_that_disagree():
    """Catches prefix sums handed over without their leading zero."""
    empty = torch.empty(0, dtype=torch.int64)
    for starts in ([1], [0, 1, 2]):
        with pytest.raises(ValueError, match=f"query_start_list has {len(starts)} entries for 1 sequences"):
            AttentionMetadata(empty, empty, empty, empty, starts, [1], 1, 1)


def test_the_longest_decode_is_that_of_a_padded_step_and_no_prompts():
    """Catches a captured decode with splits for its first step only: later contexts are longer."""
    empty = torch.empty(0, dtype=torch.int64)
    padded = AttentionMetadata(empty, empty, empty, empty, [0, 1, 2], [5, 9], 1, 4096)
    assert padded.max_decode_len == 4096
    mixed = AttentionMetadata(empty, empty, empty, empty, [0, 5, 6], [50, 9], 5, 50)
    assert mixed.max_decode_len == 9


def test_is_decode_only_means_one_row_each():
    """Catches a batch with an empty chunk mistaken for a pure decode."""
    assert make_case([(1, 3), (1, 9)]).metadata.is_decode_only
    assert not make_case([(1, 3), (2, 9)]).metadata.is_decode_only
    assert not make_case([(1, 3), (0, 9)]).metadata.is_decode_only
    assert not make_case([(2, 3), (0, 9)]).metadata.is_decode_only
