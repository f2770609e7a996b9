"""A run as JSON lines from which the memory can be rebuilt at every step (`replay.py` does).

    {"format": "minipaged-trace", "version": 1, "block_size": 16, "num_blocks": 64, "num_host_blocks": 8,
     "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    {"step": 0, "chunks": [["0", 0, 0, 7, 1]], "events": [{"kind": "admitted", "request": "0", ...}],
     "num_waiting": 0, "planned": CHANGE, "committed": CHANGE, "texts": {"4": "Four"}}

The first line is the header. Each further line is a `StepRecord` (recorder.py); lists that are empty are
left out. `chunks`: request, position of the sequence, first token, tokens, candidates. `swap_out`,
`swap_in`, `copies`: pairs of blocks. `finished`: ids; `completions`: generated tokens of what ended.

A CHANGE is what `delta.py` describes. The memory of a step, from that of the step before:

    planned   = apply(delta.planned(committed of the step before, chunks), line["planned"])
    committed = apply(delta.computed(planned, chunks), line["committed"])

`texts` gives the text of each token id when it first appears, if there is a tokenizer. A last line with the
event "closed" is there only if the memory changed after the last step (a request was aborted).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipaged.viewer import delta
from minipaged.viewer.recorder import StepRecord, Tap
from minipaged.viewer.snapshot import PoolView, look

if TYPE_CHECKING:
    from minipaged.engine import Engine
    from minipaged.scheduling import FCFSScheduler

OMITTED_IF_EMPTY = (
    "chunks", "swap_out", "swap_in", "copies", "events", "finished", "completions", "planned", "committed",
    "texts",
)  # fmt: skip


class TraceFile:
    """Writes the records of one scheduler.

    Args:
        path: the file.
        scheduler: whose memory it is.
        text_of: text of a token id; None when there is none.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self, path: Path, scheduler: FCFSScheduler, text_of: Callable[[int], str] | None = None
    ) -> None:
        self._file = path.open("w")
        self._scheduler = scheduler
        self._text_of = text_of
        self._known: set[int] = set()
        now = look(scheduler)
        self._last = PoolView(now.block_size, now.num_blocks, now.num_host_blocks)
        self._next_step = 0
        self._dump(
            {
                "format": "minipaged-trace",
                "version": 1,
                "block_size": now.block_size,
                "num_blocks": now.num_blocks,
                "num_host_blocks": now.num_host_blocks,
                "max_num_seqs": scheduler.max_num_seqs,
                "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            }
        )

    def write(self, record: StepRecord) -> None:
        """Write one step."""
        expected = delta.planned(self._last, record.scheduled)
        after = delta.computed(record.planned, record.scheduled)
        line = {
            **record._asdict(),
            "planned": delta.difference(expected, record.planned),
            "committed": delta.difference(after, record.committed),
        }
        line["texts"] = self._new_texts(line)
        self._dump({key: value for key, value in line.items() if value or key not in OMITTED_IF_EMPTY})
        self._last = record.committed
        self._next_step = record.step + 1

    def _new_texts(self, line: dict[str, Any]) -> dict[int, str]:
        if self._text_of is None:
            return {}
        changes = [c for key in ("planned", "committed") for c in line[key].get("tables", {}).values()]
        ids = {token for change in changes if change for token in change.get("tokens", (0, ()))[1]}
        ids.update(t for outputs in line["completions"].values() for tokens in outputs for t in tokens)
        new = sorted(ids - self._known)
        self._known.update(new)
        return {token: self._text_of(token) for token in new}

    def _dump(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Write what changed after the last step, if anything did, and finish the file."""
        if self._file.closed:
            return
        now = look(self._scheduler)
        if now != self._last:
            closing = {"step": self._next_step, "events": [{"kind": "closed"}]}
            change = delta.difference(self._last, now)
            self._dump({**closing, "num_waiting": len(self._scheduler.waiting), "committed": change})
        self._file.close()


class TraceWriter(TraceFile):
    """A trace of an engine, from now on. Use as a context manager, or call `close`.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, engine: Engine) -> None:
        tokenizer = None if engine.detokenizer is None else engine.detokenizer.tokenizer
        super().__init__(path, engine.scheduler, tokenizer and (lambda token: tokenizer.decode([token])))
        self._tap = Tap(engine, self.write)

    def close(self) -> None:
        """Finish the file and leave the engine as it was found."""
        self._tap.remove()
        super().close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
