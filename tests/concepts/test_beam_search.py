"""Beam search (paper, section 4.4): which candidates go on, and which blocks they share (Fig. 9 is in
test_block_table.py). The oracle is transformers' own beam search."""

import random

import pytest

from minipaged.decoding.beam_search import BeamSearch
from minipaged.decoding.params import BeamSearchParams
from minipaged.decoding.stopping import StopChecker
from minipaged.scheduling import Sample
from tests.concepts.decoding_driver import apply, decode, make_request
from tests.toy import ToyEngine, beams, ranked, run_alone, samples, toy_scheduler

WIDTHS = range(1, 9)
PENALTIES = (0.0, 0.6, 1.0, 2.0)
EARLY = (True, False, "never")


def beam_request(eos=(), max_num_tokens=10_000, prompt=(1, 2), **options):
    params = BeamSearchParams(max_tokens=None, **options)
    return make_request(prompt, BeamSearch(params, StopChecker(params, eos)), params, max_num_tokens)


def step(request, *samples):
    """One step: {token: logprob} per live beam; returns the answer as (parent's place, token, reason)."""
    places = {id(sequence): place for place, sequence in enumerate(request.sequences)}
    made = [Sample(list(sample), list(sample.values())) for sample in samples]
    branches = request.method.advance(request, made)
    answer = [(places[id(b.parent)], b.token_id, b.finish_reason) for b in branches]
    apply(request, branches)
    return answer


def test_the_best_candidates_of_all_beams_go_on_in_beam_order():
    """Catches beams that each keep one child: here the second beam dies and the first forks."""
    request = beam_request(beam_width=2)
    assert step(request, {5: -1.0, 6: -1.5, 7: -3.0, 8: -9.0}) == [(0, 5, None), (0, 6, None)]
    first = {1: -0.2, 2: -0.3, 3: -4.0, 4: -5.0}
    second = {1: -0.9, 2: -2.0, 3: -4.0, 4: -5.0}
    assert step(request, first, second) == [(0, 1, None), (0, 2, None)]
    assert [s.output_token_ids for s in request.sequences] == [[5, 1], [5, 2]]


def test_equal_scores_go_to_the_better_beam_and_then_to_the_smaller_token():
    """Catches an order that depends on how the candidates were listed."""
    request = beam_request(beam_width=3)
    assert step(request, {9: -1.0, 4: -1.0, 7: -1.0, 5: -1.0}) == [(0, 4, None), (0, 5, None), (0, 7, None)]
    same = {8: -1.0, 3: -1.0}
    assert step(request, same, same, same) == [(0, 3, None), (0, 8, None), (1, 3, None)]


def test_an_end_past_the_first_w_candidates_is_not_a_hypothesis():
    """Catches EOS collected from the reserve candidates, which transformers ignores."""
    request = beam_request(eos={0}, beam_width=2)
    assert step(request, {5: -1.0, 6: -1.5, 0: -1.6, 7: -2.0}) == [(0, 5, None), (0, 6, None)]
    assert request.method.num_candidates(request) == 4


def test_several_end_tokens_ask_for_more_candidates():
    """Catches 2 * W with three end tokens: the beam would run dry when they are all likely."""
    request = beam_request(eos={0, 1}, beam_width=2, stop_token_ids=[1, 2])
    assert request.method.num_candidates(request) == 8
    ends = {0: -0.1, 1: -0.2, 2: -0.3, 5: -2.0, 6: -3.0}
    assert step(request, ends) == [(0, 0, "stop"), (0, 1, "stop")]  # both beat any live beam: done
    assert ranked(request) == [[0]]


def test_ends_among_the_best_candidates_make_no_room_for_worse_ones(monkeypatch):
    """Catches more candidates than one beam is asked for. Stop strings may end any of them; then, as in
    transformers, fewer beams go on."""
    request = beam_request(beam_width=2)
    assert request.method.num_candidates(request) == 4
    step(request, {5: -1.0, 6: -1.1, 7: -3.0, 8: -4.0})
    monkeypatch.setattr(request.method.stop, "check", lambda _, token_id: "stop" if token_id < 5 else None)
    first, second = {1: -0.1, 7: -0.5, 2: -0.6, 8: -3.0}, {3: -0.55, 9: -1.0, 8: -3.0, 7: -4.0}
    assert step(request, first, second) == [(0, 1, "stop"), (0, 7, None)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "goes_on"),
    [
        (True, 1.0, False),
        (False, 1.0, False),  # -3 / 2 is worse than -1
        ("never", 1.0, True),  # -3 / 10 could still be better than -1
        ("never", 0.0, False),  # sums only fall
    ],
)
def test_early_stopping_says_what_a_live_beam_may_still_hope_for(early_stopping, length_penalty, goes_on):
    """Catches the three rules mixed up; width 1, hypothesis -1, live beam -3, at most 10 tokens."""
    request = beam_request(
        eos={0},
        beam_width=1,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
        max_num_tokens=12,
    )
    step(request, {5: -0.5, 6: -4.0})
    step(request, {0: -0.5 if length_penalty == 0 else -1.5, 6: -2.5})
    assert bool(request.sequences) is goes_on
    assert len(request.completions) == 1


