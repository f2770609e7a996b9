"""A run as JSON lines from which the memory can be rebuilt at every step (`replay.py` does):

    {"format": "minipaged-trace", "version": 2, "block_size": 16, "num_blocks": 64, "num_host_blocks": 8,
     "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    {"step": 0, "scheduled": [["0", 0, 0, 7, 1]], "events": [{"kind": "admitted", "request": "0", ...}],
     "num_waiting": 1, "waiting": ["1"], "planned": CHANGE, "committed": CHANGE, "texts": {"4": "Four"}}

After the header, each line is a `StepRecord` (recorder.py) without its empty lists. `scheduled`: request,
position of the sequence, first token, tokens, candidates. A CHANGE (delta.py) is relative to the memory as
the previous step left it and as the plan predicts it. `waiting`: the first ids of the queue, when they have
changed; of a shorter queue, its `num_waiting` first. `texts`: the text of each token when it first appears.
A last line with the event "closed" is there only if the memory or the queue lost a request after the last
step (it was aborted), or the prefix cache was cleared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from minipaged.engine import Engine
from minipaged.text_io import TextError, check_writable
from minipaged.viewer import delta
from minipaged.viewer.highlights import TextOf, engine_texts
from minipaged.viewer.recorder import CLEARED, Recorder, StepRecord, first_waiting
from minipaged.viewer.snapshot import PoolView, look

VERSION = 2
FORMAT = {"format": "minipaged-trace", "version": VERSION}
SIZES = {"block_size": 1, "num_blocks": 1, "num_host_blocks": 0}  # and the least that each can be
LIMITS = ("max_num_seqs", "max_num_batched_tokens")
ALWAYS = ("step", "num_waiting")  # written even when they are 0


class TraceLines(Recorder):
    """Calls `write` with each line of an engine's trace from now on, beginning with the header.

    `text_of`: the text of a token, where the engine has no tokenizer.
    """

    def __init__(self, engine: Engine, write: Callable[[str], object], text_of: TextOf | None = None) -> None:
        self._write_line = write
        self._scheduler = engine.scheduler
        self._text_of = text_of or engine_texts(engine)
        self._texts: dict[int, str] = {}  # already written
        now = look(self._scheduler)
        sizes = {name: getattr(now, name) for name in SIZES}
        self.header = FORMAT | sizes | {name: getattr(self._scheduler, name) for name in LIMITS}
        self._dump(self.header)
        self._empty = PoolView(**sizes)
        self._waiting: tuple[str, ...] = ()
        self._next_step = 0
        super().__init__(engine, self._write)

    def _write(self, record: StepRecord) -> None:
        expected = delta.planned(self._seen, record.scheduled)
        after = delta.computed(record.planned, record.scheduled)
        line = record._asdict()
        line["planned"] = delta.difference(expected, record.planned)
        line["committed"] = delta.difference(after, record.committed)
        line["waiting"] = () if record.waiting == self._waiting else record.waiting
        line["texts"] = self._new_texts(line)
        self._dump(_without_empty(line))
        self._waiting = record.waiting
        self._next_step = record.step + 1

    def synchronize(self, kind: str) -> None:
        """Write what changed between two steps, if anything, as an event `kind`: a request was aborted, or
        the prefix cache was cleared (then there is an event for it, too)."""
        now, waiting = look(self._scheduler), first_waiting(self._scheduler)
        last, cleared = self._seen, self._is_cleared(now)
        self._see(now)
        if now != last or set(self._waiting) - set(waiting):
            change = delta.difference(last, now)
            self._waiting = waiting
            events = [{"kind": kind}, *([CLEARED] if cleared else ())]
            self._dump(self._between(events, change, self._new_texts({"committed": change})))

    def state(self) -> dict[str, Any]:
        """A line (event "snapshot") that leads from an empty memory to where the last one left it."""
        change = delta.difference(self._empty, self._seen)
        return self._between([{"kind": "snapshot"}], change, self._texts)

    def _between(
        self, events: list[dict[str, str]], change: dict[str, Any], texts: dict[int, str]
    ) -> dict[str, Any]:
        line: dict[str, Any] = {
            "step": self._next_step,
            "events": events,
            "num_waiting": len(self._scheduler.waiting),
            "waiting": self._waiting,
            "committed": change,
            "texts": texts,
        }
        return _without_empty(line)

    def _new_texts(self, line: dict[str, Any]) -> dict[int, str]:
        if self._text_of is None:
            return {}
        views = [line.get(key, {}) for key in ("planned", "committed")]
        changes = [change for view in views for change in view.get("tables", {}).values()]
        ids = {token for change in changes if change for token in change.get("token_ids", (0, ()))[1]}
        completions = line.get("completions", {}).values()
        ids.update(token for outputs in completions for tokens in outputs for token in tokens)
        ids.update(t for event in line.get("events", ()) for t in event.get("draft", ()))
        new = {token: self._text_of(token) for token in sorted(ids - self._texts.keys())}
        self._texts |= new
        return new

    def _dump(self, line: dict[str, Any]) -> None:
        self._write_line(json.dumps(line, separators=(",", ":")))

    def close(self) -> None:
        """Stop listening, and write what changed after the last step, if anything did."""
        super().close()
        self.synchronize("closed")


def _without_empty(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if value or key in ALWAYS}


class TraceWriter(TraceLines):
    """A trace of an engine as a file. Use as a context manager, or call `close`.

    Raises:
        TextError: the file cannot be written. If writing fails later, while the engine runs (the disk is
            full), the run continues and `close` raises it.
    """

    def __init__(self, path: Path, engine: Engine) -> None:
        check_writable("trace", path)
        self._path = path
        self._file: TextIO | None = None  # until the first step: a refused request leaves what the file has
        self._header = ""
        self._error: OSError | None = None
        super().__init__(engine, self._write_to_file)

    def _write_to_file(self, line: str) -> None:
        if not self._header:
            self._header = line
        elif self._error is None:
            try:
                self._opened().write(line + "\n")
            except OSError as error:
                self._error = error

    def _opened(self) -> TextIO:
        if self._file is None:
            self._file = self._path.open("w", encoding="utf-8")
            self._file.write(self._header + "\n")
        return self._file

    def close(self) -> None:
        """Stop listening, write what changed after the last step, if anything did, and finish the file."""
        if self._file is not None and self._file.closed:
            return
        super().close()
        try:
            self._opened().close()
        except OSError as error:
            self._error = self._error or error
        if self._error is not None:
            reason = self._error.strerror
            raise TextError(f"cannot write trace {self._path}: {reason}; choose a place with more room")
