"""Batch policy: decodes first, prefills cut to what is left of the token budget (Sarathi, arXiv 2308.16369).

    budget 8 | d d d | p p p p p |      three decodes, then five tokens of a prompt of twelve
             | d d d | p p p p p |      the next five
             | d d d | p p : q q q |    the last two, and a new prompt begins

Decodes never wait for a prompt, so the time between tokens stays even; a smaller budget makes it
smaller, a larger one shortens the time to the first token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minipaged.scheduling.fcfs import FCFSScheduler
    from minipaged.scheduling.plan import StepPlan


class ChunkedPrefill:
    """Mixes decodes and prompt chunks in one step."""

    def fill(self, plan: StepPlan, scheduler: FCFSScheduler) -> None:
        """Fill the plan of one step."""
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.plan_decodes(plan, budget)
        # A long prompt leaves part of the budget to those behind it, so that 20 tokens behind 5,000 run
        # in the same step; the last in the queue takes all that is left.
        share = max(1, scheduler.max_num_batched_tokens * 3 // 4)
        budget -= scheduler.continue_prefills(plan, budget, share)
        budget -= scheduler.resume_preempted(plan, budget)
        scheduler.admit_waiting(plan, budget, share=share)
