"""Several threads share one engine: they take turns, and no thread has to wait in order to leave."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from minipaged.engine import Engine
from minipaged.interrupts import DeferredInterrupts
from minipaged.prompts import RequestError
from minipaged.scheduling import Request

T = TypeVar("T")

TO_FINISH = 10.0
"""Seconds that the end of the interpreter waits for the step of another thread."""


class EngineTurns:
    """Which thread has the engine, and which requests to abort once it is free."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that has it
        self._left: deque[str] = deque()
        self._is_ending = threading.Event()  # the interpreter
        weakref.finalize(self, _end, self._pid, self._lock, self._is_ending)

    def take(self, action: Callable[[Engine], T]) -> T:
        """What `action` returns, called with the engine, which only this thread has meanwhile.

        (Not a context manager: a Ctrl-C on the way into one, or out of it, would leave it open.)

        Raises:
            RequestError: this thread has it already, and would wait for itself; or the process is a fork, and
                would wait for threads that it does not have.
        """
        if self.is_fork:
            raise RequestError(
                "this process is a fork of the one that built the LLM; build it after the fork"
            )
        if self._holder == threading.get_ident():
            raise RequestError(
                "this LLM is called from inside one of its own steps, by a logits processor or a hook, and "
                "would wait forever; use another LLM there"
            )
        try:
            with self._lock:
                if self._is_ending.is_set() and threading.current_thread().daemon:
                    raise SystemExit  # (the interpreter would end it inside the step, and abort)
                self._holder = threading.get_ident()
                try:
                    return action(self._engine)
                finally:
                    self._holder = None
        finally:
            if self._left:
                self.leave(())

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork of the engine's, and has none of its threads and ranks."""
        return os.getpid() != self._pid

    def leave(self, requests: Iterable[Request]) -> None:
        """Abort requests that are no longer read: now, or as soon as the thread that has the engine is done.

        It never waits: the garbage collector may drop a stream inside a step of the same thread.
        """
        with DeferredInterrupts():
            self._left.extend(request.request_id for request in requests)
            while self._left and self._lock.acquire(blocking=False):
                try:
                    while self._left:
                        self._engine.abort(self._left[0])
                        self._left.popleft()
                finally:
                    self._lock.release()


def _end(pid: int, lock: threading.Lock, is_ending: threading.Event) -> None:
    """At the end of the interpreter: wait for the step that a daemon thread is in."""
    is_ending.set()
    if os.getpid() == pid and lock.acquire(timeout=TO_FINISH):  # (a fork does not have that thread)
        lock.release()
