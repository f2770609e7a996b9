"""Every step of an engine as plain data: what was planned, and the memory before and after the commit.

    schedule ----> planned: blocks are given, nothing is computed    execute ----> commit ----> committed

Two looks a step, because each sees what the other does not: `planned` has the blocks of a request that ends
in this very step, `committed` the forks before anyone writes. Derived from plan and tables; changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from minipaged.viewer.delta import ChunkLine
from minipaged.viewer.snapshot import PoolView, look

if TYPE_CHECKING:
    from minipaged.engine import Engine
    from minipaged.scheduling import FCFSScheduler, Request, StepPlan, StepResult


class StepRecord(NamedTuple):
    """One committed step.

    Attributes:
        step: its number. A step that failed leaves no record; what it changed is in the next one.
        scheduled: what was computed.
        swap_out: copies (device block, host block).
        swap_in: copies (host block, device block).
        copies: copy-on-write copies (device block, device block).
        events: kind, request and details of each decision: admitted, preempted (with the reason), ...
        finished: ids of the requests that ended.
        completions: id -> generated tokens of each completion that ended in this step, also while others
            of the same request go on.
        num_waiting: requests in the queue.
        planned: the memory while the step is computed.
        committed: the memory after it.
    """

    step: int
    scheduled: tuple[ChunkLine, ...]
    swap_out: tuple[tuple[int, int], ...]
    swap_in: tuple[tuple[int, int], ...]
    copies: tuple[tuple[int, int], ...]
    events: tuple[Mapping[str, Any], ...]
    finished: tuple[str, ...]
    completions: Mapping[str, tuple[tuple[int, ...], ...]]
    num_waiting: int
    planned: PoolView
    committed: PoolView


class Recorder:
    """Makes the records of one scheduler, step by step."""

    def __init__(self, scheduler: FCFSScheduler) -> None:
        self.scheduler = scheduler
        self._in_flight: tuple[int, tuple[ChunkLine, ...], PoolView] | None = None
        self._told: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # completions of each so far

    def planned(self, plan: StepPlan) -> None:
        """Look at the memory with the plan made; call it before `commit`."""
        self._in_flight = (plan.step, chunk_lines(plan), look(self.scheduler))

    def committed(self, plan: StepPlan) -> StepRecord:
        """Look again, after `commit`."""
        now = look(self.scheduler)
        # (A plan without work is not executed, and nobody saw it before its commit.)
        seen = self._in_flight is not None and self._in_flight[0] == plan.step
        step, chunks, planned = self._in_flight if seen and self._in_flight else (plan.step, (), now)
        requests = (*plan.sampling, *plan.finished)
        return StepRecord(
            step,
            chunks,
            tuple((a, b) for a, b in plan.swap_out),
            tuple((a, b) for a, b in plan.swap_in),
            tuple((a, b) for a, b in plan.copies),
            tuple({"kind": e.kind, "request": e.request_id, **e.detail} for e in plan.events),
            tuple(request.request_id for request in requests if request.is_finished),
            {request.request_id: new for request in requests if (new := self._new_completions(request))},
            len(self.scheduler.waiting),
            planned,
            now,
        )

    def _new_completions(self, request: Request) -> tuple[tuple[int, ...], ...]:
        told, self._told[request] = self._told.get(request, 0), len(request.completions)
        return tuple(tuple(sequence.output_token_ids) for sequence in request.completions[told:])


def chunk_lines(plan: StepPlan) -> tuple[ChunkLine, ...]:
    """The chunks of a plan by names instead of objects; valid until the plan is committed."""
    return tuple(
        ChunkLine(
            chunk.sequence.request.request_id,
            next(i for i, s in enumerate(chunk.sequence.request.sequences) if s is chunk.sequence),
            *chunk[1:],
        )
        for chunk in plan.scheduled
    )


class Tap:
    """Calls `listener` with the record of every step of an engine, until `remove`.

    Stands between engine and executor, the one place that every plan passes before it is committed.
    """

    def __init__(self, engine: Engine, listener: Callable[[StepRecord], None]) -> None:
        self._engine = engine
        self._executor = engine.executor
        self._listener = listener
        self._recorder = Recorder(engine.scheduler)
        engine.executor = self
        engine.observers.append(self._observe)

    def execute(self, plan: StepPlan) -> StepResult:
        """Look at the plan, then have it computed."""
        self._recorder.planned(plan)
        return self._executor.execute(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def _observe(self, plan: StepPlan, result: StepResult, engine: Engine) -> None:
        self._listener(self._recorder.committed(plan))

    def remove(self) -> None:
        """Leave the engine as it was found."""
        if self._observe in self._engine.observers:
            self._engine.observers.remove(self._observe)
            self._engine.executor = self._executor


@contextmanager
def recording(engine: Engine) -> Iterator[list[StepRecord]]:
    """The records of all steps while the block runs; for short runs, as they are kept in memory."""
    records: list[StepRecord] = []
    tap = Tap(engine, records.append)
    try:
        yield records
    finally:
        tap.remove()
