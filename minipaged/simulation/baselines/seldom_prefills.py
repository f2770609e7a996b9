"""When text-generation-inference takes new prompts: seldom, as each time the running requests have to wait.

New prompts join when they are 0.3 times as many as the requests that run, or after 20 tokens without any
(its defaults in 2024 for `waiting_served_ratio` and `max_waiting_tokens`). With `PrefillFirst`, they join as
soon as they fit; here a request queues for up to 20 steps even while memory is free. (If fewer of them fit
than are required, they wait on; that is left out here.)
"""

from typing import cast

from minipaged.scheduling import FCFSScheduler, Phases, PrefillFirst, StepPlan

WAITING_SERVED_RATIO = 0.3
MAX_WAITING_TOKENS = 20


class SeldomPrefills(PrefillFirst):
    """Prompts alone, and only when many wait or they have waited long."""

    def __init__(self) -> None:
        self._waiting_tokens = 0  # that each running request got since prompts joined

    def fill(self, plan: StepPlan, scheduler: Phases) -> None:
        """Fill the plan of one step."""
        queue = cast(FCFSScheduler, scheduler).waiting
        waiting, many = len(queue), int(WAITING_SERVED_RATIO * len(scheduler.running))
        if waiting >= many or self._waiting_tokens >= MAX_WAITING_TOKENS:
            super().fill(plan, scheduler)
        else:
            scheduler.plan_decodes(plan, scheduler.max_num_batched_tokens)
        self._waiting_tokens = 1 if len(queue) < waiting else self._waiting_tokens + 1
