"""Ctrl-C waits for a safe moment: a step is planned and committed whole, or not at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class DeferredInterrupts:
    """`with DeferredInterrupts():` holds back SIGINT until the end of the block, then handles it as before.

    Blocks may be nested: a step hook may abort a request. In other threads than the main one, which never see
    the signal, nothing is done.
    """

    def __init__(self) -> None:
        self._received: tuple[int, FrameType | None] | None = None
        self._lets_through = False
        self._open: list[tuple[Any, bool]] = []  # of each open block: the handler before, `_lets_through`

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            outer = signal.getsignal(signal.SIGINT), self._lets_through
            if callable(outer[0]):
                signal.signal(signal.SIGINT, self._note)
            self._lets_through = False
            self._open.append(outer)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number, frame
        if self._lets_through:
            # What it raises takes the block's way out, on which the next one waits again.
            self._lets_through = False
            self._handle(self._open[0][0])
            self._lets_through = True

    def _handle(self, handler: Any) -> None:
        if self._received is not None:
            received, self._received = self._received, None
            handler(*received)

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Inside a block: do not hold back one SIGINT, nor one that was held back before."""
        if self._open and threading.current_thread() is threading.main_thread():
            self._handle(self._open[0][0])
            self._lets_through = True
        try:
            yield
        finally:
            self._lets_through = False

    def __exit__(self, *exc: object) -> None:
        if threading.current_thread() is threading.main_thread():
            handler, self._lets_through = self._open.pop()
            if callable(handler):
                signal.signal(signal.SIGINT, handler)
            if not self._open or self._lets_through:
                self._handle(handler)
