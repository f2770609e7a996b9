"""What memory management costs, without a model: admission, hashing, prefix hits. CPU time of one thread.

`pytest tests/benchmarks/bench_manager.py --benchmark-columns=min,median` prints microseconds a call.
"""

import random
import time
from array import array

import pytest

from minipaged.memory import BlockAllocator, KVManager, OnDemand, PrefixCache
from tests.toy import kv_sequence

BLOCK_SIZE = 16
cpu_time = {"timer": time.process_time, "max_time": 0.3, "min_rounds": 20, "warmup": True}


def manager(num_blocks, caching):
    allocator = BlockAllocator(num_blocks)
    cache = PrefixCache(allocator, BLOCK_SIZE) if caching else None
    return KVManager(allocator, BLOCK_SIZE, OnDemand(), cache, watermark=0.0)


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(32_000) for _ in range(length)]


def admit(kv, sequence):
    """What the scheduler does for a prompt that it computes in one step."""
    group = [sequence]
    admission = kv.can_admit(group)
    kv.admit(group, admission)
    kv.register(sequence, len(sequence.token_ids))
    return admission


@pytest.mark.benchmark(group="admission of a 128-token prompt", **cpu_time)
@pytest.mark.parametrize("caching", [False, True], ids=["caching off", "caching on, no hit"])
def bench_admission(benchmark, caching):
    """Catches work that grows with the pool or is done twice."""
    kv = manager(20_000, caching)
    seeds = iter(range(10**6))

    def fresh():
        return (kv, kv_sequence(kv, prompt_of(128, next(seeds)))), {}

    admission = benchmark.pedantic(admit, setup=fresh, rounds=1000)
    assert admission.fits
    assert admission.num_cached_tokens == 0


@pytest.mark.benchmark(group="hashing 256 blocks of 16 tokens", **cpu_time)
def bench_hashing(benchmark):
    """Catches tokens that are copied one by one."""
    cache = manager(256, True).prefix_cache
    tokens = array("i", prompt_of(4096))

    def hash_all():
        hashes = []
        cache.extend_hashes(hashes, tokens)
        return hashes

    assert len(benchmark(hash_all)) == 256


@pytest.mark.benchmark(group="a fully cached prompt of 4096 tokens, looked up and admitted", **cpu_time)
def bench_full_hit(benchmark):
    """Catches a lookup that is slower than a part of the prefill it saves."""
    kv = manager(1000, True)
    prompt = prompt_of(4096)
    first = kv_sequence(kv, prompt, 5000)
    admit(kv, first)
    kv.commit_registered()
    kv.free([first])

    admitted = []

    def fresh():
        kv.free(admitted)  # the one before
        admitted[:] = [kv_sequence(kv, prompt, 5000)]
        return (kv, admitted[0]), {}

    admission = benchmark.pedantic(admit, setup=fresh, rounds=500)
    assert admission.num_cached_tokens == 4095


@pytest.mark.benchmark(group="allocate and free a block", **cpu_time)
@pytest.mark.parametrize("num_blocks", [100, 100_000])
@pytest.mark.parametrize("caching", [False, True], ids=["allocator", "prefix cache"])
def bench_allocate_and_free(benchmark, num_blocks, caching):
    """Catches an allocator whose cost grows with the pool."""
    kv = manager(num_blocks, caching)

    def turn():
        (block,) = kv.pool.allocate()
        kv.pool.free(block)

    benchmark(turn)
    assert kv.num_free == num_blocks
