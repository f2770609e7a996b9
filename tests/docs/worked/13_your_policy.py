"""Lesson 13, worked: the module has no such policy, so it is here."""

from collections import deque

from minipaged.scheduling import FCFSScheduler as GivenScheduler
from minipaged.scheduling import StepPlan


class ShortestFirst(GivenScheduler):
    """Admits the shortest prompt first, but nobody waits forever.

    Attributes:
        patience: a request goes before all shorter ones once this many others have arrived after it.
    """

    patience = 100

    def admit_waiting(
        self, plan: StepPlan, budget: int, whole: bool = False, share: int | None = None
    ) -> int:
        """Admit in your order.

        `super().admit_waiting(plan, budget, whole, share)` admits from the front of `self.waiting` until one
        does not fit. Put the queue into your order before the call, and back into the order of arrival
        (`request.arrival`) afterwards, because everything else relies on that. `self.num_arrived` is the
        number of requests that have arrived so far.

        Task 1: shortest prompt first (`request.prompt_token_ids`); among equals, the earlier first.
        Task 2: requests with `self.num_arrived - request.arrival > self.patience` before all others, in order
        of arrival.
        """
        self.waiting = deque(sorted(self.waiting, key=self._urgency))
        used = super().admit_waiting(plan, budget, whole, share)
        self.waiting = deque(sorted(self.waiting, key=lambda request: request.arrival))
        return used

    def _urgency(self, request):
        if self.num_arrived - request.arrival > self.patience:
            return (0, 0, request.arrival)
        return (1, len(request.prompt_token_ids), request.arrival)
