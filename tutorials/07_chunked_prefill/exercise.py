"""Lesson 07: chunked prefill. Write the methods that raise; the lesson is in lesson.md.

Check with    minipaged learn check 07
Stuck?        minipaged learn hint 07
"""

from minipaged.scheduling import FCFSScheduler as GivenScheduler
from minipaged.scheduling import StepPlan


class FCFSScheduler(GivenScheduler):
    """The scheduler of lesson 04, extended to cut prompts into chunks."""

    # -- task 1: the next chunk -----------------------------------------------------------------

    def continue_prefills(self, plan: StepPlan, budget: int, share: int | None = None) -> int:
        """The next chunk of every running request that is still computing its prompt.

        Those are the requests in `self.running`, in order of arrival, for which `request.is_prefill` is true.
        `self.schedule_request(plan, request, n)` schedules up to n tokens and returns how many. Each request
        gets what the ones before it left of the budget, but at most `share` tokens (None: no limit) if
        another request is behind it: a later one of these, or any in `self.waiting`. When nothing is left,
        stop.

        Returns:
            The tokens scheduled, at most `budget`.
        """
        raise NotImplementedError("Lesson 7, task 1: the next chunk of every prompt that is not done")


class ChunkedPrefill:
    """Batch policy: decodes first, then prompts, cut to what is left of the token budget."""

    def fill(self, plan: StepPlan, scheduler: GivenScheduler) -> None:
        """Fill the plan of one step.

        Task 2, in this order, each phase with what the ones before it left of the budget
        `scheduler.max_num_batched_tokens`: `plan_decodes`, `continue_prefills`, `resume_preempted`,
        `admit_waiting`.

        Task 3: a prompt gets at most three quarters of the whole budget while other requests are behind it
        (`share=`, for `continue_prefills` and `admit_waiting`; rounded down, but at least 1 token).
        """
        raise NotImplementedError("Lesson 7, task 2: decodes first, then prompts with the rest of the budget")
