"""The contracts of scheduler, batch policies and preemption policies (paper, section 4.5).

Policies are checked answer by answer, a scheduler by the plans it makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from minipaged.learn.contracts.rules import Rules, short
from minipaged.memory import KVManager
from minipaged.scheduling import Decision, FCFSScheduler, PreemptionCosts, Request, StepPlan, StepResult
from minipaged.scheduling import RequestTooLongError as TooLong


class Scheduler(Protocol):
    """Queues, admission and order; a subclass of `minipaged.scheduling.FCFSScheduler`.

    1. A plan computes at most `max_num_batched_tokens` tokens, one chunk a sequence, each beginning where
       the sequence's computed tokens end and going no further than its tokens.
    2. Only running requests are computed; all sequences of a request are sampled together.
    3. Running requests hold at most `max_num_seqs` sequences, in order of arrival.
    4. Nothing is admitted in a step that preempts, nor while something is swapped out.
    5. While requests wait or run, a step computes, moves, preempts or ends something: no standstill.
    """

    def add(self, request: Request) -> None:
        """Put a request into the queue."""
        ...

    def abort(self, request: Request) -> None:
        """End a request now."""
        ...

    def schedule(self) -> StepPlan:
        """Decide what the next step computes and moves."""
        ...

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Take the step's result into account."""
        ...

    def roll_back(self, plan: StepPlan) -> None:
        """The step failed."""
        ...

    def check_invariants(self) -> None:
        """Raise AssertionError unless queues and blocks are consistent."""
        ...


class Batch(Protocol):
    """In which order the phases of the scheduler fill a step, made by `cls()`.

    1. At most `scheduler.max_num_batched_tokens` tokens are planned.
    2. A sequence gets one chunk a step.
    """

    def fill(self, plan: StepPlan, scheduler: FCFSScheduler) -> None:
        """Call the scheduler's phases, spending its budget."""
        ...


class Preemption(Protocol):
    """Who gives way and how it comes back, made by `cls()`, or by `cls(costs)` with `PreemptionCosts`.

    1. The victim is one of the candidates.
    2. The mode is "recompute" or "swap", with a reason; "swap" only if `kv.can_swap_out(victim.sequences)`.
    """

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        """One of the candidates, which stand in order of arrival."""
        ...

    def choose_mode(self, victim: Request, kv: KVManager) -> Decision:
        """How it comes back."""
        ...


