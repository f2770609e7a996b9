"""Ctrl-C waits for a safe moment: a step is planned and committed whole, or not at all."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DeferredInterrupts:
    """`with DeferredInterrupts():` holds back SIGINT until the end of the block, then handles it as before.

    Blocks may be nested (a step hook may abort a request); the outermost ends the wait. Does nothing in other
    threads than the main one, which never see the signal.
    """

    def __init__(self) -> None:
        self._received: tuple[int, FrameType | None] | None = None
        self._handlers: list[Any] = []  # what each open block found

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                signal.signal(signal.SIGINT, self._note)
            self._handlers.append(handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number, frame

    def __exit__(self, *exc: object) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = self._handlers.pop()
            if callable(handler):
                signal.signal(signal.SIGINT, handler)
            if not self._handlers and self._received is not None:
                received, self._received = self._received, None
                handler(*received)
