"""Standard error that nobody waits for: if it is not read, a server goes on and drops lines of its log.

A pipe holds 64 KiB, and a terminal stopped with Ctrl-S takes nothing; a write then waits for ever. So a
thread writes the lines, and only so many of them may wait.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

MOST_LINES = 10_000
"""Lines that may wait to be written; more are dropped."""

PATIENCE = 2.0
"""Seconds that the end of a process waits for the last lines to be written."""


class LogThread:
    """A text stream whose `write` never waits.

    Args:
        stream: what it replaces.
        file: where the lines go, unbuffered; not `stream` itself, whose lock Python needs at exit, when a
            write may still hang.
    """

    def __init__(self, stream: Any, file: BinaryIO) -> None:
        self._stream, self._file = stream, file
        self._waiting: list[str] = []
        self._num_dropped = 0
        self._is_closed = False
        self._changed = threading.Condition()  # guards these three
        self._thread = threading.Thread(target=self._run, name="minipaged-log", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, line: str) -> int:
        """Have the thread write it, or drop it."""
        with self._changed:
            if threading.current_thread() is self._thread:  # how many were dropped: before what came later
                self._waiting.insert(0, line)
            elif len(self._waiting) < MOST_LINES:
                self._waiting.append(line)
            else:
                self._num_dropped += 1
            self._changed.notify()
        return len(line)

    def flush(self) -> None:
        """Nothing: the thread writes as soon as it can."""

    def close(self) -> None:
        """Write what waits, unless it takes too long."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        with self._file:
            while self._write_what_waits():
                pass

    def _write_what_waits(self) -> bool:
        """Wait for lines and write them; whether more may come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            lines, self._waiting = self._waiting, []
            num_dropped, self._num_dropped = self._num_dropped, 0
        with suppress(OSError, ValueError):  # it is full, or its reader has gone
            data = memoryview("".join(lines).encode(self._stream.encoding, "backslashreplace"))
            while data:
                if not (written := self._file.write(data)):  # another process has made it non-blocking
                    select.select([], [self._file], [])
                data = data[written or 0 :]
        if num_dropped:  # (after those that it took, before those that came later)
            logger.warning("%d lines of the log were dropped: its reader was too slow", num_dropped)
        return bool(lines)


@contextmanager
def log_thread() -> Iterator[None]:
    """Within the block, standard error is a `LogThread`, unless it is no file of the system."""
    stream = sys.stderr
    try:
        file = open(os.dup(stream.fileno()), "wb", buffering=0)  # noqa: SIM115 (the thread may still use it)
    except (AttributeError, OSError, ValueError):
        yield
        return
    log = LogThread(stream, file)
    sys.stderr = log  # type: ignore[assignment]
    try:
        yield
    finally:
        log.close()
        sys.stderr = stream
