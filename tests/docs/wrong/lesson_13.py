"""Lesson 13, done wrong; `caught_by` names the test that must notice, `task` the task whose tests must."""

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
    """A long prompt waits forever."""

    caught_by = "test_whoever_waited_too_long_goes_first"
    admit_waiting = by(lambda self, request: (length(request), request.arrival))


class SortsTheImpatient(FCFSScheduler):
    """Those that waited too long go first, but by length."""

    caught_by = "test_the_impatient_go_in_order_of_arrival"
    admit_waiting = by(
        lambda self, request: (self.num_arrived - request.arrival <= self.patience, length(request))
    )


class SortsThePrompts(FCFSScheduler):
    """The queue's order is right, but the prompts' tokens are sorted, too."""

    caught_by = "test_the_order_changes_nothing_in_the_tokens"

    def admit_waiting(self, plan, budget, whole=False, share=None):
        for request in self.waiting:
            request.prompt_token_ids.sort()
        return by(order)(self, plan, budget, whole, share)


# -- from the exercise's text alone --------------------------------------------------------------------------


def order(self, request, num_arrived=None):
    """The worked key."""
    arrived = self.num_arrived if num_arrived is None else num_arrived
    patient = arrived - request.arrival <= self.patience
    return (patient, length(request) if patient else 0, request.arrival)


class ByTheOutput(FCFSScheduler):
    """The shortest whole, prompt and output, is not the shortest prompt."""

    task = 1
    admit_waiting = by(lambda self, request: (request.max_num_tokens, -length(request), request.arrival))


class ByTheName(FCFSScheduler):
    """Of equal prompts by the name of the request."""

    task = 1
    admit_waiting = by(lambda self, request: (length(request), request.request_id[::-1]), back=True)


class ReturnsNothing(FCFSScheduler):
    """Forgets to return what was spent: the budget is spent twice."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        by(order)(self, plan, budget, whole, share)
        return 0


class BackByLength(FCFSScheduler):
    """Sorts back by the wrong key when nobody was admitted."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        used = by(order)(self, plan, budget, whole, share)
        if not used:
            self.waiting = deque(sorted(self.waiting, key=length))
        return used


class TheShortestAlone(FCFSScheduler):
    """Takes the shortest to the front and leaves the others as they are."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        if self.waiting:
            shortest = min(self.waiting, key=lambda request: order(self, request))
            self.waiting.remove(shortest)
            self.waiting.appendleft(shortest)
        used = FCFSScheduler.admit_waiting(self, plan, budget, whole, share)
        self.waiting = deque(sorted(self.waiting, key=lambda request: request.arrival))
        return used


class OffByOne(FCFSScheduler):
    """>= instead of >: patience ends one arrival too early."""

    task = 2
    admit_waiting = by(
        lambda self, request: (
            (late := self.num_arrived - request.arrival < self.patience),
            length(request) if late else 0,
            request.arrival,
        )
    )


class TheImpatientLast(FCFSScheduler):
    """The sign of the first number is wrong."""

    task = 2
    admit_waiting = by(lambda self, request: (not order(self, request)[0], *order(self, request)[1:]))


class PatienceByTheQueue(FCFSScheduler):
    """Counts who waits instead of who has arrived."""

    task = 2
    admit_waiting = by(
        lambda self, request: (
            (patient := len(self.waiting) <= self.patience),
            length(request) if patient else 0,
            request.arrival,
        )
    )


class TheNewestOfTheImpatient(FCFSScheduler):
    """Of those that waited too long the last is first."""

    task = 2
    admit_waiting = by(
        lambda self, request: (
            (patient := order(self, request)[0]),
            length(request) if patient else 0,
            request.arrival if patient else -request.arrival,
        )
    )


class DropsTheShare(FCFSScheduler):
    """Passes only the budget on: prompts are cut where they were to be whole."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        return by(order)(self, plan, budget)


class OrderBackIfAdmitted(FCFSScheduler):
    """Where nobody fits, the queue stays sorted by length."""

    caught_by = "test_the_queue_is_back_in_order_when_nobody_fits"

    def admit_waiting(self, plan, budget, whole=False, share=None):
        used = by(order, back=False)(self, plan, budget, whole, share)
        if used:
            self.waiting = deque(sorted(self.waiting, key=lambda request: request.arrival))
        return used


class PatienceByThoseBehind(FCFSScheduler):
    """Counts those who still wait behind a request: whoever overtook it and was served is forgotten."""

    task = 2
    admit_waiting = by(
        lambda self, request: (
            (patient := sum(r.arrival > request.arrival for r in self.waiting) <= self.patience),
            length(request) if patient else 0,
            request.arrival,
        )
    )


