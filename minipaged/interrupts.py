"""Ctrl-C waits for a safe moment: a step is planned and committed whole, or not at all."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DeferredInterrupts:
    """`with DeferredInterrupts():` holds back SIGINT until the end of the block, then handles it as before.

    Does nothing in other threads than the main one, which never see the signal.
    """

    def __enter__(self) -> None:
        self._received: tuple[int, FrameType | None] | None = None
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                signal.signal(signal.SIGINT, self._note)
                self._handler = handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number, frame

    def __exit__(self, *exc: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._received is not None:
                self._handler(*self._received)
