"""A run as JSON lines: a header, then one line per step with everything the plan decided.

    {"format": "minipaged-trace", "version": 1, "block_size": 16, "num_blocks": 64, ...}
    {"step": 0, "chunks": [...], "copies": [[2, 5]], "tables": {"0/0": [0, 1]}, "events": [...], ...}

Derived from (plan, result) alone, like the metrics. Knows no text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipaged.scheduling import StepPlan, StepResult

if TYPE_CHECKING:
    from minipaged.engine import Engine


class TraceWriter:
    """An observer of the engine that writes a file. Use as a context manager, or call `close`.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, engine: Engine) -> None:
        self._file = path.open("w")
        config, kv = engine.config, engine.scheduler.kv
        self._write(
            {
                "format": "minipaged-trace",
                "version": 1,
                "block_size": kv.block_size,
                "num_blocks": kv.allocator.num_blocks,
                "num_host_blocks": engine.executor.num_host_blocks,
                "max_num_seqs": config.max_num_seqs,
                "max_num_batched_tokens": config.max_num_batched_tokens,
            }
        )
        engine.observers.append(self.observe)

    def observe(self, plan: StepPlan, result: StepResult, engine: Engine) -> None:
        """Write one step."""
        scheduler = engine.scheduler
        self._write(
            {
                "step": plan.step,
                "chunks": [
                    {
                        "request": chunk.sequence.request.request_id,
                        "sequence": chunk.sequence.index,
                        "start": chunk.start,
                        "num_tokens": chunk.num_tokens,
                        "num_candidates": chunk.num_candidates,
                    }
                    for chunk in plan.chunks
                ],
                "swap_out": plan.swap_out,
                "swap_in": plan.swap_in,
                "copies": plan.copies,
                "events": [
                    {"kind": event.kind, "request": event.request_id, **event.detail} for event in plan.events
                ],
                "finished": [
                    request.request_id for request in (*plan.sampling, *plan.finished) if request.is_finished
                ],
                "tables": {
                    f"{request.request_id}/{position}": {
                        "blocks": sequence.table.blocks,
                        "num_tokens": sequence.table.num_tokens,
                        "where": request.state.value,
                    }
                    for request in (*scheduler.running, *scheduler.swapped)
                    for position, sequence in enumerate(request.sequences)
                },
                "num_free": scheduler.kv.num_free,
                "num_waiting": len(scheduler.waiting),
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