class CountsTheAnswerSoFar(FCFSScheduler):
    """A preempted request is as long as its prompt and what it had generated."""

    task = 1
    admit_waiting = by(lambda self, request: (request.sequences[0].num_tokens, request.arrival))


class PatienceOfTheClass(FCFSScheduler):
    """A subclass, or an object, with a patience of its own is not asked."""

    task = 2
    patience = 100

    def admit_waiting(self, plan, budget, whole=False, share=None):
        return by(lambda _, request: order(type(self), request, self.num_arrived))(
            self, plan, budget, whole, share
        )


class TwoAdmissions(FCFSScheduler):
    """Where a request that waited too long does not fit, the others are admitted all the same."""

    task = 2

    def admit_waiting(self, plan, budget, whole=False, share=None):
        ordered = sorted(self.waiting, key=lambda request: order(self, request))
        late = [request for request in ordered if order(self, request)[0] is False]
        self.waiting = deque(late)
        used = super().admit_waiting(plan, budget, whole, share)
        left, self.waiting = self.waiting, deque(request for request in ordered if request not in late)
        used += super().admit_waiting(plan, budget - used, whole, share)
        self.waiting = deque(sorted([*left, *self.waiting], key=lambda request: request.arrival))
        return used


class OnlyTheFirstLosesPatience(FCFSScheduler):
    """Of several requests that have waited too long, only the earliest goes before shorter ones."""

    caught_by = "test_all_who_waited_too_long_go_first_in_one_step"
    patience = 100

    def admit_waiting(self, plan, budget, whole=False, share=None):
        first = self.waiting[0] if self.waiting else None

        def key(request):
            late = request is first and self.num_arrived - request.arrival > self.patience
            return not late, len(request.prompt_token_ids), request.arrival

        self.waiting = deque(sorted(self.waiting, key=key))
        used = super().admit_waiting(plan, budget, whole, share)
        self.waiting = deque(sorted(self.waiting, key=lambda request: request.arrival))
        return used


class PatienceEndsForAll(FCFSScheduler):
    """Counts all arrivals, not those after a request: once there are many, it is first come, first served."""

    caught_by = "test_behind_those_who_waited_too_long_the_shortest_is_first"
    admit_waiting = by(
        lambda self, request: (
            (patient := self.num_arrived <= self.patience),
            length(request) if patient else 0,
            request.arrival,
        )
    )


class ArrivedFirstOfAll(FCFSScheduler):
    """Of those that waited too long the arrival leads the key: the third goes behind those with patience."""

    task = 2
    admit_waiting = by(
        lambda self, request: (
            (1, length(request), request.arrival) if order(self, request)[0] else (request.arrival, 0, 0)
        )
    )


class OneForAll(FCFSScheduler):
    """As soon as one request has waited too long, all go in order of arrival."""

    task = 2

    def admit_waiting(self, plan, budget, whole=False, share=None):
        late = any(not order(self, request)[0] for request in self.waiting)
        key = (lambda _, request: request.arrival) if late else order
        return by(key)(self, plan, budget, whole, share)


class PatienceByTheLast(FCFSScheduler):
    """Counts up to the last that waits: whoever arrived later and has gone is forgotten."""

    task = 2
    admit_waiting = by(
        lambda self, request: order(self, request, max(other.arrival for other in tuple(self.waiting)) + 1)
    )


class PutsTheWholeQueueBack(FCFSScheduler):
    """The queue as it was before the call, with those who were admitted."""

    caught_by = "test_whoever_is_admitted_leaves_the_queue"

    def admit_waiting(self, plan, budget, whole=False, share=None):
        before = deque(self.waiting)
        used = by(order)(self, plan, budget, whole, share)
        self.waiting = before
        return used


class SortsWhenNobodyRuns(FCFSScheduler):
    """While somebody runs, the queue is admitted in order of arrival."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        if self.running:
            return super().admit_waiting(plan, budget, whole, share)
        return by(order)(self, plan, budget, whole, share)


class SortsPromptsThatMayBeCut(FCFSScheduler):
    """Whole prompts are admitted in order of arrival."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        admit = super().admit_waiting if whole else by(order).__get__(self)
        return admit(plan, budget, whole, share)


class SortsTheFirstTen(FCFSScheduler):
    """Whoever stands further behind stays there."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        first = set(list(self.waiting)[:10])
        key = lambda self, request: (request not in first, *order(self, request))  # noqa: E731
        return by(key)(self, plan, budget, whole, share)


class TellsWhatThePlanHas(FCFSScheduler):
    """Counts what was in the plan before the call, too."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        by(order)(self, plan, budget, whole, share)
        return sum(scheduled.num_tokens for scheduled in plan.scheduled)


class LongIsLong(FCFSScheduler):
    """Prompts of more than eight tokens are all alike."""

    task = 1
    admit_waiting = by(lambda self, request: (min(8, length(request)), request.arrival))
