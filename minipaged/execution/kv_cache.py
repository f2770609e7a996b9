"""The pool tensors behind the block ids: how many fit in memory, and how they are copied and swapped.

A block id refers to one block in *every* layer's key pool and value pool. Layers may differ in shape, and so
may keys and values. The host pools, the same shapes in host memory, are allocated at the first swap.
Paper: sections 4.2 (the pool is reserved at the start), 4.4 (copy-on-write), 4.5 (swapping), 5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minipaged.config import ConfigError, EngineConfig
from minipaged.execution.attention import LayerPools, LayerSpec
from minipaged.execution.transfer import room
from minipaged.kernels.dispatch import Backend
from minipaged.kernels.layout import cache_shape
from minipaged.memory import BlockCopy

DEFAULT_CPU_MEMORY = 1 << 30
"""Bytes of a pool on a CPU if the settings do not say."""

ADDRESSABLE = 1 << 47
"""Bytes that a process can address on today's 64-bit processors."""


class KVCache:
    """Device pools `[num_blocks, Hkv, block_size, D]` for each layer's keys and values, and host pools.

    Raises ConfigError if they do not fit in memory.
    """

    def __init__(
        self,
        specs: dict[int, LayerSpec],
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        backend: Backend,
    ) -> None:
        self._num_host_blocks = num_host_blocks
        self._backend = backend
        self.pools: LayerPools = {}
        for layer, spec in specs.items():
            keys, values = (
                _allocate(cache_shape(num_blocks, block_size, spec.num_kv_heads, head_dim), spec)
                for head_dim in (spec.key_dim, spec.value_dim)
            )
            self.pools[layer] = spec, keys, values
        self._device_pools = [pool for _, *both in self.pools.values() for pool in both]
        self._host_pools: list[Tensor] = []
        self._is_cuda = self._device_pools[0].is_cuda
        self._stream = torch.cuda.Stream(self._device_pools[0].device) if self._is_cuda else None

    def copy(self, copies: list[BlockCopy]) -> None:
        """Copy device blocks; all reads happen before all writes."""
        if copies:
            self._backend.copy_blocks(self._device_pools, *_columns(copies))

    def swap_out(self, copies: list[BlockCopy]) -> None:
        """Copy (device block, host block); done before any later work of this step."""
        if copies:
            if not self._host_pools:
                self._host_pools = self._make_host_pools()
            with self._transfer():
                self._backend.swap_blocks(self._device_pools, self._host_pools, *_columns(copies))

    def swap_in(self, copies: list[BlockCopy]) -> None:
        """Copy (host block, device block); done before any later work of this step."""
        if copies:
            with self._transfer():
                self._backend.swap_blocks(self._host_pools, self._device_pools, *_columns(copies))

    def _make_host_pools(self) -> list[Tensor]:
        """Views of one buffer: each allocation of pinned memory is rounded up to a power of two."""
        sizes = [self._num_host_blocks * pool[0].nbytes for pool in self._device_pools]
        rooms = list(map(room, sizes))
        buffer = torch.empty(sum(rooms), dtype=torch.uint8, pin_memory=self._is_cuda)
        return [
            part[:size].view(pool.dtype).view(-1, *pool.shape[1:])
            for part, size, pool in zip(buffer.split(rooms), sizes, self._device_pools)
        ]

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        """On a GPU: a stream of its own, ordered with the compute stream by events on both sides."""
        if self._stream is None:
            yield
            return
        compute = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_event(compute.record_event())
        with torch.cuda.stream(self._stream):
            yield
        compute.wait_event(self._stream.record_event())


def _allocate(shape: tuple[int, int, int, int], spec: LayerSpec) -> Tensor:
    try:
        # Not cleared: nothing unwritten is read, and memory that no token reaches is never committed.
        return torch.empty(shape, dtype=spec.dtype, device=spec.device)
    except (RuntimeError, TypeError, OverflowError) as error:  # out of memory is one
        raise ConfigError(
            f"a KV pool of {shape[0]} blocks does not fit in memory; "
            "lower num_blocks or kv_cache_memory, or on a GPU gpu_memory_utilization"
        ) from error


def _columns(copies: list[BlockCopy]) -> tuple[Tensor, Tensor]:
    source, destination = torch.tensor(copies, dtype=torch.int64).T.contiguous()
    return source, destination


def block_bytes(specs: dict[int, LayerSpec], block_size: int) -> int:
    """Bytes of one block: keys and values, all layers."""
    return sum(
        block_size * spec.num_kv_heads * (spec.key_dim + spec.value_dim) * spec.dtype.itemsize
        for spec in specs.values()
    )


def pool_size(
    config: EngineConfig, bytes_per_block: int, max_model_len: int, available_bytes: Callable[[], int]
) -> tuple[int, int]:
    """How many blocks the device and the host pool get.

    `num_blocks` is used as given; a pool sized by memory is never larger than `max_num_seqs` sequences of
    `max_model_len` tokens could fill. Raises ConfigError if the memory holds no block.
    """
    num_blocks = config.num_blocks
    if num_blocks is None:
        memory = config.kv_cache_memory or available_bytes()
        useful = config.max_num_seqs * -(-max_model_len // config.block_size)
        num_blocks = min(memory // bytes_per_block, useful)
        if num_blocks < 1:
            given = config.kv_cache_memory or memory == DEFAULT_CPU_MEMORY
            source = "kv_cache_memory" if given else "gpu_memory_utilization"
            raise ConfigError(
                f"{memory} bytes for the KV pool cannot hold a block of {bytes_per_block} bytes; "
                f"raise {source}"
            )
    if num_blocks * bytes_per_block > ADDRESSABLE:
        raise ConfigError(
            f"num_blocks is {num_blocks}: at {bytes_per_block} bytes each, that is more than a machine can "
            f"address; give at most {ADDRESSABLE // bytes_per_block}, or set kv_cache_memory instead"
        )
    if 0 < config.swap_space < bytes_per_block:
        raise ConfigError(
            f"swap_space is {config.swap_space} bytes, less than one block of {bytes_per_block} bytes; "
            f"give bytes (vLLM's setting is in GiB), e.g. {4 << 30} for 4 GiB, or 0 to turn swapping off"
        )
    return num_blocks, min(num_blocks, config.swap_space // bytes_per_block)


def gpu_budget(total: int, free: int, peak: int, utilization: float) -> int:
    """Bytes of a GPU for the pool: what the weights (in place), other programs and a step's peak leave."""
    return max(0, int(total * utilization) - (total - free) - peak)
