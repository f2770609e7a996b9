"""Every step of an engine as plain data: what was planned, and the memory before and after the commit.

Each step is recorded twice: `planned` has the blocks of a request that ends in this step, and `committed` has
the forks before anything is written to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

from minipaged.engine import Engine
from minipaged.memory.prefix_cache import CachedBlock
from minipaged.scheduling import Event, FCFSScheduler, Request, StepPlan, StepResult
from minipaged.viewer.delta import ScheduledTokens
from minipaged.viewer.snapshot import PoolView, look

CLEARED = {"kind": "cleared"}  # the event of a prefix cache that was cleared before the step
MOST_WAITING = 24  # requests of the queue whose ids are recorded: as many as the viewer shows


class StepRecord(NamedTuple):
    """One committed step. A failed step leaves no record, and its changes are in the next one."""

    step: int
    scheduled: tuple[ScheduledTokens, ...]
    swap_out: tuple[tuple[int, int], ...]
    swap_in: tuple[tuple[int, int], ...]
    copies: tuple[tuple[int, int], ...]
    evicted: tuple[int, ...]  # blocks whose cached content the plan has given up for others' tokens
    events: tuple[Mapping[str, Any], ...]  # kind, request and details of each decision; or CLEARED
    finished: tuple[str, ...]  # ids of the requests that ended
    completions: Mapping[str, tuple[tuple[int, ...], ...]]  # id -> generated tokens of each that ended now
    num_waiting: int
    waiting: tuple[str, ...]  # ids of the first of them, the next to be admitted first
    planned: PoolView  # the memory while the step is computed
    committed: PoolView


class Recorder:
    """Calls `listener` with the record of every step of an engine, until `close` or the end of a `with`."""

    def __init__(self, engine: Engine, listener: Callable[[StepRecord], None]) -> None:
        self._engine = engine
        self._listener = listener
        self._planned: tuple[tuple[ScheduledTokens, ...], PoolView, tuple[int, ...], bool] | None = None
        now = look(engine.scheduler)
        self._seen = PoolView(now.block_size, now.num_blocks, now.num_host_blocks)  # after the last step
        self._num_seen: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # completions of each so far
        self._cached = self._contents()  # as the last step left them
        engine.on_planned.append(self._look_at_plan)
        engine.on_committed.append(self._record)

    def _look_at_plan(self, plan: StepPlan) -> None:
        view = look(self._engine.scheduler)
        cleared = not plan.num_preempted and self._is_cleared(view)
        evicted = self._evicted(view) - (self._seen.evictable if cleared else set())
        self._planned = scheduled_tokens(plan), view, tuple(sorted(evicted)), cleared

    def _record(self, plan: StepPlan, result: StepResult, touched: list[Request]) -> None:
        assert self._planned is not None
        scheduled, planned, evicted, cleared = self._planned
        new = {request.request_id: self._new_completions(request) for request in touched}
        record = StepRecord(
            plan.step,
            scheduled,
            tuple(plan.swap_out),
            tuple(plan.swap_in),
            tuple(plan.copies),
            evicted,
            (*([CLEARED] if cleared else ()), *map(event_fields, plan.events)),
            tuple(request.request_id for request in touched if request.is_finished),
            {request: completions for request, completions in new.items() if completions},
            len(self._engine.scheduler.waiting),
            first_waiting(self._engine.scheduler),
            planned,
            look(self._engine.scheduler),
        )
        self._listener(record)
        self._see(record.committed)

    def _see(self, view: PoolView) -> None:
        self._planned = None
        self._seen, self._cached = view, self._contents()

    def _contents(self) -> list[CachedBlock | None]:
        cache = self._engine.scheduler.kv.prefix_cache
        return [] if cache is None else cache.cached.copy()

    def _is_cleared(self, view: PoolView) -> bool:
        """Whether all that the prefix cache kept for nobody after the last step is gone, though blocks are
        free: a plan evicts only where none is, unless it frees some by a preemption."""
        cache = self._engine.scheduler.kv.prefix_cache
        kept = self._seen.evictable
        if cache is None or not kept or any(self._cached[b] is cache.entry_of(b) for b in kept):
            return False
        return self._planned is None and view.num_free > 0  # (else a step has failed)

    def _evicted(self, view: PoolView) -> set[int]:
        """Blocks that a table has taken since the last step, and that were another content's."""
        cache = self._engine.scheduler.kv.prefix_cache
        if cache is None:
            return set()
        taken = {
            block
            for table in view.on_device()
            if (old := self._seen.tables.get(table.name)) is None or old.blocks != table.blocks
            for block in table.blocks
        }
        return {b for b in taken if self._cached[b] not in (None, cache.entry_of(b))}

    def _new_completions(self, request: Request) -> tuple[tuple[int, ...], ...]:
        seen, self._num_seen[request] = self._num_seen.get(request, 0), len(request.completions)
        return tuple(tuple(sequence.output_token_ids) for sequence in request.completions[seen:])

    def close(self) -> None:
        """Stop listening."""
        if self._record in self._engine.on_committed:
            self._engine.on_planned.remove(self._look_at_plan)
            self._engine.on_committed.remove(self._record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def first_waiting(scheduler: FCFSScheduler) -> tuple[str, ...]:
    """Ids of the first requests of the queue."""
    return tuple(request.request_id for request in islice(scheduler.waiting, MOST_WAITING))


def scheduled_tokens(plan: StepPlan) -> tuple[ScheduledTokens, ...]:
    """What a plan schedules, by names instead of objects; exact until the plan is committed."""
    return tuple(
        ScheduledTokens(
            sequence.request.request_id,
            next((i for i, s in enumerate(sequence.request.sequences) if s is sequence), sequence.index),
            *numbers,
        )
        for sequence, *numbers in plan.scheduled
    )


def event_fields(event: Event) -> dict[str, Any]:
    """A decision, as in a trace."""
    return {"kind": event.kind, "request": event.request_id, **event.detail}


def admitted(events: Iterable[Mapping[str, Any]]) -> set[str]:
    """Requests that get their tables in this step: a prompt's, or those of a recomputation."""
    return {event["request"] for event in events if "cached_tokens" in event}


@contextmanager
def recording(engine: Engine) -> Iterator[list[StepRecord]]:
    """The records of all steps while the block runs; for short runs, as they are kept in memory."""
    records: list[StepRecord] = []
    with Recorder(engine, records.append):
        yield records
