"""What attention is told of a step."""

import torch

from minipaged.kernels.metadata import AttentionMetadata


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
