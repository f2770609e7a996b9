"""Iteration-level scheduling, first come, first served (paper, section 4.5).

        add               admit_waiting                     commit
    user ----> waiting -------------------> running -----------------> finished
                 ^  ^                        |   ^
                 |  +--- recompute ----------+   |  resume_preempted
                 |       (to the front)      v   |
                 |                        swapped            one step = schedule, execute, commit

The earliest arrived is served first; the latest is the first to be preempted. The first waiting request
that does not fit stops the scan. While anything is swapped out nothing new is admitted. A batch policy
says in which order the phases below fill a step; a preemption policy says who gives way.

The scheduler decides by counts: no tensors, no text, no clock.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from minipaged.memory import KVManager
from minipaged.scheduling.plan import Chunk, Event, StepPlan, StepResult
from minipaged.scheduling.preemption import PreemptionPolicy
from minipaged.scheduling.request import Branch, Request, RequestState, Sequence

logger = logging.getLogger(__name__)


def _arrival(request: Request) -> int:
    return request.arrival


class BatchPolicy(Protocol):
    """In which order the phases of the scheduler fill a step."""

    def fill(self, plan: StepPlan, scheduler: FCFSScheduler) -> None:
        """Call the scheduler's phases, spending its token budget."""
        ...


class RequestTooLongError(ValueError):
    """The request can never run; the message has the numbers."""


