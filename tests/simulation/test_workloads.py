"""Lengths, arrivals, files: published means, seeds, clear errors."""

import json
from dataclasses import replace
from itertools import islice, pairwise

import pytest

from minipaged.simulation.hardware import UnknownNameError
from minipaged.simulation.workloads import (
    ALPACA,
    CHAT,
    SHAREGPT,
    TRANSLATION,
    Arrival,
    Lengths,
    Lognormal,
    WorkloadError,
    find_workload,
    poisson,
    prompt_tokens,
    read_lengths,
    steady,
)


@pytest.mark.parametrize(
    ("workload", "prompt", "output"),
    [(SHAREGPT, 161.31, 337.99), (ALPACA, 19.31, 58.45)],
    ids=["sharegpt", "alpaca"],
)
def test_lengths_have_the_published_means(workload, prompt, output):
    """100,000 draws; the standard error is below 0.4 %. Catches a mean that holds only before the cut."""
    drawn = list(islice(workload.lengths(1), 100_000))
    assert sum(x.prompt for x in drawn) / len(drawn) == pytest.approx(prompt, rel=0.02)
    assert sum(x.output for x in drawn) / len(drawn) == pytest.approx(output, rel=0.02)


def test_sharegpt_varies_more_than_alpaca():
    """The paper's Fig. 11: both skewed to the right, ShareGPT with the higher variance."""

    def spread(workload):
        lengths = sorted(x.prompt + x.output for x in islice(workload.lengths(0), 20_000))
        mean = sum(lengths) / len(lengths)
        assert lengths[len(lengths) // 2] < mean, "not skewed to the right"
        return sum((x - mean) ** 2 for x in lengths) / len(lengths)

    assert spread(SHAREGPT) > 10 * spread(ALPACA)


def test_no_length_is_below_one_or_beyond_the_cut():
    """A prompt of 0 tokens could not be scheduled, 2,049 tokens not be held by the model."""
    drawn = list(islice(SHAREGPT.lengths(3), 20_000))
    assert min(min(x[:2]) for x in drawn) >= 1
    assert max(x.prompt + x.output for x in drawn) <= 2048


def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    def first(seed):
        return list(poisson(SHAREGPT, 2.0, 50, seed))

    assert first(0) == first(0) != first(1)


def test_lengths_do_not_depend_on_the_rate():
    """Systems and rates are compared on the same requests. Catches one generator for gaps and lengths."""
    slow, fast = (list(poisson(ALPACA, rate, 20, 0)) for rate in (1.0, 10.0))
    assert [a.lengths for a in slow] == [a.lengths for a in fast]
    assert [a.time for a in slow] == pytest.approx([10 * a.time for a in fast])


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process():
    """20,000 gaps: mean 1 / rate, standard deviation as large as the mean (1 % error each)."""
    times = [a.time for a in poisson(ALPACA, 4.0, 20_000, 0)]
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.03)
    assert (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)


def test_an_infinite_rate_is_everything_at_once():
    assert {a.time for a in poisson(ALPACA, float("inf"), 5, 0)} == {0.0}


def test_steady_arrivals_are_evenly_spaced():
    assert [a.time for a in steady(ALPACA, 10, 0.5)] == [0.0, 0.1, 0.2, 0.3, 0.4]


def test_requests_share_exactly_the_tokens_of_their_prefix():
    """Catches prompts that would hit the prefix cache by accident, or never."""
    a, b, c = (
        prompt_tokens(Arrival(i, 0.0, Lengths(10, 1, prefix, 6))) for i, prefix in enumerate((3, 3, 4))
    )
    assert a[:6] == b[:6] != c[:6]
    assert not set(a[6:]) & set(b[6:])
    assert len(a) == 10


def test_prompts_of_a_conversation_grow_until_they_are_cut():
    """Catches a history that is forgotten, or one that outgrows the model."""
    drawn = list(islice(CHAT.lengths(0), 3000))
    assert max(x.prompt for x in drawn) == 1024
    assert max(x.output for x in drawn) <= 1024
    assert sum(x.prompt for x in drawn) / len(drawn) > 2 * SHAREGPT.prompt.mean


def test_a_prefix_is_in_front_of_the_drawn_prompt():
    drawn = list(islice(replace(TRANSLATION, prefix_tokens=80).lengths(0), 100))
    assert min(x.prompt for x in drawn) > 80
    assert {x.prefix_tokens for x in drawn} == {80}


def test_lengths_from_a_file_are_drawn_as_they_are(tmp_path):
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps([[5, 7], [100, 1]]))
    drawn = set(islice(read_lengths(file).lengths(0), 50))
    assert drawn == {Lengths(5, 7), Lengths(100, 1)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[5, -7]]", r"entry 0 is \[5, -7\]; give \[prompt tokens, output tokens\], integers from 1 up"),
        ("[[5, 7], [0, 1]]", "entry 1 is"),
        ("[[5, 7], [1.5, 1]]", "entry 1 is"),
        ("[[5, true]]", "entry 0 is"),
        ("[]", "not empty"),
        ("{}", "must be a JSON list"),
        ("nonsense", "is not JSON"),
    ],
)
def test_a_bad_file_is_refused_with_its_entry(tmp_path, content, message):
    file = tmp_path / "lengths.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        find_workload(str(file))


def test_bad_names_rates_and_means_are_refused():
    with pytest.raises(UnknownNameError, match="choose one of sharegpt, alpaca"):
        find_workload("shareGPT")
    with pytest.raises(WorkloadError, match="rate is 0"):
        list(poisson(ALPACA, 0, 1, 0))
    with pytest.raises(WorkloadError, match="mean is 3000"):
        Lognormal(3000, 1.0, 2048)
