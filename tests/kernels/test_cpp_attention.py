"""The C++ kernels against the float64 oracle, over the same poisoned pools as the reference path."""

import ctypes
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from minipaged.kernels.dispatch import why_not_cpp
from minipaged.kernels.reference import cache as reference_cache
from minipaged.kernels.reference import oracle
from tests.kernels.cases import assert_close, check_attention, make_case, token_at
from tests.kernels.random_shapes import LENGTHS, options_of_a_case

if missing := why_not_cpp(torch.device("cpu")):
    pytest.skip(missing, allow_module_level=True)

from minipaged.kernels.cpp import attention, build
from minipaged.kernels.cpp.attention import paged_attention, write_kv
from minipaged.kernels.cpp.panels import Prefetch

DTYPES = list(build.DTYPES)
DECODES = [(1, 1), (1, 4), (1, 5), (1, 23), (1, 300)]  # the last one in several tiles of keys
MIXED = [(1, 9), (7, 7), (3, 12), (1, 1), (5, 6), (2, 140)]
PROMPTS = [(150, 150), (40, 200), (1, 3)]  # more rows than a work item, more keys than a tile

check = partial(check_attention, paged_attention)


def attend(case, **options):
    return paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, scale=0.3, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [DECODES, MIXED, PROMPTS], ids=["decodes", "mixed", "prompts"])
def test_any_mix_of_query_lengths_equals_the_oracle(lengths, dtype):
    """Catches a mask shifted by one, and a running softmax that forgets to shrink what came before."""
    check(lengths, dtype=dtype, head_dims=(64, 64))


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 64, 256])
def test_block_size_changes_nothing(block_size):
    """Catches row pointers that run past a page, or stop short of its end."""
    check(MIXED, block_size=block_size)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 1), (6, 2), (14, 2), (40, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_query_heads_share_the_kv_head_of_their_group(heads, dtype):
    """Catches rows lost between groups of 4, 2 and 1, and a work item too small for one token's heads."""
    check(MIXED, heads=heads, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dims", [(64, 64), (80, 80), (33, 63), (192, 128), (8, 24), (32, 8), (1, 1)])
def test_head_sizes_need_not_be_whole_vectors(head_dims, dtype):
    """Catches elements counted twice where strips overlap, and reads beyond the end of a row (poison)."""
    check([*MIXED, (20, 33)], head_dims=head_dims, dtype=dtype)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 100])
@pytest.mark.parametrize("lengths", [DECODES, MIXED, PROMPTS], ids=["decodes", "mixed", "prompts"])
def test_a_window_reads_only_what_it_can_see(lengths, window):
    """Catches an off-by-one at the window's edge, and NaN from a row that sees nothing of a tile."""
    check(lengths, sliding_window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.7, False), (None, True), (0.7, True)])
def test_softcap_and_sinks_equal_the_oracle(softcap, with_sinks, window, dtype):
    """Catches a softcap applied before the scale, or a sink that takes part in the values."""
    check(MIXED, softcap=softcap, with_sinks=with_sinks, sliding_window=window, dtype=dtype, scale=1.0)


@pytest.mark.parametrize("size", [2**-10, 32])
def test_scores_of_any_size_stay_finite(size):
    """Catches an exponential that overflows, or is wrong far from 0: scores up to about +-1500."""
    case = make_case(MIXED)
    # Sixteenths, whose scores float32 holds exactly: an error in one of 1500 would be most of the tolerance.
    case.query = (case.query * 16).round() / 16 * size
    case.key_cache = (case.key_cache * 16).round() / 16
    inputs = (case.query, case.key_cache, case.value_cache, case.metadata)
    assert_close(paged_attention(*inputs, scale=1.0), oracle.paged_attention(*inputs, scale=1.0), case)


def test_a_sequence_without_query_rows_is_skipped():
    """Catches an empty chunk that shifts everyone behind it."""
    check([(2, 5), (0, 6), (1, 3)])


WINDOWS = [None, 5, 62]  # 62: of some rows, it begins in the middle of a run of keys


