"""The contract of a scheduler, and what every plan must obey (paper, section 4.5)."""

from __future__ import annotations

import sys
from collections import Counter, deque
from numbers import Integral
from typing import Any

from minipaged.learn.contracts.rules import Rules, short
from minipaged.scheduling import FCFSScheduler, Request, RequestTooLongError, StepPlan, StepResult

CIRCLES = 1000
"""So many steps without a token are no policy but an endless loop."""


class SchedulerContract(FCFSScheduler):
    """Queues, admission and order; watches a subclass of `FCFSScheduler`, into which this class is mixed.

    1. A plan computes at most `max_num_batched_tokens` tokens; a sequence is scheduled once, from where its
       computed tokens end and no further than its tokens.
    2. Only running requests are computed; all sequences of a request are sampled together.
    3. Running requests reserve at most `max_num_seqs` sequences. Each queue is in order of arrival after a
       step is scheduled, whatever the order of admission.
    4. Nothing is admitted in a step that preempts, nor while something that came earlier is swapped out.
    5. While requests wait or run, a step computes, moves, preempts or ends something: no standstill. After
       fewer than 1,000 steps that preempt or compute nothing, a token is sampled or a request ends.
    6. From `add` until it ends, a request is in one of the queues `waiting`, `running` and `swapped`.
    7. A phase returns the tokens that it spent of its budget: those that it scheduled and, if the manager
       charges for them, cached ones.
    """

    def __init__(self, *args: Any, **kw: Any) -> None:
        self.rules = Rules("scheduler")
        self._present: list[Request] = []  # added, and not ended when it was last looked at
        self._steps_idle = 0  # that preempt or compute nothing, since a token was sampled or a request ended
        super().__init__(*args, **kw)

    def add(self, request: Request) -> None:
        """The request is in the queue afterwards."""
        self.rules.call(super().add, request, may_raise=(RequestTooLongError,))
        name = request.request_id
        self.rules.require(request in self.waiting, f"add({name}) left the request out of the queue")
        self._present.append(request)

    @property
    def has_unfinished(self) -> bool:
        """A lost request counts: without a next step, which reports it, its caller would wait forever."""
        return super().has_unfinished or any(not request.is_finished for request in self._present)

    def schedule(self) -> StepPlan:
        """Rules 1 to 6."""
        self.rules.call(self._check_queues)
        unfinished = self.has_unfinished
        plan = self.rules.call(super().schedule)
        self._check_queues()
        require = self.rules.require
        require(isinstance(plan, StepPlan), f"schedule() returned {short(plan)}; give the step's plan")
        check_plan(self.rules, plan, self)
        if unfinished:
            check_progress(self.rules, plan, self)
            self._check_not_in_circles(plan)
        reserved = sum(request.method.num_sequences for request in self.running)
        message = f"{reserved} sequences run in step {plan.step}; max_num_seqs is {self.max_num_seqs}"
        require(reserved <= self.max_num_seqs, message)
        for name in ("waiting", "running", "swapped"):
            arrivals = [request.arrival for request in getattr(self, name)]
            message = f"{name} requests stand in the order {short(arrivals)} of arrival"
            require(arrivals == sorted(arrivals), f"{message}; keep every queue sorted by it")
        admitted = [event.request_id for event in plan.events if event.kind == "admitted"]
        message = f"step {plan.step} preempts and admits {short(admitted)}; the blocks are for those who run"
        require(not (admitted and plan.num_preempted), message)
        first = self.swapped[0].arrival if self.swapped else sys.maxsize
        late = [r.request_id for r in self.running if r.arrival > first and r.request_id in admitted]
        message = f"step {plan.step} admits {short(late)} while a request that came earlier is swapped out"
        require(not late, message)
        return plan

    def plan_decodes(self, *args: Any, **options: Any) -> int:
        """Rule 7."""
        return self._spent("plan_decodes", super().plan_decodes, *args, **options)

    def continue_prefills(self, *args: Any, **options: Any) -> int:
        """Rule 7."""
        return self._spent("continue_prefills", super().continue_prefills, *args, **options)

    def resume_preempted(self, *args: Any, **options: Any) -> int:
        """Rule 7."""
        return self._spent("resume_preempted", super().resume_preempted, *args, **options)

    def admit_waiting(self, *args: Any, **options: Any) -> int:
        """Rule 7."""
        return self._spent("admit_waiting", super().admit_waiting, *args, **options)

    def _spent(self, name: str, phase: Any, plan: StepPlan, budget: int, *args: Any, **options: Any) -> int:
        before, known = plan.num_tokens, len(plan.events)
        spent = phase(plan, budget, *args, **options)
        scheduled = plan.num_tokens - before
        cached = sum(event.detail.get("cached_tokens", 0) for event in plan.events[known:])
        message = f"{name} scheduled {scheduled} tokens of a budget of {budget} and returned {short(spent)}"
        is_right = isinstance(spent, Integral) and scheduled <= int(spent) <= scheduled + cached
        self.rules.require(is_right, f"{message}; return what it spent")
        return int(spent)

    def end(self, request: Request, *args: Any, **options: Any) -> None:
        """Rule 5."""
        self._steps_idle = 0
        super().end(request, *args, **options)

    def _check_not_in_circles(self, plan: StepPlan) -> None:
        if plan.sampling:
            self._steps_idle = 0
        elif plan.num_preempted or not plan.scheduled:
            self._steps_idle += 1
        message = f"{CIRCLES} steps have preempted, moved or copied without sampling a token"
        self.rules.require(self._steps_idle < CIRCLES, f"{message}; let a request run until it is sampled")

    def _check_queues(self) -> None:
        for name in ("waiting", "running", "swapped"):
            queue = getattr(self, name)
            message = f"{name} is {short(queue)}; keep a deque or a list of requests"
            self.rules.require(isinstance(queue, deque | list), message)
        self._present = [request for request in self._present if not request.is_finished]
        places = Counter(map(id, (*self.waiting, *self.running, *self.swapped)))
        for request in self._present:
            count = places[id(request)]
            where = f"in the queues {count} times" if count else "in no queue"
            message = f"request {request.request_id} was added, has not ended and is {where}"
            self.rules.require(count == 1, f"{message}; keep it in one until it ends")

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Every computed token is counted."""
        ends = [(scheduled.sequence, scheduled.start + scheduled.num_tokens) for scheduled in plan.scheduled]
        touched = self.rules.call(super().commit, plan, result)
        message = f"commit of step {plan.step} returned {short(touched)}; give a list of requests"
        self.rules.require(isinstance(touched, list), message)
        for sequence, end in ends:
            alive = any(sequence is live for live in sequence.request.sequences)
            message = f"commit of step {plan.step} left {short(sequence)} where {end} tokens are computed"
            self.rules.require(not alive or sequence.num_computed_tokens == end, message)
        return touched


def check_plan(rules: Rules, plan: StepPlan, scheduler: FCFSScheduler) -> None:
    """What holds for every plan, whoever made it."""
    step, budget = f"step {plan.step}", scheduler.max_num_batched_tokens
    message = f"the plan of {step} has {plan.num_tokens} tokens; the budget is {budget}"
    rules.require(plan.num_tokens <= budget, message)
    seen: set[int] = set()
    for sequence, start, num_tokens, _ in plan.scheduled:
        name = f"sequence {sequence.request.request_id}/{sequence.index}"
        rules.require(id(sequence) not in seen, f"{step} schedules {name} twice")
        seen.add(id(sequence))
        computed, total = sequence.num_computed_tokens, len(sequence.token_ids)
        rules.require(
            start == computed and 1 <= num_tokens <= total - start,
            f"{step} computes tokens {start} to {start + num_tokens} of {name}, which has {computed} of "
            f"{total} computed",
        )
        has_slots = start + num_tokens <= sequence.table.num_tokens
        rules.require(has_slots, f"{step} computes tokens of {name} that have no slot")
        runs = any(sequence.request is running for running in scheduler.running)
        rules.require(runs, f"{step} computes {name}, whose request is not running")
    sampled = [scheduled.sequence for scheduled in plan.scheduled if scheduled.num_candidates]
    wanted = [sequence for request in plan.sampling for sequence in request.sequences]
    rules.require(
        len(sampled) == len(wanted) and all(a is b for a, b in zip(sampled, wanted)),
        f"{step} samples {short(sampled)}; all sequences of a request are sampled together",
    )


def check_progress(rules: Rules, plan: StepPlan, scheduler: FCFSScheduler) -> None:
    """A step with something to do does something."""
    is_empty = not (scheduler.running or scheduler.swapped or scheduler.waiting)
    rules.require(
        bool(plan.has_work or plan.num_preempted or plan.finished or is_empty),
        f"step {plan.step} does nothing, though {len(scheduler.running)} requests run, "
        f"{len(scheduler.swapped)} are swapped out and {len(scheduler.waiting)} wait",
    )
