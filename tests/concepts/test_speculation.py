"""Speculative decoding (Leviathan et al., arXiv 2211.17192): drafts change the steps, and never the text."""

from __future__ import annotations

import contextlib
import math
from array import array
from types import SimpleNamespace

import pytest

from minipaged import BeamSearchParams, SamplingParams
from minipaged.components import Components, build_scheduler
from minipaged.config import DRAFT_ROWS, ConfigError, EngineConfig
from minipaged.decoding.speculation import PromptLookup
from minipaged.scheduling import FCFSScheduler, Sample, StepResult
from tests.engine.drafters import Foresight, Script
from tests.engine.toy_model import ToyModel, toy_engine
from tests.toy import outputs, run_alone, samples

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def skip_without_drafts():
    """The specification may run on another scheduler."""
    if not FCFSScheduler.__module__.startswith("minipaged."):
        pytest.skip("a scheduler of your own makes no drafts")


def drafting(drafter, *, tokens=4, **options):
    """An engine whose drafts come from this drafter."""
    skip_without_drafts()
    components = Components(drafter=lambda: drafter)
    return toy_engine(components=components, num_speculative_tokens=tokens, **options)


def run(engine):
    """Step to the end; the number of steps. Every block comes back."""
    steps = 0
    while engine.has_unfinished:
        engine.step()
        engine.check_invariants()
        steps += 1
    return steps


def expected(prompt, num_tokens):
    """The tokens without drafts, blocks or batches."""
    return outputs(run_alone(prompt, num_tokens, samples()))[0]


def drafted(engine):
    """The drafts of an engine's steps from now on: [(request, tokens, accepted)]."""
    found = []
    engine.on_committed.append(
        lambda plan, result, touched: found.extend(
            (event.request_id, event.detail["tokens"], event.detail["accepted"])
            for event in plan.events
            if event.kind == "drafted"
        )
    )
    return found


def test_the_example_of_lesson_15():
    """Ten tokens with a draft of four, of which two are right: the sequence grows by three in one step, and
    the third block goes back. Catches a wrong token that is kept, and a right one that is lost."""
    prompt = [3, 1, 4, 1, 5]
    was, a, little, *_ = expected([*prompt], 4)[1:]
    engine = drafting(Script([was, a, little + 1, 9]))
    request = engine.add_request("r", prompt, GREEDY)
    engine.step()  # the prompt: the first token
    (sequence,) = request.sequences
    assert len(sequence.token_ids) == 6
    seen = []
    engine.on_planned.append(
        lambda plan: seen.append((sequence.table.num_tokens, len(sequence.table.blocks)))
    )
    engine.step()
    assert seen == [(10, 3)]  # six tokens and four drafted ones, in blocks of four
    assert sequence.output_token_ids[1:] == [was, a, little]
    assert (sequence.table.num_tokens, len(sequence.table.blocks)) == (8, 2)
    assert sequence.num_uncomputed_tokens == 1, "the newest token has no K/V yet, as after any decode"
    run(engine)
    assert outputs(request) == [expected(prompt, 20)]


@pytest.mark.parametrize(("right", "steps"), [(1.0, 1 + 4), (0.0, 1 + 19)])
def test_steps_for_20_tokens_with_drafts_of_four(right, steps):
    """All right: the prompt, then five tokens a step. All wrong: one token a step, as without drafts."""
    engine = drafting(Foresight(right))
    request = engine.add_request("r", range(7), GREEDY)
    assert run(engine) == steps
    assert outputs(request) == [expected(range(7), 20)]
    assert engine.metrics.generation_tokens == 20


def test_the_step_records_the_draft_and_the_output():
    """Catches an outcome from which nobody can see what was drafted, and one with tokens behind an end."""
    prompt = [3, 1, 4, 1, 5]
    was, a, little, dog, *_ = expected([*prompt], 5)[1:]
    details = []
    for stop in ([], [a]):
        engine = drafting(Script([was, a, little + 1, 9], [dog]))
        engine.on_committed.append(
            lambda plan, *_: details.extend(event.detail for event in plan.events if event.kind == "drafted")
        )
        engine.add_request("r", prompt, GREEDY.clone(stop_token_ids=stop))
        run(engine)
    draft = [was, a, little + 1, 9]
    assert details == [
        {"tokens": 4, "accepted": 2, "draft": draft, "output": [was, a, little]},
        {"tokens": 1, "accepted": 1, "draft": [dog], "output": expected(prompt, 6)[4:]},
        {"tokens": 4, "accepted": 1, "draft": draft, "output": [was, a]},
    ]


