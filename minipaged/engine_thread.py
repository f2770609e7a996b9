"""A thread that steps an engine, for callers that must not wait for a step.

Requests are checked and built by their callers; changes to the engine (a request to queue or to abort) go
through an inbox to the thread, and only this thread touches the scheduler and the memory. Outputs go to each
reader's event loop. A step that fails is rolled back by the engine and retried, up to `MAX_FAILURES`
failures in a row; a lost rank ends the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial

from minipaged.decoding.params import RequestOutputKind
from minipaged.engine import Engine
from minipaged.execution.distributed import RankError
from minipaged.output_processor import OutputProgress
from minipaged.outputs import RequestOutput
from minipaged.prompts import RequestError
from minipaged.scheduling import Request, RequestState, StepPlan

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""After so many failed steps in a row, a request ends with "error"."""


class QueueFullError(RuntimeError):
    """`max_waiting` requests are already waiting."""


class EngineStoppedError(RuntimeError):
    """The engine was shut down, or its thread died."""


class Reader:
    """A request, and the task that waits for its outputs. `put` and `take` run in that task's event loop."""

    def __init__(self, request_id: str, prompt: str | None) -> None:
        self.request_id = request_id
        self.prompt = prompt
        try:
            self.loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RequestError(
                "AsyncLLM.generate needs a running event loop; call it in a coroutine, or use LLM"
            ) from None
        self.news = asyncio.Event()
        self.pending: deque[RequestOutput | Exception] = deque()  # an exception is the last
        self.done = False  # nothing comes after what is pending
        self.request: Request | None = None  # None: not submitted yet
        self.is_aborted = False  # before it was submitted
        self.progress: OutputProgress | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, or the reason why there will be none."""
        if self.done:
            return
        if isinstance(output, Exception):
            self.done = True
        else:
            if self.request is not None and self.request.params.output_kind != RequestOutputKind.DELTA:
                self.pending.clear()
            self.done = output.finished
        self.pending.append(output)
        self.news.set()

    def take(self) -> RequestOutput:
        """The first pending output; raises it if it is an exception."""
        output = self.pending.popleft()
        if isinstance(output, Exception):
            raise output
        return output


class EngineThread:
    """The thread that steps an engine, and its interface for other threads."""

    def __init__(self, engine: Engine) -> None:
        self._stopped: str | None = None  # why
        self._pid = os.getpid()
        self._engine = engine
        self._readers: dict[str, Reader] = {}  # of unfinished requests
        self._lock = threading.RLock()  # of `_readers` and `_stopped`; never held during a step
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: end
        self._planned: StepPlan | None = None  # what the current step computes
        self._failures: Counter[str] = Counter()  # consecutive failed steps of each request
        engine.on_planned.insert(0, self._note_plan)
        engine.on_committed.insert(0, self._note_commit)
        self._thread = threading.Thread(target=self._run, name="minipaged-engine", daemon=True)
        self._thread.start()

    # -- called from anywhere -------------------------------------------------------------------

    @property
    def stopped(self) -> str | None:
        """Why it accepts no requests; None if it does. A rank that died while nothing ran is noticed here."""
        if os.getpid() != self._pid:
            return "this process is a fork of the one that built the AsyncLLM; build it after the fork"
        loss = getattr(self._engine.executor, "loss", None)
        if self._stopped is None and loss is not None:
            logger.error("%s", loss)
            self._stopped = loss
            self._inbox.put(None)
        return self._stopped

    def check_caller(self) -> None:
        """Raise RequestError: this thread is the engine's, so it would wait for itself."""
        if threading.current_thread() is self._thread:
            raise RequestError(
                "this AsyncLLM is called from inside one of its own steps, by a logits processor or a hook, "
                "and would wait forever; use another AsyncLLM there"
            )

    def register(self, reader: Reader, max_waiting: int | None) -> None:
        """Reserve its id, and its place if there is one."""
        self.check_caller()
        with self._lock:
            if (why := self.stopped) is not None:
                raise EngineStoppedError(why)
            if reader.request_id in self._readers:
                raise RequestError(f"request_id {reader.request_id!r} is in use; give each request its own")
            if max_waiting is not None and self._num_waiting() >= max_waiting:
                raise QueueFullError(
                    f"{max_waiting} requests are already waiting; try again later, or raise max_waiting"
                )
            self._readers[reader.request_id] = reader

    def submit(self, reader: Reader, request: Request) -> None:
        """Queue a registered request, unless its reader was closed in the meantime."""
        with self._lock:
            if self._readers.get(reader.request_id) is reader:
                reader.request = request
                reader.progress = OutputProgress(
                    request, reader.prompt, self._engine.text_rules(request.params)
                )
                self._inbox.put(partial(self._engine.submit, request))
                if reader.is_aborted:
                    self.close(reader)

    def close(self, reader: Reader) -> None:
        """Abort a request that nobody reads any more."""
        with self._lock:
            if self._readers.get(reader.request_id) is not reader:
                return
            if reader.request is None:
                del self._readers[reader.request_id]
            else:
                self._inbox.put(partial(self._abort, reader.request))

    def abort(self, request_id: str) -> None:
        """End a request, and notify its reader."""
        with self._lock:
            reader = self._readers.get(request_id)
            if reader is not None and reader.request is None:
                reader.is_aborted = True
            elif reader is not None:
                self.close(reader)

    def between_steps(self, action: Callable[[], None]) -> None:
        """Call `action` in the thread; it must not raise."""
        self._inbox.put(action)

    def stop(self) -> bool:
        """End the thread; open readers get an error. False: it runs on, to the end of the step that called,
        or because this process is a fork."""
        if os.getpid() != self._pid:
            return False
        with self._lock:
            self._stopped = self._stopped or "the engine is shut down; build a new AsyncLLM"
        self._inbox.put(None)
        if threading.current_thread() is self._thread:
            return False
        self._thread.join()
        return True

    def _num_waiting(self) -> int:
        requests = [reader.request for reader in list(self._readers.values())]
        return sum(request is None or request.state is RequestState.WAITING for request in requests)

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._read_inbox():
                if self._engine.has_unfinished:
                    self._step()
        except RankError as error:
            logger.error("%s", error)
            self._stopped = self._stopped or str(error)
        except BaseException as error:
            logger.exception("The engine's thread died")
            cause = f"the engine's thread died of {error!r}"
            self._stopped = f"{cause}; restart the server or build a new AsyncLLM"
        finally:
            self._end()

    def _read_inbox(self) -> bool:
        """Process the messages; wait for one if there is nothing else to do. False: end."""
        wait = not self._engine.has_unfinished
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()
            wait = False

    def _abort(self, request: Request) -> None:
        if not request.is_finished:
            self._engine.abort(request.request_id)
        self._deliver([request])

    def _step(self) -> None:
        try:
            self._deliver(self._engine.step())
        except RankError:
            raise  # the next one would fail too
        except Exception as error:
            logger.exception("A step failed; its requests are recomputed")
            self._note_failure(f"{type(error).__name__}: {error}")
            self._deliver(self._requests())
        finally:
            self._planned = None  # (its requests would stay alive while the engine is idle)

    def _requests(self) -> list[Request]:
        return [reader.request for reader in list(self._readers.values()) if reader.request]

    def _note_plan(self, plan: StepPlan) -> None:
        self._planned = plan

    def _note_commit(self, plan: StepPlan, *_: object) -> None:
        for request in plan.touched if self._failures else ():
            self._failures.pop(request.request_id, None)

    def _note_failure(self, error: str) -> None:
        """Count a failure for each request of the step; without a plan, its cause cannot be known."""
        for request in self._planned.touched if self._planned is not None else self._requests():
            self._failures[request.request_id] += 1
            if self._failures[request.request_id] >= MAX_FAILURES:
                self._engine.abort(request.request_id, error)

    def _deliver(self, requests: Iterable[Request]) -> None:
        """Send their new outputs to their readers, one message per event loop."""
        messages: dict[asyncio.AbstractEventLoop, list[tuple[Reader, RequestOutput | Exception]]] = {}
        for request in requests:
            reader = self._readers.get(request.request_id)
            if reader is None or reader.request is not request or reader.progress is None:
                continue
            output: RequestOutput | Exception | None
            try:
                output = reader.progress.next()
            except Exception as error:  # (in a tokenizer or a decoding method of the user's own)
                logger.exception("The output of request %s cannot be made", request.request_id)
                self._engine.abort(request.request_id)
                output = error
            if output is not None:
                messages.setdefault(reader.loop, []).append((reader, output))
            if request.is_finished:
                self._failures.pop(request.request_id, None)
                with self._lock:
                    del self._readers[request.request_id]
        for loop, batch in messages.items():
            if not _send(loop, batch):
                for reader, _ in batch:
                    self.close(reader)

    def _end(self) -> None:
        with self._lock:
            readers = list(self._readers.values())
            self._readers.clear()
        for reader in readers:
            with contextlib.suppress(Exception):  # (of an engine in whatever state; all must be notified)
                self._engine.abort(reader.request_id)
            _send(reader.loop, [(reader, EngineStoppedError(self._stopped))])
        # (Or the two would keep each other alive.)
        self._engine.on_planned = [hook for hook in self._engine.on_planned if hook != self._note_plan]
        self._engine.on_committed = [hook for hook in self._engine.on_committed if hook != self._note_commit]


def _send(loop: asyncio.AbstractEventLoop, batch: list[tuple[Reader, RequestOutput | Exception]]) -> bool:
    """Send outputs to an event loop. False: it is closed."""
    try:
        loop.call_soon_threadsafe(_deliver, batch)
    except RuntimeError:
        return False
    return True


def _deliver(batch: list[tuple[Reader, RequestOutput | Exception]]) -> None:
    for reader, output in batch:
        reader.put(output)
