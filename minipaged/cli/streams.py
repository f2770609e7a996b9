"""Standard streams that cannot break a command, even if closed, full, or unable to encode a character."""

from __future__ import annotations

import io
import logging
import os
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler
from typing import Any

from minipaged.text_io import TextError, decode, keep, without_controls


class KeptOutput:
    """Standard output that remembers what was written; once it fails, it only remembers."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._written: list[str] = []
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write through, as long as that works."""
        self._written.append(text)
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered."""
        self._attempt(self._stream.flush)

    def close_kept(self) -> None:
        """Raise `TextError`, which says where the text is, if not all of it arrived."""
        self.flush()
        if self.error is not None:
            to_nowhere(self._stream)  # what is left in its buffer would fail again at exit
            reason, place = self.error.strerror, keep("".join(self._written))
            raise TextError(f"cannot write standard output: {reason}; {place}")

    def _attempt(self, action: Any) -> None:
        if self.error is None:
            try:
                action()
            except BrokenPipeError:  # the reader has seen enough
                raise
            except OSError as error:
                self.error = error


class StandardErrorHandler(logging.StreamHandler):
    """Logs to the current standard error: a progress bar replaces it while shown, and lets lines pass."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Its text."""
        return without_controls(super().format(record), sys.stderr.isatty())


@contextmanager
def held_log() -> Iterator[None]:
    """Lines of the log wait for the end of the block, so that none stands in the middle of an answer."""
    root = logging.getLogger()
    shown = [handler for handler in root.handlers if isinstance(handler, StandardErrorHandler)]
    held = [MemoryHandler(sys.maxsize, sys.maxsize, target=handler) for handler in shown]
    for handler, waiting in zip(shown, held):
        root.addHandler(waiting)
        root.removeHandler(handler)
    try:
        yield
    finally:
        for handler, waiting in zip(shown, held):
            root.addHandler(handler)
            root.removeHandler(waiting)
            waiting.close()  # (closing passes on what it holds)


@contextmanager
def standard_streams() -> Iterator[KeptOutput]:
    """Standard streams that are open and take any character, and an output that is not lost."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # (takes the lowest number, which is this one)
    before = sys.stdout, sys.stderr
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (stays open)
    stream: Any = sys.stdout or _Closed()
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    sys.stdout = output = KeptOutput(stream)  # type: ignore[assignment]
    try:
        yield output
    finally:
        sys.stdout, sys.stderr = before
        if sys.stderr is not None:
            try:
                sys.stderr.flush()
            except (OSError, ValueError):
                to_nowhere(sys.stderr)  # else Python tries again at exit, and changes the exit code to 120


class _Closed(io.StringIO):
    """In place of a standard output that was closed before the command began."""

    def write(self, text: str) -> int:
        raise OSError(9, "it is closed")


def to_nowhere(stream: Any) -> None:
    """Discard what is still written to a stream."""
    with suppress(OSError, ValueError):  # no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def has_unread_input() -> bool:
    """Whether standard input is a file with something in it, or a pipe that has something or is complete.

    Never waits, so an inherited pipe that nobody writes to is not one.
    """
    with suppress(AttributeError, OSError, ValueError):  # it is None, closed or an object of one's own
        number = sys.stdin.fileno()
        kind = os.fstat(number)
        if stat.S_ISFIFO(kind.st_mode):
            return bool(select.select([number], [], [], 0)[0])
        return stat.S_ISREG(kind.st_mode) and kind.st_size > 0
    return False


def read_standard_input() -> str:
    """All of standard input. Raises `TextError` if it is closed or not UTF-8."""
    if sys.stdin is None or sys.stdin.closed:
        raise TextError("standard input is closed; give a file, or pipe the text in")
    try:
        binary = getattr(sys.stdin, "buffer", None)
        return sys.stdin.read() if binary is None else decode("standard input", binary.read())
    except OSError as error:
        raise TextError(
            f"cannot read standard input: {error.strerror}; give a file, or pipe the text in"
        ) from error
