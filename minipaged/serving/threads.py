"""Threads that nothing waits for: neither a request that is out of time nor the end of the process.

A tokenizer cannot be interrupted, and Python joins the threads of its own pools (`asyncio.to_thread`,
`ThreadPoolExecutor`) before it exits.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """At most `most` threads at a time; each ends when there is nothing left to do.

    Args:
        most: the number of threads.
        patience: seconds after which a job is overdue: it may never end, so its thread no longer counts.
    """

    def __init__(self, most: int, patience: float = math.inf) -> None:
        self._most = most
        self._patience = patience
        self._num_threads = 0
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._begun: dict[Future[Any], float] = {}  # of the jobs that run
        self._lock = threading.Lock()  # of these three

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a thread call `fn`."""
        future: Future[T] = Future()
        with self._lock:
            self._jobs.append((future, partial(fn, *args, **kwargs)))
            self._start()
        return future

    def is_overdue(self, job: Future[Any]) -> bool:
        """Whether a job has run for too long. To be called now and then: it also replaces lost threads."""
        with self._lock:
            self._start()
            return job in self._overdue()

    def _start(self) -> None:
        """Start a thread, if there is work for it."""
        if self._jobs and self._num_threads - len(self._overdue()) < self._most:
            threading.Thread(target=self._run, name="minipaged-prepare", daemon=True).start()
            self._num_threads += 1

    def _overdue(self) -> list[Future[Any]]:
        before = time.monotonic() - self._patience
        return [job for job, begin in self._begun.items() if begin < before]

    def _run(self) -> None:
        while (job := self._next()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            with self._lock:
                self._begun[future] = time.monotonic()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            finally:
                with self._lock:
                    del self._begun[future]

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """The next job; None: there is none for this thread, which ends."""
        with self._lock:
            # (More than `most`: overdue jobs have ended after all.)
            if self._jobs and self._num_threads - len(self._overdue()) <= self._most:
                return self._jobs.popleft()
            self._num_threads -= 1
            return None
