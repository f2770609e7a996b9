"""One simulated run: arrivals go in, the real engine steps, and a record of every request comes out.

The executor's clock jumps from step to step and is the engine's clock; records are made by step hooks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import ceil

from minipaged.config import EngineConfig
from minipaged.engine import Engine
from minipaged.learn.contracts.rules import ContractError
from minipaged.scheduling import (
    DecodingMethod,
    FCFSScheduler,
    Request,
    RequestState,
    RequestTooLongError,
    Sequence,
    StepPlan,
    StepResult,
)
from minipaged.simulation.baselines.contiguous import ContiguousKVManager
from minipaged.simulation.executor import SimulatedExecutor
from minipaged.simulation.records import GAP_RESOLUTION, Record, Run, Usage
from minipaged.simulation.scripts import Script, ScriptedSampling
from minipaged.simulation.workloads import Arrival, prompt_tokens

MethodOf = Callable[[Arrival], DecodingMethod]


def one_sample(arrival: Arrival) -> DecodingMethod:
    """One sample, as long as the trace says."""
    return ScriptedSampling(arrival.lengths.output)


class NoParams:
    """In place of a request's parameters: no policy may know where it ends."""


def _hidden_field(error: ContractError) -> str | None:
    """The field that no simulated request has, if a class asked for it."""
    cause = error.__cause__
    if not isinstance(cause, AttributeError) or not isinstance(cause.obj, NoParams | Script):
        return None
    return "params" if isinstance(cause.obj, NoParams) else f"method.{cause.name}"


@contextmanager
def explained_hidden_fields(
    requests: str = "simulated requests", error_class: type[ValueError] = ContractError
) -> Iterator[None]:
    """If a class asks where one of the `requests` ends, an `error_class` explains that it cannot know."""
    try:
        yield
    except ContractError as error:
        if (name := _hidden_field(error)) is None:
            raise
        raise error_class(
            f"{error}; {requests} have no request.{name}: go by request.prompt_token_ids"
        ) from error


