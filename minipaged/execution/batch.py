"""A plan becomes flat ragged tensors: the rows of all chunks behind each other, no padding.

    chunks    a: 5 tokens from 0     b: 1 token from 8     c: 2 tokens from 5        block size 4
    rows      a a a a a | b | c c
    positions 0 1 2 3 4 | 8 | 5 6
    slots     through each sequence's block table: table[position // 4] * 4 + position % 4

Building this is on the path of every step, so it is arrays and one short loop. Block tables hardly change
from one step to the next: the builder keeps the last ones and rewrites only rows that differ.
Paper: section 5.1. Does NOT know: the model, the pool's tensors, how tokens are chosen.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minipaged.kernels.metadata import AttentionMetadata
from minipaged.scheduling import ScheduledSequence


class Batch(NamedTuple):
    """T rows of S sequences.

    Attributes:
        input_ids: [1, T] int64.
        positions: [1, T] int64, each row's position in its own sequence.
        metadata: what attention needs.
        logits_rows: [R] int64, ascending: the rows whose logits are needed.
        sampling: the chunks that get candidates, in plan order.
        sampling_index: which of the R rows belongs to each of them; None if it is all of them, in order.
        prompts: chunks whose prompt tokens' log-probabilities are wanted, and where their rows begin in R.
    """

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    logits_rows: Tensor
    sampling: list[ScheduledSequence]
    sampling_index: list[int] | None
    prompts: list[tuple[ScheduledSequence, int]]


class BatchBuilder:
    """Builds the batch of one plan after the other.

    Args:
        block_size: tokens a block.
        device: where the tensors go.
    """

    def __init__(self, block_size: int, device: torch.device | str) -> None:
        self.block_size = block_size
        self.device = torch.device(device)
        self._known: list[list[int]] = []  # row -> the blocks that `_tables` holds there
        self._tables = np.zeros((0, 0), dtype=np.int32)

    def build(self, chunks: list[ScheduledSequence]) -> Batch:
        """The tensors of at least one chunk."""
        token_ids = array("i")
        starts: list[int] = []
        lengths: list[int] = []
        width = 0
        self._make_room(len(chunks), max(len(chunk.sequence.table.blocks) for chunk in chunks))
        known, tables = self._known, self._tables
        for row, (sequence, start, num_tokens, _) in enumerate(chunks):
            if num_tokens == 1:
                token_ids.append(sequence.token_ids[start])
            else:
                token_ids += sequence.token_ids[start : start + num_tokens]
            starts.append(start)
            lengths.append(num_tokens)
            blocks = sequence.table.blocks
            if known[row] != blocks:
                known[row] = blocks[:]
                tables[row, : len(blocks)] = blocks
            width = max(width, len(blocks))

        num_sequences = len(chunks)
        start_of = np.array(starts, dtype=np.int64)
        length_of = np.array(lengths, dtype=np.int64)
        query_start = np.zeros(num_sequences + 1, dtype=np.int64)
        np.cumsum(length_of, out=query_start[1:])
        context_len = start_of + length_of
        owner = np.repeat(np.arange(num_sequences), length_of)
        positions = np.arange(len(token_ids)) - (query_start[:-1] - start_of)[owner]
        logical, offset = np.divmod(positions, self.block_size)
        slots = tables[owner, logical].astype(np.int64) * self.block_size + offset

        query_start_list = query_start.tolist()
        rows, sampling, sampling_index, prompts = choose_logits_rows(chunks, query_start_list)
        metadata = AttentionMetadata(
            slot_mapping=self._tensor(slots),
            query_start=self._tensor(query_start.astype(np.int32)),
            context_len=self._tensor(context_len.astype(np.int32)),
            block_tables=self._tensor(tables[:num_sequences, :width].copy()),
            query_start_list=query_start_list,
            context_len_list=context_len.tolist(),
            max_query_len=max(lengths),
            max_context_len=int(context_len.max()),
        )
        return Batch(
            input_ids=self._tensor(np.array(token_ids, dtype=np.int64))[None],
            positions=self._tensor(positions)[None],
            metadata=metadata,
            logits_rows=self._tensor(np.array(rows, dtype=np.int64)),
            sampling=sampling,
            sampling_index=sampling_index,
            prompts=prompts,
        )

    def _make_room(self, rows: int, width: int) -> None:
        have_rows, have_width = self._tables.shape
        if rows > have_rows or width > have_width:
            grown = np.zeros((max(rows, 2 * have_rows), max(width, 2 * have_width)), dtype=np.int32)
            grown[:have_rows, :have_width] = self._tables
            self._tables = grown
            self._known += [[] for _ in range(len(grown) - have_rows)]

    def _tensor(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def choose_logits_rows(
    chunks: list[ScheduledSequence], query_start: list[int]
) -> tuple[list[int], list[ScheduledSequence], list[int] | None, list[tuple[ScheduledSequence, int]]]:
    """The fields `logits_rows`, `sampling`, `sampling_index`, `prompts` of a `Batch`.

    A sampling chunk needs its last row. A prompt whose log-probabilities are wanted needs every row that
    predicts a prompt token, that is: whose next token is in the prompt.
    """
    rows: list[int] = []
    sampling: list[ScheduledSequence] = []
    index: list[int] = []
    prompts: list[tuple[ScheduledSequence, int]] = []
    for number, chunk in enumerate(chunks):
        last = query_start[number + 1] - 1
        num_prompt_rows = num_predicted_prompt_tokens(chunk)
        if num_prompt_rows:
            prompts.append((chunk, len(rows)))
            rows += range(query_start[number], query_start[number] + num_prompt_rows)
        if chunk.num_candidates:
            if not rows or rows[-1] != last:
                rows.append(last)
            sampling.append(chunk)
            index.append(len(rows) - 1)
    return rows, sampling, index if prompts else None, prompts


def num_predicted_prompt_tokens(chunk: ScheduledSequence) -> int:
    """How many rows of the chunk, from its first, predict a prompt token somebody wants to know about."""
    sequence = chunk.sequence
    request = sequence.request
    if getattr(request.params, "prompt_logprobs", None) is None or sequence is not request.sequences[0]:
        return 0
    return max(0, min(chunk.num_tokens, sequence.num_prompt_tokens - 1 - chunk.start))
