"""Iteration-level scheduling, first come, first served (paper, section 4.5).

    add ----> waiting ---- admit ---> running ---- commit ---> finished
                ^                      |   ^
                +-- recompute ---------+   |         one step: schedule, execute, then commit or roll back
                    (roll back, too)   +-> swapped

The earliest arrival is served first; the latest is the first to be preempted. The first waiting request that
does not fit stops admission, and while anything is swapped out, nothing new is admitted. A batch policy sets
the order in which four phases fill a step; a preemption policy decides which request is preempted, and how.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

from minipaged.memory import KVManager
from minipaged.scheduling import limits
from minipaged.scheduling.plan import Event, ScheduledSequence, StepPlan, StepResult
from minipaged.scheduling.policies import BatchPolicy
from minipaged.scheduling.preemption import PreemptionPolicy
from minipaged.scheduling.request import Branch, Request, RequestState, Sequence

by_arrival = attrgetter("arrival")


@dataclass(eq=False, repr=False)
class FCFSScheduler:
    """Queues, admission, order and preemption. The queues are in order of arrival."""

    kv: KVManager
    policy: BatchPolicy  # how a step is composed
    preemption: PreemptionPolicy  # who is preempted, and how
    max_num_seqs: int  # sequences that may hold device blocks at once
    max_num_batched_tokens: int  # most tokens a step computes
    max_model_len: int  # longest sequence, prompt and output together

    def __post_init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.swapped: deque[Request] = deque()
        self.in_flight: StepPlan | None = None  # neither committed nor rolled back yet
        self.num_preemptions = self.num_generated_tokens = self.num_arrived = self.num_steps = 0
        # Aborted while a step was in flight, or lost in its commit -> the error of those that failed.
        self._deferred_ends: dict[Request, str | None] = {}

    # -- requests come and go -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue; RequestTooLongError if it could not run even alone."""
        limits.check_can_ever_run(request, self)
        request.arrival = self.num_arrived
        self.num_arrived += 1
        self.waiting.append(request)

    def abort(self, request: Request, error: str | None = None) -> None:
        """End a request now, whatever its state; one that is being computed ends with that step's commit.
        With an `error`, it has failed."""
        is_computing = self.in_flight is not None and not self.in_flight.has_failed
        if is_computing and request.state is not RequestState.WAITING:
            self._deferred_ends.setdefault(request, error)
        elif not request.is_finished:
            self.end(request, "abort" if error is None else "error", error)

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        """The live sequences become completions as they are, and every block is freed."""
        self.kv.free(request.sequences)  # first: if this fails, the request is still where it was
        request.error = error
        if reason == "error":
            limits.warn_failed(request)
        self._leave_queue(request)
        for sequence in request.sequences:
            sequence.finish_reason = reason
        # (In this order, here and in `apply_branches`: other threads read a request while it is streamed.)
        request.completions += request.sequences
        request.sequences = []
        request.state = RequestState.FINISHED

    def _leave_queue(self, request: Request) -> None:
        queue = getattr(self, request.state.value)
        if request in queue:
            queue.remove(request)

    def _move_to(self, state: RequestState, request: Request) -> None:
        self._leave_queue(request)
        request.state = state
        # (Not always at the end: after a failed step an earlier request may come back behind a later one.)
        insort(getattr(self, state.value), request, key=by_arrival)

    def _end_deferred(self) -> list[Request]:
        ended = [request for request in self._deferred_ends if not request.is_finished]
        for request in ended:
            self.abort(request, self._deferred_ends[request])
        self._deferred_ends = {}
        return ended

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits, runs or is swapped out."""
        return bool(self.waiting or self.running or self.swapped)

    def has_room_for(self, request: Request) -> bool:
        """Whether `max_num_seqs` allows it to run. A request reserves the sequences that it will fork."""
        reserved = sum(r.method.num_sequences for r in self.running)
        return reserved + request.method.num_sequences <= self.max_num_seqs

    # -- one step -------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide what the next step computes and moves; then `commit` or `roll_back`, even if this fails."""
        failed = self.in_flight  # None, or a plan whose rollback failed: it is retried
        assert failed is None or failed.has_failed, "commit or roll back the last plan first"
        ended = self._end_deferred() if failed is None else self.roll_back(failed)
        self.in_flight = plan = StepPlan(self.num_steps, finished=ended)
        self.num_steps += 1
        self.policy.fill(plan, self)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Apply the step's result. Returns the requests that got tokens or ended."""
        # First, what may fail in an override: nothing has changed yet, so the step can be rolled back.
        decisions = []
        row = 0
        for request in plan.sampling:
            first, row = row, row + len(request.sequences)
            samples = result.samples[first:row]
            failed = request.request_id in result.errors
            decisions.append(None if failed else request.method.advance(request, samples))
        self.in_flight = None
        try:
            self.kv.commit_registered()
            for request in plan.changed:
                request.has_run = True
            for sequence, start, num_tokens, _ in plan.scheduled:
                sequence.num_computed_tokens = start + num_tokens
            for request, branches in zip(plan.sampling, decisions):
                if branches is None:
                    self.end(request, "error", result.errors[request.request_id])
                else:
                    self.num_generated_tokens += len(branches)
                    self.apply_branches(request, branches)
        except BaseException as failure:
            for request in plan.touched:
                self._deferred_ends[request] = f"{type(failure).__name__}: {failure}"
            self._end_deferred()
            raise
        return list(dict.fromkeys((*plan.sampling, *plan.finished, *self._end_deferred())))

    def apply_branches(self, request: Request, branches: list[Branch]) -> None:
        """Continue a request with the branches its decoding method chose (paper, section 4.4).

        live       A    B    C
        branches   A+x  A+y  C+z          B has none: freed
        live       A    A'   C            A' is forked from A before anything is appended
        """
        if len(branches) == len(request.sequences) == 1 and branches[0].finish_reason is None:
            request.sequences[0].append(branches[0])  # (nearly every request of nearly every step)
            return
        children: list[Sequence] = []
        for branch in branches:
            child = branch.parent
            if branch.finish_reason is not None:
                child = child.fork(self.kv.new_table())
            elif child in children:
                child = child.fork(self.kv.fork(child))
                request.sequences.append(child)  # its blocks are freed, whatever happens
            children.append(child)
        for child, branch in zip(children, branches):
            child.append(branch)
        live = [child for child in children if child.finish_reason is None]
        self.kv.free(sequence for sequence in request.sequences if sequence not in live)
        request.completions += [child for child in children if child.finish_reason is not None]
        request.sequences = live
        if not live:
            self.running.remove(request)
            request.state = RequestState.FINISHED

    def roll_back(self, plan: StepPlan) -> list[Request]:
        """The step failed: forget what it registered, and requeue every request it touched for recomputation.
        Returns the requests that ended anyway."""
        plan.has_failed = True
        self.kv.roll_back_registered()
        for request in plan.touched:
            if not request.is_finished:
                self._requeue(request)
        self.in_flight = None
        return plan.finished + self._end_deferred()

    def _requeue(self, request: Request) -> None:
        self.kv.free(request.sequences)
        self._move_to(RequestState.WAITING, request)

    # -- the four phases, called by the batch policy; each returns the tokens it spent of the budget --

    def plan_decodes(self, plan: StepPlan, budget: int) -> int:
        """One token for every running sequence that has only its newest token to compute. Preempts the latest
        arrivals when blocks run out."""
        left = budget
        for position, request in enumerate(self.running):  # (`make_room` takes none from before it)
            if request.is_prefill:
                continue
            sequences = request.sequences
            if len(sequences) > left:
                break
            needed = self.kv.blocks_to_grow(sequences)
            if needed:
                if not self.make_room(plan, request, needed, position):
                    break  # the request itself was preempted: nobody is behind it
                plan.changed.append(request)
            plan.copies += self.kv.grow(sequences, needed)
            left -= self.schedule_rest(plan, request)
        return budget - left

    def continue_prefills(self, plan: StepPlan, budget: int, share: int | None = None) -> int:
        """The next chunk of every running request that is still computing its prompt: at most `share` tokens
        of one request while others are behind it."""
        if len(plan.sampling) == len(self.running):
            return 0  # all of them are decodes
        left = budget
        prefills = [request for request in self.running if request.is_prefill]
        for request in prefills:
            is_last = not self.waiting and request is prefills[-1]
            limit = left if share is None or is_last else min(left, share)
            left -= self.schedule_request(plan, request, limit)
        return budget - left

    def resume_preempted(self, plan: StepPlan, budget: int) -> int:
        """Resume swapped-out requests, the earliest arrival first."""
        left, has_admitted = budget, False
        while self.swapped and left and not plan.num_preempted:
            if self.waiting and self.waiting[0].arrival < self.swapped[0].arrival:
                # It is not new: when it was preempted, the host had no room.
                used, has_admitted = self.admit_first(plan, left), True
            elif not has_admitted:
                used = self.swap_in_first(plan, left)
            else:
                # Admission may copy from a cached block that nobody holds. A swap-in of the same step would
                # run before the copy, perhaps into that very block.
                break
            if not used:
                break
            left -= used
        return budget - left

    def admit_waiting(
        self, plan: StepPlan, budget: int, whole: bool = False, share: int | None = None
    ) -> int:
        """Admit from the front of the queue until one does not fit. `whole`: only a prompt that fits the rest
        of the budget, or the first of the step. `share`: as in `continue_prefills`."""
        left = budget
        while self.waiting and left and not self.swapped and not plan.num_preempted:
            used = self.admit_first(plan, left, whole, share)
            if not used:
                break
            left -= used
        return budget - left

    # -- what the phases are made of ------------------------------------------------------------

    def schedule_request(self, plan: StepPlan, request: Request, limit: int) -> int:
        """Schedule up to `limit` tokens of a request. Returns how many."""
        if request.num_uncomputed_tokens <= limit:
            return self.schedule_rest(plan, request)
        # Each sequence is completed up to its last token before the next one begins (which may share blocks
        # that this one computes): all are sampled together, once their last tokens fit in a step.
        left = limit
        for sequence in request.sequences:
            if count := min(sequence.num_uncomputed_tokens - 1, left):
                self._schedule(plan, sequence, count, 0)
                left -= count
        return limit - left

    def schedule_rest(self, plan: StepPlan, request: Request) -> int:
        """Schedule all uncomputed tokens of a request; its sequences are sampled. Returns how many."""
        candidates = request.method.num_candidates(request)
        used = 0
        for sequence in request.sequences:
            count = len(sequence.token_ids) - sequence.num_computed_tokens
            self._schedule(plan, sequence, count, candidates)
            used += count
        plan.sampling.append(request)
        return used

    def _schedule(self, plan: StepPlan, sequence: Sequence, count: int, candidates: int) -> None:
        start = sequence.num_computed_tokens
        plan.scheduled.append(ScheduledSequence(sequence, start, count, candidates))
        self.kv.register(sequence, start + count)

    def admit_first(self, plan: StepPlan, left: int, whole: bool = False, share: int | None = None) -> int:
        """Admit the first waiting request if it fits. Returns the budget it uses, 0 if it does not."""
        request = self.waiting[0]
        if not self.has_room_for(request):
            return 0
        admission = self.kv.can_admit(request.sequences, others_run=bool(self.running))
        if not admission.fits:
            if not self.running:  # the pool is empty: after a preemption, the grown request no longer fits
                self.end_outgrown(plan, request)
            return 0
        if whole and admission.num_charged_tokens > left and plan.scheduled:
            return 0
        plan.changed.append(request)
        self._move_to(RequestState.RUNNING, request)
        plan.copies += self.kv.admit(request.sequences, admission)
        if not request.has_run:
            request.num_cached_tokens = admission.num_cached_tokens
        detail = {
            "prompt_tokens": len(request.prompt_token_ids),
            "cached_tokens": admission.num_cached_tokens,
            "blocks": sum(admission.grants),
        }
        kind = "resumed" if request.has_run else "admitted"
        plan.events.append(Event(kind, request.request_id, detail))
        # 0, unless the manager charges for cached tokens, too, as a prefix-unaware scheduler does.
        cached_but_charged = admission.num_charged_tokens - request.num_uncomputed_tokens
        limit = left if share is None or not self.waiting else min(left, share)
        return min(left, self.schedule_request(plan, request, limit) + cached_but_charged)

    def swap_in_first(self, plan: StepPlan, left: int) -> int:
        """Bring the first swapped-out request back if it fits. Returns the tokens scheduled, else 0."""
        request = self.swapped[0]
        sequences = request.sequences
        if not self.has_room_for(request) or left < len(sequences):
            return 0
        if not self.kv.can_swap_in(sequences):
            if not self.running:
                self.end_outgrown(plan, request)
            return 0
        plan.changed.append(request)
        self._move_to(RequestState.RUNNING, request)
        plan.swap_in += self.kv.swap_in(sequences)
        plan.copies += self.kv.grow(sequences, self.kv.blocks_to_grow(sequences))
        plan.events.append(Event("resumed", request.request_id, {"mode": "swap"}))
        return self.schedule_request(plan, request, left)

    def make_room(self, plan: StepPlan, request: Request, needed: int, position: int) -> bool:
        """Preempt until `needed` blocks are free for the request at `position` in `running`. Returns False if
        the request itself was preempted, or ended because it is alone."""
        while needed > self.kv.num_free:
            candidates = self.running[position:]  # those before it are scheduled already
            victim = self.preemption.choose_victim(candidates)
            if victim is request and len(self.running) == 1:
                # Only its own preallocated blocks are left.
                if not self.kv.free_preallocated(request.sequences):
                    self.end_outgrown(plan, request)
                    return False
                needed = self.kv.blocks_to_grow(request.sequences)
                continue
            self.preempt(plan, victim)
            if victim is request:
                return False
        return True

    def preempt(self, plan: StepPlan, victim: Request) -> None:
        """Take all blocks of a running request: move them to the host, or free them to be recomputed."""
        mode, reason = self.preemption.choose_mode(victim, self.kv)
        plan.num_preempted += 1
        victim.num_preemptions += 1
        self.num_preemptions += 1
        if mode == "swap":
            plan.changed.append(victim)
            self._move_to(RequestState.SWAPPED, victim)
            plan.swap_out += self.kv.swap_out(victim.sequences)
        else:
            self._requeue(victim)
        plan.events.append(Event("preempted", victim.request_id, {"mode": mode, "reason": reason}))
        limits.warn_preempted(victim, mode, reason, self.num_preemptions)

    def end_outgrown(self, plan: StepPlan, request: Request) -> None:
        """A request that is alone and needs more than the whole pool ends with the text so far."""
        limits.warn_outgrown(request, self.kv)
        self.end(request, "length")
        plan.finished.append(request)
        plan.events.append(Event("outgrown", request.request_id, {}))

    def check_invariants(self) -> None:
        """Raise AssertionError unless queues and blocks are consistent (the engine's invariants)."""
        for queue in (self.waiting, self.running, self.swapped):
            assert list(queue) == sorted(queue, key=by_arrival), "a queue is not in order of arrival"
        assert sum(r.method.num_sequences for r in self.running) <= self.max_num_seqs
        assert not any(s.table.blocks for request in self.waiting for s in request.sequences)
        live = [*self.waiting, *self.running, *self.swapped]
        assert all(len(request.sequences) <= request.method.num_sequences for request in live)
        self.kv.check_invariants(sequence for request in live for sequence in request.sequences)
