"""Threads that nothing waits for: neither a request that is out of time nor the end of the process.

A tokenizer cannot be interrupted, and Python joins the threads of its own pools (`asyncio.to_thread`,
`ThreadPoolExecutor`) before it exits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """At most `most` threads at a time; each ends when there is nothing left to do."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_threads = 0
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()  # of these two

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a thread call `fn`."""
        future: Future[T] = Future()
        with self._lock:
            self._jobs.append((future, partial(fn, *args, **kwargs)))
            if self._num_threads < self._most:
                threading.Thread(target=self._run, name="minipaged-prepare", daemon=True).start()
                self._num_threads += 1
        return future

    def _run(self) -> None:
        while (job := self._next()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """The next job; None: there is none, and the thread ends."""
        with self._lock:
            if self._jobs:
                return self._jobs.popleft()
            self._num_threads -= 1
            return None