class FCFSScheduler:
    """Queues, admission and order.

    Args:
        kv: the memory manager.
        policy: how a step is composed.
        preemption: who gives way, and how.
        max_num_seqs: sequences that may hold device blocks at once.
        max_num_batched_tokens: tokens a step computes at most.
        max_model_len: longest sequence, prompt and output together.
    """

    def __init__(
        self,
        kv: KVManager,
        policy: BatchPolicy,
        preemption: PreemptionPolicy,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.preemption = preemption
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.swapped: deque[Request] = deque()  # in order of arrival
        self.num_preemptions = 0
        self.num_generated_tokens = 0
        self._num_arrived = 0
        self._num_steps = 0
        self._num_seats = 0  # sequences the running requests hold blocks for, or will after they fork
        self._prefilling: list[Request] = []  # running, with more than the newest token to compute
        self._in_flight: StepPlan | None = None
        self._aborted: list[Request] = []  # while a step is in flight
        self._moved: list[Request] = []  # admitted or swapped by the plan in flight

    # -- queue ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue.

        Raises:
            RequestTooLongError: it could not run even alone.
        """
        self._check_can_ever_run(request)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.append(request)

    def _check_can_ever_run(self, request: Request) -> None:
        prompt = len(request.prompt_token_ids)
        if prompt >= self.max_model_len:
            raise RequestTooLongError(
                f"the prompt has {prompt} tokens, but prompt and output together may have "
                f"{self.max_model_len} (max_model_len) and at least 1 is output; shorten the prompt"
            )
        # Asked of the manager in numbers only: an empty pool, nothing cached.
        needed = self.kv.blocks_for_admission(prompt, request.max_num_tokens)
        pool = self.kv.allocator.num_blocks
        if needed > pool:
            raise RequestTooLongError(
                f"the request needs {needed} KV blocks of {self.kv.block_size} tokens to be admitted "
                f"(prompt of {prompt} tokens, at most {request.max_num_tokens} with output), the pool "
                f"has {pool}; raise num_blocks or kv_cache_memory, or ask for less"
            )
        width = request.method.num_sequences
        limit = min(self.max_num_seqs, self.max_num_batched_tokens)
        if width > limit:
            raise RequestTooLongError(
                f"the request runs {width} sequences at once, more than max_num_seqs "
                f"{self.max_num_seqs} or max_num_batched_tokens {self.max_num_batched_tokens} allows"
            )

    def abort(self, request: Request) -> None:
        """End a request now, whatever its state; its blocks come back exactly once.

        A request of the step in flight is still being computed: it is freed by that step's `commit`.
        """
        if request.state is RequestState.FINISHED:
            return
        if self._in_flight is not None and request.state is not RequestState.WAITING:
            self._aborted.append(request)
            return
        self._end(request, "abort")

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits, runs or is swapped out."""
        return bool(self.waiting or self.running or self.swapped)

    # -- one step -------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide what the next step computes and moves.

        The plan must be followed by `commit` or `rollback` before the next `schedule`.
        """
        assert self._in_flight is None, "commit or roll back the last plan first"
        plan = StepPlan(self._num_steps)
        self._num_steps += 1
        self._moved.clear()
        self._in_flight = plan
        self.policy.fill(plan, self)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Take the step's result into account: counts, new tokens, forks, finished requests.

        Returns:
            Requests that got tokens or ended.
        """
        self._in_flight = None
        self.kv.commit_published()
        for sequence, start, num_tokens, _ in plan.chunks:
            sequence.num_computed_tokens = start + num_tokens
        samples = result.samples
        row = 0
        finished = False
        for request in plan.sampling:
            stop = row + len(request.sequences)
            self._apply(request, request.method.advance(request, samples[row:stop]))
            finished = finished or not request.sequences
            row = stop
        if finished:
            self.running = [r for r in self.running if r.state is not RequestState.FINISHED]
        self._end_aborted()
        return plan.sampling + plan.finished

    def rollback(self, plan: StepPlan) -> None:
        """The step failed: nothing it was to compute, copy or move can be trusted.

        What it published is withdrawn, and every request it touched goes back to the queue to be
        recomputed. Requests it did not touch keep their blocks.
        """
        self._in_flight = None
        self.kv.withdraw_published()
        touched = {id(r): r for r in (*self._moved, *(c.sequence.request for c in plan.chunks))}
        for request in touched.values():
            self._leave(request)
            self.kv.free(request.sequences)
            request.state = RequestState.WAITING
        requeued = sorted((*touched.values(), *self.waiting), key=_arrival)
        self.waiting = deque(requeued)
        self._end_aborted()

    # -- phases, called by the batch policy -----------------------------------------------------

    def plan_decodes(self, plan: StepPlan, budget: int) -> int:
        """One token for every running sequence that has only its newest token to compute.

        Preempts the latest arrived when blocks run out. Returns the tokens planned.
        """
        kv = self.kv
        prefilling = self._prefilling
        left = budget
        position = 0
        while position < len(self.running) and left:
            request = self.running[position]
            position += 1
            if prefilling and request in prefilling:
                continue
            sequences = request.sequences
            if len(sequences) > left:
                break
            needed = kv.blocks_to_grow(sequences)
            if needed > kv.num_free and not self._make_room(plan, request, needed, position - 1):
                break  # the request itself gave way: nobody is behind it
            plan.copies += kv.grow(sequences, needed)
            left -= self._plan_request(plan, request, left)
        return budget - left

    def continue_prefills(self, plan: StepPlan, budget: int, share: int | None = None) -> int:
        """The next chunk of every running request that is still computing its prompt.

        Args:
            share: most tokens one request gets while others are behind it. Returns the tokens planned.
        """
        left = budget
        for request in list(self._prefilling):
            if not left:
                break
            left -= self._plan_request(plan, request, self._allowance(request, left, share))
        return budget - left

    def resume_preempted(self, plan: StepPlan, budget: int) -> int:
        """Bring swapped-out requests back, the earliest arrived first. Returns the tokens planned."""
        left = budget
        admitted = False
        while self.swapped and not plan.num_preempted:
            request = self.swapped[0]
            if self.waiting and self.waiting[0].arrival < request.arrival:
                # It was preempted after that one, but the host had no room for it: it is not new.
                used = self._admit_first(plan, left, whole=False, share=None)
                admitted = True
            elif admitted:
                # Admission may copy from a cached block that nobody holds. A swap-in of the same step
                # would run before the copy, perhaps into that very block.
                break
            else:
                used = self._swap_in_first(plan, left)
            if not used:
                break
            left -= used
        return budget - left

    def admit_waiting(
        self, plan: StepPlan, budget: int, whole: bool = False, share: int | None = None
    ) -> int:
        """Admit from the front of the queue until one does not fit.

        Args:
            whole: admit a prompt only if all of it fits the rest of the budget, unless it is the first.
            share: as in `continue_prefills`. Returns the tokens planned.
        """
        left = budget
        while self.waiting and left and not self.swapped and not plan.num_preempted:
            used = self._admit_first(plan, left, whole, share)
            if not used:
                break
            left -= used
        return budget - left

    # -- what the phases are made of ------------------------------------------------------------

    def _plan_request(self, plan: StepPlan, request: Request, allowance: int) -> int:
        """Plan up to `allowance` tokens of a request.

        The last tokens of its sequences are computed in the same step, so that all are sampled
        together; before that, each sequence is completed up to its last token before the next one
        begins (a later sequence may share blocks that an earlier one computes).
        """
        sequences = request.sequences
        complete = request.gap <= allowance
        candidates = request.method.num_candidates(request) if complete else 0
        publish = self.kv.prefix_cache is not None
        used = 0
        for sequence in sequences:
            start = sequence.num_computed_tokens
            count = len(sequence.token_ids) - start
            if not complete:
                count = min(count - 1, allowance - used)
                if not count:
                    continue
            plan.chunks.append(Chunk(sequence, start, count, candidates))
            if publish:
                self.kv.publish(sequence, start + count)
            used += count
        if complete:
            plan.sampling.append(request)
            if self._prefilling and request in self._prefilling:
                self._prefilling.remove(request)
        plan.num_tokens += used
        return used

    def _allowance(self, request: Request, left: int, share: int | None) -> int:
        is_last = not self.waiting and (not self._prefilling or self._prefilling[-1] is request)
        return left if share is None or is_last else min(left, share)

    def _admit_first(self, plan: StepPlan, left: int, whole: bool, share: int | None) -> int:
        """Admit the first waiting request if it fits. Returns the budget it uses, 0 if it does not."""
        request = self.waiting[0]
        if self._num_seats + request.method.num_sequences > self.max_num_seqs:
            return 0
        admission = self.kv.can_admit(request.sequences, others_run=bool(self.running))
        if not admission.fits:
            if not self.running:
                # All blocks are free and still it does not fit: it grew, was preempted, and now
                # needs more than the pool has.
                self._outgrown(plan, request)
            return 0
        if whole and admission.num_charged_tokens > left and plan.chunks:
            return 0
        self.waiting.popleft()
        plan.copies += self.kv.admit(request.sequences, admission)
        if not request.num_preemptions:
            request.num_cached_tokens = admission.num_cached_tokens
        kind = "resumed" if request.num_preemptions else "admitted"
        detail = {
            "prompt_tokens": len(request.prompt_token_ids),
            "cached_tokens": admission.num_cached_tokens,
            "blocks": sum(admission.grants),
        }
        plan.events.append(Event(kind, request.request_id, detail))
        self._start(request)
        used = self._plan_request(plan, request, self._allowance(request, left, share))
        num_to_compute = sum(len(s.token_ids) for s in request.sequences) - admission.num_cached_tokens
        return min(left, used + admission.num_charged_tokens - num_to_compute)

    def _swap_in_first(self, plan: StepPlan, left: int) -> int:
        """Bring the first swapped-out request back if it fits. Returns the tokens planned, else 0."""
        request = self.swapped[0]
        sequences = request.sequences
        if self._num_seats + request.method.num_sequences > self.max_num_seqs or left < len(sequences):
            return 0
        if not self.kv.can_swap_in(sequences):
            if not self.running:
                self._outgrown(plan, request)
            return 0
        self.swapped.popleft()
        plan.swap_in += self.kv.swap_in(sequences)
        plan.copies += self.kv.grow(sequences, self.kv.blocks_to_grow(sequences))
        plan.events.append(Event("resumed", request.request_id, {"mode": "swap"}))
        self._start(request)
        return self._plan_request(plan, request, left)

    def _make_room(self, plan: StepPlan, request: Request, needed: int, position: int) -> bool:
        """Preempt until `needed` blocks are free for the request at `position` of the running ones.

        Returns False when the request itself had to give way, or ended because it is alone.
        """
        while needed > self.kv.num_free:
            candidates = self.running[position:]  # those before it are planned already
            victim = self.preemption.choose_victim(candidates)
            if victim is request and len(self.running) == 1:
                # Its own spare blocks are the last there are.
                if self.kv.give_back_spare(request.sequences):
                    needed = self.kv.blocks_to_grow(request.sequences)
                    continue
                self._outgrown(plan, request)
                return False
            self._preempt(plan, victim)
            if victim is request:
                return False
        return True

    def _preempt(self, plan: StepPlan, victim: Request) -> None:
        mode, reason = self.preemption.choose_mode(victim, self.kv)
        self._leave(victim)
        if mode == "swap":
            plan.swap_out += self.kv.swap_out(victim.sequences)
            victim.state = RequestState.SWAPPED
            insort(self.swapped, victim, key=_arrival)
            self._moved.append(victim)
        else:
            self.kv.free(victim.sequences)
            victim.state = RequestState.WAITING
            insort(self.waiting, victim, key=_arrival)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        plan.num_preempted += 1
        plan.events.append(Event("preempted", victim.request_id, {"mode": mode, "reason": reason}))
        logger.warning(
            "Request %s is preempted by %s because there is not enough KV cache space (%s). This can "
            "affect the end-to-end performance. Increase gpu_memory_utilization or num_blocks, or "
            "decrease max_num_seqs or max_num_batched_tokens. total_cumulative_preemption_cnt=%d",
            victim.request_id,
            mode,
            reason,
            self.num_preemptions,
        )

    def _outgrown(self, plan: StepPlan, request: Request) -> None:
        """A request that is alone and needs more than the whole pool ends with what it has."""
        logger.warning(
            "Request %s ends with finish reason length: its %d tokens need more than the %d KV blocks "
            "of %d tokens that there are. Raise num_blocks, kv_cache_memory or gpu_memory_utilization.",
            request.request_id,
            sum(len(sequence.token_ids) for sequence in request.sequences),
            self.kv.allocator.num_blocks,
            self.kv.block_size,
        )
        self._end(request, "length")
        plan.events.append(Event("outgrown", request.request_id, {}))
        plan.finished.append(request)

    def _start(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        # (After a failed step an earlier request may come back behind a later one.)
        insort(self.running, request, key=_arrival)
        self._moved.append(request)
        self._num_seats += request.method.num_sequences
        if request.gap > len(request.sequences):
            insort(self._prefilling, request, key=_arrival)

    def _leave(self, request: Request) -> None:
        """Take a request out of whichever queue it stands in."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self._num_seats -= request.method.num_sequences
            if request in self._prefilling:
                self._prefilling.remove(request)
        elif request.state is RequestState.SWAPPED:
            self.swapped.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _end(self, request: Request, reason: str) -> None:
        self._leave(request)
        for sequence in request.sequences:
            sequence.finish_reason = reason
        self._finish(request, request.sequences)

    def _end_aborted(self) -> None:
        for request in self._aborted:
            if request.state is not RequestState.FINISHED:
                self._end(request, "abort")
        self._aborted.clear()

    def _finish(self, request: Request, completions: Iterable[Sequence]) -> None:
        """The last live sequences become completions; every block comes back."""
        request.completions += completions
        self.kv.free(request.sequences)
        request.sequences = []
        request.state = RequestState.FINISHED

    def _apply(self, request: Request, branches: list[Branch]) -> None:
        """Turn branches into fork, append and free."""
        self.num_generated_tokens += len(branches)
        if len(branches) == 1 and len(request.sequences) == 1:
            branch = branches[0]
            branch.parent.append(branch)
            if branch.finish_reason is not None:
                self._num_seats -= request.method.num_sequences
                self._finish(request, [branch.parent])
            return
        # Fork before anything is appended: every branch starts from its parent as it was.
        live: list[Sequence] = []
        ended: list[Sequence] = []
        for branch in branches:
            if branch.finish_reason is not None:
                ended.append(branch.parent.branch(self.kv.new_table()))
            elif branch.parent in live:
                live.append(branch.parent.branch(self.kv.fork(branch.parent)))
            else:
                live.append(branch.parent)
        children = (iter(live), iter(ended))
        for branch in branches:
            next(children[branch.finish_reason is not None]).append(branch)
        self.kv.free(sequence for sequence in request.sequences if sequence not in live)
        request.sequences = live
        request.completions += ended
        if not live:
            self._num_seats -= request.method.num_sequences
            request.state = RequestState.FINISHED

    def check_invariants(self) -> None:
        """Raise AssertionError unless queues and blocks are consistent (design of the engine, invariants)."""
        arrivals = [request.arrival for request in self.running]
        assert arrivals == sorted(arrivals), "running is not in order of arrival"
        assert self._num_seats == sum(r.method.num_sequences for r in self.running) <= self.max_num_seqs
        for request in self.waiting:
            assert all(not sequence.table.blocks for sequence in request.sequences)
        for request in (*self.running, *self.swapped):
            assert len(request.sequences) <= request.method.num_sequences
        live = (*self.waiting, *self.running, *self.swapped)
        self.kv.check_invariants([sequence for request in live for sequence in request.sequences])
