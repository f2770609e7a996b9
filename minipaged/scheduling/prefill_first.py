"""Batch policy: prefills alone, then decodes (the schedule of the paper's system, and of Orca).

A step computes prompts if any can be admitted, else one token of every running request. Best time to
first token; every admission stalls the running decodes for a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minipaged.scheduling.fcfs import FCFSScheduler
    from minipaged.scheduling.plan import StepPlan


class PrefillFirst:
    """Never mixes prefills and decodes. A prompt beyond the budget takes several steps, alone."""

    def fill(self, plan: StepPlan, scheduler: FCFSScheduler) -> None:
        """Fill the plan of one step."""
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.continue_prefills(plan, budget)
        scheduler.admit_waiting(plan, budget, whole=True)
        if not plan.chunks:
            budget = scheduler.max_num_batched_tokens
            budget -= scheduler.plan_decodes(plan, budget)
            scheduler.resume_preempted(plan, budget)
