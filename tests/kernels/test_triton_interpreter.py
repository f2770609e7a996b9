"""Layer 2: every Triton kernel, every branch, in Triton's interpreter on a CPU, over poisoned pools.

`tests/conftest.py` switches it on, before triton is first imported, where no GPU is found. Tiles of 16 tokens
and splits of 32 keep the shapes tiny and still cross every boundary. bfloat16 is left to a device: here it
would be wrong.
"""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.kernels.layout import cache_shape
from minipaged.kernels.metadata import AttentionMetadata
from minipaged.kernels.reference import cache as reference_cache
from minipaged.kernels.reference import oracle
from tests.kernels.cases import assert_close, check_attention, make_case
from tests.kernels.random_shapes import LENGTHS, options_of_a_case
from tests.slow import slow_but

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is used where there is no GPU", allow_module_level=True)
pytest.importorskip("triton", reason="needs the package triton")

import triton
import triton.language as tl
from triton.runtime import interpreter

from minipaged.kernels.dispatch import select_backend
from minipaged.kernels.triton import attention as triton_attention
from minipaged.kernels.triton import cache as triton_cache
from minipaged.kernels.triton import decode as triton_decode
from minipaged.kernels.triton.config import DecodeConfig
from minipaged.kernels.triton.decode import find_splits, paged_decode

pytestmark = pytest.mark.interpreter

TRITON = select_backend("triton", "cpu")
DTYPES = [torch.float32, torch.float16]
ONE_SPLIT = [(1, 1), (1, 16), (1, 30)]
SPLITS = [(1, 32), (1, 33), (1, 75)]
MIXED = [(1, 20), (19, 19), (9, 40)]

check = partial(check_attention, TRITON.paged_attention)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [ONE_SPLIT, SPLITS, MIXED], ids=["decode", "split", "prefill"])
def test_each_kernel_equals_the_oracle(lengths, dtype):
    """Catches a tile, split or row boundary off by one."""
    check(lengths, dtype=dtype)


@pytest.mark.parametrize("lengths", [SPLITS, MIXED], ids=["split", "prefill"])
@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 256])
def test_the_tile_is_independent_of_the_block(block_size, lengths):
    """Catches a tile that assumes it covers whole blocks, or one block."""
    check(lengths, block_size=block_size)


@pytest.mark.parametrize("lengths", [SPLITS, MIXED], ids=["split", "prefill"])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (16, 1), (6, 2)])
def test_every_group_size_is_packed(heads, lengths):
    """Catches rows of padding taken for heads, and a group that does not divide the rows."""
    check(lengths, heads=heads)


@pytest.mark.parametrize("lengths", [SPLITS, MIXED], ids=["split", "prefill"])
@pytest.mark.parametrize("head_dims", [(80, 80), (24, 16), (16, 48), (8, 4)])
def test_odd_and_unequal_head_sizes_are_padded(head_dims, lengths):
    """Catches a padded column read or stored, and K's size used for V."""
    check(lengths, head_dims=head_dims)


@pytest.mark.parametrize("lengths", [SPLITS, MIXED], ids=["split", "prefill"])
@pytest.mark.parametrize("window", [1, 5, 16, 33, 100])
def test_a_window_reads_only_what_it_can_see(window, lengths):
    """Catches a window's edge off by one, a row that sees nothing of its first tile, tiles read in vain."""
    check(lengths, sliding_window=window)


@pytest.mark.parametrize("lengths", [ONE_SPLIT, SPLITS, MIXED], ids=["decode", "split", "prefill"])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.7, False), (None, True), (0.7, True)])
def test_softcap_and_sinks_equal_the_oracle(softcap, with_sinks, lengths):
    """Catches a sink counted once a split, and a softcap in the wrong base."""
    check(lengths, softcap=softcap, with_sinks=with_sinks, scale=1.0)


def test_a_softcap_survives_large_scores():
    """Catches a tanh that overflows to NaN."""
    check(ONE_SPLIT, softcap=2.0, scale=500.0)


def test_a_sequence_without_query_rows_is_skipped():
    """Catches an empty chunk that shifts everyone behind it."""
    check([(2, 5), (0, 6), (17, 20)])


def test_more_splits_than_one_reduce_chunk():
    """Catches a reduce that keeps only its last chunk of splits."""
    check([(1, 17 * 32 + 3), (1, 40)], heads=(1, 1), head_dims=(16, 16))


FEW = DecodeConfig(tile=16, split_length=32, num_warps=1, num_stages=1, max_splits=4)
LONGER = replace(FEW, long_split_length=64, max_splits=8)


