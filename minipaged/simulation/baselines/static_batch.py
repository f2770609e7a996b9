"""FasterTransformer: request-level batches over memory reserved to the maximum (paper, section 6.1).

When a batch is done, the next one takes as many waiting requests as fit. It runs until its last request ends,
and returns nothing before that. The differences from the engine's scheduler: no request is admitted while any
is running, and `commit` keeps finished requests until the batch is done.
"""

from minipaged.scheduling import FCFSScheduler, Phases, Request, StepPlan, StepResult
from minipaged.scheduling.preemption import Recompute
from minipaged.simulation.baselines.contiguous import ContiguousKVManager


class OneBatch:
    """Batch policy: admit while nothing runs, then decode until nothing runs."""

    def fill(self, plan: StepPlan, scheduler: Phases) -> None:
        """Fill the plan of one step."""
        budget = scheduler.max_num_batched_tokens
        if scheduler.running:
            scheduler.plan_decodes(plan, budget)
        else:
            scheduler.admit_waiting(plan, budget)


class StaticBatchScheduler(FCFSScheduler):
    """Runs one batch after the other."""

    def __init__(self, kv: ContiguousKVManager, max_num_seqs: int, max_model_len: int) -> None:
        # All prompts of a batch are computed in one step.
        budget = max_num_seqs * max_model_len
        super().__init__(kv, OneBatch(), Recompute(), max_num_seqs, budget, max_model_len)
        self._done: list[Request] = []

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """As for the engine's scheduler, but finished requests are returned with the last of their batch."""
        touched = super().commit(plan, result)
        self._done += [request for request in touched if request.is_finished]
        if self.running:
            return [request for request in touched if not request.is_finished]
        done, self._done = self._done, []
        return done
