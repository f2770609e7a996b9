"""Ctrl-C waits for a safe moment, so that a step is planned and committed completely or not at all."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


class DeferredInterrupts:
    """`with DeferredInterrupts():` holds back SIGINT until the end of the block, then handles it as before.

    Does nothing in threads other than the main one, which never see the signal.

    Args:
        patience: seconds after which another SIGINT is handled at once: the block may be an endless loop.
    """

    def __init__(self, patience: float = 3.0) -> None:
        self._patience = patience

    def __enter__(self) -> Self:
        self._received: tuple[int, FrameType | None] | None = None
        self._handler: Any = None
        self._lets_through = False
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                signal.signal(signal.SIGINT, self._note)
                self._handler = handler
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._since = time.monotonic()
        self._received = number, frame
        if self._lets_through:
            self._lets_through = False  # the next one waits until what this one raises is handled
            self._handle()
            self._lets_through = True
        elif time.monotonic() > self._since + self._patience:
            self._handle()

    def _handle(self) -> None:
        if self._received is not None and self._handler is not None:
            received, self._received = self._received, None
            self._handler(*received)

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Inside the block: handle SIGINT at once, even one that was held back before."""
        self._handle()
        self._lets_through = True
        try:
            yield
        finally:
            self._lets_through = False

    def __exit__(self, *exc: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handle()
