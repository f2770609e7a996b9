"""What sampling costs beside itself: 256 settings against one, greedy against its logits.

`pytest tests/benchmarks/bench_sampling.py --benchmark-columns=min,median`. Read the groups: in
each, "256 settings" should take less than twice "one setting".
"""

import random

import pytest
import torch

from minipaged.decoding.params import SamplingParams
from minipaged.decoding.sampling import Sampler
from minipaged.decoding.stopping import StopChecker
from tests.concepts.decoding_driver import make_sequence, schedule

ROWS, VOCAB = 256, 8_000
CENTER = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}


def varied(rng, penalties):
    options = {
        "temperature": rng.uniform(0.3, 1.5),
        "top_k": rng.randint(1, 99),
        "top_p": rng.uniform(0.5, 1.0),
        "min_p": rng.uniform(0, 0.1),
    }
    if penalties:
        options |= {
            "repetition_penalty": rng.uniform(0.8, 1.4),
            "frequency_penalty": rng.uniform(0, 1),
            "presence_penalty": rng.uniform(0, 1),
        }
    return options


def batch(options_of_row):
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(150)] for _ in range(ROWS)]
    return [
        schedule(make_sequence(prompt, prompt[:100], SamplingParams(seed=row, **options_of_row(row))))
        for row, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def logits():
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("penalties", [False, True], ids=["filters", "filters and penalties"])
@pytest.mark.parametrize("settings", ["one setting", "256 settings"])
def bench_random_rows(benchmark, logits, settings, penalties):
    """Each row a setting of its own, or all the same."""
    rng = random.Random(1)
    same = CENTER | (PENALTIES if penalties else {})
    scheduled = batch(lambda row: same if settings == "one setting" else varied(rng, penalties))
    benchmark.group = "filters and penalties" if penalties else "filters"
    benchmark(Sampler(), logits, scheduled)


@pytest.mark.parametrize("options", [{}, {"logprobs": 0}], ids=["plain", "general path"])
def bench_greedy_rows(benchmark, logits, options):
    """The short way of an all-greedy batch, and the general one."""
    benchmark.group = "greedy"
    benchmark(Sampler(), logits, batch(lambda row: {"temperature": 0, **options}))


def bench_random_rows_without_filters(benchmark, logits):
    """Noise for the whole vocabulary and nothing else."""
    benchmark.group = "filters"
    benchmark(Sampler(), logits, batch(lambda row: {}))


@pytest.mark.benchmark(group="a stop check without stop strings")
def bench_stop_check(benchmark):
    """Text or sets built per token would show here: 256 sequences at 1,500 steps/s leave 2.6 us each."""
    checker = StopChecker(SamplingParams(max_tokens=None), [0])
    sequence = make_sequence([1], params=None)
    assert benchmark(checker.check, sequence, 3) is None