def test_each_row_of_a_draft_is_a_decode():
    """Catches a row that computes more than its token, or draws more than one candidate."""
    engine = drafting(Foresight(1.0))
    engine.add_request("r", range(3), GREEDY)
    rows = []
    engine.on_planned.append(lambda plan: rows.append([row[1:] for row in plan.scheduled]))
    engine.step()
    engine.step()
    assert rows == [[(0, 3, 1)], [(start, 1, 1) for start in range(3, 8)]]


@pytest.mark.parametrize("right", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("growth", ["on_demand", "chunked", "reserve"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
def test_the_text_is_the_same_in_a_pool_that_is_too_small(right, growth, mode, caching):
    """Catches slots of wrong tokens that are taken for computed ones, by preemption, swap or prefix cache."""
    engine = drafting(
        Foresight(right),
        num_blocks=14,
        num_host_blocks=14,
        page_growth=growth,
        preemption_mode=mode,
        enable_prefix_caching=caching,
    )
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, i] for i in range(6)]
    requests = [engine.add_request(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    found = drafted(engine)
    run(engine)
    assert [outputs(request) for request in requests] == [[expected(prompt, 20)] for prompt in prompts]
    assert sum(num_accepted for *_, num_accepted in found) > 10
    if growth == "on_demand":
        assert engine.metrics.num_preemptions > 0


def test_the_drafter_in_use_leaves_the_text_as_it_is():
    """Prompt lookup, or a class of your own (`--use drafter=...`)."""
    skip_without_drafts()
    engine = toy_engine(num_speculative_tokens=4)
    requests = [engine.add_request(f"r{i}", [*range(i), *range(i)], GREEDY) for i in range(2, 8)]
    run(engine)
    assert [outputs(r) for r in requests] == [[expected(r.prompt_token_ids, 20)] for r in requests]


# -- what a draft may take ---------------------------------------------------------------------------------


def test_on_demand_growth_never_keeps_an_empty_block():
    """Catches blocks of wrong tokens that stay with the table (section 4.3: less than a block is empty)."""
    engine = drafting(Foresight(0.5), tokens=8)
    request = engine.add_request("r", range(6), SamplingParams(temperature=0, max_tokens=40))
    while engine.has_unfinished:
        engine.step()
        for sequence in request.sequences:
            assert sequence.table.capacity - sequence.table.num_tokens < sequence.table.block_size


def test_reserved_blocks_stay_reserved():
    """Catches a wrong draft that gives away what page growth had reserved for later tokens."""
    engine = drafting(Foresight(0.0), page_growth="reserve", num_blocks=12)
    request = engine.add_request("r", range(6), SamplingParams(temperature=0, max_tokens=30))
    engine.step()
    held = len(request.sequences[0].table.blocks)
    assert held == 9
    for _ in range(5):
        engine.step()
        assert len(request.sequences[0].table.blocks) == held


def test_a_draft_takes_nothing_from_others():
    """Catches preemption for a draft: with no block left, there is no draft."""
    engine = drafting(Foresight(1.0), num_blocks=4)
    for i in range(2):
        engine.add_request(f"r{i}", range(5), SamplingParams(temperature=0, max_tokens=3))
    found = drafted(engine)
    run(engine)
    assert engine.metrics.num_preemptions == 0
    assert found == [("r0", 1, 1), ("r1", 1, 1)]  # what fits the blocks that they hold


def test_a_step_with_a_prompt_has_no_draft():
    """Catches drafts that make a prompt wait: they only fill steps of decodes."""
    engine = drafting(Foresight(1.0), max_num_batched_tokens=8)
    engine.add_request("r0", range(5), GREEDY)
    engine.step()
    engine.add_request("r1", range(40), GREEDY)
    found = drafted(engine)
    engine.step()
    engine.step()
    assert not found


def test_only_one_sequence_without_a_function_gets_drafts():
    """Samples and beams decode as ever."""
    engine = drafting(Foresight(1.0))
    plain = engine.add_request("plain", range(5), GREEDY)
    engine.add_request("samples", range(5), SamplingParams(n=2, max_tokens=10))
    engine.add_request("beams", range(5), BeamSearchParams(beam_width=2, max_tokens=10))
    engine.add_request("one beam", range(5), BeamSearchParams(beam_width=1, max_tokens=10))
    watched = SamplingParams(max_tokens=10, logits_processors=[lambda ids, logits: logits])
    engine.add_request("watched", range(5), watched)
    found = drafted(engine)
    run(engine)
    assert {request_id for request_id, *_ in found} == {"plain"}
    assert outputs(plain) == [expected(range(5), 20)]


@pytest.mark.parametrize(
    ("limit", "rows"),
    [({"max_num_batched_tokens": 7}, 7), ({"max_num_seqs": 3}, DRAFT_ROWS), ({}, DRAFT_ROWS)],
)
def test_a_step_has_no_more_rows_than_its_limits_allow(limit, rows):
    """Catches drafts that overflow what memory was measured for; three requests share the rest."""
    drafter = Foresight(1.0)
    engine = drafting(drafter, tokens=DRAFT_ROWS - 1, **limit)
    for i in range(3):
        engine.add_request(f"r{i}", [i], SamplingParams(temperature=0, max_tokens=60))
    sizes = []
    engine.on_planned.append(lambda plan: sizes.append((len(plan.scheduled), len(plan.sampling))))
    engine.step()
    engine.step()
    assert sizes[1] == (rows, 3)
    assert drafter.asked[-3:] == [-(-(rows - 3) // 3)] * 3


def test_a_draft_that_is_longer_than_was_asked_for_is_cut():
    """Catches a drafter that says more than it may: rows behind the end of the text, or past the limit."""

    class Talkative(Foresight):
        def draft(self, sequences, counts):
            return super().draft(sequences, [count + 3 for count in counts])

    engine = drafting(Talkative(1.0), tokens=2)
    request = engine.add_request("r", range(7), GREEDY)
    found = drafted(engine)
    run(engine)
    assert {tokens for _, tokens, _ in found} <= {1, 2}
    assert outputs(request) == [expected(range(7), 20)]


class HalfRight(Foresight):
    """Is right once a draft."""

    def draft(self, sequences, counts):
        """See `Drafter`."""
        return [[right, *(50 - token for token in rest)] for right, *rest in super().draft(sequences, counts)]


def test_drafts_are_long_where_tokens_are_accepted_and_short_where_not():
    """Catches a text without repetitions that pays for four wrong rows in every step."""
    right, wrong = Foresight(1.0), Foresight(0.0)
    for drafter in (right, wrong):
        engine = drafting(drafter, tokens=6)
        engine.add_request("r", range(3), SamplingParams(temperature=0, max_tokens=30))
        run(engine)
    assert right.asked[:3] == [6, 6, 6]
    assert wrong.asked[:3] == [6, 1, 1]
    half = drafting(drafter := HalfRight(), tokens=6)
    half.add_request("r", range(3), SamplingParams(temperature=0, max_tokens=30))
    run(half)
    assert drafter.asked[:4] == [6, 3, 3, 3]


# -- the end of a text, and the prefix cache ---------------------------------------------------------------


@pytest.mark.parametrize("place", range(1, 12))
def test_a_stop_token_or_the_length_ends_a_text_inside_a_draft(place):
    """Catches tokens behind the end, and an end that the draft hides."""
    tokens = expected(range(7), 20)
    stop = tokens[place]
    first = tokens.index(stop)
    engine = drafting(Foresight(1.0))
    stopped = engine.add_request(
        "a", range(7), SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop])
    )
    cut = engine.add_request("b", range(7), SamplingParams(temperature=0, max_tokens=place))
    run(engine)
    assert outputs(stopped) == [tokens[: first + 1]]
    assert outputs(cut) == [tokens[:place]]
    assert [r.completions[0].finish_reason for r in (stopped, cut)] == ["stop", "length"]


def test_a_draft_that_repeats_the_last_token_is_not_accepted_by_a_text_that_has_ended():
    """Catches a draft compared with the token before the end, which is the last that the sequence has."""
    last, stop = expected([3, 1, 4], 2)
    engine = drafting(Script([last]))
    request = engine.add_request("r", [3, 1, 4], GREEDY.clone(stop_token_ids=[stop]))
    found = drafted(engine)
    run(engine)
    assert (found, outputs(request)) == ([("r", 1, 0)], [[last, stop]])


def test_the_cache_never_learns_a_wrong_token_and_knows_the_right_ones():
    """Catches a block that is published before its tokens are confirmed, or never."""
    prompt = [1, 2, 3]
    for right in (0.0, 1.0):
        engine = drafting(Foresight(right), enable_prefix_caching=True)
        engine.add_request("r", prompt, SamplingParams(temperature=0, max_tokens=18))
        run(engine)
        engine.scheduler.kv.roll_back_registered()  # (what a failed step does)
        text = [*prompt, *expected(prompt, 18)]
        again = engine.add_request("again", text, SamplingParams(temperature=0, max_tokens=1))
        run(engine)
        assert again.num_cached_tokens == 20  # of 21; the last token was never computed
        assert outputs(again) == [expected(text, 1)]


# -- prompt lookup -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count", "draft"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 3, [3, 4, 9]),
        ([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], 1, [5]),  # three tokens agree there, two in the later place
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, [6]),  # as many agree: the later place
        ([1, 2, 3, 4, 5, 7, 2, 3, 4, 6, 1, 2, 3, 4], 1, [5]),  # four agree there, three in the later place
        ([9, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6, 9, 1, 2, 3, 4], 1, [6]),  # four agree: a fifth does not count
        ([4, 4, 4], 4, [4, 4, 4, 4]),
        ([8, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),  # it repeats itself to its end
        ([1, 2, 3, 4, 2], 3, []),  # one token alone says little
        ([1], 3, []),
        ([1, 2], 3, []),
    ],
)
def test_prompt_lookup_drafts_what_followed_the_same_tokens_before(text, count, draft):
    """Catches a place preferred to a later one that agrees as far, and a place where one token agrees."""
    assert PromptLookup().draft([SimpleNamespace(token_ids=array("i", text))], [count]) == [draft]


# -- what fails --------------------------------------------------------------------------------------------


def test_a_failed_step_leaves_nothing_of_its_drafts(monkeypatch):
    """Catches slots of a draft that outlive the roll-back."""
    engine = drafting(Foresight(0.7))
    request = engine.add_request("r", range(7), GREEDY)
    execute = engine.executor.execute
    calls = iter(range(1000))

    def fail(plan):
        if next(calls) % 2:
            engine.executor.fail(plan)
            raise RuntimeError("half way")
        return execute(plan)

    monkeypatch.setattr(engine.executor, "execute", fail)
    while engine.has_unfinished:
        try:
            engine.step()
        except RuntimeError:
            assert engine.scheduler.kv.num_used == 0
        engine.check_invariants()
    assert outputs(request) == [expected(range(7), 20)]


def test_a_draft_token_after_which_no_logit_is_finite_costs_nobody_a_request(monkeypatch):
    """If the logits after a draft token are not finite, the token is rejected."""
    engine = drafting(Foresight(1.0))
    request = engine.add_request("r", range(7), GREEDY)
    execute = engine.executor.execute

    def invalid_after_drafts(plan):
        valid = execute(plan).samples
        invalid = [Sample([0], [math.nan])] * (len(valid) - len(plan.sampling))
        return StepResult(
            [*valid[: len(plan.sampling)], *invalid], errors={"r": "not finite"} if invalid else {}
        )

    monkeypatch.setattr(engine.executor, "execute", invalid_after_drafts)
    assert run(engine) > 9  # (one token a step, or two: the sample before the invalid one counts)
    assert outputs(request) == [expected(range(7), 20)]
    assert request.error is None


def test_a_request_without_a_valid_token_fails_whatever_its_draft_says(monkeypatch):
    """Catches an error that is taken for one of the draft's: an invalid token would be kept."""
    engine = drafting(Foresight(1.0))
    request = engine.add_request("r", range(7), GREEDY)
    engine.step()
    invalid = StepResult([Sample([0], [math.nan])] * 5, errors={"r": "not finite"})
    monkeypatch.setattr(engine.executor, "execute", lambda plan: invalid)
    engine.step()
    assert (request.is_finished, request.error) == (True, "not finite")


def test_an_error_while_a_draft_is_settled_ends_its_request_and_no_other(monkeypatch):
    """Catches blocks and slots that are lost when a commit fails half way."""
    engine = drafting(Foresight(1.0))
    first, second = (engine.add_request(f"r{i}", [i, 1, 2], GREEDY) for i in range(2))
    plain = engine.add_request("plain", range(4), SamplingParams(n=2, max_tokens=20))
    engine.step()
    advance = second.method.advance
    calls = iter(range(100))

    def fail(request, found):
        if next(calls) == 2:
            raise RuntimeError("no")
        return advance(request, found)

    monkeypatch.setattr(second.method, "advance", fail)
    with pytest.raises(RuntimeError, match="no"):
        engine.step()
    engine.check_invariants()
    assert second.error == "RuntimeError: no"
    run(engine)
    assert outputs(first) == [expected([0, 1, 2], 20)]
    assert len(plain.completions) == 2


@pytest.mark.parametrize("token_id", [-1, 50, 10**6])
def test_a_draft_that_is_not_a_token_is_refused(token_id):
    """Catches a kernel that reads past the embeddings."""
    engine = drafting(Script([token_id]))
    engine.add_request("r", range(4), GREEDY)
    engine.step()
    with pytest.raises(ValueError, match=f"drafted token {token_id}, but the model has 50 tokens; draft ids"):
        engine.step()
    assert engine.scheduler.kv.num_used == 0
    run(engine)


@pytest.mark.parametrize("draft", [[[99]], None, [None]], ids=["no_token", "nothing", "no_list"])
def test_a_drafter_that_always_fails_costs_one_step(draft, caplog):
    """Catches failures in every second step: a failed one is a prefill again, then the drafter is asked."""
    engine = drafting(SimpleNamespace(draft=lambda sequences, counts: draft))
    request = engine.add_request("r", range(7), GREEDY)
    engine.step()
    with pytest.raises((ValueError, TypeError)) as caught:
        engine.step()
    run(engine)
    assert outputs(request) == [expected(range(7), 20)]
    (line,) = [record.message for record in caplog.records]
    assert line == f"the drafter failed and will not be asked again: {caught.value}"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("spoil", [lambda ids: ids.append(1), memoryview], ids=["append", "view"])
def test_what_a_drafter_does_to_the_texts_is_forgotten(spoil, fails):
    """Catches a drafted token in the output, and a NumPy view that a drafter keeps: its text cannot grow."""

    kept = []

    class Spoils:
        def draft(self, sequences, counts):
            kept.extend(spoil(sequence.token_ids) for sequence in sequences)
            if fails and len(kept) < 4:
                raise RuntimeError("no")
            return [[1]] * len(sequences)

    engine = drafting(Spoils())
    request = engine.add_request("r", range(7), GREEDY)
    while engine.has_unfinished:
        with contextlib.suppress(RuntimeError):
            engine.step()
        engine.check_invariants()
    assert outputs(request) == [expected(range(7), 20)]


def test_what_cannot_draft_is_refused():
    """Layers whose state cannot go back, and a scheduler that knows no drafts."""
    skip_without_drafts()
    model = ToyModel()
    model.kept_states = set()
    config = EngineConfig(num_speculative_tokens=3, block_size=4)
    with pytest.raises(ConfigError, match="num_speculative_tokens is 3, but layers with a recurrent state"):
        build_scheduler(config, model)

    class Mine(FCFSScheduler):
        pass

    with pytest.raises(ConfigError, match="a scheduler of your own"):
        toy_engine(components=Components(scheduler=Mine), num_speculative_tokens=3)
    with pytest.raises(ConfigError, match="num_speculative_tokens is -1; give at least 0"):
        toy_engine(num_speculative_tokens=-1)
