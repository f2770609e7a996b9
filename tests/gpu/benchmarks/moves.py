"""Block copies and swaps in GB/s at block sizes 1-256 (paper, Figure 19a), against a memory copy a block."""

from functools import partial

import torch
from torch import Tensor

from minipaged.kernels.dispatch import select_backend
from minipaged.kernels.layout import cache_shape
from tests.gpu.benchmarks.timing import Machine

POOLS, KV_HEADS, HEAD_DIM = 16, 8, 128  # keys and values of 8 layers
MOST_SINGLE_COPIES = 2048


def moves(machine: Machine) -> None:
    """Copy on the device, swap out, swap in; all layers of the blocks in one call."""
    triton = select_backend("triton", machine.device)
    total_bytes = 1 << 14 if machine.dry_run else 1 << 28
    for block_size in (4, 16) if machine.dry_run else (1, 2, 4, 8, 16, 32, 64, 128, 256):
        num_pools, heads = (2, 1) if machine.dry_run else (POOLS, KV_HEADS)
        block_bytes = block_size * heads * HEAD_DIM * machine.dtype.itemsize
        count = max(1, total_bytes // (block_bytes * num_pools))
        shape = cache_shape(2 * count, block_size, heads, HEAD_DIM)
        host_shape = cache_shape(count, block_size, heads, HEAD_DIM)
        pools = [torch.zeros(shape, dtype=machine.dtype, device=machine.device) for _ in range(num_pools)]
        host = [torch.zeros(host_shape, dtype=machine.dtype, pin_memory=True) for _ in range(num_pools)]
        shuffled = torch.randperm(2 * count)
        source, destination, places = shuffled[:count], shuffled[count:], torch.randperm(count)
        moved = count * block_bytes * num_pools
        parameters = f"block size {block_size}, {count} blocks of {num_pools} pools"
        runs = {
            "copy": partial(triton.copy_blocks, pools, source, destination),
            "swap out": partial(triton.swap_blocks, pools, host, source, places),
            "swap in": partial(triton.swap_blocks, host, pools, places, source),
        }
        for name, run in runs.items():
            with machine.attempt(name, parameters):
                machine.record(name, parameters, moved / machine.time_with_host_ms(run) / 1e6, "GB/s")
        pairs = list(zip(source.tolist(), places.tolist()))[:MOST_SINGLE_COPIES]
        took = machine.time_with_host_ms(partial(swap_one_by_one, pools[0], host[0], pairs))
        machine.record(
            "swap out", f"{parameters}: a copy a block", len(pairs) * block_bytes / took / 1e6, "GB/s"
        )


def swap_one_by_one(pool: Tensor, host: Tensor, pairs: list[tuple[int, int]]) -> None:
    """One asynchronous memory copy a block, as without a kernel."""
    for block, place in pairs:
        host[place].copy_(pool[block], non_blocking=True)
