"""Chunked attention is paged attention over pieces cut at chunk boundaries."""

import torch

from minipaged.execution.chunked_attention import split_at_chunks
from minipaged.kernels.reference.attention import paged_attention
from tests.kernels.cases import assert_close, make_case


def test_a_sequence_is_cut_where_its_chunks_end() -> None:
    """The picture of the module's docstring: chunk size 8, block size 4, rows 6 to 10."""
    case = make_case([(5, 11)], block_size=4)
    pieces = split_at_chunks(case.metadata, 8, case.key_cache)
    table = case.metadata.block_tables[0].tolist()
    assert pieces.query_start_list == pieces.query_start.tolist() == [0, 2, 5]
    assert pieces.context_len_list == pieces.context_len.tolist() == [8, 3]
    assert pieces.block_tables[0].tolist() == table[:2]
    assert pieces.block_tables[1, 0].item() == table[2]
    assert (pieces.max_query_len, pieces.max_context_len) == (3, 8)
    assert pieces.slot_mapping is case.metadata.slot_mapping


def test_short_contexts_are_left_as_they_are() -> None:
    """A context within the first chunk costs nothing."""
    case = make_case([(3, 3), (1, 8)], block_size=4)
    assert split_at_chunks(case.metadata, 8, case.key_cache) is case.metadata


def test_each_row_sees_its_own_chunk_up_to_itself() -> None:
    """Against the definition, for decodes, chunks and prompts that end before, on and after a boundary."""
    chunk_size, scale = 8, 0.3
    lengths = [(5, 11), (1, 8), (1, 9), (17, 17), (3, 24), (2, 10)]
    # Tokens of a chunk that no row sees any more stay readable: the oracle below looks each up by slot.
    case = make_case(lengths, block_size=2)
    pieces = split_at_chunks(case.metadata, chunk_size, case.key_cache)
    output = paged_attention(case.query, case.key_cache, case.value_cache, pieces, scale=scale)

    expected = torch.zeros_like(output, dtype=torch.float64)
    for sequence, (query_len, context_len) in enumerate(lengths):
        table = case.metadata.block_tables[sequence].tolist()
        for row in range(query_len):
            position = context_len - query_len + row
            seen = range(position // chunk_size * chunk_size, position + 1)
            keys = torch.stack([case.key_cache[table[p // 2], :, p % 2] for p in seen]).double()
            values = torch.stack([case.value_cache[table[p // 2], :, p % 2] for p in seen]).double()
            flat_row = case.metadata.query_start_list[sequence] + row
            for head in range(4):
                query = case.query[flat_row, head].double()
                weights = torch.softmax(keys[:, head // 2] @ query * scale, dim=0)
                expected[flat_row, head] = weights @ values[:, head // 2]
    assert_close(output, expected, case)
