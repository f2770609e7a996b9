"""A draft model follows texts with block tables of its own, and truncates them where drafts are rejected."""

from __future__ import annotations

import random
from array import array

import pytest

from minipaged import SamplingParams
from minipaged.execution.draft_model import DraftModel
from tests.concepts.test_speculation import GREEDY, drafted, drafting, expected, run
from tests.engine.drafters import Script
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


def with_draft_model(model, budget=128, **options):
    """An engine and its drafter."""
    drafter = DraftModel(model, budget)
    return drafting(drafter, **options), drafter


def test_it_computes_each_token_once():
    """An accepted token is not computed again: after the prompt, the model computes what is new to it, and
    then its own draft (except for its last token)."""
    engine, drafter = with_draft_model(Forgetful())
    request = engine.add_request("r", range(7), GREEDY)
    run(engine)
    assert outputs(request) == [expected(range(7), 20)]
    assert drafter.runner.steps[:8] == [[8], [1], [1], [1], [2], [1], [1], [1]]


@pytest.mark.parametrize("every", [2, 3, 5])
def test_after_a_rejected_token_its_table_is_truncated(every):
    """Catches K/V of a wrong token that it reads later (the toy model fails such a step)."""
    engine, _ = with_draft_model(Forgetful(every))
    requests = [engine.add_request(f"r{i}", [i, 1, 2, 3, 4], GREEDY) for i in range(3)]
    found = drafted(engine)
    run(engine)
    assert [outputs(request) for request in requests] == [[expected([i, 1, 2, 3, 4], 20)] for i in range(3)]
    assert 0 < sum(right for *_, right in found) < sum(tokens for _, tokens, _ in found)


def test_a_long_prompt_is_read_a_step_at_a_time():
    """Catches one that makes everybody wait: each draft reads as many tokens as a step may have, and drafts
    for the others meanwhile."""
    engine, drafter = with_draft_model(Forgetful(2), budget=16)
    engine.add_request("short", range(4), SamplingParams(temperature=0, max_tokens=30))
    engine.add_request("long", range(40), SamplingParams(temperature=0, max_tokens=30))
    found = drafted(engine)
    run(engine)
    assert max(map(sum, drafter.runner.steps)) == 16
    names = [name for name, *_ in found]
    assert names.index("long") >= 2
    assert "short" in names[names.index("long") :]


def test_a_model_that_fails_costs_drafts_and_nothing_else(caplog):
    """Catches a request that is lost for a draft; the log says it once."""
    model = Forgetful()
    engine, drafter = with_draft_model(model)
    request = engine.add_request("r", range(7), GREEDY)
    execute = model.execute

    def fail(plan):
        if len(model.steps) % 3 == 2:
            model.steps.append([])
            raise MemoryError("no room")
        return execute(plan)

    model.execute = fail
    run(engine)
    assert outputs(request) == [expected(range(7), 20)]
    assert caplog.text.count("the draft model fails, so there are no drafts: no room") == 1
    drafter.draft([], [])
    assert drafter.pool.num_free == drafter.runner.num_blocks


@pytest.mark.parametrize("every", [0, 2])
def test_a_later_text_is_read_from_where_it_differs_from_earlier_ones(every):
    """The turns of a chat. Catches one that is read anew at each turn, and a block that is taken for what was
    output although it holds what was drafted (the toy model fails a step that reads it)."""
    engine, drafter = with_draft_model(Forgetful(every))
    text = []
    for _ in range(3):
        drafter.runner.steps.clear()
        prompt = [*text, 1, 2, 3, 4, 5]
        request = engine.add_request("r", prompt, GREEDY)
        run(engine)
        assert outputs(request) == [expected(prompt, 20)]
        ((num_read,), *_) = drafter.runner.steps
        assert 0 <= num_read - (len(prompt) + 1 - len(text)) <= 8  # the last draft, and what fills no block
        text = [*prompt, *outputs(request)[0]]


def test_two_texts_that_were_read_to_their_end_share_no_block_that_they_write_to(caplog):
    """Catches the newest token computed into a block that another text has, too."""
    engine, drafter = with_draft_model(Forgetful())
    for names in ("a", "bc"):
        drafter.runner.steps.clear()
        requests = [engine.add_request(name, range(7), GREEDY) for name in names]
        run(engine)
        assert [outputs(request) for request in requests] == [[expected(range(7), 20)]] * len(names)
    assert drafter.runner.steps[0] == [4, 4]  # the second block of two, with the newest token
    assert not caplog.text


