"""Attention of one layer on one CPU thread: the paths side by side, in CPU seconds.

Each group holds the paths of one batch, and `stream`: reading the batch's keys and values once, from first to
last, which no path can beat where bytes decide (decode). 8 query and 4 KV heads of 64, pages scattered.

    pytest tests/benchmarks/bench_attention_paths.py --benchmark-only --benchmark-columns=min,median,rounds
"""

import time
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from minipaged.kernels.dispatch import select_backend, why_not_cpp
from minipaged.kernels.layout import cache_shape
from minipaged.kernels.metadata import AttentionMetadata
from tests.kernels.cases import metadata_of

# CPU time is the figure that survives a busy machine.
pytestmark = [
    pytest.mark.benchmark(timer=time.process_time, max_time=0.5),
    pytest.mark.usefixtures("one_thread"),
]

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 4, 64
SCALE = HEAD_DIM**-0.5
CPU = torch.device("cpu")
cpp = pytest.param(
    "cpp", marks=pytest.mark.skipif((why := why_not_cpp(CPU)) is not None, reason=f"C++ kernels: {why}")
)
PATHS = ["stream", "torch", cpp]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class Batch(NamedTuple):
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    metadata: AttentionMetadata


def make_batch(lengths: list[tuple[int, int]], dtype: torch.dtype, block_size: int = 16) -> Batch:
    """A batch from (query length, context length) a sequence, in a pool that it fills, in random order."""
    generator = torch.Generator().manual_seed(0)
    widths = [-(-context // block_size) for _, context in lengths]
    free = torch.randperm(sum(widths), generator=generator, dtype=torch.int32)
    tables = torch.nn.utils.rnn.pad_sequence(free.split(widths), batch_first=True)
    slots = [
        int(tables[sequence, position // block_size]) * block_size + position % block_size
        for sequence, (query_len, context) in enumerate(lengths)
        for position in range(context - query_len, context)
    ]
    shape = cache_shape(len(free), block_size, NUM_KV_HEADS, HEAD_DIM)
    metadata = metadata_of(lengths, torch.tensor(slots), tables)
    query = torch.randn(metadata.query_start_list[-1], NUM_HEADS, HEAD_DIM, generator=generator).to(dtype)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return Batch(query, keys, values, metadata)


def measure(benchmark, path: str, batch: Batch) -> None:
    if path == "stream":
        keys, values = batch.key_cache.view(torch.float32), batch.value_cache.view(torch.float32)
        benchmark(lambda: (keys.sum(), values.sum()))
    else:
        output = benchmark(select_backend(path, CPU).paged_attention, *batch, scale=SCALE)
        assert output.shape == batch.query.shape
        assert output.isfinite().all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("block_size", [16, 32])
@dtypes
def bench_decode(benchmark, path, block_size, dtype):
    """32 decodes of context 512-1024."""
    benchmark.group = f"attention: 32 decodes, context 512-1024, block size {block_size}, {dtype}"
    lengths = [(1, 512 + 16 * number) for number in range(33)][:32]
    measure(benchmark, path, make_batch(lengths, dtype, block_size))


@pytest.mark.parametrize("path", ["torch", cpp])
@pytest.mark.parametrize("shared", [0, 512])
@dtypes
def bench_shared_prefix(benchmark, path, shared, dtype):
    """32 decodes of context 560-591 whose tables begin with the same blocks, or do not."""
    benchmark.group = f"attention: 32 decodes, the first {shared} of 560-591 tokens shared, {dtype}"
    batch = make_batch([(1, 560 + number) for number in range(32)], dtype)
    tables = batch.metadata.block_tables
    tables[:, : shared // 16] = tables[0, : shared // 16]
    measure(benchmark, path, batch)


@pytest.mark.parametrize("path", ["torch", cpp])
@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("4 decodes, context 30-60", [(1, 30), (1, 40), (1, 50), (1, 60)]),
        ("a prompt of 512", [(512, 512)]),
        ("chunks: 64 rows at context 1024, and 16 decodes", [(64, 1024), *[(1, 700)] * 16]),
    ],
    ids=["short", "prompt", "chunk"],
)
@dtypes
def bench_mixtures(benchmark, path, name, lengths, dtype):
    """What else a step may hold."""
    benchmark.group = f"attention: {name}, {dtype}"
    measure(benchmark, path, make_batch(lengths, dtype))


@pytest.mark.parametrize("path", ["torch", cpp])
@pytest.mark.parametrize("num_tokens", [32, 2048])
def bench_write_kv(benchmark, path, num_tokens):
    """One layer's K/V of a decode step, and of a step full of prompts."""
    benchmark.group = f"write_kv: {num_tokens} tokens, fp32"
    batch = make_batch([(num_tokens // 32, 200)] * 32, torch.float32)
    keys, values = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_DIM)
    slots = batch.metadata.slot_mapping
    benchmark(select_backend(path, CPU).write_kv, keys, values, batch.key_cache, batch.value_cache, slots)
    block, offset = slots // 16, slots % 16
    assert torch.equal(batch.key_cache[block, :, offset], keys)
