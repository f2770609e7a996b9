"""The pool tensors behind the block ids, and how they are copied and swapped.

A block id refers to one block in *every* layer's key pool and value pool. Layers may differ in shape, and so
may keys and values. The host pools, the same shapes in host memory, are allocated at the first swap.
Paper: sections 4.4 (copy-on-write), 4.5 (swapping), 5.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minipaged.config import ConfigError
from minipaged.execution.attention import LayerPools, LayerSpec
from minipaged.execution.transfer import room
from minipaged.kernels.dispatch import Backend
from minipaged.kernels.layout import cache_shape
from minipaged.memory import BlockCopy


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
        # Not zeroed: nothing unwritten is read, and memory that no token reaches is never committed.
        return torch.empty(shape, dtype=spec.dtype, device=spec.device)
    except (RuntimeError, TypeError, OverflowError) as error:  # out of memory is one
        raise ConfigError(
            f"a KV pool of {shape[0]} blocks does not fit in memory; "
            "lower num_blocks or kv_cache_memory, or on a GPU gpu_memory_utilization"
        ) from error


def _columns(copies: list[BlockCopy]) -> tuple[Tensor, Tensor]:
    source, destination = torch.tensor(copies, dtype=torch.int64).T.contiguous()
    return source, destination