@pytest.mark.parametrize(("early_stopping", "goes_on"), [(True, False), (False, True)])
def test_early_stopping_ends_the_search_even_if_a_live_beam_is_better(early_stopping, goes_on):
    """Catches True read as False: here the best live beam, -0.2 / 2, beats both hypotheses."""
    request = beam_request(eos={0}, beam_width=2, early_stopping=early_stopping)
    step(request, {5: -0.1, 0: -3.0, 6: -4.0, 7: -5.0})
    step(request, {6: -0.1, 0: -0.5, 7: -1.0, 8: -2.0}, {6: -9.0})
    assert [s.output_token_ids for s in request.completions] == [[0], [5, 0]]
    assert bool(request.sequences) is goes_on


def test_with_a_negative_length_penalty_a_live_beam_counts_at_its_present_length():
    """Catches "never" that judges it by the longest length, which is then its worst: -1.2 * 10 ** 0.5."""
    options = {"early_stopping": "never", "length_penalty": -0.5, "max_num_tokens": 12}
    request = beam_request(eos={0}, beam_width=2, **options)
    step(request, {0: -1.0, 5: -1.1, 6: -8.0, 7: -9.0})
    answer = step(request, {6: -0.1, 0: -0.2, 7: -9.0, 8: -9.5}, {6: -9.0})  # hypotheses -1, -1.3 * 2 ** 0.5
    assert answer == [(0, 0, "stop"), (0, 6, None), (0, 7, None)]


def test_a_live_beam_as_good_as_the_worst_hypothesis_is_hopeless():
    """Catches a search that goes on for a draw, which transformers does not."""
    request = beam_request(eos={0}, beam_width=1)
    assert step(request, {0: -1.0, 5: -1.0}) == [(0, 0, "stop")]


def test_at_the_last_length_the_w_best_end():
    """Catches live beams that are thrown away when the length is reached."""
    request = beam_request(beam_width=2, num_return_sequences=2, max_num_tokens=3)
    assert step(request, {5: -1.0, 6: -1.5, 7: -2.0, 8: -3.0}) == [(0, 5, "length"), (0, 6, "length")]
    assert ranked(request) == [[5], [6]]
    assert not request.sequences


def test_forbidden_tokens_are_not_candidates():
    """Catches a beam of probability zero that survives because the vocabulary is small."""
    request = beam_request(beam_width=2)
    assert step(request, {5: -1.0, 6: float("-inf"), 7: float("-inf")}) == [(0, 5, None)]


def test_beams_that_the_scheduler_ends_are_ranked_with_the_hypotheses():
    """Catches a request that outgrew the pool and returns nothing, or only what had already ended."""
    request = beam_request(eos={0}, beam_width=2, num_return_sequences=2)
    step(request, {0: -1.0, 5: -1.1, 6: -1.2, 7: -3.0})
    for sequence in request.sequences:
        sequence.finish_reason = "length"
    request.completions += request.sequences
    assert ranked(request) == [[0], [5]]


def test_a_search_without_a_token_has_a_score():
    """Catches a division by zero for a request that is looked at or aborted before its first token."""
    request = beam_request(beam_width=2)
    assert request.method.score(request.sequences[0]) == 0
    request.completions += request.sequences
    assert ranked(request) == [[]]


@pytest.mark.parametrize("logprob", [-2.0, -0.5], ids=["worse", "as good"])
def test_a_hypothesis_outside_the_best_w_is_not_kept(logprob):
    """Catches completions that pile up: each would be turned into text and counted."""
    request = beam_request(eos={0}, beam_width=1, early_stopping="never", max_num_tokens=1000)
    step(request, {0: -1.0, 5: -1.5})
    step(request, {0: logprob, 5: -2.5})
    assert [s.output_token_ids for s in request.completions] == [[0]]
    assert request.sequences


def test_a_hypothesis_is_compared_with_those_of_the_same_step_too():
    """Catches one that is kept although the one before it has just displaced what it beats: -1, -3 / 1."""
    request = beam_request(eos={0, 1}, beam_width=2, early_stopping="never", max_num_tokens=1000)
    step(request, {0: -1.0, 1: -3.0, 5: -3.1, 6: -3.2})
    step(request, {0: -0.1, 7: -9.0}, {0: -0.5, 7: -9.0})  # -3.2 / 2 is the second best, -3.7 / 2 the third
    assert [s.output_token_ids for s in request.completions] == [[0], [1], [5, 0]]


def test_a_hypothesis_that_was_beaten_counts_no_more():
    """Catches a search that goes on for what could only beat a hypothesis that is out of the best W."""
    request = beam_request(eos={0}, beam_width=1, early_stopping="never", max_num_tokens=12)
    step(request, {0: -1.0, 5: -1.1})
    step(request, {0: -0.1, 5: -0.2})
    assert [request.method.score(s) for s in request.completions] == pytest.approx([-1.0, -0.6])
    assert step(request, {5: -6.0, 6: -9.0}) == []  # -7.3 / 10 at the most


