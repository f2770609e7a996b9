"""A trace read back: the records of the run, without the engine that wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minipaged.viewer import delta
from minipaged.viewer.delta import ScheduledTokens
from minipaged.viewer.recorder import StepRecord
from minipaged.viewer.snapshot import PoolView
from minipaged.viewer.trace import FORMAT, SIZES, VERSION


class TraceError(ValueError):
    """A file that is not a trace, or not a whole one; the message names file and line."""


class Trace:
    """The records of a trace, read while you iterate; raises `TraceError` where it is not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts: dict[int, str] = {}  # by token id, as far as the file was read
        try:
            with path.open() as file:
                first = file.readline()
        except OSError as error:
            raise TraceError(f"cannot read trace {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise TraceError(f"{path} is no trace: it is not text; make one with --trace FILE") from error
        self.header = self._parse(1, first)
        if not FORMAT.items() <= self.header.items():
            raise TraceError(f"{path} is no trace of version {VERSION}; make one with --trace FILE")

    def __iter__(self) -> Iterator[StepRecord]:
        now = PoolView(*(self.header[size] for size in SIZES))
        with self.path.open() as file:
            file.readline()
            for number, text in enumerate(file, start=2):
                line = self._parse(number, text)
                self.texts.update({int(token): piece for token, piece in line.get("texts", {}).items()})
                try:
                    record = _record(now, line)
                except (KeyError, TypeError, ValueError, IndexError) as error:
                    raise TraceError(
                        f"{self.path}, line {number} does not continue the trace ({error!r}); is one missing?"
                    ) from error
                yield record
                now = record.committed

    def _parse(self, number: int, text: str) -> dict[str, Any]:
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise TraceError(f"{self.path}, line {number} is not JSON: {error.msg}; was it cut?") from error
        if not isinstance(line, dict):
            raise TraceError(f"{self.path}, line {number} is not a JSON object")
        return line


def read_trace(path: str | Path) -> Trace:
    """Open a trace; see `Trace`."""
    return Trace(Path(path))


def _record(before: PoolView, line: Mapping[str, Any]) -> StepRecord:
    scheduled = tuple(ScheduledTokens(*tokens) for tokens in line.get("scheduled", ()))
    planned = delta.apply(delta.planned(before, scheduled), line.get("planned", {}))
    return StepRecord(
        step=line["step"],
        scheduled=scheduled,
        **{name: tuple((a, b) for a, b in line.get(name, ())) for name in ("swap_out", "swap_in", "copies")},
        events=tuple(line.get("events", ())),
        finished=tuple(line.get("finished", ())),
        completions={key: tuple(map(tuple, outputs)) for key, outputs in line.get("completions", {}).items()},
        num_waiting=line["num_waiting"],
        planned=planned,
        committed=delta.apply(delta.computed(planned, scheduled), line.get("committed", {})),
    )
