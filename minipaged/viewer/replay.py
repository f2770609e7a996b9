"""Reading a trace: the records of the run, without the engine that wrote them."""

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
    """A file that is not a trace, or not a complete one; the message names the file and the line."""


class Trace:
    """The records of a trace, read while you iterate; raises `TraceError` at the first bad line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts: dict[int, str] = {}
        first = next(self._lines(), None)
        if first is None:
            raise TraceError(f"{path} is empty; make a trace with --trace FILE")
        self.header = self._parse(*first)
        if not FORMAT.items() <= self.header.items():
            theirs = self.header.get("version")
            if self.header.get("format") == FORMAT["format"] and isinstance(theirs, int) and theirs > VERSION:
                known = f"but this minipaged knows version {VERSION}"
                raise TraceError(
                    f"{path} is a trace of version {theirs}, {known}; read it with a newer minipaged"
                )
            raise TraceError(f"{path} is not a trace of version {VERSION}; make one with --trace FILE")
        for size, least in SIZES.items():
            if type(value := self.header.get(size)) is not int or value < least:
                raise TraceError(f"{path}, line 1: {size} is {value!r}; give an integer of at least {least}")

    def __iter__(self) -> Iterator[StepRecord]:
        now = PoolView(*(self.header[size] for size in SIZES))
        waiting: tuple[str, ...] = ()
        lines = self._lines()
        next(lines)
        for number, text in lines:
            if not text.strip():
                continue
            line = self._parse(number, text)
            try:
                self.texts.update({int(token): str(piece) for token, piece in line.get("texts", {}).items()})
                record = _record(now, waiting, line)
                _check_blocks(record.planned, now, line.get("planned", {}))
                _check_blocks(record.committed, record.planned, line.get("committed", {}))
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                raise TraceError(
                    f"{self.path}, line {number} does not continue the trace ({error!r}); is a line missing?"
                ) from error
            yield record
            now, waiting = record.committed, record.waiting

    def _lines(self) -> Iterator[tuple[int, str]]:
        number = 1
        try:
            with self.path.open(encoding="utf-8") as file:
                for number, text in enumerate(file, start=1):
                    yield number, text
        except OSError as error:
            reason = f"{error.strerror}; make a trace with --trace FILE"
            raise TraceError(f"cannot read trace {self.path}: {reason}") from error
        except UnicodeDecodeError as error:
            where = f"{self.path} is not a trace: after line {number}"
            raise TraceError(f"{where} it is not text; make a trace with --trace FILE") from error

    def _parse(self, number: int, text: str) -> dict[str, Any]:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", "too deep")
            raise TraceError(
                f"{self.path}, line {number} is not JSON (was it truncated?): {reason}"
            ) from error
        if not isinstance(line, dict):
            raise TraceError(
                f"{self.path}, line {number} is not a JSON object; make a trace with --trace FILE"
            )
        return line


def read_trace(path: str | Path) -> Trace:
    """Open a trace; see `Trace`."""
    return Trace(Path(path))


def _check_blocks(view: PoolView, checked: PoolView, change: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError unless every table and block could belong to this pool. What `change` has
    not changed since `checked`, an earlier view, is not read again."""
    pools = range(view.num_blocks), range(view.num_host_blocks)
    changes = change.get("tables", {})
    for name, table in view.tables.items():
        if table is checked.tables.get(name):
            continue
        entry = changes.get(name, {})
        numbers = [table.num_tokens, table.num_computed, table.num_prompt]
        for keep, added in (entry[field] for field in delta.LISTS if field in entry):
            numbers += (keep, *added)
        if set(map(type, numbers)) != {int} or min(numbers) < 0:
            raise TypeError(f"{table.name} has a field that is not an integer of at least 0")
        for block in table.blocks if entry.keys() & {"blocks", "on_host"} else ():
            if block not in pools[bool(table.on_host)]:
                raise ValueError(f"{table.name} has block {block}, which is not in the pool")
    for block in view.evictable - checked.evictable:
        if block not in pools[0]:
            raise ValueError(f"evictable block {block} is not in the pool")


def _record(before: PoolView, waiting: tuple[str, ...], line: Mapping[str, Any]) -> StepRecord:
    scheduled = tuple(ScheduledTokens(*tokens) for tokens in line.get("scheduled", ()))
    listed = line.get("waiting", [*waiting])
    if type(listed) is not list or not all(isinstance(request, str) for request in listed):
        raise TypeError("waiting is not a list of ids")
    planned = delta.apply(delta.planned(before, scheduled), line.get("planned", {}))
    return StepRecord(
        step=line["step"],
        scheduled=scheduled,
        **{name: tuple((a, b) for a, b in line.get(name, ())) for name in ("swap_out", "swap_in", "copies")},
        evicted=tuple(line.get("evicted", ())),
        events=tuple(line.get("events", ())),
        finished=tuple(line.get("finished", ())),
        completions={key: tuple(map(tuple, outputs)) for key, outputs in line.get("completions", {}).items()},
        num_waiting=line["num_waiting"],
        waiting=tuple(listed[: line["num_waiting"]]),
        planned=planned,
        committed=delta.apply(delta.computed(planned, scheduled), line.get("committed", {})),
    )
