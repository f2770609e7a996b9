"""One step of the whole engine, and each of its parts: 32 sequences of a 3.4 M Llama. CPU time of one thread.

pytest tests/benchmarks/bench_step.py --benchmark-columns=min,median,rounds
"""

import copy
import random
import time

import pytest
import torch

from minipaged import LLM, SamplingParams
from minipaged.config import config_from
from minipaged.execution.accel.packed_linear import can_pack, pack_linears
from minipaged.execution.model_runner import ModelRunner
from minipaged.scheduling import StepResult
from tests.benchmarks.bench_kernels import cpp

cpu_time = {"timer": time.process_time, "max_time": 0.5, "min_rounds": 5, "warmup": False}
packs = pytest.mark.skipif(not can_pack(), reason="this build of PyTorch cannot pack weights")
NUM_SEQUENCES = 32


def engine_of(model, rebuilt=True, **options):
    """An engine over a model that it may change."""
    config = {"max_num_seqs": NUM_SEQUENCES, "num_blocks": 3000, "disable_log_stats": True} | options
    runner = ModelRunner(model, config_from(config))
    if rebuilt:
        runner.optimize()
    return LLM(executor=runner, **config).engine


def add(engine, num_requests, prompt_length, max_tokens=1000):
    rng = random.Random(prompt_length)
    for number in range(num_requests):
        prompt = [rng.randrange(3, 1000) for _ in range(prompt_length)]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(f"{prompt_length}-{number}", prompt, params)


def decoding(model, context=200, **options):
    """An engine whose next steps are decodes only."""
    engine = engine_of(model, **options)
    add(engine, NUM_SEQUENCES, context)
    while any(request.sequences[0].num_generated_tokens == 0 for request in all_requests(engine)):
        engine.step()
    return engine


def all_requests(engine):
    return [*engine.scheduler.running, *engine.scheduler.waiting]


@pytest.mark.benchmark(group="a step of 32 decodes, by attention backend", **cpu_time)
@pytest.mark.parametrize("backend", ["torch", cpp])
def bench_backend(benchmark, llama, backend):
    """Catches a kernel whose gain is lost on the way to it."""
    engine = decoding(llama, attention_backend=backend)
    assert len(benchmark(engine.step)) == NUM_SEQUENCES


@pytest.mark.benchmark(group="a step of 32 decodes, by model", **cpu_time)
@pytest.mark.parametrize("model", ["as given", pytest.param("rebuilt", marks=packs)])
def bench_model(benchmark, llama, model):
    """Catches fused layers and packed weights that some change of the model's layers has undone."""
    engine = decoding(llama, rebuilt=model == "rebuilt")
    assert len(benchmark(engine.step)) == NUM_SEQUENCES


@pytest.mark.benchmark(group="a step of 32 decodes, by block size", **cpu_time)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def bench_block_size(benchmark, llama, block_size):
    """Catches a cost per block in what is done per step."""
    engine = decoding(llama, block_size=block_size)
    assert len(benchmark(engine.step)) == NUM_SEQUENCES


@pytest.mark.benchmark(group="a step of 32 decodes, by context", **cpu_time)
@pytest.mark.parametrize("context", [30, 200, 600])
def bench_context(benchmark, llama, context):
    """What the part that grows with the context, attention, has in a step."""
    engine = decoding(llama, context)
    assert len(benchmark(engine.step)) == NUM_SEQUENCES


@pytest.mark.benchmark(group="a step by what it computes", **cpu_time)
@pytest.mark.parametrize("step", ["32 decodes", "a prompt of 512", "31 decodes and 512 of a prompt"])
def bench_mixture(benchmark, llama, step):
    """Catches a prompt that costs more among decodes than alone (chunked prefill)."""
    engine = engine_of(llama, max_num_batched_tokens=512 + 31, enable_prefix_caching=False)

    def fresh():
        for request in all_requests(engine):
            engine.abort(request.request_id)
        if step != "a prompt of 512":
            add(engine, NUM_SEQUENCES - ("31" in step), 16)
            engine.step()
        if "512" in step:
            add(engine, 1, 512)

    benchmark.pedantic(engine.step, setup=fresh, rounds=10)
    assert len(engine.scheduler.running) == (1 if step == "a prompt of 512" else NUM_SEQUENCES)


@pytest.mark.benchmark(group="parts of a step of 32 decodes", **cpu_time)
@pytest.mark.parametrize("part", ["schedule", "plan to tensors", "forward", "sample", "commit"])
def bench_part(benchmark, llama, part):
    """Schedule, tensors, forward pass, sampling and commit, each alone."""
    engine = decoding(llama)
    runner, scheduler = engine.executor, engine.scheduler
    plan = scheduler.schedule()
    with torch.inference_mode():
        batch = runner.builder.build(plan.scheduled)
        logits = runner.forward(batch).clone()
        result = StepResult(runner.sampler(logits, batch.sampling))
    scheduler.commit(plan, result)
    plans = []

    def commit_last():
        if plans:
            scheduler.commit(plans.pop(), result)

    def schedule_next():
        commit_last()
        plans.append(scheduler.schedule())
        return (plans.pop(), result), {}

    with torch.inference_mode():
        match part:
            case "schedule":
                benchmark.pedantic(lambda: plans.append(scheduler.schedule()), setup=commit_last, rounds=200)
            case "commit":
                benchmark.pedantic(scheduler.commit, setup=schedule_next, rounds=200)
            case "plan to tensors":
                benchmark(runner.builder.build, plan.scheduled)
            case "forward":
                benchmark(runner.forward, batch)
            case "sample":
                benchmark(runner.sampler, logits, batch.sampling)
    commit_last()
    engine.check_invariants()


@pytest.mark.benchmark(group="a forward pass of 32 rows", **cpu_time)
@pytest.mark.parametrize("what", ["transformers, no past", "paged, context 200"])
def bench_against_the_model_alone(benchmark, llama, what):
    """The bound: the model's own layers over as many rows, attending to nothing before them."""
    alone = copy.deepcopy(llama)
    if can_pack():
        pack_linears(alone)
    engine = decoding(llama)
    with torch.inference_mode():
        batch = engine.executor.builder.build(engine.scheduler.schedule().scheduled)
        ids = batch.input_ids.T  # 32 sequences of one token
        if what == "transformers, no past":
            logits = benchmark(lambda: alone(input_ids=ids, use_cache=False).logits)
        else:
            logits = benchmark(engine.executor.forward, batch)
    assert logits.numel() == NUM_SEQUENCES * 1024
