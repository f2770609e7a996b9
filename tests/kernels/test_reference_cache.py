"""Layer 1: cache writes, block copies and swaps, value by value."""

import pytest
import torch

from minipaged.kernels.layout import cache_shape
from minipaged.kernels.reference.cache import copy_blocks, swap_blocks, write_kv
from tests.kernels.cases import make_case, token_at


def pool(num_blocks=6, block_size=2, kv_heads=2, head_dim=3, dtype=torch.float32):
    """Block b holds the value b everywhere."""
    shape = cache_shape(num_blocks, block_size, kv_heads, head_dim)
    return torch.arange(num_blocks, dtype=dtype).view(-1, 1, 1, 1).expand(shape).clone()


def block_values(cache):
    assert (cache == cache[:, :1, :1, :1]).all()
    return cache[:, 0, 0, 0].tolist()


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_write_kv_puts_each_token_in_its_slot_and_touches_nothing_else(dtype, block_size):
    """Catches a block and an offset swapped, and a write past the batch."""
    case = make_case([(3, 7), (1, 1), (5, 5)], dtype=dtype, head_dims=(8, 6), block_size=block_size)
    for tokens, cache in ((case.new_key, case.key_cache), (case.new_value, case.value_cache)):
        slots = case.metadata.slot_mapping.tolist()
        assert torch.equal(torch.stack([token_at(cache, slot) for slot in slots]), tokens)
    keys, values = torch.full_like(case.key_cache, 9.0), torch.full_like(case.value_cache, 9.0)
    write_kv(case.new_key, case.new_value, keys, values, case.metadata.slot_mapping)
    for tokens, cache in ((case.new_key, keys), (case.new_value, values)):
        for slot, token in zip(case.metadata.slot_mapping.tolist(), tokens):
            assert torch.equal(token_at(cache, slot), token)
            token_at(cache, slot).fill_(9.0)
        assert (cache == 9.0).all()


def test_write_kv_skips_slot_minus_one():
    """Catches -1 taken as Python's last element, which corrupts the last block."""
    keys, values = pool(), pool()
    tokens = torch.full((3, 2, 3), 50.0)
    write_kv(tokens, tokens, keys, values, torch.tensor([-1, 5, -1]))
    assert (token_at(keys, 5) == 50).all()
    token_at(keys, 5).fill_(2.0)
    assert torch.equal(keys, pool())


def test_copy_blocks_copies_in_every_pool():
    """Catches a copy-on-write that forgets a layer, or the values."""
    caches = [pool(), pool(head_dim=5)]
    copy_blocks(caches, torch.tensor([0, 3]), torch.tensor([5, 4]))
    assert [block_values(cache) for cache in caches] == [[0, 1, 2, 3, 3, 0]] * 2


@pytest.mark.parametrize(("source", "destination"), [([1, 2], [3, 1]), ([2, 1], [1, 3])])
def test_copy_blocks_reads_everything_before_it_writes(source, destination):
    """Catches a chain 1 -> 3, 2 -> 1 in which block 3 receives the new block 1."""
    cache = pool()
    copy_blocks([cache], torch.tensor(source), torch.tensor(destination))
    assert block_values(cache) == [0, 2, 2, 1, 4, 5]


def test_copy_blocks_of_nothing_changes_nothing():
    """Catches an empty index that selects everything."""
    cache = pool()
    copy_blocks([cache], torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    assert torch.equal(cache, pool())


def test_swap_out_and_back_in_elsewhere_restores_the_blocks():
    """Catches source and destination ids mixed up between the two pools."""
    device, host = [pool(), pool()], [pool(3) * 0, pool(3) * 0]
    swap_blocks(device, host, torch.tensor([4, 1]), torch.tensor([0, 2]))
    assert [block_values(cache) for cache in host] == [[4, 0, 1]] * 2
    swap_blocks(host, device, torch.tensor([0, 2]), torch.tensor([5, 0]))
    assert [block_values(cache) for cache in device] == [[1, 1, 2, 3, 4, 4]] * 2


def test_swap_blocks_refuses_unequal_lists():
    """Catches a silently shortened zip that loses a layer."""
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        swap_blocks([pool(), pool()], [pool()], torch.tensor([0]), torch.tensor([0]))


@pytest.mark.parametrize("block_size", [0, 257])
def test_cache_shape_refuses_a_block_size_out_of_range(block_size):
    """Catches a block size the kernels cannot tile."""
    with pytest.raises(ValueError, match=f"block_size {block_size}"):
        cache_shape(10, block_size, 2, 8)


def test_cache_shape_refuses_an_empty_pool():
    """Catches a pool of no blocks, which would fail later and far away."""
    with pytest.raises(ValueError, match="num_blocks is 0"):
        cache_shape(0, 16, 2, 8)
