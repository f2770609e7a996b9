"""What a step does besides attention: matrix multiplications and block copies; and attention by block size.

pytest tests/benchmarks/bench_kernels.py --benchmark-columns=min,median,rounds
"""

import time

import pytest
import torch

from minipaged.execution.accel.packed_linear import PackedLinear, can_pack
from minipaged.kernels.dispatch import select_backend, why_not_cpp
from minipaged.kernels.layout import cache_shape
from tests.benchmarks.bench_attention_paths import CPU, NUM_KV_HEADS, SCALE, make_batch

pytestmark = [
    pytest.mark.benchmark(timer=time.process_time, max_time=0.3),
    pytest.mark.usefixtures("one_thread"),
]
WHY_NOT_CPP = why_not_cpp(CPU)
cpp = pytest.param("cpp", marks=pytest.mark.skipif(WHY_NOT_CPP is not None, reason=f"C++: {WHY_NOT_CPP}"))
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


@pytest.mark.parametrize("weights", ["plain", "packed"])
@pytest.mark.parametrize("num_rows", [1, 32, 256])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 1376), (768, 4096)], ids=["256x1376", "768x4096"])
@dtypes
def bench_linear(benchmark, weights, num_rows, inputs, outputs, dtype):
    """Catches packed weights that are no longer worth their code."""
    if weights == "packed" and not can_pack(dtype):
        pytest.skip(f"oneDNN packs no {dtype} weights here")
    benchmark.group = f"GEMM: {num_rows} rows, {inputs} x {outputs}, {dtype}"
    plain = torch.nn.Linear(inputs, outputs, bias=False, dtype=dtype)
    rows = torch.randn(num_rows, inputs, dtype=dtype)
    with torch.inference_mode():
        output = benchmark(PackedLinear(plain) if weights == "packed" else plain, rows)
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        assert torch.allclose(output, plain(rows), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 128])
@pytest.mark.parametrize("path", ["torch", cpp])
def bench_block_size(benchmark, path, block_size):
    """Figure 18a of the paper: small blocks cost attention time; catches a path that needs large ones."""
    benchmark.group = f"attention by block size: 32 decodes, context 100-600, {path}"
    batch = make_batch([(1, 100 + 16 * number) for number in range(32)], torch.float32, block_size)
    output = benchmark(select_backend(path, CPU).paged_attention, *batch, scale=SCALE)
    assert output.isfinite().all()


@pytest.mark.parametrize("num_sequences", [1, 8, 32, 128])
@pytest.mark.parametrize("path", ["torch", cpp])
def bench_batch_size(benchmark, path, num_sequences):
    """Catches a cost per sequence that swallows what batching gains."""
    benchmark.group = f"attention by batch size: decodes of context 300, {path}"
    batch = make_batch([(1, 300)] * num_sequences, torch.float32)
    output = benchmark(select_backend(path, CPU).paged_attention, *batch, scale=SCALE)
    assert output.isfinite().all()


@pytest.mark.parametrize("operation", ["copy_blocks", "swap_blocks"])
@pytest.mark.parametrize("block_size", [16, 32])
def bench_moving_blocks(benchmark, operation, block_size):
    """64 blocks of 4 layers, scattered: copy-on-write within the pool, and a swap to the host's."""
    benchmark.group = f"64 blocks of {block_size} tokens in 4 layers moved"
    pools = [torch.randn(cache_shape(256, block_size, NUM_KV_HEADS, 64)) for _ in range(8)]
    targets = [torch.zeros_like(pool) for pool in pools] if operation == "swap_blocks" else pools
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    source, destination = order[:64], order[64:128]
    arguments = (pools, targets) if operation == "swap_blocks" else (pools,)
    benchmark(getattr(select_backend("torch", CPU), operation), *arguments, source, destination)
    assert all(torch.equal(to[destination], of[source]) for of, to in zip(pools, targets))
