"""Iteration-level scheduling, first come, first served (paper, section 4.5).

    plan_decodes        running, newest token only    the latest arrived gives way when blocks run out
    continue_prefills   running, prompt not done
    resume_preempted    swapped -> running            nobody comes in while a step preempts
    admit_waiting       waiting -> running            nothing new while anything is swapped out

The earliest arrived is served first; the latest is the first to be preempted. The first waiting request
that does not fit stops the scan. While anything is swapped out nothing new is admitted. A batch policy
says in which order these phases fill a step; a preemption policy says who gives way.
"""

from __future__ import annotations

from typing import Protocol

from minipaged.memory import KVManager
from minipaged.scheduling.base import Scheduler
from minipaged.scheduling.plan import Chunk, Event, StepPlan
from minipaged.scheduling.preemption import PreemptionPolicy
from minipaged.scheduling.request import Request


class BatchPolicy(Protocol):
    """In which order the phases of the scheduler fill a step."""

    def fill(self, plan: StepPlan, scheduler: FCFSScheduler) -> None:
        """Call the scheduler's phases, spending its token budget."""
        ...


class FCFSScheduler(Scheduler):
    """First come, first served.

    Args:
        policy: how a step is composed; the others are those of `Scheduler`.
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
        super().__init__(kv, preemption, max_num_seqs, max_num_batched_tokens, max_model_len)
        self.policy = policy

    def _fill(self, plan: StepPlan) -> None:
        self.policy.fill(plan, self)

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
        while self.swapped and left and not plan.num_preempted:
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
        if self._prefilling and request in self._prefilling and request.gap - used <= len(sequences):
            self._prefilling.remove(request)  # its last tokens, if they are left, make a decode
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