def test_a_step_that_is_tried_again_finds_the_same_hypotheses():
    """Catches hypotheses that a failed step leaves behind: the same ones would then not enter again."""
    request = beam_request(eos={0}, beam_width=2, num_return_sequences=2)
    step(request, {5: -0.1, 6: -0.2, 7: -3.0, 8: -4.0})
    ends = [Sample([0, 9], [-0.1, -9.0])] * 2
    answers = [request.method.advance(request, ends) for _ in range(3)]
    assert [branch.token_id for branch in answers[0]] == [0, 0]
    assert answers[1:] == answers[:1] * 2


def test_hypotheses_survive_a_neighbour_that_fails():
    """Catches a beam search that loses hypotheses when another request's `advance` fails after its own."""
    method, neighbour = beams(2, stop=3, early_stopping="never"), samples(1)
    engine = ToyEngine(toy_scheduler(), vocabulary=6)
    request = engine.add([1, 2], 20, method)
    engine.add([3], 20, neighbour)
    while engine.scheduler.has_unfinished:
        plan = engine.scheduler.schedule()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(neighbour, "advance", lambda *_: 1 / 0)
            if request in plan.sampling and len(plan.sampling) > 1:
                with pytest.raises(ZeroDivisionError):
                    engine.scheduler.commit(plan, engine.executor.execute(plan))
        engine.scheduler.roll_back(plan)
        engine.step()
    assert ranked(request) == ranked(run_alone([1, 2], 20, method, 6))
    assert any(completion.finish_reason == "stop" for completion in request.completions)


def test_only_the_partly_filled_last_block_of_a_beam_is_copied():
    """Catches a beam that copies what it has in common with another (section 4.4)."""
    engine = ToyEngine(toy_scheduler(block_size=4))
    request = engine.add(range(6), 20, beams(4))
    while engine.scheduler.has_unfinished:
        tables = [sequence.table for sequence in request.sequences]
        partly_filled = {table.blocks[-1] for table in tables if table.num_tokens % 4}
        assert {copy.source for copy in engine.step().copies} <= partly_filled
    assert engine.executor.num_copies > 4


@pytest.fixture(scope="module")
def oracle():
    """Imported here: the other tests of this file run where torch is not installed, and the time limit of a
    lesson's test does not count the seconds for transformers."""
    from tests.concepts import beam_oracle

    return beam_oracle


@pytest.mark.parametrize("group", range(8))
def test_ids_and_scores_are_those_of_transformers(group, oracle, monkeypatch):
    """Catches any deviation from `generate(num_beams=W)`; 40 random cases in one batch, 8 groups."""
    from minipaged.decoding.sampling import Sampler  # needs torch

    rng = random.Random(group)
    model = oracle.tiny_llama(group, vocab_size=rng.choice([24, 40]))
    requests, expected, ends = [], [], []
    eos = oracle.likely_tokens(model)[: group % 4]
    for case in range(40):
        prompt = [rng.randrange(model.config.vocab_size) for _ in range(rng.randint(1, 6))]
        width = WIDTHS[(case + group) % 8]
        length = rng.randint(1, 14)
        min_tokens = rng.choice([0, 0, rng.randint(0, length)])
        options = {
            "length_penalty": PENALTIES[rng.randrange(4)],
            "early_stopping": EARLY[rng.randrange(3)],
            "num_return_sequences": rng.randint(1, width),
        }
        params = BeamSearchParams(beam_width=width, max_tokens=length, min_tokens=min_tokens, **options)
        method = BeamSearch(params, StopChecker(params, eos))
        requests.append(make_request(prompt, method, params, len(prompt) + length))
        expected.append(
            oracle.hf_beam_search(
                model,
                prompt,
                eos,
                monkeypatch,
                num_beams=width,
                max_new_tokens=length,
                min_new_tokens=min_tokens or None,
                **options,
            )
        )
    decode(lambda tokens: oracle.logits_of(model, tokens), requests, Sampler(eos))
    for request, wanted in zip(requests, expected):
        best = list(request.method.rank(request))
        ends += [sequence.finish_reason for sequence in best]
        p, found, ids = request.params, [s.output_token_ids for s in best], [ids for ids, _ in wanted]
        search = f"width {p.beam_width}, penalty {p.length_penalty}, early_stopping {p.early_stopping}"
        assert found == ids, f"{search}: expected the tokens {ids}, got {found}; {p}"
        scores, right = [request.method.score(s) for s in best], [score for _, score in wanted]
        assert scores == pytest.approx(right, abs=1e-4), f"{search}: expected {right}, got {scores}; {p}"
    assert not eos or ends.count("stop") / len(ends) > 0.1, "EOS was hardly reached: the cases test little"
