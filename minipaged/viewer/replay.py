"""A trace read back: the memory at every step, without the engine that wrote it.

    trace = read_trace(path);  for record in trace: record.planned, record.committed, trace.texts

Gives the same `StepRecord`s that the recorder made, so that whatever draws a live engine draws a trace.
Knows the format (`trace.py`) and nothing of schedulers, models or tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minipaged.viewer import delta
from minipaged.viewer.delta import ChunkLine
from minipaged.viewer.recorder import StepRecord
from minipaged.viewer.snapshot import PoolView


class TraceError(ValueError):
    """A file that is not a trace, or not a whole one; the message names file and line."""


class Trace:
    """The records of a trace, read one by one while you iterate.

    Attributes:
        header: the first line.
        texts: token id -> text, as far as it was read.

    Raises:
        TraceError: the file cannot be read, or a line is not what the format says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts: dict[int, str] = {}
        try:
            with path.open() as file:
                first = file.readline()
        except OSError as error:
            raise TraceError(f"cannot read trace {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise TraceError(f"{path} is no trace: it is not text; make one with --trace FILE") from error
        self.header = self._parse(1, first)
        if self.header.get("format") != "minipaged-trace" or self.header.get("version") != 1:
            raise TraceError(f"{path} is no trace of version 1; make one with --trace FILE")

    def __iter__(self) -> Iterator[StepRecord]:
        header = self.header
        now = PoolView(header["block_size"], header["num_blocks"], header["num_host_blocks"])
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
    chunks = tuple(ChunkLine(*chunk) for chunk in line.get("chunks", ()))
    planned = delta.apply(delta.planned(before, chunks), line.get("planned", {}))
    committed = delta.apply(delta.computed(planned, chunks), line.get("committed", {}))
    return StepRecord(
        line["step"],
        chunks,
        _pairs(line, "swap_out"),
        _pairs(line, "swap_in"),
        _pairs(line, "copies"),
        tuple(line.get("events", ())),
        tuple(line.get("finished", ())),
        {request: tuple(map(tuple, outputs)) for request, outputs in line.get("completions", {}).items()},
        line["num_waiting"],
        planned,
        committed,
    )


def _pairs(line: Mapping[str, Any], name: str) -> tuple[tuple[int, int], ...]:
    return tuple((source, destination) for source, destination in line.get(name, ()))
