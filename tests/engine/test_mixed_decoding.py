"""Greedy, samples and beams in one batch: each equals the same request alone (paper, section 4.4)."""

from __future__ import annotations

import logging

import pytest

from minipaged import BeamSearchParams, SamplingParams
from tests.engine.conftest import make_llm

METHODS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(n=4, temperature=0.8, seed=3, max_tokens=20, ignore_eos=True),
    BeamSearchParams(beam_width=4, num_return_sequences=4, max_tokens=20),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=11, max_tokens=20),
    BeamSearchParams(beam_width=3, length_penalty=0.6, early_stopping=True, max_tokens=20),
    SamplingParams(n=2, best_of=4, seed=5, repetition_penalty=1.3, max_tokens=20),
]


def run(llm, prompts, params):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [[(c.token_ids, c.finish_reason) for c in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def requests(prompts):
    return list(zip(prompts[:12], METHODS * 2))


@pytest.fixture(scope="module")
def results_alone(model, requests):
    llm = make_llm(model, enable_prefix_caching=False)
    return [run(llm, [prompt], [params])[0] for prompt, params in requests]


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no_caching"])
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "prefill_first"])
def test_each_request_of_a_mixed_batch_equals_itself_alone(
    model, requests, results_alone, caching, mode, chunked, caplog
):
    """Beams that lose their order after a swap, samples that change their stream when recomputed."""
    caplog.set_level(logging.ERROR)
    llm = make_llm(
        model,
        block_size=4,
        num_blocks=56,
        enable_prefix_caching=caching,
        preemption_mode=mode,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=64,
    )
    prompts, params = zip(*requests)
    assert run(llm, prompts, params) == results_alone
    assert llm.engine.metrics.num_preemptions > 0


def test_samples_with_different_seeds_differ_and_each_equals_its_seed_alone(model, prompts):
    """All samples drawing the same stream, or a stream that depends on the number of samples."""
    llm = make_llm(model)
    group = SamplingParams(n=4, temperature=1.0, seed=100, max_tokens=16, ignore_eos=True)
    texts = [tokens for tokens, _ in run(llm, prompts[:1], [group])[0]]
    assert len({tuple(tokens) for tokens in texts}) == 4
    for i, tokens in enumerate(texts):
        alone = SamplingParams(temperature=1.0, seed=100 + i, max_tokens=16, ignore_eos=True)
        assert run(llm, prompts[:1], [alone])[0][0][0] == tokens


def test_samples_share_the_prompt_and_copy_only_its_last_block(model):
    """Computing the prompt once per sample, or copying full blocks."""
    llm = make_llm(model, block_size=4, enable_prefix_caching=False)
    prompt = list(range(3, 13))  # two full blocks and a half
    plans = []
    llm.engine.on_planned.append(plans.append)
    run(llm, [prompt], [SamplingParams(n=3, seed=0, max_tokens=2, ignore_eos=True)])
    assert sum(plan.num_tokens for plan in plans) == 10 + 3
    assert [len(plan.copies) for plan in plans] == [0, 2]
    assert llm.engine.metrics.peak_kv_blocks == 3 + 2


def test_sharing_saves_more_blocks_the_wider_the_beam(model, prompts):
    """Beams that are copied instead of shared (paper, Fig. 15)."""
    saved = []
    for width in (2, 4, 6):
        llm = make_llm(model, block_size=4, enable_prefix_caching=False)
        run(llm, prompts[:4], [BeamSearchParams(beam_width=width, max_tokens=20)] * 4)
        saved.append(llm.engine.metrics.sharing_saving)
    assert 0.2 < saved[0] < saved[1] < saved[2] < 1
