"""One simulated run: arrivals in, steps, what happened to every request out.

    while anything is left:   add what has arrived -> schedule -> execute (the clock moves) -> commit

The loop of the real engine with a clock that jumps. Records are made from (plan, clock) alone. Knows
neither why the scheduler decides nor what a step costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from minipaged.scheduling import (
    DecodingMethod,
    FCFSScheduler,
    Request,
    RequestState,
    RequestTooLongError,
    Sequence,
    StepPlan,
)
from minipaged.simulation.executor import SimulatedExecutor
from minipaged.simulation.records import GAP_RESOLUTION, Record, Run, Usage
from minipaged.simulation.scripts import ScriptedSampling
from minipaged.simulation.workloads import Arrival, prompt_tokens

MethodOf = Callable[[Arrival], DecodingMethod]


def one_sample(arrival: Arrival) -> DecodingMethod:
    """The usual decoding: one sample, as long as the trace says."""
    return ScriptedSampling(arrival.lengths.output)


class Simulation:
    """A scheduler, an executor and the records of what they do.

    Args:
        scheduler: the real one, or a baseline.
        executor: its clock is the simulation's.
        method_of: the decoding method of a request.
        max_output: output limit that the user asks for; None: up to the scheduler's longest sequence.
            (Where a request really ends is known to its decoding method alone.)
        usage_every: look at the memory every so many steps; 0: never.
    """

    def __init__(
        self,
        scheduler: FCFSScheduler,
        executor: SimulatedExecutor,
        method_of: MethodOf = one_sample,
        max_output: int | None = None,
        usage_every: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.method_of = method_of
        self.max_output = max_output
        self.run = Run()
        self.num_present = 0
        self._records: dict[str, Record] = {}
        self._usage_every = usage_every
        self._watched = [0.0] * 5  # seconds, and seconds x (requests, tokens, held, shared)

    def add(self, arrival: Arrival) -> None:
        """Queue a request, its output cut to the longest sequence; one that can never run is refused."""
        limit = self.scheduler.max_model_len
        lengths = arrival.lengths
        if lengths.prompt + lengths.output > limit > lengths.prompt:
            arrival = arrival._replace(lengths=lengths._replace(output=limit - lengths.prompt))
        tokens = prompt_tokens(arrival)
        if self.max_output is not None:
            limit = min(limit, len(tokens) + self.max_output)
        name = str(arrival.number)
        request = Request(
            name, tokens, self.method_of(arrival), arrival.lengths, limit, self.scheduler.kv.new_table()
        )
        try:
            self.scheduler.add(request)
        except RequestTooLongError:
            self.run.num_refused += 1
            return
        # (An idle clock stands where its last step ended.)
        self.executor.now = max(self.executor.now, arrival.time)
        self._records[name] = Record(arrival)
        self.num_present += 1

    def advance(self, until: float) -> None:
        """Step until nothing is left or the clock reaches `until` (the last step may go past it)."""
        while self.scheduler.has_unfinished and self.executor.now < until:
            self.step()

    def step(self) -> StepPlan:
        """One step; the clock moves to its end."""
        scheduler, executor, run = self.scheduler, self.executor, self.run
        begin = executor.now
        plan = scheduler.schedule()
        if plan.events:
            self._note_events(plan, begin)
        touched = scheduler.commit(plan, executor.execute(plan))
        now = executor.now
        run.num_steps += 1
        if self._usage_every and run.num_steps % self._usage_every == 0:
            self._watch(now - begin)
        records, gaps = self._records, run.gaps
        per_second = 1 / GAP_RESOLUTION
        finished = RequestState.FINISHED
        for request in plan.sampling:
            record = records[request.request_id]
            if record.first_token is None:
                record.first_token = now
            else:
                gaps[int((now - record.last_token) * per_second)] += 1
            record.last_token = now
        for request in touched:
            if request.state is finished:
                self._note_finished(request, now)
        return plan

    def _note_events(self, plan: StepPlan, now: float) -> None:
        for kind, request_id, detail in plan.events:
            if kind == "admitted":
                self._records[request_id].admitted = now
                self.run.num_cached_tokens += detail["cached_tokens"]
            elif kind == "preempted":
                self._records[request_id].preemptions += 1
                self.run.num_preemptions += 1

    def _note_finished(self, request: Request, now: float) -> None:
        record = self._records.pop(request.request_id)
        record.finished = now
        self.run.records.append(record)
        self.num_present -= 1

    def _watch(self, seconds: float) -> None:
        kv = self.scheduler.kv
        sequences = [s for request in self.scheduler.running for s in request.sequences]
        if not sequences:
            return
        entries = sum(len(s.table.blocks) for s in sequences)
        tokens = sum(s.table.num_tokens for s in sequences)
        blocks = kv.num_used
        if entries > blocks:
            # Some are shared: their slots count once.
            tokens = _distinct_tokens(sequences)
        slots = kv.allocator.num_blocks * kv.block_size
        shared = max(0.0, 1 - blocks / entries)
        usage = (len(self.scheduler.running), tokens / slots, blocks * kv.block_size / slots, shared)
        for i, value in enumerate((1.0, *usage)):
            self._watched[i] += seconds * value

    def forget_usage(self) -> None:
        """Average from here on: what was before is warm-up."""
        self._watched = [0.0] * 5

    def finish(self) -> Run:
        """Close the books."""
        run = self.run
        run.seconds = self.executor.now
        seconds = self._watched[0]
        if seconds:
            run.usage = Usage(*(value / seconds for value in self._watched[1:]))
        return run


def _distinct_tokens(sequences: Iterable[Sequence]) -> int:
    filled: dict[int, int] = {}
    for sequence in sequences:
        table = sequence.table
        for logical, block in enumerate(table.blocks):
            filled[block] = max(filled.get(block, 0), table.filled(logical))
    return sum(filled.values())


def simulate(
    simulation: Simulation,
    arrivals: Iterable[Arrival],
    *,
    until: float = float("inf"),
    max_users: int | None = None,
) -> Run:
    """Run a trace.

    Args:
        arrivals: in order of time.
        until: stop the clock here, finished or not, seconds.
        max_users: turn an arrival away while so many requests are in the system.
    """
    source: Iterator[Arrival] = iter(arrivals)
    upcoming = next(source, None)
    executor, scheduler = simulation.executor, simulation.scheduler
    while executor.now < until:
        while upcoming is not None and upcoming.time <= executor.now:
            if max_users is not None and simulation.num_present >= max_users:
                simulation.run.num_dropped += 1
            else:
                simulation.add(upcoming)
            upcoming = next(source, None)
        if scheduler.has_unfinished:
            simulation.step()
        elif upcoming is None:
            break
        else:
            executor.now = upcoming.time
    return simulation.finish()