class Simulation:
    """An engine over a simulated executor, and the records of what it does."""

    def __init__(
        self,
        scheduler: FCFSScheduler,
        executor: SimulatedExecutor,
        method_of: MethodOf = one_sample,
        max_output: int | None = None,  # that the user asks for; where a request ends is up to its method
        usage_every: int = 0,  # look at the memory every so many steps; 0: never
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.method_of = method_of
        self.max_output = max_output
        self.usage_every = usage_every
        self.run = Run()
        self.refusal = ""  # why the last request that was refused can never run
        config = EngineConfig(disable_log_stats=True)
        self.engine = Engine(executor, config, clock=lambda: executor.now, scheduler=scheduler)
        # In place of the engine's own metrics, which cost time.
        self.engine.on_planned[:] = [self._note_plan]
        self.engine.on_committed[:] = [self._note_step]
        self._records: dict[str, Record] = {}
        self._begin = 0.0  # of the step in flight
        self.forget_usage()

    @property
    def num_present(self) -> int:
        """Requests in the system."""
        return len(self._records)

    def add(self, arrival: Arrival) -> None:
        """Queue a request, its output cut to the longest sequence; one that can never run is refused."""
        limit = self.scheduler.max_model_len
        lengths = arrival.lengths
        if lengths.prompt >= limit:
            self.run.num_refused += 1
            self.refusal = (
                f"a prompt has {lengths.prompt} tokens, but max_model_len is {limit}; give shorter prompts"
            )
            return
        is_cut_short = lengths.prompt + lengths.output > limit
        if is_cut_short:
            arrival = arrival._replace(lengths=lengths._replace(output=limit - lengths.prompt))
        tokens, name = prompt_tokens(arrival), str(arrival.number)
        if self.max_output is not None:
            limit = min(limit, len(tokens) + self.max_output)
        table = self.scheduler.kv.new_table()
        # Only the paper's "oracle" knows the output in advance.
        params = arrival.lengths if isinstance(self.scheduler.kv, ContiguousKVManager) else NoParams()
        request = Request(name, tokens, self.method_of(arrival), params, limit, table)
        try:
            self.engine.submit(request)
        except RequestTooLongError as error:
            self.run.num_refused += 1
            self.refusal = str(error)
            return
        # (An idle clock stands where its last step ended.)
        self.executor.now = max(self.executor.now, arrival.time)
        self._records[name] = Record(arrival.time, arrival.lengths, is_cut_short=is_cut_short)

    def advance(self, until: float = float("inf")) -> None:
        """Step until nothing is left or the clock reaches `until` (the last step may go past it)."""
        while self.scheduler.has_unfinished and self.executor.now < until:
            self.engine.step()

    def _note_plan(self, plan: StepPlan) -> None:
        self._begin = self.executor.now
        for kind, request_id, detail in plan.events:
            if kind == "admitted":
                self._records[request_id].admitted = self._begin
                self.run.num_cached_tokens += detail["cached_tokens"]
            elif kind == "outgrown":
                self._records[request_id].is_cut_short = True
        self.run.num_preemptions += plan.num_preempted

    def _note_step(self, plan: StepPlan, result: StepResult, touched: list[Request]) -> None:
        now, run, records, gaps = self.executor.now, self.run, self._records, self.run.gaps
        run.num_steps += 1
        run.num_samples += len(plan.sampling)
        if self.usage_every and run.num_steps % self.usage_every == 0:
            self._watch(now - self._begin)
        per_second = 1 / GAP_RESOLUTION
        for request in plan.sampling:
            record = records[request.request_id]
            if record.last_token is None:
                record.first_token = now
            else:
                gap = now - record.last_token
                run.gap_seconds += gap
                gaps[ceil(gap * per_second)] += 1
            record.last_token = now
        finished = RequestState.FINISHED
        for request in touched:
            if request.state is finished:
                record = records.pop(request.request_id)
                record.finished = now
                record.num_tokens = request.completions[0].num_generated_tokens
                run.records.append(record)

    def _watch(self, seconds: float) -> None:
        usage = self.look()
        if usage is not None:
            for i, value in enumerate((1.0, *usage)):
                self._watched[i] += seconds * value

    def look(self) -> Usage | None:
        """How the memory is used now; None if nothing runs."""
        kv = self.scheduler.kv
        sequences = [s for request in self.scheduler.running for s in request.sequences]
        if not sequences:
            return None
        entries = sum(len(s.table.blocks) for s in sequences)
        tokens = sum(s.table.num_tokens for s in sequences)
        blocks = kv.num_used
        if entries > blocks:
            # Some are shared: their slots count once.
            tokens = _distinct_tokens(sequences)
        slots = kv.allocator.num_blocks * kv.block_size
        shared = max(0.0, 1 - blocks / entries)
        return Usage(len(self.scheduler.running), tokens / slots, blocks * kv.block_size / slots, shared)

    def forget_usage(self) -> None:
        """Average from here on: what came before is warm-up."""
        self._watched = [0.0] * 5  # seconds, and seconds x each field of `Usage`

    def finish(self) -> Run:
        """The run up to now."""
        self.run.seconds = self.executor.now
        seconds, *sums = self._watched
        if seconds:
            self.run.usage = Usage(*(value / seconds for value in sums))
            self.run.watched_seconds = seconds
        return self.run


class WatchedSimulation(Simulation):
    """Looks at the memory while a step is computed: after the commit, what ends in the step is gone."""

    peak_blocks = 0
    _usage: Usage | None = None

    def _note_plan(self, plan: StepPlan) -> None:
        super()._note_plan(plan)
        self._usage = super().look()
        self.peak_blocks = max(self.peak_blocks, self.scheduler.kv.num_used)

    def look(self) -> Usage | None:
        """As the plan of the newest step left it."""
        return self._usage


def _distinct_tokens(sequences: Iterable[Sequence]) -> int:
    filled: dict[int, int] = {}
    for sequence in sequences:
        for logical, block in enumerate(sequence.table.blocks):
            filled[block] = max(filled.get(block, 0), sequence.table.filled(logical))
    return sum(filled.values())


def simulate(
    simulation: Simulation,
    arrivals: Iterable[Arrival],
    *,
    until: float = float("inf"),
    max_users: int | None = None,
) -> Run:
    """Run a trace in order of time, to its end or to `until` seconds.

    An arrival is turned away while `max_users` requests are in the system.
    """
    for arrival in arrivals:
        simulation.advance(min(arrival.time, until))
        if max(arrival.time, simulation.executor.now) >= until:
            break
        if max_users is not None and simulation.num_present >= max_users:
            simulation.run.num_dropped += 1
        else:
            simulation.add(arrival)
    simulation.advance(until)
    return simulation.finish()
