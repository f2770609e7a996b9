"""Greedy tokens are those of transformers, whatever the settings and whoever else is in the batch."""

from __future__ import annotations

import logging

import pytest

from minipaged import SamplingParams
from tests.engine.conftest import make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def run(llm, prompts) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
    llm.engine.check_invariants()
    return [output.outputs[0].token_ids for output in outputs]


def blocks_for_largest(prompts, block_size: int) -> int:
    """The smallest pool in which every request can run to its end alone."""
    return max(-(-(len(prompt) + 24) // block_size) for prompt in prompts)


def test_greedy_texts_of_the_reference_vary(expected):
    """A model that repeats one token would make every equality below pass by luck."""
    assert sum(len(set(tokens)) > 6 for tokens in expected) > 24


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("pool", ["ample", "tight"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "prefill_first"])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no_caching"])
def test_tokens_do_not_depend_on_blocks_pool_policy_or_cache(
    model, prompts, expected, block_size, pool, chunked, caching, caplog
):
    """Wrong slots at a block boundary, a lost block, a stale prefix, a mixed-up chunk."""
    caplog.set_level(logging.ERROR)
    prompts, expected = prompts[:12], expected[:12]
    num_blocks = 4096 if pool == "ample" else 2 * blocks_for_largest(prompts, block_size)
    llm = make_llm(
        model,
        block_size=block_size,
        num_blocks=num_blocks,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=caching,
        max_num_batched_tokens=48,
        max_num_seqs=16,
    )
    assert run(llm, prompts) == expected
    if pool == "tight":
        assert llm.engine.metrics.num_preemptions > 0


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("growth", ["on_demand", "chunked", "reserve"])
def test_tokens_do_not_depend_on_preemption_or_growth(model, prompts, expected, mode, growth, caplog):
    """Blocks swapped to the wrong place, recomputation that drops a token, preallocated blocks shared."""
    caplog.set_level(logging.ERROR)
    prompts, expected = prompts[:16], expected[:16]
    num_blocks = 2 * blocks_for_largest(prompts, 4)
    llm = make_llm(model, block_size=4, num_blocks=num_blocks, preemption_mode=mode, page_growth=growth)
    assert run(llm, prompts) == expected
    metrics = llm.engine.metrics
    if growth == "on_demand":
        assert metrics.num_preemptions > 0
        assert (metrics.blocks_swapped_in > 0) == (mode == "swap" or metrics.blocks_swapped_out > 0)


@pytest.mark.parametrize("budget", [1, 5, 17, 2048])
def test_tokens_do_not_depend_on_the_chunk_size(model, prompts, expected, budget):
    """A chunk that attends to positions after it, or writes to the slots of another."""
    llm = make_llm(model, max_num_batched_tokens=budget)
    assert run(llm, prompts[:8]) == expected[:8]


def test_tokens_are_the_same_alone_and_in_a_batch(model, prompts, expected):
    """A request whose result depends on its neighbours."""
    llm = make_llm(model)
    assert [run(llm, [prompt])[0] for prompt in prompts[:6]] == expected[:6]
    assert run(llm, prompts) == expected


def test_a_second_run_hits_the_prefix_cache_and_says_the_same(model, prompts, expected):
    """A cached block with foreign or stale content; a fully cached prompt computes one token."""
    llm = make_llm(model, block_size=4)
    assert run(llm, prompts) == expected
    llm.engine.reset_metrics()
    assert run(llm, prompts) == expected
    metrics = llm.engine.metrics
    cached = sum(min(len(p) // 4 * 4, len(p) - 1) for p in prompts)
    assert metrics.prefix_cache_hits == cached
    assert metrics.prefix_cache_queries == sum(map(len, prompts))
