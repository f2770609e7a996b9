"""Lesson 05, done wrong; `caught_by` names the test that must notice, `task` the task whose tests must."""

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


# -- from the exercise's text alone --------------------------------------------------------------------------


class OnDemandFallsBackToOne(OnDemand):
    """A prompt of three blocks that makes do with one."""

    task = 1

    def at_admission(self, needed, remaining):
        return (needed, 1)


class OneBlockWhateverIsNeeded(OnDemand):
    """The next token's block, without the one for its copy."""

    task = 1

    def while_running(self, needed, remaining):
        return (1,)


class TheMinimumFirst(Reserve):
    """The right numbers in the wrong order: a fork never gets more than it must have."""

    task = 2

    def while_running(self, needed, remaining):
        return (needed, remaining)


class ReservesWhatIsNeeded(Reserve):
    """No reservation: on-demand growth by another name."""

    task = 2

    def at_admission(self, needed, remaining):
        return (needed,)


class ReservesOnTopOfTheRest(Reserve):
    """`remaining` includes `needed` already."""

    task = 2

    def at_admission(self, needed, remaining):
        return (needed + remaining,)


class GrantsSixteen(Chunked):
    """16, whatever `grant` is."""

    task = 3

    def at_admission(self, needed, remaining):
        return (max(needed, min(remaining, 16)), needed)


class GrantsOnTop(Chunked):
    """A whole grant beside the prompt's own blocks."""

    task = 3

    def at_admission(self, needed, remaining):
        return (min(remaining, needed + self.grant), needed)


class TheMinimumIsOne(Chunked):
    """Falls back to one block, though more are needed."""

    task = 3

    def at_admission(self, needed, remaining):
        return (max(needed, min(remaining, self.grant)), 1)


class GrantsTooFewWhileRunning(Chunked):
    """The `max` is missing in one of the two methods."""

    task = 3

    def while_running(self, needed, remaining):
        return (min(remaining, self.grant), needed)


class KeepsTheGrantInTheClass(Chunked):
    """The second policy changes the first."""

    task = 3

    def __init__(self, grant=16):
        KeepsTheGrantInTheClass.grant = grant


class AWholeGrantOrNone(Chunked):
    """Where fewer blocks remain than a grant has, only what is needed."""

    caught_by = "test_a_grant_lies_between_what_is_needed_and_what_remains"

    def at_admission(self, needed, remaining):
        return (max(needed, self.grant) if self.grant <= remaining else needed, needed)


class TheGrantShrinks(Chunked):
    """Cuts the grant itself: every later sequence gets as little."""

    task = 3

    def while_running(self, needed, remaining):
        self.grant = min(self.grant, remaining)
        return (max(needed, self.grant), needed)


class TakesTheLastBlocksAtOnce(OnDemand):
    """When two blocks remain, both."""

    caught_by = "test_on_demand_growth_looks_only_at_what_is_needed"

    def at_admission(self, needed, remaining):
        return (remaining if remaining <= 2 else needed,)


class CountsInAList(OnDemand):
    """A list of the right numbers; the engine asks for a tuple."""

    caught_by = "test_on_demand_growth_looks_only_at_what_is_needed"

    def while_running(self, needed, remaining):
        return [needed]


class FloatsOfTheRightSize(Reserve):
    """`4.0 == 4`, but nobody can take 4.0 blocks."""

    caught_by = "test_a_reservation_is_all_that_remains"

    def at_admission(self, needed, remaining):
        return (remaining / 1,)
