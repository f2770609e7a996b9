"""Decode steps at a few fixed shapes: padded, captured once as a CUDA graph, replayed from then on.

A host may take longer to launch the hundreds of small kernels of a decode step than a GPU to run them. A
graph launches them at once, but with the captured shapes, addresses and grid sizes. So the
step is copied into static tensors, and padded:

    5 decodes, longest context 700      captured for 8 rows and contexts of up to 1024
    input_ids     a   b   c   d   e   .   .   .     padding: whatever the row held before,
    slots         s   s   s   s   s  -1  -1  -1              written nowhere,
    context_len   9 700   4   8   1   1   1   1              attending to one token; nobody reads the result

Prompts and mixed steps run uncaptured: their shapes hardly repeat. A graph is captured when its shape first
occurs: most runs need few of the hundred shapes, and each costs about three steps.
Source: PyTorch, "CUDA semantics: CUDA graphs".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from minipaged.execution.batch import Batch
from minipaged.kernels.metadata import AttentionMetadata

Compute = Callable[[], Tensor]
"""Reads static tensors, and returns a result [rows, V]."""

ROW_STEP = 32  # all rows share one read of the weights: some padding costs little
SHORTEST_CONTEXT = 512


def padded_rows(rows: int, limit: int) -> int:
    """The least of 1, 2, 4, 8, 16, 32, 64, 96, ..., `limit` that holds `rows`."""
    doubled = 1 << (rows - 1).bit_length()
    return min(doubled if rows <= ROW_STEP else -(-rows // ROW_STEP) * ROW_STEP, limit)


def padded_context(tokens: int, limit: int) -> int:
    """The least of 512, 1024, 2048, ..., `limit` that holds `tokens`; it sets the programs per sequence."""
    return min(max(SHORTEST_CONTEXT, 1 << (tokens - 1).bit_length()), limit)


class CUDAGraphRunner:
    """Runs decode steps from static tensors of the largest one; every smaller one is their beginning."""

    def __init__(
        self,
        compute: Callable[[Batch], Tensor],  # -> logits [R, V]
        capture: Callable[[Compute], Compute],  # -> a replay, which sees new static tensors and nothing else
        max_rows: int,
        max_context_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._compute = compute
        self._capture = capture
        self._graphs: dict[tuple[int, int], Compute] = {}  # (rows, context) -> replay
        self.max_rows = max_rows
        self.max_context_len = max_context_len
        num_blocks = -(-max_context_len // block_size)
        # Nobody reads the results of padding rows, but they must name a token, a position and a block.
        self._input_ids = torch.zeros((1, max_rows), dtype=torch.int64, device=device)
        self._positions = torch.zeros((1, max_rows), dtype=torch.int64, device=device)
        self._output_indices = torch.arange(max_rows, device=device)
        self._slot_mapping = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self._query_start = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._context_len = torch.ones(max_rows, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros((max_rows, num_blocks), dtype=torch.int32, device=device)

    def accepts(self, batch: Batch) -> bool:
        """Whether it has only decodes, each with logits, and neither too many nor too long."""
        metadata = batch.metadata
        return (
            metadata.is_decode_only
            and len(batch.output_indices) == metadata.num_sequences <= self.max_rows
            and metadata.max_context_len <= self.max_context_len
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Logits [R, V] of a step that is accepted; the next step may overwrite them."""
        padded = self.pad(batch)
        shape = padded.metadata.num_sequences, padded.metadata.max_context_len
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(partial(self._compute, padded))
        return self._graphs[shape]()[: batch.metadata.num_sequences]

    def pad(self, batch: Batch) -> Batch:
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
        return batch._replace(
            input_ids=self._input_ids[:, :rows],
            positions=self._positions[:, :rows],
            metadata=metadata,
            output_indices=self._output_indices[:rows],
            output_rows=list(range(rows)),
        )


class CaptureError(RuntimeError):
    """The computation cannot be captured; the message says why."""


_capturing = Lock()  # PyTorch has one mode that refuses to wait, for all threads


class CUDAGraphCapture:
    """Captures computations on a CUDA or ROCm device. One replay runs at a time, so they share memory."""

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self._device = device
        self._max_rows = max_rows
        self._stream = torch.cuda.Stream(device)  # captures that share a pool must share their stream
        self._pool = torch.cuda.graph_pool_handle()
        self._results: Tensor | None = None  # [max_rows, V], of the last replay

    @torch.inference_mode()  # like the steps: a generator keeps tensors of the mode of the first capture
    def __call__(self, compute: Compute) -> Compute:
        """The replay of a computation, which runs three times; CaptureError if it cannot be captured."""
        with _capturing:
            return self._captured(compute)

    def _captured(self, compute: Compute) -> Compute:
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        sync_mode = torch.cuda.get_sync_debug_mode()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                logits = compute()  # compiles kernels, which cannot be captured
                # Neither can a wait for the device; detected here, not halfway through a capture, which
                # would leave PyTorch's allocator in the graphs' pool.
                torch.cuda.set_sync_debug_mode("error")
                compute()
                torch.cuda.set_sync_debug_mode(sync_mode)
                if self._results is None:
                    self._results = logits.new_empty((self._max_rows, logits.shape[1]))
                result = self._results[: logits.shape[0]]
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    result.copy_(compute())
        except RuntimeError as error:
            raise CaptureError(str(error).strip().split("\n")[0]) from error
        finally:
            torch.cuda.set_sync_debug_mode(sync_mode)
            caller.wait_stream(self._stream)

        @torch.inference_mode()
        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
