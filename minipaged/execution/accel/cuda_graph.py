"""A computation on the GPU, recorded once, then launched as a whole.

Source: PyTorch, "CUDA semantics: CUDA graphs". Does NOT know: steps, batches, models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Compute = Callable[[], Tensor]
"""Reads tensors that stay where they are, and returns a result [rows, V]."""


class RecordingError(RuntimeError):
    """What was to be recorded cannot be; the message says why."""


class CudaRecorder:
    """Records computations as CUDA graphs, on a CUDA or ROCm device: call it with one, and get its replay.

    No two of them run at a time, so they share a memory pool, and one tensor [max_rows, V] for results.
    """

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self._device = device
        self._max_rows = max_rows
        self._stream = torch.cuda.Stream(device)  # recordings that share a pool must share their stream
        self._pool = torch.cuda.graph_pool_handle()
        self._results: Tensor | None = None

    def __call__(self, compute: Compute) -> Compute:
        """Record a computation that bears repetition; raise RecordingError if no graph can hold it."""
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        waiting = torch.cuda.get_sync_debug_mode()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                logits = compute()  # compiles kernels, which cannot be recorded
                # Waiting for the device cannot be, either; better found out here than half-way through.
                torch.cuda.set_sync_debug_mode("error")
                compute()
                torch.cuda.set_sync_debug_mode(waiting)
                if self._results is None:
                    self._results = logits.new_empty((self._max_rows, logits.shape[1]))
                result = self._results[: logits.shape[0]]
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    result.copy_(compute())
        except RuntimeError as error:
            raise RecordingError(str(error).strip().split("\n")[0]) from error
        finally:
            torch.cuda.set_sync_debug_mode(waiting)
            caller.wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