def check_parts_of_a_prompt(head_dims, window, dtype):
    case = make_case([(150, 150)], head_dims=head_dims, dtype=dtype)
    whole = attend(case, sliding_window=window)
    for query_len, end in [(1, 150), (1, 77), (5, 140), (33, 130)]:
        part = make_case([(query_len, end)], head_dims=head_dims, dtype=dtype)
        part.metadata.block_tables[:] = case.metadata.block_tables[:, : part.metadata.block_tables.shape[1]]
        part.query = case.query[end - query_len : end]
        part.key_cache, part.value_cache = case.key_cache, case.value_cache
        assert torch.equal(attend(part, sliding_window=window), whole[end - query_len : end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("head_dims", [(64, 64), (80, 40)])
def test_a_row_is_the_same_bits_alone_in_a_chunk_or_in_a_prompt(head_dims, window, dtype):
    """Catches greedy tokens that depend on the batch: the order of additions must be the row's own."""
    check_parts_of_a_prompt(head_dims, window, dtype)


def with_shared_blocks(lengths, num_keys, **shape):
    """A case whose tables begin with the blocks of the table before, for `num_keys` keys."""
    case = make_case(lengths, **shape)
    block_size = case.key_cache.shape[2]
    for sequence, count in enumerate(num_keys, 1):
        num_blocks = count // block_size
        tables = case.metadata.block_tables
        tables[sequence, :num_blocks] = tables[sequence - 1, :num_blocks]
    return case


def alone(case, sequence):
    """The sequence's rows, computed in a call without the others."""
    metadata = case.metadata
    start, end = metadata.query_start_list[sequence : sequence + 2]
    (context,) = metadata.context_len_list[sequence : sequence + 1]
    own = replace(
        metadata,
        query_start=torch.tensor([0, end - start], dtype=torch.int32),
        context_len=torch.tensor([context], dtype=torch.int32),
        block_tables=metadata.block_tables[sequence : sequence + 1],
        query_start_list=[0, end - start],
        context_len_list=[context],
    )
    return replace(case, query=case.query[start:end], metadata=own)


SHARED = {
    "one prompt": ([(1, 200), (1, 190), (1, 300), (1, 65)], [140, 150, 64]),
    "all but the last": ([(1, 129), (1, 129), (1, 129)], [128, 128]),  # a beam after its first step
    "less than a tile": ([(1, 70), (1, 80)], [60]),
    "two families": ([(1, 200), (1, 200), (1, 260), (1, 270), (1, 280)], [128, 0, 200, 128]),
    "a prompt between": ([(1, 200), (30, 200), (1, 200), (1, 210)], [128, 128, 192]),
    "more than an item holds": ([(1, 100 + i) for i in range(40)], [96] * 39),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [{"head_dims": (64, 64), "block_size": 16}, {"heads": (6, 2)}, {"heads": (40, 1)}]
)
@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize(("lengths", "num_keys"), SHARED.values(), ids=SHARED)
def test_shared_blocks_are_read_together_and_change_no_bit(lengths, num_keys, window, shape, dtype):
    """Catches a sequence that sees another's keys, loses its own, or is cut by another's window."""
    case = with_shared_blocks(lengths, num_keys, dtype=dtype, **shape)
    together = attend(case, sliding_window=window, sinks=case.sinks)
    for sequence, (start, end) in enumerate(
        zip(case.metadata.query_start_list, case.metadata.query_start_list[1:])
    ):
        part = alone(case, sequence)
        assert torch.equal(attend(part, sliding_window=window, sinks=case.sinks), together[start:end])
    inputs = (case.query, case.key_cache, case.value_cache, case.metadata)
    options = {"scale": 0.3, "sliding_window": window, "sinks": case.sinks}
    assert_close(together, oracle.paged_attention(*inputs, **options), case)


@pytest.mark.slow
@pytest.mark.parametrize("tuning", ["generic", "znver3", "skylake"])
def test_a_row_keeps_its_bits_as_compiled_for_avx2(tuning, tmp_path, monkeypatch):
    """Catches a multiply-add fused in one loop, but not in another, as by GCC 12 when tuning for Zen 3; and
    tiles that begin in the middle of a run of keys.
    """
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    library = tmp_path / "library.so"
    source = next(source for source in build.SOURCES if source.stem == "paged_attention")
    processor = ["-march=x86-64-v3", f"-mtune={tuning}"]
    subprocess.run([*build.find_compiler(), *build.FLAGS, *processor, source, "-o", library], check=True)
    functions = ctypes.CDLL(str(library))
    for dtype in DTYPES:
        name = f"paged_attention_{str(dtype).removeprefix('torch.')}"
        monkeypatch.setitem(attention._attend, dtype, getattr(functions, name))
        for window in WINDOWS:
            check_parts_of_a_prompt((64, 64), window, dtype)
        for lengths, num_keys in SHARED.values():
            for heads in (6, 2), (8, 4), (40, 1):
                case = with_shared_blocks(lengths, num_keys, dtype=dtype, heads=heads)
                starts = case.metadata.query_start_list
                rows = [attend(alone(case, sequence)) for sequence in range(len(starts) - 1)]
                assert torch.equal(torch.cat(rows), attend(case))


def of_heads(case, first, end):
    """KV heads `first` to `end` of a case, and the query heads that they serve."""
    group = case.query.shape[1] // case.key_cache.shape[1]
    pools = [cache[:, first:end].contiguous() for cache in (case.key_cache, case.value_cache)]
    return replace(
        case,
        query=case.query[:, first * group : end * group],
        key_cache=pools[0],
        value_cache=pools[1],
        sinks=case.sinks[first * group : end * group],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(7, 7), (40, 40), (12, 4), (40, 2)])
@pytest.mark.parametrize("head_dims", [(64, 64), (80, 96), (24, 24)])
@pytest.mark.parametrize(
    "lengths", [DECODES, [(3, 70), (2, 200), (1, 65), (9, 9)]], ids=["decodes", "chunks"]
)
def test_heads_are_read_together_and_change_no_bit(lengths, head_dims, heads, dtype):
    """Catches a head that sees another's keys, and rows of an item mixed up."""
    case = make_case(lengths, heads=heads, head_dims=head_dims, dtype=dtype)
    alone = [
        attend(part, sliding_window=150, sinks=part.sinks)
        for part in (of_heads(case, head, head + 1) for head in range(heads[1]))
    ]
    assert torch.equal(attend(case, sliding_window=150, sinks=case.sinks), torch.cat(alone, dim=1))


def test_threads_change_nothing():
    """Catches scratch memory shared between threads, and an item done by nobody."""
    mixed = make_case([(60, 300), (1, 900), (200, 200)], head_dims=(64, 64), heads=(8, 4))
    decodes = make_case([(1, 70 + i) for i in range(8)], head_dims=(64, 64), heads=(12, 12))
    alone = [attend(case, softcap=0.7) for case in (mixed, decodes)]
    torch.set_num_threads(3)  # of a decode's 12 heads, seven or eight share an item
    assert torch.equal(attend(mixed, softcap=0.7), alone[0])
    assert torch.equal(attend(decodes, softcap=0.7), alone[1])


@pytest.mark.parametrize("lengths", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefetching_into_another_cache_changes_no_bit(dtype, lengths, monkeypatch):
    """Catches prefetches beyond the last row, and rows that are read only by one of the two ways."""
    case, results = make_case(lengths, dtype=dtype, heads=(8, 4), head_dims=(64, 64)), []
    for prefetch in (Prefetch.PAST_L2, Prefetch.INTO_L2):
        monkeypatch.setattr(attention, "best_prefetch", lambda own=prefetch: own)
        results.append(attend(case))
    assert torch.equal(*results)


def test_strided_queries_are_read_by_their_strides():
    """Catches a transposed query taken for a contiguous one."""
    case = make_case(MIXED)
    expected = attend(case)
    for strided in (
        case.query.transpose(0, 1).contiguous().transpose(0, 1),
        case.query.transpose(1, 2).contiguous().transpose(1, 2),  # not even a row is contiguous
    ):
        case.query = strided
        assert torch.equal(attend(case), expected)


def test_another_type_takes_the_reference_path():
    """Catches bits of one type read as another."""
    check(MIXED, dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, options=options_of_a_case(DTYPES, max_group=7, max_head_dim=100))
def test_random_shapes_equal_the_oracle(lengths, options):
    """Catches what no table of cases covers: random combinations of features and shapes."""
    check(lengths, **options)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_write_kv_equals_the_reference_bit_for_bit(dtype, block_size):
    """Catches a block and an offset swapped, and a write past the batch: all else of the pool is compared."""
    case = make_case([(3, 7), (1, 1), (5, 5)], dtype=dtype, head_dims=(8, 6), block_size=block_size)
    pools = [(torch.full_like(case.key_cache, 9.0), torch.full_like(case.value_cache, 9.0)) for _ in range(2)]
    for write, (keys, values) in zip((write_kv, reference_cache.write_kv), pools):
        write(case.new_key, case.new_value, keys, values, case.metadata.slot_mapping)
    for actual, expected in zip(*pools):
        assert torch.equal(actual, expected)


def test_write_kv_skips_slot_minus_one_and_reads_by_strides():
    """Catches -1 taken for an address before the pool, and rows of a transposed tensor mixed up."""
    case = make_case([(4, 4)])
    tokens = torch.randn(2, 4, 32).transpose(0, 1)  # [T, Hkv, D], heads outermost in memory
    keys, values = torch.zeros_like(case.key_cache), torch.zeros_like(case.value_cache)
    write_kv(tokens, tokens, keys, values, torch.tensor([-1, 5, -1, 2]))
    for cache in (keys, values):
        for token, slot in ((1, 5), (3, 2)):
            assert torch.equal(token_at(cache, slot), tokens[token])
            token_at(cache, slot).zero_()
        assert not cache.any()


def test_write_kv_converts_to_the_pools_type():
    """Catches float32 keys copied byte by byte into a bfloat16 pool."""
    case = make_case([(2, 2)], dtype=torch.bfloat16)
    keys, values = torch.zeros_like(case.key_cache), torch.zeros_like(case.value_cache)
    write_kv(case.new_key.float(), case.new_value.float(), keys, values, case.metadata.slot_mapping)
    assert torch.equal(token_at(keys, int(case.metadata.slot_mapping[1])), case.new_key[1])