@pytest.mark.parametrize("options", [{"salt": "other"}, {"enable_prefix_caching": False}])
def test_a_text_that_may_not_share_is_read_from_its_beginning(options):
    """Catches a draft model whose speed reveals what other users wrote."""
    salt = options.pop("salt", "")
    drafter = DraftModel(Forgetful(), 64, **options)
    for own in ("", salt):
        engine = drafting(drafter)
        engine.add_request("r", range(12), GREEDY, cache_salt=own)
        drafter.runner.steps.clear()
        run(engine)
        assert drafter.runner.steps[0] == [13]


def test_blocks_of_ended_texts_make_room_for_others():
    """Catches a pool that is full of what nobody follows any more."""
    engine, drafter = with_draft_model(Forgetful(num_blocks=8))
    for i in range(6):
        request = engine.add_request("r", [i, 1, 2, 3, 4, 5, 6], GREEDY)
        run(engine)
        assert outputs(request) == [expected(request.prompt_token_ids, 20)]
        assert drafter.runner.steps
        drafter.runner.steps.clear()
    drafter.draft([], [])
    assert drafter.pool.num_free == 8


@pytest.mark.parametrize("seed", range(20))
def test_random_texts_that_begin_alike(seed, caplog):
    """Catches a block that is found with other content than its hash says, is freed twice, or never."""
    rng = random.Random(seed)
    model = Forgetful(rng.choice([0, 2, 3]), num_blocks=rng.choice([6, 10, 20, 64]))
    budget, size = rng.choice([8, 16, 128]), rng.choice([16, 30, 64])
    engine, drafter = with_draft_model(model, budget, num_blocks=size, tokens=rng.randint(1, 6))
    texts, requests = [[]], []
    while engine.has_unfinished or len(requests) < 25:
        if len(requests) < 25 and rng.random() < 0.3:
            beginning = rng.choice(texts)[: rng.choice([0, 8, 13, 40])]
            prompt = [*beginning, *(rng.randrange(50) for _ in range(rng.randint(1, 6)))]
            params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 15))
            salt = rng.choice(["", "", "other"])
            requests.append(engine.add_request(f"r{len(requests)}", prompt, params, cache_salt=salt))
        if engine.has_unfinished:
            engine.step()
        held = [block for reading in drafter._readings.values() for block in reading.table.blocks]
        drafter.pool.check_invariants(held)
        texts = [[]] + [[*r.prompt_token_ids, *outputs(r)[0]] for r in requests if r.is_finished]
    for request in requests:
        assert outputs(request) == [expected(request.prompt_token_ids, request.params.max_tokens)]
    assert "the draft model fails" not in caplog.text
    drafter.draft([], [])
    assert drafter.pool.num_free == model.num_blocks


def sequence_of(*tokens):
    """A sequence with this prompt."""
    return drafting(Script()).add_request("r", tokens, GREEDY).sequences[0]


def test_what_the_model_cannot_read_has_no_draft():
    """Catches a position, or a token of a larger vocabulary, that it has no row for."""
    text = sequence_of(1, 2, 3, 4, 5, 6, 7)
    assert [len(draft) for draft in DraftModel(Forgetful(max_model_len=10), 64).draft([text], [3])] == [3]
    assert DraftModel(Forgetful(max_model_len=10), 64).draft([text], [4]) == [[]]
    assert DraftModel(Forgetful(vocabulary=7), 64).draft([text], [3]) == [[]]


def test_the_text_that_waited_longest_for_a_draft_makes_room():
    """Catches one that is read again and again because another, of long ago, is kept."""
    drafter = DraftModel(Forgetful(num_blocks=2, block_size=2), 64)
    first, second, third = sequence_of(1, 2), sequence_of(3, 4), sequence_of(5, 6)
    for sequence in (first, second, first, third, first):
        drafter.draft([sequence], [1])
    assert drafter.runner.steps == [[2], [2], [1], [2], [1]]


def test_a_right_token_that_was_never_scheduled_does_not_count_as_computed(caplog):
    """Catches a table that is taken for longer than it is, where the pool had no room for the next draft."""
    drafter = DraftModel(Forgetful(num_blocks=4, block_size=2), 64)
    first, other = sequence_of(1, 2, 3), sequence_of(4)
    (draft,) = drafter.draft([first], [4])  # three blocks; the engine has none to spare, and drops it
    first.token_ids.append(draft[0])
    assert drafter.draft([other, first], [2, 4])[1] == []  # four blocks, of which the other has one
    first.token_ids += array("i", draft[1:3])
    assert drafter.draft([first], [1]) == [[draft[3]]]
    assert not caplog.text
