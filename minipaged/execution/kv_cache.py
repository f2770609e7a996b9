"""The pool tensors behind the block ids, and the moves of blocks: copies, swaps.

One block id names one block in *every* layer's key pool and value pool. Layers may differ in shape, and so
may keys and values. The host pool, the same shapes in host memory, is allocated when something is first
swapped out: most runs never do.
Paper: sections 4.2, 4.3 (copy-on-write), 4.5 (swapping), 5.1. Does NOT know: who holds a block, and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minipaged.config import ConfigError
from minipaged.execution.attention import LayerSpec
from minipaged.kernels.dispatch import Backend
from minipaged.kernels.layout import cache_shape
from minipaged.memory import BlockCopy


class KVCache:
    """Device pools, and host pools on demand.

    Args:
        specs: layer -> shape and type of its keys and values.
        num_blocks: blocks of the device pools.
        num_host_blocks: blocks of the host pools.
        block_size: tokens a block.
        backend: its `copy_blocks` and `swap_blocks` do the work.

    Raises:
        ConfigError: the pools do not fit in memory.

    Attributes:
        pools: layer -> (spec, key pool, value pool).
    """

    def __init__(
        self,
        specs: dict[int, LayerSpec],
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        backend: Backend,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self._backend = backend
        self.pools = {
            layer: (spec, self._pool(spec, spec.key_dim), self._pool(spec, spec.value_dim))
            for layer, spec in specs.items()
        }
        self._device_pools = [pool for _, keys, values in self.pools.values() for pool in (keys, values)]
        self._host_pools: list[Tensor] = []
        self._is_cuda = self._device_pools[0].is_cuda
        self._stream = torch.cuda.Stream(self._device_pools[0].device) if self._is_cuda else None

    def _pool(self, spec: LayerSpec, head_dim: int) -> Tensor:
        shape = cache_shape(self.num_blocks, self.block_size, spec.num_kv_heads, head_dim)
        try:
            # Not cleared: nothing unwritten is read, and memory that no token reaches is never committed.
            return torch.empty(shape, dtype=spec.dtype, device=spec.device)
        except RuntimeError as error:  # of which out-of-memory is a kind
            raise ConfigError(
                f"a KV pool of {self.num_blocks} blocks does not fit in memory; "
                "lower num_blocks, kv_cache_memory or gpu_memory_utilization"
            ) from error

    def copy(self, copies: list[BlockCopy]) -> None:
        """Copy device blocks; all reads happen before all writes."""
        if copies:
            source, destination = self._columns(copies)
            self._backend.copy_blocks(self._device_pools, source, destination)

    def swap_out(self, copies: list[BlockCopy]) -> None:
        """Copy (device block, host block); done before any later work of this step."""
        if copies:
            self._allocate_host_pools()
            source, destination = self._columns(copies)
            with self._transfer():
                self._backend.swap_blocks(self._device_pools, self._host_pools, source, destination)

    def swap_in(self, copies: list[BlockCopy]) -> None:
        """Copy (host block, device block); done before any later work of this step."""
        if copies:
            source, destination = self._columns(copies)
            with self._transfer():
                self._backend.swap_blocks(self._host_pools, self._device_pools, source, destination)

    def _allocate_host_pools(self) -> None:
        if not self._host_pools:
            self._host_pools = [
                torch.empty(
                    (self.num_host_blocks, *pool.shape[1:]), dtype=pool.dtype, pin_memory=self._is_cuda
                )
                for pool in self._device_pools
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

    @staticmethod
    def _columns(copies: list[BlockCopy]) -> tuple[Tensor, Tensor]:
        source, destination = torch.tensor(copies, dtype=torch.int64).T.contiguous()
        return source, destination


def block_bytes(specs: dict[int, LayerSpec], block_size: int) -> int:
    """Bytes of one block: keys and values, all layers."""
    return sum(
        block_size * spec.num_kv_heads * (spec.key_dim + spec.value_dim) * spec.dtype.itemsize
        for spec in specs.values()
    )
