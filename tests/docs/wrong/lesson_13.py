"""Lesson 13, done wrong; `caught_by` names the test that must notice."""

from collections import deque

from minipaged.scheduling import FCFSScheduler


def by(key, back=True):
    """An admission in the order of `key(scheduler, request)`."""

    def admit_waiting(self, plan, budget, whole=False, share=None):
        self.waiting = deque(sorted(self.waiting, key=lambda request: key(self, request)))
        used = FCFSScheduler.admit_waiting(self, plan, budget, whole, share)
        if back:
            self.waiting = deque(sorted(self.waiting, key=lambda request: request.arrival))
        return used

    return admit_waiting


def length(request):
    return len(request.prompt_token_ids)


class LongestFirst(FCFSScheduler):
    """The sign is wrong."""

    caught_by = "test_the_shortest_prompt_is_admitted_first"
    admit_waiting = by(lambda self, request: (-length(request), request.arrival))


class TheLaterOfEquals(FCFSScheduler):
    """Of equal prompts the newest is first."""

    caught_by = "test_of_equal_prompts_the_earlier_is_admitted_first"
    admit_waiting = by(lambda self, request: (length(request), -request.arrival))


class LeavesItSorted(FCFSScheduler):
    """The queue stays in the order of length."""

    caught_by = "test_the_queue_is_back_in_order_of_arrival_after_each_step"
    admit_waiting = by(lambda self, request: (length(request), request.arrival), back=False)


class HasAllThePatience(FCFSScheduler):
    """A long prompt waits for ever."""

    caught_by = "test_whoever_waited_too_long_goes_first"
    admit_waiting = by(lambda self, request: (length(request), request.arrival))


class SortsTheImpatient(FCFSScheduler):
    """Those that waited too long go first, but by length."""

    caught_by = "test_the_impatient_go_in_order_of_arrival"
    admit_waiting = by(
        lambda self, request: (self.num_arrived - request.arrival <= self.patience, length(request))
    )
