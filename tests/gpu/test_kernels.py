"""Layer 4: the Triton kernels on a GPU, in every dtype, at sizes that fill the chip.

Expected values come from the PyTorch path in float64 on the same device; layer 1 holds that to the oracle.
"""

import pytest
import torch

from minipaged.kernels.dispatch import select_backend, why_not_triton
from minipaged.kernels.layout import cache_shape
from minipaged.kernels.reference import attention as reference
from minipaged.kernels.reference import cache as reference_cache
from tests.kernels.cases import assert_close, make_case

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm device", allow_module_level=True)
if (missing := why_not_triton(torch.device("cuda"))) is not None:
    pytest.skip(missing, allow_module_level=True)

TRITON = select_backend("auto", "cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DECODES = [(1, 1 + 97 * s % 500) for s in range(128)]
SPLITS = [(1, 1 + 397 * s % 6000) for s in range(64)]
MIXED = [(1, 1 + 397 * s % 3000) for s in range(32)] + [
    (700, 700),
    (333, 2048),
    (1, 1),
    (129, 130),
    (64, 4000),
]
BATCHES = pytest.mark.parametrize("lengths", [DECODES, SPLITS, MIXED], ids=["decode", "split", "prefill"])


def check(lengths, *, dtype=torch.bfloat16, softcap=None, with_sinks=False, sliding_window=None, **shape):
    shape = {"heads": (32, 8), "head_dims": (128, 128), "block_size": 16} | shape
    case = make_case(lengths, dtype=dtype, sliding_window=sliding_window, device="cuda", **shape)
    options = {"scale": 0.09, "softcap": softcap, "sliding_window": sliding_window}
    actual = TRITON.paged_attention(
        case.query,
        case.key_cache,
        case.value_cache,
        case.metadata,
        sinks=case.sinks if with_sinks else None,
        **options,
    )
    expected = reference.paged_attention(
        case.query.double(),
        case.key_cache.double(),
        case.value_cache.double(),
        case.metadata,
        sinks=case.sinks.double() if with_sinks else None,
        **options,
    )
    assert actual.dtype == dtype
    assert_close(actual, expected, dtype)


def test_auto_picks_triton_on_a_gpu():
    """Catches a GPU left to the CPU's path."""
    assert TRITON.name == "triton"


@BATCHES
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_kernel_equals_the_reference(dtype, lengths):
    """Catches what the interpreter lacks: bfloat16, matrix units, asynchronous copies, real pointers."""
    check(lengths, dtype=dtype)


@BATCHES
@pytest.mark.parametrize("block_size", [8, 32, 128, 256])
def test_the_tile_is_independent_of_the_block(block_size, lengths):
    """Catches a tile that assumes it covers whole blocks, or one block."""
    check(lengths, block_size=block_size)


@BATCHES
@pytest.mark.parametrize("heads", [(8, 8), (24, 8), (32, 2), (16, 1)])
def test_every_group_size_is_packed(heads, lengths):
    """Catches rows of padding taken for heads."""
    check(lengths, heads=heads)


@BATCHES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dims", [(32, 32), (64, 64), (80, 80), (192, 128), (256, 256)])
def test_every_head_size_fits_its_config(head_dims, dtype, lengths):
    """Catches a config that asks for more shared memory than this chip has."""
    check(lengths, head_dims=head_dims, heads=(8, 2), dtype=dtype)


@BATCHES
@pytest.mark.parametrize(
    "features",
    [
        {"sliding_window": 1},
        {"sliding_window": 1000},
        {"softcap": 3.0},
        {"with_sinks": True},
        {"sliding_window": 128, "softcap": 3.0, "with_sinks": True},
    ],
    ids=["window of 1", "window", "softcap", "sinks", "all"],
)
def test_features_equal_the_reference(features, lengths):
    """Catches a feature that holds in the interpreter and not on the chip."""
    check(lengths, **features)


def test_who_else_is_in_the_batch_changes_no_bit():
    """Catches a split length that depends on the longest context of the batch."""
    together = make_case(
        [(1, 400), (1, 5000)],
        heads=(32, 8),
        head_dims=(128, 128),
        block_size=16,
        dtype=torch.bfloat16,
        device="cuda",
    )
    alone = make_case(
        [(1, 400)], heads=(32, 8), head_dims=(128, 128), block_size=16, dtype=torch.bfloat16, device="cuda"
    )
    ours = alone.metadata.block_tables[0, :25].long()
    theirs = together.metadata.block_tables[0, :25].long()
    alone.key_cache[ours] = together.key_cache[theirs]
    alone.value_cache[ours] = together.value_cache[theirs]
    alone.query[0] = together.query[0]
    results = [
        TRITON.paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, scale=0.09)[0]
        for case in (alone, together)
    ]
    assert torch.equal(*results)


