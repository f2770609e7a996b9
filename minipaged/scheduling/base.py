"""What every scheduler does: requests come, move between queues, end; steps are committed or rolled back.

        add                                                 commit
    user ----> waiting -------------------> running -----------------> finished
                 ^  ^                        |   ^
                 |  +--- recompute ----------+   |                one step = schedule, execute, commit
                 |       (to the front)      v   |
              rollback                     swapped

Which requests a step serves, and in which order, is the subclass's business (`fcfs.py`). All decisions are
by counts: no tensors, no text, no clock.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import deque

from minipaged.memory import KVManager
from minipaged.scheduling.branching import apply_branches, finish
from minipaged.scheduling.plan import Event, StepPlan, StepResult
from minipaged.scheduling.preemption import PreemptionPolicy
from minipaged.scheduling.request import Request, RequestState

logger = logging.getLogger(__name__)


def _arrival(request: Request) -> int:
    return request.arrival


class RequestTooLongError(ValueError):
    """The request can never run; the message has the numbers."""


class Scheduler:
    """Queues and the life of requests.

    Args:
        kv: the memory manager.
        preemption: who gives way, and how.
        max_num_seqs: sequences that may hold device blocks at once.
        max_num_batched_tokens: tokens a step computes at most.
        max_model_len: longest sequence, prompt and output together.
    """

    def __init__(
        self,
        kv: KVManager,
        preemption: PreemptionPolicy,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self.kv = kv
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
            if request not in self._aborted:
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
        self._fill(plan)
        return plan

    def _fill(self, plan: StepPlan) -> None:
        """Decide the step; the subclass's part."""
        raise NotImplementedError

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Take the step's result into account: counts, new tokens, forks, finished requests.

        Returns:
            Requests that got tokens or ended.
        """
        # First what may fail in somebody else's code: nothing has changed yet, the step can be rolled back.
        decisions = []
        row = 0
        for request in plan.sampling:
            stop = row + len(request.sequences)
            decisions.append((request, request.method.advance(request, result.samples[row:stop])))
            row = stop
        self._in_flight = None
        self.kv.commit_published()
        for sequence, start, num_tokens, _ in plan.chunks:
            sequence.num_computed_tokens = start + num_tokens
        finished = False
        for request, branches in decisions:
            self.num_generated_tokens += len(branches)
            apply_branches(request, branches, self.kv)
            if not request.sequences:
                self._num_seats -= request.method.num_sequences
                finished = True
        if finished:
            self.running = [r for r in self.running if r.state is not RequestState.FINISHED]
        aborted = [request for request in self._end_aborted() if request not in plan.sampling]
        return plan.sampling + plan.finished + aborted

    def rollback(self, plan: StepPlan) -> list[Request]:
        """The step failed: nothing it was to compute, copy or move can be trusted.

        What it published is withdrawn, and every request it touched goes back to the queue to be
        recomputed. Requests it did not touch keep their blocks.

        Returns:
            Requests that ended all the same: aborted meanwhile, or outgrown while planning.
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
        return plan.finished + self._end_aborted()

    # -- for subclasses -------------------------------------------------------------------------

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
        finish(request, self.kv)

    def _end_aborted(self) -> list[Request]:
        ended = [request for request in self._aborted if request.state is not RequestState.FINISHED]
        for request in ended:
            self._end(request, "abort")
        self._aborted.clear()
        return ended

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
            "affect the end-to-end performance. Increase gpu_memory_utilization, num_blocks, "
            "tensor_parallel_size or pipeline_parallel_size, or decrease max_num_seqs or "
            "max_num_batched_tokens. total_cumulative_preemption_cnt=%d",
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
