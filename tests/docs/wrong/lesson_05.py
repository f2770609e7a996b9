"""Lesson 05, done wrong; `caught_by` names the test that must notice."""

from minipaged.memory import Chunked, OnDemand, Reserve


class OneMoreThanNeeded(OnDemand):
    """A preallocated block for each sequence: waste of a whole block."""

    caught_by = "test_on_demand_asks_for_what_the_tokens_need"

    def at_admission(self, needed, remaining):
        return (min(needed + 1, remaining),)


class GrantsPastTheEnd(Chunked):
    """Sixteen blocks for a sequence that can only use three more."""

    caught_by = "test_chunked_never_asks_for_more_than_remains"

    def at_admission(self, needed, remaining):
        return (max(needed, self.grant), needed)

    while_running = at_admission


class NoFallback(Chunked):
    """Sixteen or nothing: waits, or preempts, though one block would do."""

    caught_by = "test_chunked_asks_for_sixteen_pages_then_for_the_minimum"

    def while_running(self, needed, remaining):
        return (max(needed, min(remaining, self.grant)),)


class TooFewForALongPrompt(Chunked):
    """A grant below what the prompt needs."""

    caught_by = "test_chunked_gives_a_long_prompt_all_it_needs"

    def at_admission(self, needed, remaining):
        return (min(remaining, self.grant), needed)


class AdmitsOnCredit(Reserve):
    """Takes what it needs now and hopes: not a reservation."""

    caught_by = "test_reserve_takes_everything_at_admission_or_waits"

    def at_admission(self, needed, remaining):
        return (remaining, needed)


class AllOrNothingWhileRunning(Reserve):
    """A fork that wants the rest of its reservation, whatever the pool has."""

    caught_by = "test_a_fork_of_a_reservation_makes_do_with_what_it_must_have"

    def while_running(self, needed, remaining):
        return (remaining,)
