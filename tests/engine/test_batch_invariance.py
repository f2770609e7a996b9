"""On a CPU, no bit of what a request gets depends on the other requests, or on how it is scheduled."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from minipaged import LLM, SamplingParams
from minipaged.execution.accel.packed_linear import is_left_to_onednn
from minipaged.kernels.dispatch import why_not_cpp

DTYPES = ["float32", "bfloat16"]
SCHEDULES = {
    "beside all others": {},
    "beside two others": {"max_num_seqs": 3},
    "in chunks": {"max_num_batched_tokens": 16},
    "prefills first": {"enable_chunked_prefill": False},
    "recomputed": {"num_blocks": 24, "preemption_mode": "recompute"},
    "swapped": {"num_blocks": 24, "preemption_mode": "swap"},
    "in blocks of 5": {"block_size": 5},
    "with draft tokens": {"num_speculative_tokens": 4},
}


def why_not(dtype):
    """Why this machine multiplies many rows in another order than one."""
    reason = why_not_cpp(torch.device("cpu"))
    if reason is None and is_left_to_onednn(getattr(torch, dtype)):
        reason = f"oneDNN multiplies many rows in {dtype} here"
    return reason


@cache
def requests():
    """Twelve prompts of 3 to 150 tokens, greedy and at temperature 1 in turn; some begin alike."""
    source = random.Random(5)
    common = [source.randrange(3, 1000) for _ in range(40)]
    prompts, params = [], []
    for number, length in enumerate([3, 20, 33, 64, 150, 7, 90, 41, 5, 17, 70, 48]):
        prompt = [source.randrange(3, 1000) for _ in range(length)]
        prompts.append({"prompt_token_ids": (common + prompt) if number % 3 == 0 else prompt})
        options = {"temperature": number % 2, "seed": number, "max_tokens": 20, "ignore_eos": True}
        params.append(SamplingParams(**options, logprobs=2 if number % 3 else None))
    return prompts, params


def results(outputs):
    """Of each request its tokens, and all log-probabilities as they are."""
    found = []
    for output in outputs:
        completion = output.outputs[0]
        steps = completion.logprobs or []
        likeliest = [{token: entry.logprob for token, entry in step.items()} for step in steps]
        found.append((completion.token_ids, completion.cumulative_logprob, likeliest))
    return found


@cache
def alone(dtype):
    """The results of the requests, one after another."""
    llm = LLM(dtype=dtype, enable_prefix_caching=False, disable_log_stats=True)
    return results([llm.generate(*pair)[0] for pair in zip(*requests())])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_schedule_changes_no_bit(dtype, schedule):
    """Catches a kernel that adds up a row in another order where there are more of them."""
    if reason := why_not(dtype):
        pytest.skip(reason)
    llm = LLM(dtype=dtype, enable_prefix_caching=False, disable_log_stats=True, **SCHEDULES[schedule])
    assert results(llm.generate(*requests())) == alone(dtype)
    metrics = llm.engine.metrics
    assert (metrics.num_preemptions > 0) == (schedule in ("recomputed", "swapped"))
    assert (metrics.blocks_swapped_out > 0) == (schedule == "swapped")
    assert (metrics.draft_tokens > 0) == (schedule == "with draft tokens")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hit_in_the_prefix_cache_changes_no_bit(dtype):
    """Catches keys and values that depend on how many tokens were computed with them."""
    if reason := why_not(dtype):
        pytest.skip(reason)
    llm = LLM(dtype=dtype, disable_log_stats=True)
    llm.generate(*requests())
    assert results(llm.generate(*requests())) == alone(dtype)
    assert llm.engine.metrics.prefix_cache_hits > 500


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype):
    """Catches sums that threads share."""
    if reason := why_not(dtype):
        pytest.skip(reason)
    expected, own = alone(dtype), torch.get_num_threads()
    try:
        torch.set_num_threads(2 if own == 1 else 1)
        llm = LLM(dtype=dtype, disable_log_stats=True)
        assert results(llm.generate(*requests())) == expected
    finally:
        torch.set_num_threads(own)