class WatchedPreemption:
    """A preemption policy whose every choice is checked."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.rules = Rules("preemption")
        self._inner = self.rules.call(make)

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        """See `Preemption`."""
        names = [request.request_id for request in candidates]
        victim = self.rules.call(self._inner.choose_victim, list(candidates))
        self.rules.require(
            any(victim is candidate for candidate in candidates),
            f"choose_victim chose {short(victim)}, which is none of the candidates {short(names)}",
        )
        return victim

    def choose_mode(self, victim: Request, kv: KVManager) -> Decision:
        """See `Preemption`."""
        decision = self.rules.call(self._inner.choose_mode, victim, kv)
        what = f"choose_mode({victim.request_id}) answered {short(decision)}"
        self.rules.require(
            isinstance(decision, tuple)
            and len(decision) == 2
            and decision[0] in ("recompute", "swap")
            and isinstance(decision[1], str),
            f'{what}; give Decision("recompute" or "swap", reason)',
        )
        self.rules.require(
            decision[0] == "recompute" or kv.can_swap_out(victim.sequences),
            f"{what}, but the host pool cannot take its blocks; ask kv.can_swap_out first",
        )
        return Decision(*decision)


def check_chunks(rules: Rules, plan: StepPlan, scheduler: FCFSScheduler) -> None:
    """What holds for the chunks of every plan, whoever made it."""
    computed = sum(chunk.num_tokens for chunk in plan.scheduled)
    rules.require(
        computed == plan.num_tokens <= scheduler.max_num_batched_tokens,
        f"the plan of step {plan.step} has {computed} tokens (num_tokens {plan.num_tokens}); the budget is "
        f"{scheduler.max_num_batched_tokens}",
    )
    seen: set[int] = set()
    for sequence, start, num_tokens, _ in plan.scheduled:
        name = f"{sequence.request.request_id}/{sequence.index}"
        rules.require(id(sequence) not in seen, f"step {plan.step} has two chunks of sequence {name}")
        seen.add(id(sequence))
        computed, total = sequence.num_computed_tokens, len(sequence.token_ids)
        rules.require(
            start == computed and 1 <= num_tokens <= total - start,
            f"step {plan.step} computes tokens {start} to {start + num_tokens} of sequence {name}, which has "
            f"{computed} of {total} computed",
        )
        rules.require(
            start + num_tokens <= sequence.table.num_tokens,
            f"step {plan.step} computes tokens of sequence {name} that have no slot",
        )
        rules.require(
            any(sequence.request is running for running in scheduler.running),
            f"step {plan.step} computes sequence {name}, whose request is not running",
        )
    sampled = [chunk.sequence for chunk in plan.scheduled if chunk.num_candidates]
    wanted = [sequence for request in plan.sampling for sequence in request.sequences]
    rules.require(
        len(sampled) == len(wanted) and all(a is b for a, b in zip(sampled, wanted)),
        f"step {plan.step} samples {short(sampled)}; all sequences of a request are sampled together",
    )


class WatchedBatch:
    """A batch policy whose every plan is checked."""

    def __init__(self, make: Callable[[], Any], concept: str) -> None:
        self.rules = Rules(concept)
        self._inner = self.rules.call(make)

    def fill(self, plan: StepPlan, scheduler: FCFSScheduler) -> None:
        """See `Batch`."""
        self.rules.call(self._inner.fill, plan, scheduler)
        check_chunks(self.rules, plan, scheduler)
        check_standstill(self.rules, plan, scheduler)


def check_standstill(rules: Rules, plan: StepPlan, scheduler: FCFSScheduler) -> None:
    """A step with something to do does something."""
    evictable = not (plan.has_work or plan.num_preempted or plan.finished)
    rules.require(
        not (evictable and scheduler.has_unfinished),
        f"step {plan.step} does nothing, though {len(scheduler.running)} requests run, "
        f"{len(scheduler.swapped)} are swapped out and {len(scheduler.waiting)} wait",
    )


def watch_scheduler(part: type[FCFSScheduler]) -> Callable[..., FCFSScheduler]:
    """A maker of watched schedulers: a subclass that checks each plan and each commit."""

    class Watched(part):  # type: ignore[valid-type,misc]
        """The given scheduler; its plans are checked."""

        def __init__(self, *args: Any, **kw: Any) -> None:
            self.rules = Rules("scheduler")
            super().__init__(*args, **kw)

        def add(self, request: Request) -> None:
            """Queue; the request must be in the queue afterwards."""
            self.rules.call(super().add, request, may_raise=TooLong)
            self.rules.require(
                request in self.waiting, f"add({request.request_id}) left the request out of the queue"
            )

        def schedule(self) -> StepPlan:
            """Plan a step and check it."""
            unfinished = self.has_unfinished
            swapped = [request.arrival for request in self.swapped]
            plan = self.rules.call(super().schedule)
            rules = self.rules
            check_chunks(rules, plan, self)
            if unfinished:
                check_standstill(rules, plan, self)
            seats = sum(request.method.num_sequences for request in self.running)
            rules.require(
                seats <= self.max_num_seqs,
                f"{seats} sequences run in step {plan.step}; max_num_seqs is {self.max_num_seqs}",
            )
            arrivals = [request.arrival for request in self.running]
            rules.require(
                arrivals == sorted(arrivals),
                f"running requests stand in the order {short(arrivals)} of arrival",
            )
            admitted = [event.request_id for event in plan.events if event.kind == "admitted"]
            rules.require(
                not (admitted and plan.num_preempted),
                f"step {plan.step} preempts and admits {short(admitted)}; the blocks are for those who run",
            )
            rules.require(
                not (admitted and swapped and self.swapped),
                f"step {plan.step} admits {short(admitted)} while a request is swapped out",
            )
            return plan

        def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
            """Commit; every computed token is counted."""
            ends = [(chunk.sequence, chunk.start + chunk.num_tokens) for chunk in plan.scheduled]
            touched = self.rules.call(super().commit, plan, result)
            for sequence, end in ends:
                alive = any(sequence is live for live in sequence.request.sequences)
                self.rules.require(
                    not alive or sequence.num_computed_tokens == end,
                    f"commit of step {plan.step} left {short(sequence)} where {end} tokens are computed",
                )
            return touched

    Watched.__name__ = part.__name__
    return Watched


def watch_preemption(part: Callable[..., Any]) -> Callable[[PreemptionCosts], WatchedPreemption]:
    """A maker of watched preemption policies."""
    return lambda costs: WatchedPreemption(lambda: make_preemption(part, costs))


def make_preemption(part: Callable[..., Any], costs: PreemptionCosts) -> Any:
    """A policy; the costs are for one that asks for them."""
    return part(costs) if inspect.signature(part).parameters else part()


def watch_batch(concept: str) -> Callable[[Callable[[], Any]], Callable[[], WatchedBatch]]:
    """What makes makers of watched batch policies."""
    return lambda part: lambda: WatchedBatch(part, concept)
