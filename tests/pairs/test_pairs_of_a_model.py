"""Every feature with every other over a real model: greedy tokens stay those of transformers in fp32."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.scheduling import Request
from tests.engine.conftest import make_llm, reference_greedy
from tests.models.zoo import build

MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
AMPLE, TINY = 256, 17

# What a feature changes in the settings, and whom it puts beside the greedy requests.
SETTINGS: dict[str, dict[str, Any]] = {
    "prefix_caching": {"enable_prefix_caching": True},
    "chunked_prefill": {"enable_chunked_prefill": True, "max_num_batched_tokens": 9},
    "swap": {"preemption_mode": "swap", "num_blocks": TINY},
    "recompute": {"preemption_mode": "recompute", "num_blocks": TINY},
    "chunked_growth": {"page_growth": "chunked"},
    "reserve": {"page_growth": "reserve"},
    "tiny_pool": {"num_blocks": TINY},
    "seats": {"max_num_seqs": 4},
    "speculation": {"num_speculative_tokens": 3},
    "parallel_sampling": {},
    "beams": {},
    "stop_token": {},
    "abort": {},
}
COMPANIONS = {
    "parallel_sampling": SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True),
    "beams": BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True),
}
EXCLUSIVE = {frozenset({"swap", "recompute"}), frozenset({"chunked_growth", "reserve"})}
PAIRS = [pair for pair in itertools.combinations(SETTINGS, 2) if frozenset(pair) not in EXCLUSIVE]


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Some with a common beginning of two blocks and a half, some alone."""
    common = [(7 * i) % 90 + 5 for i in range(10)]
    return [[*common, 11 + i, 40 - i] for i in range(3)] + [[60 + i] * 3 + [20, 30 + i] for i in range(3)]


@pytest.fixture(scope="module")
def expected(model, prompts) -> list[list[int]]:
    return [reference_greedy(model, prompt, MAX_TOKENS) for prompt in prompts]


def run(llm: LLM, prompts: list[list[int]], features: set[str], stop: int) -> list[Request]:
    """The greedy requests, with the companions of the features between them; one is aborted half-way."""
    greedy = [
        GREEDY if "stop_token" not in features else SamplingParams(
            temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, stop_token_ids=(stop,)
        )
    ] * len(prompts)  # fmt: skip
    engine = llm.engine
    requests = []
    for i, (prompt, params) in enumerate(zip(prompts, greedy)):
        requests.append(engine.add_request(f"greedy-{i}", prompt, params))
        for name in features & COMPANIONS.keys():
            engine.add_request(f"{name}-{i}", prompt[: 4 + i], COMPANIONS[name])
    if "abort" in features:
        engine.add_request("aborted", prompts[0], GREEDY)
    for step in itertools.count():
        if not engine.has_unfinished:
            return requests
        if step == 5:
            engine.abort("aborted")
        engine.step()
        engine.check_invariants()
    raise AssertionError


def until(tokens: list[int], stop: int) -> list[int]:
    """Up to and including the stop token."""
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_two_features_together_leave_the_greedy_tokens_as_they_are(model, prompts, expected, pair, caplog):
    """Bugs of this field live where two features meet."""
    caplog.set_level(logging.ERROR)
    features = set(pair)
    options: dict[str, Any] = {"block_size": 4, "num_blocks": AMPLE, "enable_prefix_caching": False}
    for name in pair:
        options |= SETTINGS[name]
    stop = expected[0][6]
    llm = make_llm(model, **options)
    requests = run(llm, prompts, features, stop)
    cut: Callable[[list[int]], list[int]] = (
        (lambda tokens: until(tokens, stop)) if "stop_token" in features else list
    )
    assert [r.completions[0].output_token_ids for r in requests] == [cut(tokens) for tokens in expected]
    assert llm.engine.scheduler.kv.num_used == 0
    metrics = llm.engine.metrics
    gentle = {"reserve", "seats", "chunked_prefill"}  # so few run at once that nobody need give way
    if features & {"swap", "recompute", "tiny_pool"} and not features & gentle:
        assert metrics.num_preemptions > 0
    if "prefix_caching" in features:
        assert metrics.prefix_cache_hits > 0
    if "speculation" in features:
        assert metrics.draft_tokens > 0
    if "abort" in features:
        assert metrics.request_success["abort"] == 1
