"""Requests through the whole engine to their end: the alternatives of each concept side by side.

16 requests with prompts of 20 to 120 tokens and 8 to 40 new ones, a 3.4 M Llama, CPU time of one thread.

    pytest tests/benchmarks/bench_end_to_end.py --benchmark-columns=min,median,rounds
"""

import random
import time

import pytest
import torch

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.config import config_from
from minipaged.execution.model_runner import ModelRunner

cpu_time = {"timer": time.process_time, "warmup": False}
ROUNDS = 5


def requests_of(shared=0):
    """Prompts, the first `shared` tokens of each the same, and how many tokens each asks for."""
    rng = random.Random(0)
    prefix = [rng.randrange(3, 1000) for _ in range(shared)]
    prompts = [[*prefix, *(rng.randrange(3, 1000) for _ in range(rng.randint(20, 120)))] for _ in range(16)]
    return prompts, [rng.randint(8, 40) for _ in prompts]


def llm_of(model, **options):
    config = {"num_blocks": 1000, "max_num_seqs": 16, "disable_log_stats": True} | options
    runner = ModelRunner(model, config_from(config))
    runner.optimize()
    return LLM(executor=runner, **config)


def run(benchmark, llm, shared=0, params=None):
    """All requests to their end, from an empty cache; returns the first completions."""
    prompts, lengths = requests_of(shared)
    params = params or (lambda length: SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))

    def fresh():
        llm.engine.reset_prefix_cache()
        llm.engine.reset_metrics()

    def generate():
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return llm.generate(inputs, [params(length) for length in lengths])

    outputs = benchmark.pedantic(generate, setup=fresh, rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["peak KV blocks"] = llm.engine.metrics.peak_kv_blocks
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert [len(ids) for ids in tokens] == lengths
    llm.engine.check_invariants()
    return tokens


@pytest.mark.benchmark(group="16 requests, by page growth", **cpu_time)
@pytest.mark.parametrize("page_growth", ["on_demand", "chunked", "reserve"])
def bench_page_growth(benchmark, llama, page_growth):
    """In a pool that holds few requests at their longest: what is reserved keeps others waiting."""
    run(benchmark, llm_of(llama, page_growth=page_growth, num_blocks=60))


@pytest.mark.benchmark(group="16 requests in a pool for 6, by preemption", **cpu_time)
@pytest.mark.parametrize("mode", ["none, pool for all", "recompute", "swap"])
def bench_preemption(benchmark, llama, mode):
    """Catches a way out and back that costs more than waiting would."""
    options = {"num_blocks": 40, "preemption_mode": mode} if mode in ("recompute", "swap") else {}
    llm = llm_of(llama, enable_prefix_caching=False, **options)
    run(benchmark, llm)
    assert bool(llm.engine.metrics.num_preemptions) == bool(options)


@pytest.mark.benchmark(group="16 requests, by batch policy", **cpu_time)
@pytest.mark.parametrize("policy", ["prefill first", "chunked prefill"])
def bench_batch_policy(benchmark, llama, policy):
    """8 at a time, 128 tokens a step: prompts alone, or beside the decodes."""
    chunked = policy == "chunked prefill"
    run(
        benchmark,
        llm_of(llama, enable_chunked_prefill=chunked, max_num_seqs=8, max_num_batched_tokens=128),
    )


@pytest.mark.benchmark(group="16 requests, by block size", **cpu_time)
@pytest.mark.parametrize("block_size", [4, 16, 32, 128])
def bench_block_size(benchmark, llama, block_size):
    """Catches overheads per block; the peak in `extra_info` shows what large ones waste."""
    run(benchmark, llm_of(llama, block_size=block_size, num_blocks=16_000 // block_size))


@pytest.mark.benchmark(group="16 requests, by a shared prefix of 256 tokens", **cpu_time)
@pytest.mark.parametrize("caching", [False, True], ids=["caching off", "caching on"])
def bench_prefix_caching(benchmark, llama, caching):
    """Catches a cache that is hit and saves nothing."""
    llm = llm_of(llama, enable_prefix_caching=caching)
    run(benchmark, llm, shared=256)
    assert bool(llm.engine.metrics.prefix_cache_hits) == caching


@pytest.mark.benchmark(group="16 requests, by decoding method", **cpu_time)
@pytest.mark.parametrize("method", ["greedy", "sample", "4 samples", "4 beams"])
def bench_method(benchmark, llama, method):
    """Four completions share their prompt's blocks: they may not cost four times one."""
    made = {
        "sample": lambda length: SamplingParams(max_tokens=length, ignore_eos=True, seed=1),
        "4 samples": lambda length: SamplingParams(n=4, max_tokens=length, ignore_eos=True, seed=1),
        "4 beams": lambda length: BeamSearchParams(beam_width=4, max_tokens=length, ignore_eos=True),
    }
    run(benchmark, llm_of(llama, max_num_seqs=64), params=made.get(method))


WHO = pytest.mark.parametrize("who", ["minipaged", "transformers, one by one", "transformers, padded batch"])


def against_generate(benchmark, model, who):
    """The same tokens from `model.generate`, whose padded batch runs until its longest request ends."""
    prompts, lengths = requests_of()
    model.generation_config.pad_token_id = 0

    def generate(batch, max_tokens):
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        options = {"do_sample": False, "max_new_tokens": max_tokens, "eos_token_id": None}
        return model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()

    def padded():
        return [row[:length] for row, length in zip(generate(prompts, max(lengths)), lengths)]

    def one_by_one():
        return [generate([prompt], length)[0] for prompt, length in zip(prompts, lengths)]

    model.generation_config.eos_token_id = None
    expected = padded()
    if who == "minipaged":
        tokens = run(benchmark, llm_of(model))
    else:
        with torch.inference_mode():
            tokens = benchmark.pedantic(one_by_one if "one" in who else padded, rounds=3)
    assert tokens == expected


@pytest.mark.benchmark(group="16 requests, by who runs them", **cpu_time)
@WHO
def bench_against_generate(benchmark, llama, who):
    """A Llama."""
    against_generate(benchmark, llama, who)


@pytest.mark.benchmark(group="16 requests to a hybrid model, by who runs them", **cpu_time)
@WHO
def bench_hybrid_against_generate(benchmark, hybrid, who):
    """Catches recurrent layers that are called for each decode, or whose states are copied each time."""
    against_generate(benchmark, hybrid, who)
