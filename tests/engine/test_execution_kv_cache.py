"""Pool tensors: their shapes and sizes, and the moves of blocks in the order of a plan."""

import pytest
import torch

from minipaged.config import ConfigError, EngineConfig
from minipaged.execution.attention import LayerSpec
from minipaged.execution.kv_cache import KVCache
from minipaged.execution.memory_budget import (
    DEFAULT_CPU_MEMORY,
    block_bytes,
    gpu_budget,
    num_kept_states,
    pool_size,
)
from minipaged.kernels.dispatch import select_backend
from minipaged.kernels.layout import cache_shape
from minipaged.memory import BlockCopy

CPU = torch.device("cpu")
SPECS = {
    0: LayerSpec(2, 8, 8, torch.float32, CPU),
    1: LayerSpec(1, 6, 4, torch.bfloat16, CPU),
}


def make_cache(num_blocks: int = 4, num_host_blocks: int = 3) -> KVCache:
    """Block b of every pool is full of b."""
    cache = KVCache(SPECS, num_blocks, num_host_blocks, block_size=2, backend=select_backend("torch", CPU))
    for _, keys, values in cache.pools.values():
        for block in range(num_blocks):
            keys[block] = values[block] = block
    return cache


def content(cache: KVCache) -> list[int]:
    """What each block is full of, the same in every layer, keys and values."""
    found = {
        tuple(tuple(set(block.flatten().tolist())) for block in pool)
        for _, keys, values in cache.pools.values()
        for pool in (keys, values)
    }
    (blocks,) = found
    assert all(len(block) == 1 for block in blocks)
    return [int(block[0]) for block in blocks]


def test_layers_have_pools_of_their_own_shape() -> None:
    """Layers may differ, and keys from values (MLA)."""
    cache = make_cache()
    shapes = [(keys.shape, values.shape, keys.dtype) for _, keys, values in cache.pools.values()]
    assert shapes == [
        (cache_shape(4, 2, 2, 8), cache_shape(4, 2, 2, 8), torch.float32),
        (cache_shape(4, 2, 1, 6), cache_shape(4, 2, 1, 4), torch.bfloat16),
    ]


def test_block_bytes_are_what_the_pools_take() -> None:
    """The scheduler weighs moves, and sizing divides memory, by this number."""
    taken = sum(pool.nbytes for _, *pools in make_cache(num_blocks=5).pools.values() for pool in pools)
    assert block_bytes(SPECS, block_size=2) * 5 == taken


def test_copies_read_before_they_write() -> None:
    """1 -> 2 and 0 -> 1 in one step: block 2 gets the old block 1."""
    cache = make_cache()
    cache.copy([BlockCopy(0, 1), BlockCopy(1, 2)])
    assert content(cache) == [0, 0, 1, 3]


def test_a_swap_out_and_in_restores_the_content_elsewhere() -> None:
    """The round trip through the host, to other block ids."""
    cache = make_cache()
    cache.swap_out([BlockCopy(1, 0), BlockCopy(3, 2)])
    cache.copy([BlockCopy(0, 1), BlockCopy(0, 3)])
    cache.swap_in([BlockCopy(2, 0), BlockCopy(0, 2)])
    assert content(cache) == [3, 0, 1, 0]


def test_the_host_pool_appears_with_the_first_swap() -> None:
    """Most runs never swap; they must not pay for it."""
    cache = make_cache()
    cache.copy([BlockCopy(0, 1)])
    cache.swap_out([])
    cache.swap_in([])
    assert cache._host_pools == []
    cache.swap_out([BlockCopy(0, 1)])
    assert [pool.shape for pool in cache._host_pools] == [
        (3, *pool.shape[1:]) for pool in cache._device_pools
    ]


def test_the_host_pools_lie_side_by_side_in_one_allocation() -> None:
    """Catches pinned memory of nearly twice its size: each allocation is rounded up to a power of two."""
    cache = make_cache()
    cache.swap_out([BlockCopy(0, 1)])
    pools = cache._host_pools
    [buffer] = {pool.untyped_storage().data_ptr() for pool in pools}
    places = [pool.data_ptr() - buffer for pool in pools]
    assert places == [0, 384, 768, 848]  # 3 blocks each: of 128, 128, 24 and 16 bytes; 16 divides all places
    assert pools[0].untyped_storage().nbytes() == 896
    assert [len(pool) for pool in cache._host_pools] == [3] * 4


