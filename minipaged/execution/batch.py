"""A plan becomes flat ragged tensors: the rows of all scheduled sequences one after another, unpadded.

    scheduled a: 5 tokens from 0     b: 1 token from 8     c: 2 tokens from 5        block size 4
    rows      a a a a a | b | c c
    positions 0 1 2 3 4 | 8 | 5 6
    slots     through each sequence's block table: table[position // 4] * 4 + position % 4

Paper: sections 4.3 (one flat batch) and 5.1.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import sub
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
    scheduled: list[ScheduledSequence]  # all S


class BatchBuilder:
    """Builds the batch of each plan, with tensors on `device`.

    Block tables hardly change from one step to the next, so the last ones are kept in one array, and only the
    rows that differ are written.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._known: list[list[int]] = []  # row -> the blocks that `_tables` holds there
        self._tables = np.zeros((0, 0), dtype=np.int32)

    def build(self, scheduled: list[ScheduledSequence]) -> Batch:
        """The tensors of at least one scheduled sequence."""
        token_ids, positions, slots = array("i"), array("q"), array("q")
        query_starts, context_lens = [0], []
        block_size = scheduled[0].sequence.table.block_size
        for sequence, start, num_tokens, _ in scheduled:
            stop, blocks = start + num_tokens, sequence.table.blocks
            if num_tokens == 1:
                token_ids.append(sequence.token_ids[start])
                positions.append(start)
                slots.append(blocks[start // block_size] * block_size + start % block_size)
            else:
                token_ids += sequence.token_ids[start:stop]
                positions.frombytes(np.arange(start, stop).tobytes())
                slots.frombytes(slots_of(blocks, block_size, start, stop).tobytes())
            query_starts.append(len(token_ids))
            context_lens.append(stop)
        tables = [item.sequence.table.blocks for item in scheduled]
        output_rows, sampling, sampling_index, prompts = choose_outputs(scheduled, query_starts)
        batch = self.assemble((token_ids, positions, slots), query_starts, context_lens, tables, output_rows)
        return batch._replace(
            sampling=sampling, sampling_index=sampling_index, prompts=prompts, scheduled=scheduled
        )

    def assemble(
        self,
        rows: tuple[Sequence[int], ...],
        query_starts: list[int],
        context_lens: list[int],
        tables: list[list[int]],
        output_rows: list[int],
    ) -> Batch:
        """The tensors of `rows` (token ids, positions and slots), for no sequences yet."""
        of_rows = [np.array(numbers, dtype=np.int64) for numbers in (*rows, output_rows)]
        counts = [np.array(numbers, dtype=np.int32) for numbers in (query_starts, context_lens)]
        moved = to_device([*of_rows, *counts, self._update_tables(tables).copy()], self.device)
        input_ids, positions, slot_mapping, output_indices, query_start, context_len, block_tables = moved
        metadata = AttentionMetadata(
            slot_mapping=slot_mapping,
            query_start=query_start,
            context_len=context_len,
            block_tables=block_tables,
            query_start_list=query_starts,
            context_len_list=context_lens,
            max_query_len=max(map(sub, query_starts[1:], query_starts)),
            max_context_len=max(context_lens),
        )
        return Batch(
            input_ids=input_ids[None],
            positions=positions[None],
            metadata=metadata,
            output_indices=output_indices,
            output_rows=output_rows,
            sampling=[],
            sampling_index=None,
            prompts=[],
            scheduled=[],
        )

    def _update_tables(self, tables: list[list[int]]) -> np.ndarray:
        """The block tables [S, longest] int32, a view; entries past the end of a shorter one mean nothing."""
        rows, columns = len(tables), max(map(len, tables))
        old_rows, old_columns = self._tables.shape
        if rows > old_rows or columns > old_columns:
            grown = np.zeros((max(rows, 2 * old_rows), max(columns, 2 * old_columns)), dtype=np.int32)
            grown[:old_rows, :old_columns] = self._tables
            self._known += [[] for _ in range(len(grown) - len(self._known))]
            self._tables = grown
        for row, blocks in enumerate(tables):
            if self._known[row] != blocks:
                self._known[row] = []  # (a Ctrl-C may come before it is written)
                self._tables[row, : len(blocks)] = blocks
                self._known[row] = blocks[:]
        return self._tables[:rows, :columns]


def slots_of(blocks: list[int], block_size: int, start: int, stop: int) -> np.ndarray:
    """`BlockTable.slots` of the positions start <= p < stop, as int64."""
    first = start // block_size
    own = np.array(blocks[first : -(-stop // block_size)], dtype=np.int64)
    slots = own[:, None] * block_size + np.arange(block_size)
    return slots.ravel()[start - first * block_size :][: stop - start]


def choose_outputs(
    scheduled: list[ScheduledSequence], query_start: list[int]
) -> tuple[list[int], list[ScheduledSequence], list[int] | None, list[tuple[ScheduledSequence, int]]]:
    """The fields `output_rows`, `sampling`, `sampling_index` and `prompts` of a `Batch`.

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