@pytest.mark.parametrize("window", [None, 40, 150, 300])
@pytest.mark.parametrize("config", [FEW, LONGER], ids=["few", "longer"])
def test_long_contexts_have_longer_splits_but_no_more_of_them(config, window):
    """Catches a split that the grid has no program for, and one counted from another place than it starts."""
    lengths = [(1, 128), (1, 129), (1, 300), (1, 421)]
    case = make_case(lengths, heads=(1, 1), head_dims=(16, 16), sliding_window=window)
    inputs = case.query, case.key_cache, case.value_cache, case.metadata
    actual = torch.empty_like(case.query)
    paged_decode(actual, *inputs, config, 0.3, window)
    assert_close(actual, oracle.paged_attention(*inputs, scale=0.3, sliding_window=window), case)


def test_a_context_has_four_splits_unless_they_would_be_too_short_or_too_long():
    """Catches as many splits of 4,096 tokens as shorter contexts need, each with a partial result."""
    assert [LONGER.num_splits(length) for length in (32, 33, 128, 129, 256, 257, 512, 513)] == [
        *(1, 2, 4, 4, 4, 5, 8, 8)
    ]
    assert [FEW.num_splits(421, window) for window in (None, 40, 150)] == [4, 3, 5]
    assert FEW.num_splits(32, 5) == 1  # however small the window


@pytest.mark.parametrize("window", slow_but([None, 150], [None, 40, 128, 150, 300]))
@pytest.mark.parametrize("config", [FEW, LONGER], ids=["few", "longer"])
def test_no_context_has_more_splits_than_are_allocated(config, window):
    """Catches a shorter context, or one just beyond the window, with more splits than the longest one."""
    counts = torch.zeros(600, dtype=torch.int32)
    lengths = config.split_length, config.long_split_length, config.max_splits
    count_splits[(600,)](counts, window, config.tile, *lengths)
    allocated = [config.num_splits(longest, window) for longest in range(1, 601)]
    assert allocated == sorted(allocated)
    assert (counts <= torch.tensor(allocated)).all()
    assert counts.max() == allocated[-1]  # and none is allocated in vain


@triton.jit
def count_splits(
    counts,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_LENGTH: tl.constexpr,
    LONG_SPLIT_LENGTH: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    context_len = tl.program_id(0) + 1
    _, _, _, count = find_splits(context_len, WINDOW, TILE, SPLIT_LENGTH, LONG_SPLIT_LENGTH, MAX_SPLITS)
    tl.store(counts + context_len - 1, count)


@pytest.mark.parametrize(
    ("config", "window", "counts"),
    [
        (FEW, None, [2, 3, 4, 4]),
        (FEW, 40, [2, 3, 2, 3]),
        (LONGER, None, [2, 3, 5, 7]),
        (LONGER, 40, [2, 3, 2, 3]),
    ],
)
def test_a_context_has_as_many_partial_results_as_splits(config, window, counts, monkeypatch):
    """Catches programs that compute empty splits, and a length that the window does not shorten."""
    case = make_case([(1, 40), (1, 129), (1, 300), (1, 421)], heads=(1, 1), head_dims=(16, 16))
    maxima = []
    kernel = triton_decode.reduce_kernel

    class Spying:
        def __getitem__(self, grid):
            return lambda *arguments, **options: (
                maxima.append(arguments[2]),
                kernel[grid](*arguments, **options),
            )

    monkeypatch.setattr(triton_decode, "reduce_kernel", Spying())
    new_empty = torch.Tensor.new_empty

    def poisoned(tensor, *shape, **options):
        found = new_empty(tensor, *shape, **options)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    output = torch.empty_like(case.query)
    inputs = output, case.query, case.key_cache, case.value_cache, case.metadata
    paged_decode(*inputs, config, 0.3, window)
    [found] = maxima
    assert (~found.isnan()).sum(-1).flatten().tolist() == counts


def test_the_tiling_is_that_of_all_sequences_and_kv_heads(monkeypatch):
    """Catches a size of the batch that is not the one the memory for partial results is counted with."""
    asked, decode_config = [], triton_attention.decode_config

    def noting(*arguments):
        asked.append(arguments[3])
        return decode_config(*arguments)

    monkeypatch.setattr(triton_attention, "decode_config", noting)
    case = make_case(SPLITS, heads=(4, 2))
    TRITON.paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, scale=0.3)
    assert asked == [6]


