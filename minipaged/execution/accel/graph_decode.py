"""Decode steps at a few fixed shapes: padded, recorded once as a CUDA graph, replayed from then on.

A host may take longer to launch the hundreds of small kernels of a decode step than a GPU to run them. A
graph launches them at once, but with the shapes, addresses and numbers of programs that were recorded. So
the step is copied into tensors that stay where they are, and padded:

    5 decodes, longest context 700      recorded for 8 rows and contexts of up to 1024
    input_ids     a   b   c   d   e   .   .   .     padding: whatever the row held before,
    slots         s   s   s   s   s  -1  -1  -1              written nowhere,
    context_len   9 700   4   8   1   1   1   1              attending to one token; nobody reads the result

Prompts and mixed steps stay as they are: their shapes hardly repeat. A graph is recorded when its shape first
occurs, the step at hand being the example: most runs meet few of the hundred shapes, and each costs about
three steps. Source: PyTorch, "CUDA semantics: CUDA graphs". Does NOT know: requests, layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from minipaged.execution.accel.cuda_graph import Compute
from minipaged.execution.batch import Batch
from minipaged.kernels.metadata import AttentionMetadata

Forward = Callable[[Batch], Tensor]  # a step -> its logits [R, V]

ROW_STEP = 32  # all rows share one read of the weights: some padding costs little
SHORTEST_CONTEXT = 512


def padded_rows(rows: int, limit: int) -> int:
    """The least of 1, 2, 4, 8, 16, 32, 64, 96, ..., `limit` that holds `rows`."""
    doubled = 1 << (rows - 1).bit_length()
    return min(doubled if rows <= ROW_STEP else -(-rows // ROW_STEP) * ROW_STEP, limit)


def padded_context(tokens: int, limit: int) -> int:
    """The least of 512, 1024, 2048, ..., `limit` that holds `tokens`.

    It fixes how many programs share a sequence: for the longest possible one most would have nothing to do.
    """
    return min(max(SHORTEST_CONTEXT, 1 << (tokens - 1).bit_length()), limit)


class PaddedDecodes:
    """Static tensors of the largest decode step; every smaller one is their beginning.

    Args:
        forward: computes the padded step.
        max_rows: decodes of the largest step.
        max_context_len: tokens of the longest sequence.
    """

    def __init__(
        self, forward: Forward, max_rows: int, max_context_len: int, block_size: int, device: torch.device
    ) -> None:
        self._forward = forward
        self.max_rows = max_rows
        self.max_context_len = max_context_len
        num_blocks = -(-max_context_len // block_size)
        # Nobody reads the results of padding rows, but they must name a token, a position and a block.
        self._input_ids = torch.zeros((1, max_rows), dtype=torch.int64, device=device)
        self._positions = torch.zeros((1, max_rows), dtype=torch.int64, device=device)
        self._logits_rows = torch.arange(max_rows, device=device)
        self._slot_mapping = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self._query_start = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._context_len = torch.ones(max_rows, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros((max_rows, num_blocks), dtype=torch.int32, device=device)

    def accepts(self, batch: Batch) -> bool:
        """Whether all it has are decodes, each with logits, and neither too many nor too long."""
        metadata = batch.metadata
        return (
            metadata.is_decode_only
            and len(batch.logits_rows) == metadata.num_sequences <= self.max_rows
            and metadata.max_context_len <= self.max_context_len
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Logits [R, V] of a step that is accepted; the next step may overwrite them."""
        return self._forward(self.fill(batch))[: batch.metadata.num_sequences]

    def fill(self, batch: Batch) -> Batch:
        """The step, padded, in views of the static tensors; only what the host knows is new."""
        given = batch.metadata
        count = given.num_sequences
        rows = padded_rows(count, self.max_rows)
        width = min(given.block_tables.shape[1], self._block_tables.shape[1])
        self._input_ids[:, :count] = batch.input_ids
        self._positions[:, :count] = batch.positions
        self._slot_mapping[:count] = given.slot_mapping
        self._slot_mapping[count:rows] = -1
        self._context_len[:count] = given.context_len
        self._context_len[count:rows] = 1
        self._block_tables[:count, :width] = given.block_tables[:, :width]
        metadata = AttentionMetadata(
            slot_mapping=self._slot_mapping[:rows],
            query_start=self._query_start[: rows + 1],
            context_len=self._context_len[:rows],
            block_tables=self._block_tables[:rows],
            query_start_list=list(range(rows + 1)),
            context_len_list=given.context_len_list + [1] * (rows - count),
            max_query_len=1,
            max_context_len=padded_context(given.max_context_len, self.max_context_len),
        )
        ids, positions, logits_rows = self._input_ids, self._positions, self._logits_rows[:rows]
        return Batch(ids[:, :rows], positions[:, :rows], metadata, logits_rows, *batch[4:])


def replayed(forward: Forward, record: Callable[[Compute], Compute]) -> Forward:
    """A `forward` of padded steps that is recorded at the first step of each shape, then replayed.

    A replay sees nothing new but what lies in the static tensors. `record` turns a computation into its
    replay; it may raise `RecordingError`.
    """
    replays: dict[tuple[int, int], Compute] = {}

    def run(padded: Batch) -> Tensor:
        shape = padded.metadata.num_sequences, padded.metadata.max_context_len
        if shape not in replays:
            replays[shape] = record(partial(forward, padded))
        return replays[shape]()

    return run