def test_a_pool_of_more_than_2_to_the_31_elements_is_addressed():
    """Catches an offset computed in 32 bits: the last block of a large pool would land at its beginning."""
    block_size, heads, dim = 16, 8, 128
    num_blocks = 2**31 // (block_size * heads * dim) + 2
    pool_bytes = 2 * num_blocks * block_size * heads * dim
    if torch.cuda.mem_get_info()[0] < 3 * pool_bytes:
        pytest.skip(f"needs {3 * pool_bytes >> 30} GiB of free device memory")
    small = make_case(
        [(1, 16)], heads=(8, 8), head_dims=(dim, dim), block_size=16, dtype=torch.bfloat16, device="cuda"
    )
    inputs = small.query, small.key_cache, small.value_cache, small.metadata
    expected = TRITON.paged_attention(*inputs, scale=0.09)
    shape = cache_shape(num_blocks, block_size, heads, dim)
    keys, values = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    last = num_blocks - 1
    slots = last * block_size + torch.arange(16, device="cuda")
    mine = small.metadata.block_tables[0, 0].long()
    tokens = [cache[mine].transpose(0, 1).contiguous() for cache in (small.key_cache, small.value_cache)]
    TRITON.write_kv(*tokens, keys, values, slots)
    assert torch.equal(keys[last], small.key_cache[mine])
    TRITON.copy_blocks([keys, values], torch.tensor([last]), torch.tensor([last - 1]))
    small.metadata.block_tables[0, 0] = last - 1
    assert torch.equal(
        TRITON.paged_attention(small.query, keys, values, small.metadata, scale=0.09), expected
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_is_bit_equal_to_the_reference(dtype):
    """Catches padding heads or columns written, and a skipped slot written."""
    case = make_case(MIXED, heads=(24, 6), head_dims=(80, 64), block_size=16, dtype=dtype, device="cuda")
    slots = case.metadata.slot_mapping.clone()
    slots[::7] = -1
    expected = [torch.full_like(cache, 9.0) for cache in (case.key_cache, case.value_cache)]
    actual = [cache.clone() for cache in expected]
    reference_cache.write_kv(case.new_key, case.new_value, *expected, slots)
    TRITON.write_kv(case.new_key, case.new_value, *actual, slots)
    assert all(map(torch.equal, actual, expected))


def random_pools(device="cuda", num_blocks=64, layers=8):
    shape = cache_shape(num_blocks, 16, 8, 128)
    pin = device == "cpu"
    return [torch.randn(shape, device=device, pin_memory=pin).to(torch.bfloat16) for _ in range(layers)]


@pytest.mark.parametrize("overlap", [False, True])
def test_copy_blocks_is_bit_equal_to_the_reference(overlap):
    """Catches a write that overtakes a read among programs that really run at the same time."""
    expected = random_pools()
    actual = [pool.clone() for pool in expected]
    shuffled = torch.randperm(64)
    copies = (shuffled[:40], shuffled[20:60]) if overlap else (shuffled[:32], shuffled[32:])
    reference_cache.copy_blocks(expected, *copies)
    TRITON.copy_blocks(actual, *copies)
    assert all(map(torch.equal, actual, expected))


def test_blocks_swapped_out_and_in_are_bit_equal():
    """Catches ids mixed up between the pools, and a host pool the device cannot reach."""
    device = random_pools()
    original = [pool.clone() for pool in device]
    host = [torch.empty_like(pool[:40], device="cpu").pin_memory() for pool in device]
    blocks = torch.randperm(64)[:40]
    places = torch.randperm(40)
    TRITON.swap_blocks(device, host, blocks, places)
    for pool in device:
        pool[blocks.cuda()] = 0
    TRITON.swap_blocks(host, device, places, blocks)
    assert all(map(torch.equal, device, original))


def test_a_host_pool_that_is_not_pinned_is_refused():
    """Catches an illegal access, which ends the process and its GPU context."""
    device = random_pools(layers=1)
    host = [torch.empty_like(pool, device="cpu") for pool in device]
    with pytest.raises(ValueError, match="not pinned"):
        TRITON.swap_blocks(device, host, torch.tensor([0]), torch.tensor([0]))