def test_a_decode_among_prompts_has_the_bits_that_it_has_without_them():
    """Catches decodes that run through another kernel, unsplit, and rows written by both or neither."""
    options = {"scale": 0.3, "sinks": make_case(MIXED).sinks}
    mixed = make_case([(1, 20), (9, 40), (1, 75), (0, 6), (2, 5), (1, 3)])
    pools, given = (mixed.key_cache, mixed.value_cache), mixed.metadata
    attended = TRITON.paged_attention(mixed.query, *pools, given, **options)
    alone = [0, 2, 5]
    rows = [given.query_start_list[sequence] for sequence in alone]
    contexts = [given.context_len_list[sequence] for sequence in alone]
    decodes = AttentionMetadata(
        slot_mapping=given.slot_mapping[rows],
        query_start=torch.arange(4, dtype=torch.int32),
        context_len=given.context_len[alone],
        block_tables=given.block_tables[alone],
        query_start_list=[0, 1, 2, 3],
        context_len_list=contexts,
        max_query_len=1,
        max_context_len=max(contexts),
    )
    assert torch.equal(TRITON.paged_attention(mixed.query[rows], *pools, decodes, **options), attended[rows])
    assert_close(attended, oracle.paged_attention(mixed.query, *pools, given, **options), mixed)


def test_how_long_other_contexts_are_changes_no_bit():
    """Catches a split length that depends on the longest context of the batch."""
    alone = make_case([(1, 30)], seed=5)
    together = make_case([(1, 30), (1, 75)], seed=5)
    table = together.metadata.block_tables
    for position in range(30):  # the same tokens, in other blocks
        theirs, ours = alone.metadata.block_tables[0, position // 4], table[0, position // 4]
        together.key_cache[ours, :, position % 4] = alone.key_cache[theirs, :, position % 4]
        together.value_cache[ours, :, position % 4] = alone.value_cache[theirs, :, position % 4]
    together.query[0] = alone.query[0]
    results = [
        TRITON.paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, scale=0.3)[0]
        for case in (alone, together)
    ]
    assert torch.equal(*results)


def test_strided_queries_are_read_by_their_strides():
    """Catches a kernel that takes the transposed query of a model for a contiguous one."""
    for lengths in (SPLITS, MIXED):
        case = make_case(lengths)
        strided = case.query.transpose(0, 1).contiguous().transpose(0, 1)
        inputs = (case.key_cache, case.value_cache, case.metadata)
        actual = TRITON.paged_attention(strided, *inputs, scale=0.3)
        assert torch.equal(actual, TRITON.paged_attention(case.query, *inputs, scale=0.3))


def test_bfloat16_is_refused():
    """Catches silently wrong figures."""
    case = make_case(ONE_SPLIT, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="use float16 or float32"):
        TRITON.paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, scale=0.3)


@pytest.mark.parametrize("lengths", [SPLITS, MIXED], ids=["split", "prefill"])
def test_programs_may_run_in_any_order(lengths, monkeypatch):
    """Catches a program that writes another's rows: in ascending order their owner would put them right."""
    builder = interpreter.interpreter_builder
    set_index = builder.set_grid_idx
    monkeypatch.setattr(
        builder,
        "set_grid_idx",
        lambda *index: set_index(*(size - 1 - i for size, i in zip(builder.grid_dim, index))),
    )
    check(lengths, heads=(3, 1))  # 16 rows hold 5 tokens of 3 heads: one row is left over