def test_a_pool_that_does_not_fit_names_the_setting() -> None:
    """Not a traceback out of an allocator."""
    with pytest.raises(ConfigError, match=r"2251799813685248 blocks.*lower num_blocks"):
        KVCache(SPECS, 2**51, 0, block_size=16, backend=select_backend("torch", CPU))


class TestPoolSize:
    """How many blocks; 100 bytes a block, sequences of at most 64 tokens, blocks of 16."""

    def size(self, available: int = 10_000, **settings: object) -> tuple[int, int]:
        return pool_size(EngineConfig(**settings), 100, 64, lambda: available)

    def test_num_blocks_is_taken_at_its_word(self) -> None:
        """More than useful, too: a test or an experiment asked for it."""
        assert self.size(num_blocks=7)[0] == 7
        assert self.size(num_blocks=5000, kv_cache_memory=300)[0] == 5000

    def test_kv_cache_memory_comes_before_what_is_available(self) -> None:
        """And is rounded down to whole blocks."""
        assert self.size(kv_cache_memory=1999)[0] == 19

    def test_otherwise_it_is_what_is_available(self) -> None:
        """Found out by the caller, and only if it is asked for."""
        assert self.size(available=1234)[0] == 12

    def test_it_is_not_measured_when_the_settings_say(self) -> None:
        """A profiling pass of the largest step takes time."""

        def measured() -> int:
            raise AssertionError("measured")

        for settings in ({"num_blocks": 3}, {"kv_cache_memory": 300}):
            assert pool_size(EngineConfig(**settings), 100, 64, measured)[0] == 3

    def test_a_pool_is_never_larger_than_all_sequences_together(self) -> None:
        """3 sequences of 64 tokens can fill 12 blocks of 16; a tiny model would get millions."""
        assert self.size(available=10**9, max_num_seqs=3)[0] == 12
        assert pool_size(EngineConfig(max_num_seqs=3), 100, 65, lambda: 10**9)[0] == 15  # 65 need 5 each

    def test_the_host_pool_is_bounded_by_swap_space_and_by_the_device_pool(self) -> None:
        """What is on the host was on the device."""
        assert self.size(num_blocks=7, swap_space=350) == (7, 3)
        assert self.size(num_blocks=7) == (7, 7)
        assert self.size(num_blocks=7, swap_space=100) == (7, 1)
        assert self.size(num_blocks=7, swap_space=0) == (7, 0)

    def test_memory_for_no_block_is_an_error(self) -> None:
        """A pool of 0 blocks would refuse every request, one by one."""
        with pytest.raises(
            ConfigError, match=r"99 bytes .* cannot hold a block of 100 bytes; raise kv_cache_memory"
        ):
            self.size(kv_cache_memory=99)
        with pytest.raises(ConfigError, match="raise gpu_memory_utilization"):
            self.size(available=0)
        with pytest.raises(ConfigError, match="raise kv_cache_memory"):
            pool_size(EngineConfig(), DEFAULT_CPU_MEMORY + 1, 64, lambda: DEFAULT_CPU_MEMORY)

    def test_gpu_budget_is_the_share_less_weights_others_and_activations(self) -> None:
        """1000 in all, 300 in use, 150 more at the peak of a step."""
        assert gpu_budget(total=1000, free=700, peak=150, utilization=0.9) == 450
        assert gpu_budget(total=1000, free=700, peak=150, utilization=0.4) == 0


def test_states_are_kept_in_a_quarter_of_the_pools_bytes() -> None:
    """Catches a count by the wrong unit, and states kept where no prefix is."""
    assert num_kept_states(EngineConfig(), pool_bytes=4000, state_bytes=10) == 100
    assert num_kept_states(EngineConfig(), pool_bytes=4000, state_bytes=1000) == 8  # the least
    assert num_kept_states(EngineConfig(), pool_bytes=4000, state_bytes=0) == 0
    assert num_kept_states(EngineConfig(enable_prefix_caching=False), pool_bytes=4000, state_bytes=10) == 0
