"""Lesson 04: first come, first served, one iteration at a time. Write the methods that raise.

Check with    minipaged learn check 04
Stuck?        minipaged learn hint 04

What you may call (all given by the base class):

    self.waiting                    deque of requests, in order of arrival
    self.running                    list of requests, in order of arrival
    self.swapped                    deque of requests whose blocks are on the host (lesson 06)
    request.is_prefill              whether it has more to compute than its newest token
    request.sequences               its live sequences: one, more after a fork
    plan.scheduled, plan.copies     lists of what the step computes, and of what it copies first
    self.admit_first(plan, left, whole, share)
                                    admit self.waiting[0] if it fits; returns the tokens it uses, 0 if it does not
                                    (call it with 1 or more tokens left: it would admit the request even with 0)
                                    (whole: only if all of the prompt fits `left`, or the step is still
                                    empty; share: the most that one prompt gets, for lesson 07)
    self.schedule_request(plan, request, left)
                                    schedule the request's uncomputed tokens, at most `left`; returns how many
    self.make_room(plan, request, needed, position)
                                    preempt until `needed` blocks are free for the request at `position` of
                                    self.running; False if the request itself was preempted
    self.kv.blocks_to_grow(sequences)
                                    the blocks that one more token for each of them needs
    self.kv.num_free                the number of free blocks
    self.kv.grow(sequences, needed) take them; returns the copies that must run first
"""

from minipaged.scheduling import FCFSScheduler as GivenScheduler
from minipaged.scheduling import StepPlan


class FCFSScheduler(GivenScheduler):
    """First come, first served."""

    # -- task 1: admission ----------------------------------------------------------------------

    def admit_waiting(
        self, plan: StepPlan, budget: int, whole: bool = False, share: int | None = None
    ) -> int:
        """Admit from the front of the queue until one does not fit.

        Nothing is admitted while a request is swapped out, or in a step that preempted one
        (`plan.num_preempted`). Pass `whole` and `share` on to `admit_first`.

        Returns:
            The tokens scheduled, at most `budget`.
        """
        raise NotImplementedError("Lesson 4, task 1: admit from the front until one does not fit")

    # -- task 2: decodes ------------------------------------------------------------------------

    def plan_decodes(self, plan: StepPlan, budget: int) -> int:
        """One token for every running sequence that has only its newest token to compute.

        In order of arrival; a request is scheduled with all its sequences or not at all, and the walk ends at
        the first request that is too large for the rest of the budget. When blocks run out, `make_room`
        preempts the latest arrival, so `self.running` gets shorter while you walk it.

        Returns:
            The tokens scheduled, at most `budget`.
        """
        raise NotImplementedError("Lesson 4, task 2: one token for every running sequence")


class PrefillFirst:
    """Batch policy: prompts on their own, then decodes; never both in one step."""

    # -- task 3: a step -------------------------------------------------------------------------

    def fill(self, plan: StepPlan, scheduler: GivenScheduler) -> None:
        """Fill the plan of one step by calling the scheduler's phases.

        Prompts come first: `continue_prefills(plan, budget)` for those that are longer than a step, then
        `admit_waiting(plan, budget, whole=True)`. Only if nothing was scheduled, call `plan_decodes`, then
        `resume_preempted(plan, budget)`. The budget is `scheduler.max_num_batched_tokens`; each phase
        returns what it spent, and the next one gets the rest.
        """
        raise NotImplementedError("Lesson 4, task 3: prompts alone, then decodes")
