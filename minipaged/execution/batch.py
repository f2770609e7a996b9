"""A plan becomes flat ragged tensors: the rows of all scheduled sequences one after another, unpadded.

    scheduled a: 5 tokens from 0     b: 1 token from 8     c: 2 tokens from 5        block size 4
    rows      a a a a a | b | c c
    positions 0 1 2 3 4 | 8 | 5 6
    slots     through each sequence's block table: table[position // 4] * 4 + position % 4

The slots are `BlockTable.slots` of every sequence, computed in numpy for all of them at once.
Paper: section 5.1.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minipaged.execution.transfer import to_device
from minipaged.kernels.metadata import AttentionMetadata
from minipaged.scheduling import ScheduledSequence


class Batch(NamedTuple):
    """T rows of S sequences, of which R are the rows whose logits are needed."""

    input_ids: Tensor  # [1, T] int64
    positions: Tensor  # [1, T] int64, each row's position in its own sequence
    metadata: AttentionMetadata
    output_indices: Tensor  # [R] int64, ascending
    output_rows: list[int]  # the same on the host
    sampling: list[ScheduledSequence]  # those that get candidates, in plan order
    sampling_index: list[int] | None  # which of the R rows each of them has; None: all, in order
    # Those whose prompt tokens' log-probabilities are wanted, and where their rows begin in R.
    prompts: list[tuple[ScheduledSequence, int]]


class BatchBuilder:
    """Builds the batch of one plan after the other, with tensors on `device`.

    Block tables hardly change from one step to the next, so the last ones are kept in one array, and only the
    rows that differ are written.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._known: list[list[int]] = []  # row -> the blocks that `_tables` holds there
        self._tables = np.zeros((0, 0), dtype=np.int32)

    def build(self, scheduled: list[ScheduledSequence]) -> Batch:
        """The tensors of at least one scheduled sequence."""
        token_ids = array("i")
        for sequence, start, num_tokens, _ in scheduled:
            if num_tokens == 1:
                token_ids.append(sequence.token_ids[start])
            else:
                token_ids += sequence.token_ids[start : start + num_tokens]
        sequences, starts, lengths, _ = zip(*scheduled)
        start_of, length_of = np.array((starts, lengths), dtype=np.int32)
        query_start = np.zeros(len(scheduled) + 1, dtype=np.int32)
        np.cumsum(length_of, out=query_start[1:])
        context_len = start_of + length_of
        query_start_list, context_len_list = query_start.tolist(), context_len.tolist()

        # A row's position: its place in the batch, less where its sequence begins there, plus `start`.
        tables = self._update_tables([sequence.table.blocks for sequence in sequences])
        owner = np.repeat(np.arange(len(scheduled)), length_of)
        positions = np.arange(len(token_ids)) - (query_start[:-1] - start_of)[owner]
        block_size = sequences[0].table.block_size
        slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size

        outputs, sampling, sampling_index, prompts = choose_outputs(scheduled, query_start_list)
        of_rows = np.array(token_ids, dtype=np.int64), positions, slots, np.array(outputs, dtype=np.int64)
        moved = to_device((*of_rows, query_start, context_len, tables.copy()), self.device)
        input_ids, row_positions, slot_mapping, output_indices, query_starts, contexts, block_tables = moved
        metadata = AttentionMetadata(
            slot_mapping=slot_mapping,
            query_start=query_starts,
            context_len=contexts,
            block_tables=block_tables,
            query_start_list=query_start_list,
            context_len_list=context_len_list,
            max_query_len=max(lengths),
            max_context_len=max(context_len_list),
        )
        return Batch(
            input_ids=input_ids[None],
            positions=row_positions[None],
            metadata=metadata,
            output_indices=output_indices,
            output_rows=outputs,
            sampling=sampling,
            sampling_index=sampling_index,
            prompts=prompts,
        )

    def _update_tables(self, tables: list[list[int]]) -> np.ndarray:
        """The block tables [S, longest] int32, a view; what lies behind a shorter one means nothing."""
        rows, columns = len(tables), max(map(len, tables))
        old_rows, old_columns = self._tables.shape
        if rows > old_rows or columns > old_columns:
            grown = np.zeros((max(rows, 2 * old_rows), max(columns, 2 * old_columns)), dtype=np.int32)
            grown[:old_rows, :old_columns] = self._tables
            self._tables = grown
            self._known += [[] for _ in range(len(grown) - old_rows)]
        for row, blocks in enumerate(tables):
            if self._known[row] != blocks:
                self._known[row] = blocks[:]
                self._tables[row, : len(blocks)] = blocks
        return self._tables[:rows, :columns]


def choose_outputs(
    scheduled: list[ScheduledSequence], query_start: list[int]
) -> tuple[list[int], list[ScheduledSequence], list[int] | None, list[tuple[ScheduledSequence, int]]]:
    """The fields `output_indices`, `sampling`, `sampling_index`, `prompts` of a `Batch`.

    Sampling needs the last row; a prompt's log-probabilities, every row whose next token is in the prompt.
    """
    outputs: list[int] = []
    sampling: list[ScheduledSequence] = []
    index: list[int] = []
    prompts: list[tuple[ScheduledSequence, int]] = []
    for item, first, end in zip(scheduled, query_start, query_start[1:]):
        if num_predicted := num_predicted_prompt_tokens(item):
            prompts.append((item, len(outputs)))
            outputs += range(first, first + num_predicted)
        if item.num_candidates:
            if not outputs or outputs[-1] != end - 1:
                outputs.append(end - 1)
            sampling.append(item)
            index.append(len(outputs) - 1)
    return outputs, sampling, index if prompts else None, prompts


def num_predicted_prompt_tokens(item: ScheduledSequence) -> int:
    """How many scheduled rows, from the first, predict a prompt token whose log-probability is wanted."""
    sequence, start, num_tokens, _ = item
    request, num_left = sequence.request, sequence.num_prompt_tokens - 1 - start
    if num_left <= 0 or sequence is not request.sequences[0]:
        return 0
    return 0 if getattr(request.params, "prompt_logprobs", None) is None else min(num_tokens, num_left)
