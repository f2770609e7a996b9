"""A draft model follows the texts with block tables of its own, and goes back where it guessed wrong."""

from __future__ import annotations

import pytest

from minipaged import SamplingParams
from minipaged.execution.draft_model import DraftModel
from tests.concepts.test_speculation import GREEDY, drafted, drafting, expected, run
from tests.engine.toy_model import ToyModel
from tests.toy import outputs


class Forgetful(ToyModel):
    """Says what the toy model says, but for every n-th answer."""

    def __init__(self, every: int = 0, **options) -> None:
        super().__init__(**options)
        self.every = every
        self.num_answers = 0
        self.steps: list[list[int]] = []  # tokens per sequence of each step

    def execute(self, plan):
        """See `ToyExecutor`: it asserts that each table holds the K/V of exactly its text."""
        self.steps.append([item.num_tokens for item in plan.scheduled])
        result = super().execute(plan)
        for sample in result.samples:
            self.num_answers += 1
            if self.every and self.num_answers % self.every == 0:
                sample.token_ids[0] = (sample.token_ids[0] + 1) % self.vocab_size
        return result


def with_draft_model(model, chunk=8, **options):
    """An engine and its drafter."""
    drafter = DraftModel(model, 16 * chunk)
    return drafting(drafter, **options), drafter


def test_it_computes_each_token_once():
    """A guess that was right is not computed again: after the prompt, the model reads what is new to it, and
    then its own guesses. (Its last guess it never read.)"""
    engine, drafter = with_draft_model(Forgetful())
    request = engine.add_request("r", range(7), GREEDY)
    run(engine)
    assert outputs(request) == [expected(range(7), 20)]
    assert drafter.runner.steps[:8] == [[8], [1], [1], [1], [2], [1], [1], [1]]


@pytest.mark.parametrize("every", [2, 3, 5])
def test_after_a_wrong_guess_its_table_goes_back(every):
    """Catches K/V of a wrong token that it reads later (the toy model fails such a step)."""
    engine, _ = with_draft_model(Forgetful(every))
    requests = [engine.add_request(f"r{i}", [i, 1, 2, 3, 4], GREEDY) for i in range(3)]
    found = drafted(engine)
    run(engine)
    assert [outputs(request) for request in requests] == [[expected([i, 1, 2, 3, 4], 20)] for i in range(3)]
    assert 0 < sum(right for *_, right in found) < sum(tokens for _, tokens, _ in found)


def test_a_long_prompt_is_read_in_chunks():
    """Catches a prompt that is computed at once, beyond what memory was measured for."""
    engine, drafter = with_draft_model(Forgetful(), chunk=8)
    engine.add_request("r", range(30), GREEDY)
    run(engine)
    assert drafter.runner.steps[:4] == [[8], [8], [8], [7]]


def test_ended_requests_give_their_blocks_back():
    """Catches a pool that is full after a few requests."""
    engine, drafter = with_draft_model(Forgetful(num_blocks=16))
    for i in range(10):
        engine.add_request(f"r{i}", [i, 1, 2], GREEDY)
        run(engine)
    drafter.draft([], [])
    assert drafter.pool.num_free == 16


@pytest.mark.parametrize("num_blocks", [1, 3, 7, 12])
def test_a_pool_too_small_for_all_follows_as_many_as_it_can(num_blocks):
    """Catches a table that is taken from one sequence while its guess is made for another."""
    engine, _ = with_draft_model(Forgetful(3, num_blocks=num_blocks))
    requests = [engine.add_request(f"r{i}", [i] * (3 + i), GREEDY) for i in range(4)]
    found = drafted(engine)
    run(engine)
    assert [outputs(request) for request in requests] == [[expected([i] * (3 + i), 20)] for i in range(4)]
    assert bool(found) == (num_blocks > 1)


def test_what_it_cannot_read_it_does_not_guess():
    """Tokens beyond its vocabulary, and texts longer than it was made for."""
    small = Forgetful(vocabulary=40, max_model_len=20)
    engine, _ = with_draft_model(small)
    foreign = engine.add_request("foreign", [1, 45, 2], GREEDY)
    found = drafted(engine)
    run(engine)
    assert not found
    long = engine.add_request("long", [1, 2, 3], SamplingParams(temperature=0, max_tokens=30))
    run(engine)
    assert outputs(foreign) == [expected([1, 45, 2], 20)]
    assert outputs(long) == [expected([1, 2, 3], 30)]


def test_requests_that_wait_or_are_preempted_are_followed_on(caplog):
    """Catches a sequence that is read from its beginning after every preemption."""
    caplog.set_level("ERROR")
    engine, drafter = with_draft_model(Forgetful(4), num_blocks=14)
    requests = [engine.add_request(f"r{i}", [i, *range(8)], GREEDY) for i in range(5)]
    run(engine)
    assert engine.metrics.num_preemptions > 0
    assert [outputs(r) for r in requests] == [[expected(r.prompt_token_ids, 20)] for r in requests]
    assert sum(n > 4 for step in drafter.runner.steps for n in step) <= 2 * len(requests)
