"""Capture a computation on the GPU once as a CUDA graph, then launch it as a whole.

Source: PyTorch, "CUDA semantics: CUDA graphs".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Compute = Callable[[], Tensor]
"""Reads tensors that stay where they are, and returns a result [rows, V]."""


class CaptureError(RuntimeError):
    """The computation cannot be captured; the message says why."""


class CUDAGraphCapture:
    """Captures computations on a CUDA or ROCm device: call it with one, and get its replay.

    Only one replay runs at a time, so they share a memory pool, and one tensor [max_rows, V] for results.
    """

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self._device = device
        self._max_rows = max_rows
        self._stream = torch.cuda.Stream(device)  # captures that share a pool must share their stream
        self._pool = torch.cuda.graph_pool_handle()
        self._results: Tensor | None = None

    def __call__(self, compute: Compute) -> Compute:
        """Run the computation several times, capture it, and return its replay.

        Raises:
            CaptureError: it waits for the device, or does something else that no graph can hold.
        """
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        sync_mode = torch.cuda.get_sync_debug_mode()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                logits = compute()  # compiles kernels, which cannot be captured
                # Neither can a wait for the device; found out here, not half-way through a capture.
                torch.cuda.set_sync_debug_mode("error")
                compute()
                torch.cuda.set_sync_debug_mode(sync_mode)
                if self._results is None:
                    self._results = logits.new_empty((self._max_rows, logits.shape[1]))
                result = self._results[: logits.shape[0]]
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    result.copy_(compute())
        except RuntimeError as error:
            raise CaptureError(str(error).strip().split("\n")[0]) from error
        finally:
            torch.cuda.set_sync_debug_mode(sync_mode)
            caller.wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
