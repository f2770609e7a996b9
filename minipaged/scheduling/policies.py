"""Batch policies: the order in which the scheduler's phases fill a step.

    prefill first    | p p p p p p p |      prompts alone,
                     | d d d |              then one token per sequence: each admission stalls the decodes

    chunked prefill  | d d d | p p p p p |      budget 8: three decodes, then five of a prompt of twelve
                     | d d d | p p p p p |      the next five
                     | d d d | p p : q q q |    the last two, and a new prompt begins

Prefill first is the schedule of vLLM before chunked prefill; it has the best time to first token. With
chunked prefill (Sarathi-Serve, arXiv 2403.02310) decodes never wait for a prompt; a smaller budget evens
out the time between tokens, a larger one shortens the time to the first.
"""

from __future__ import annotations

from typing import Protocol

from minipaged.scheduling.plan import StepPlan
from minipaged.scheduling.request import Request


class Phases(Protocol):
    """What a policy may call: `plan_decodes` and `continue_prefills` before any phase that admits, or they
    schedule what was just admitted again. Each returns the tokens it spent (see `FCFSScheduler`)."""

    max_num_batched_tokens: int
    running: list[Request]

    def plan_decodes(self, plan: StepPlan, budget: int) -> int: ...  # noqa: D102

    def continue_prefills(self, plan: StepPlan, budget: int, share: int | None = None) -> int: ...  # noqa: D102

    def resume_preempted(self, plan: StepPlan, budget: int) -> int: ...  # noqa: D102

    def admit_waiting(  # noqa: D102
        self, plan: StepPlan, budget: int, whole: bool = False, share: int | None = None
    ) -> int: ...


class BatchPolicy(Protocol):
    """Fills the plan of one step."""

    def fill(self, plan: StepPlan, scheduler: Phases) -> None:
        """Call the scheduler's phases, spending its token budget."""
        ...


class PrefillFirst:
    """Prefills and decodes take separate steps, except for a request that is recomputed while others are
    swapped out. A prompt larger than the budget takes several steps; only the last has room for others."""

    def fill(self, plan: StepPlan, scheduler: Phases) -> None:
        """Fill the plan of one step."""
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.continue_prefills(plan, budget)
        scheduler.admit_waiting(plan, budget, whole=True)
        if not plan.scheduled:
            budget = scheduler.max_num_batched_tokens
            budget -= scheduler.plan_decodes(plan, budget)
            scheduler.resume_preempted(plan, budget)


class ChunkedPrefill:
    """Decodes first; the rest of the budget goes to prompts, cut to fit."""

    def fill(self, plan: StepPlan, scheduler: Phases) -> None:
        """Fill the plan of one step."""
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.plan_decodes(plan, budget)
        # A long prompt leaves part of the budget to those behind it, so that 20 tokens behind 5,000 run in
        # the same step; the last in the queue takes all that is left.
        share = max(1, scheduler.max_num_batched_tokens * 3 // 4)
        budget -= scheduler.continue_prefills(plan, budget, share)
        budget -= scheduler.resume_preempted(plan, budget)
        scheduler.admit_waiting(plan, budget, share=share)
