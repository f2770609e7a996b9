"""What the prefix cache costs and saves, without a model. CPU time of one thread.

pytest tests/benchmarks/bench_prefix_cache.py --benchmark-columns=min,median,rounds
"""

import time
from array import array

import pytest

from tests.benchmarks.bench_manager import BLOCK_SIZE, admit, manager, prompt_of
from tests.benchmarks.bench_scheduler import add, scheduler_of, step
from tests.toy import kv_sequence

cpu_time = {"timer": time.process_time, "max_time": 0.3, "min_rounds": 10, "warmup": False}


@pytest.mark.benchmark(group="a cached prompt looked up, by its length", **cpu_time)
@pytest.mark.parametrize("length", [256, 1024, 4096, 16384])
def bench_lookup(benchmark, length):
    """Catches a look-up that grows faster than the prompt."""
    kv = manager(2000, True)
    prompt = prompt_of(length)
    first = kv_sequence(kv, prompt, 20_000)
    admit(kv, first)
    kv.commit_registered()
    kv.free([first])

    def fresh():
        return ([kv_sequence(kv, prompt, 20_000)],), {}

    admission = benchmark.pedantic(kv.can_admit, setup=fresh, rounds=100)
    assert admission.num_cached_tokens == length - 1


@pytest.mark.benchmark(group="hashing 4096 tokens, by block size", **cpu_time)
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def bench_hashing(benchmark, block_size):
    """Larger blocks hash quicker and match less."""
    cache = manager(16, True).prefix_cache
    cache.block_size = block_size
    tokens = array("i", prompt_of(4096))

    def hash_all():
        hashes = []
        cache.extend_hashes(hashes, tokens)
        return hashes

    assert len(benchmark(hash_all)) == 4096 // block_size


@pytest.mark.benchmark(group="32 blocks allocated, by where they come from", **cpu_time)
@pytest.mark.parametrize("source", ["free", "evicted"])
def bench_eviction(benchmark, source):
    """Catches an eviction that searches for the block to evict."""
    kv = manager(10_000, True)
    if source == "evicted":
        sequence = kv_sequence(kv, prompt_of(10_000 * BLOCK_SIZE), 1 << 20)
        admit(kv, sequence)
        kv.commit_registered()
        kv.free([sequence])
    taken = []

    def take():
        taken.append(kv.pool.allocate(32))

    benchmark.pedantic(take, rounds=300)
    assert len({block for blocks in taken for block in blocks}) == 32 * len(taken)


@pytest.mark.benchmark(group="64 requests to their end, by what their prompts share", **cpu_time)
@pytest.mark.parametrize("shared", ["caching off", "nothing", "half", "all"])
def bench_requests(benchmark, shared):
    """Scheduling alone, prompts of 256, 16 tokens each: what hits and misses cost beside the model."""

    def fresh():
        scheduler = scheduler_of(64 * 40, caching=shared != "caching off", max_num_seqs=16)
        for number in range(64):
            seed = {"all": 0, "half": number % 2 * number}.get(shared, number)
            add(scheduler, seed, prompt_length=256, max_tokens=16)
        return (scheduler,), {}

    def drain(scheduler):
        cached = 0
        while scheduler.has_unfinished:
            plan = step(scheduler)
            cached += sum(e.detail["cached_tokens"] for e in plan.events if e.kind == "admitted")
        return cached

    cached = benchmark.pedantic(drain, setup=fresh, rounds=10)
    # 16 start together: blocks of that very step are shared only where they are full and not the last.
    assert cached == {"half": 7 * 240 + 24 * 255, "all": 15 * 240 + 48 * 255}.get(shared, 0)