def test_a_group_larger_than_the_configured_rows_widens_the_program():
    """Catches a division by zero in the launch: the interpreter's config has 16 rows."""
    check(MIXED, heads=(20, 1), head_dims=(16, 16))


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, options=options_of_a_case(DTYPES), decode=st.booleans())
def test_random_shapes_equal_the_oracle(lengths, options, decode):
    """Catches what no table of cases covers: random combinations of features and shapes."""
    check([(1 if decode else query, context) for query, context in lengths], **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_write_kv_is_bit_equal_to_the_reference(block_size, dtype):
    """Catches a slot split wrongly into block and offset, and padding heads or columns written."""
    case = make_case(
        [(3, 7), (1, 1), (5, 5)], heads=(3, 3), head_dims=(10, 6), block_size=block_size, dtype=dtype
    )
    slots = case.metadata.slot_mapping.clone()
    slots[2] = -1
    expected = [torch.full_like(cache, 9.0) for cache in (case.key_cache, case.value_cache)]
    actual = [cache.clone() for cache in expected]
    reference_cache.write_kv(case.new_key, case.new_value, *expected, slots)
    TRITON.write_kv(case.new_key, case.new_value, *actual, slots)
    assert all(map(torch.equal, actual, expected))


def test_write_kv_reads_strided_tokens():
    """Catches a model's transposed keys taken for contiguous ones."""
    case = make_case([(6, 6)])
    expected = [torch.full_like(cache, 9.0) for cache in (case.key_cache, case.value_cache)]
    actual = [cache.clone() for cache in expected]
    reference_cache.write_kv(case.new_key, case.new_value, *expected, case.metadata.slot_mapping)
    strided = [
        tokens.transpose(0, 1).contiguous().transpose(0, 1) for tokens in (case.new_key, case.new_value)
    ]
    TRITON.write_kv(*strided, *actual, case.metadata.slot_mapping)
    assert all(map(torch.equal, actual, expected))


def random_pools(*block_shapes, num_blocks=6, dtype=torch.float32):
    return [
        torch.randn(cache_shape(num_blocks, size, heads, dim)).to(dtype) for size, heads, dim in block_shapes
    ]


@pytest.mark.parametrize(
    ("source", "destination"),
    [([0, 3], [5, 4]), ([1, 2], [3, 1]), ([2, 1], [1, 3]), ([1, 2], [2, 1]), ([4], [4]), ([], [])],
    ids=["apart", "chain", "chain backwards", "exchange", "itself", "nothing"],
)
def test_copy_blocks_is_bit_equal_to_the_reference(source, destination):
    """Catches a write that overtakes a read, a chunk lost, a pool copied with another pool's size."""
    expected = random_pools((4, 2, 160), (4, 2, 160), (4, 2, 3))
    actual = [pool.clone() for pool in expected]
    copies = torch.tensor(source, dtype=torch.int64), torch.tensor(destination, dtype=torch.int64)
    reference_cache.copy_blocks(expected, *copies)
    TRITON.copy_blocks(actual, *copies)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 2), torch.float32),
        ((3, 1, 1), torch.float32),
        ((3, 1, 1), torch.float16),
        ((3, 1, 1), torch.int8),
    ],
    ids=["words of 8", "words of 4", "words of 2", "words of 1"],
)
def test_blocks_of_any_number_of_bytes_are_copied_whole(shape, dtype):
    """Catches a last word torn or spilled into the next block."""
    expected = [(100 * pool).to(dtype) for pool in random_pools(shape)]
    actual = [pool.clone() for pool in expected]
    copies = torch.tensor([0, 2]), torch.tensor([3, 5])
    reference_cache.copy_blocks(expected, *copies)
    TRITON.copy_blocks(actual, *copies)
    assert all(map(torch.equal, actual, expected))


def test_copies_that_do_not_overlap_take_one_launch(monkeypatch):
    """Catches a launch a layer, or a launch a block."""
    launches = []
    kernel = triton_cache.move_kernel

    class Counting:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(triton_cache, "move_kernel", Counting())
    TRITON.copy_blocks(random_pools(*[(4, 2, 8)] * 6), torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5]))
    assert launches == [(3, 6, 1)]


@pytest.mark.parametrize(("offset", "is_aligned"), [(0, True), (8, False)])
def test_pools_are_declared_aligned_only_if_they_are(offset, is_aligned, monkeypatch):
    """Catches moves of 16 bytes from an address that is not a multiple: on a GPU, they fail."""
    declared = []
    kernel = triton_cache.move_kernel

    class Noting:
        def __getitem__(self, grid):
            return lambda *arguments, **options: (
                declared.append(options["ALIGNED"]),
                kernel[grid](*arguments, **options),
            )

    monkeypatch.setattr(triton_cache, "move_kernel", Noting())
    pool = torch.zeros(6 * 64 + 16, dtype=torch.int8)
    first = -pool.data_ptr() % 16 + offset
    TRITON.copy_blocks(
        [pool[first : first + 6 * 64].view(6, 1, 1, 64)], torch.tensor([0, 2]), torch.tensor([3, 5])
    )
    assert declared == [is_aligned]


def test_swap_blocks_is_bit_equal_to_the_reference():
    """Catches source and destination ids mixed up between the two pools."""
    device = random_pools((4, 2, 8), (4, 2, 3))
    expected, actual = ([torch.zeros_like(pool[:3]) for pool in device] for _ in range(2))
    moves = torch.tensor([4, 1]), torch.tensor([0, 2])
    reference_cache.swap_blocks(device, expected, *moves)
    TRITON.swap_blocks(device, actual, *moves)
    assert all(map(torch.equal, actual, expected))


def test_swap_blocks_refuses_unequal_lists():
    """Catches a silently shortened zip that loses a layer."""
    pools = random_pools((4, 2, 8), (4, 2, 8))
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        TRITON.swap_blocks(pools, pools[:1], torch.tensor([0]), torch.tensor([0]))
