"""What a step costs beside the model: `schedule` + `commit`, the executor left out. CPU time of one thread.

`pytest tests/benchmarks/bench_scheduler.py --benchmark-columns=min,median,ops` prints steps/s.
"""

import random
import time

import pytest

from minipaged.decoding.methods import SamplingMethod
from minipaged.decoding.params import SamplingParams
from minipaged.decoding.stopping import StopChecker
from minipaged.memory import BlockAllocator, Chunked, KVManager, OnDemand, PrefixCache, Reserve, SwapSpace
from minipaged.scheduling import (
    ChunkedPrefill,
    FCFSScheduler,
    Recompute,
    Request,
    Sample,
    StepResult,
    Swap,
)

cpu_time = {"timer": time.process_time}
ROUNDS = 640  # steps; every 16th takes a block for each sequence
MAX_LENGTH = 100_000
SAMPLE = Sample([7], [-0.1])


def scheduler_of(
    num_blocks, *, growth=None, preemption=None, caching=True, num_host_blocks=0, max_num_seqs=1024
):
    allocator = BlockAllocator(num_blocks)
    kv = KVManager(
        allocator,
        16,
        growth or OnDemand(),
        PrefixCache(allocator, 16) if caching else None,
        SwapSpace(num_host_blocks, num_blocks) if num_host_blocks else None,
    )
    return FCFSScheduler(kv, ChunkedPrefill(), preemption or Recompute(), max_num_seqs, 1 << 20, MAX_LENGTH)


def add(scheduler, number, prompt_length=128, max_tokens=MAX_LENGTH):
    """A greedy request as the engine makes it."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    method = SamplingMethod(params, StopChecker(params, (2,)))
    rng = random.Random(number)
    prompt = [rng.randrange(32_000) for _ in range(prompt_length)]
    limit = min(prompt_length + max_tokens, MAX_LENGTH)
    request = Request(f"r{number}", prompt, method, params, limit, scheduler.kv.new_table())
    scheduler.add(request)
    return request


def step(scheduler, answers={}):  # noqa: B006  (one answer a batch size, made once)
    """One step without a model."""
    plan = scheduler.schedule()
    count = len(plan.sampling)  # (each has one sequence)
    if count not in answers:
        answers[count] = StepResult([SAMPLE] * count)
    scheduler.commit(plan, answers[count])
    return plan


def running(num_running, num_waiting=0, **options):
    scheduler = scheduler_of(num_running * 100, max_num_seqs=num_running, **options)
    for number in range(num_running):
        add(scheduler, number)
    step(scheduler)
    assert len(scheduler.running) == num_running
    for number in range(num_waiting):
        add(scheduler, number)
    return scheduler


@pytest.mark.benchmark(group="a step, by running decodes", **cpu_time)
@pytest.mark.parametrize("num_running", [64, 128, 256, 512])
def bench_decodes(benchmark, num_running):
    """Catches a cost that grows faster than the number of running sequences."""
    scheduler = running(num_running)
    plan = benchmark.pedantic(step, (scheduler,), rounds=ROUNDS)
    assert len(plan.scheduled) == num_running


@pytest.mark.benchmark(group="a step of 256 decodes, by waiting requests", **cpu_time)
@pytest.mark.parametrize("num_waiting", [0, 10_000])
def bench_waiting(benchmark, num_waiting):
    """Catches a look at everybody who waits."""
    scheduler = running(256, num_waiting)
    plan = benchmark.pedantic(step, (scheduler,), rounds=ROUNDS)
    assert len(plan.scheduled) == 256
    assert len(scheduler.waiting) == num_waiting


@pytest.mark.benchmark(group="a step of 256 decodes, by prefix caching", **cpu_time)
@pytest.mark.parametrize("caching", [False, True], ids=["off", "on"])
def bench_caching(benchmark, caching):
    """Catches hashing in steps that fill no block."""
    scheduler = running(256, caching=caching)
    plan = benchmark.pedantic(step, (scheduler,), rounds=ROUNDS)
    assert len(plan.scheduled) == 256


@pytest.mark.benchmark(group="a step of 256 decodes, by page growth", **cpu_time)
@pytest.mark.parametrize("growth", [OnDemand, Chunked, Reserve], ids=lambda g: g.__name__)
def bench_growth(benchmark, growth):
    """Catches a policy that is asked for every token."""
    scheduler = scheduler_of(256 * 100, growth=growth(), max_num_seqs=256)
    for number in range(256):
        add(scheduler, number, max_tokens=1400)
    step(scheduler)
    assert len(scheduler.running) == 256
    plan = benchmark.pedantic(step, (scheduler,), rounds=ROUNDS)
    assert len(plan.scheduled) == 256


@pytest.mark.benchmark(group="64 requests to their end, by preemption", **cpu_time)
@pytest.mark.parametrize("preemption", ["none", "recompute", "swap"])
def bench_preemption(benchmark, preemption):
    """Catches a preemption and resumption that cost more than the steps around them."""

    def fresh():
        num_blocks = 64 * 20 if preemption == "none" else 64 * 9
        policy = Swap() if preemption == "swap" else Recompute()
        scheduler = scheduler_of(num_blocks, preemption=policy, num_host_blocks=num_blocks, caching=False)
        for number in range(64):
            add(scheduler, number, max_tokens=128)
        return (scheduler,), {}

    def drain(scheduler):
        while scheduler.has_unfinished:
            step(scheduler)
        return scheduler.num_preemptions

    num_preemptions = benchmark.pedantic(drain, setup=fresh, rounds=10)
    assert bool(num_preemptions) == (preemption != "none")
