"""How many blocks the pools get: what the settings say, or what fits in memory.

On a GPU the pool takes what the weights, the activations of the largest step and other programs leave.
Paper: section 4.1 (the pool is reserved at the start).
"""

from __future__ import annotations

from collections.abc import Callable

from minipaged.config import ConfigError, EngineConfig

DEFAULT_CPU_MEMORY = 1 << 30
"""Bytes of a pool on a CPU if the settings do not say."""

ADDRESSABLE = 1 << 47
"""Bytes that a process can address on today's 64-bit processors."""


def pool_size(
    config: EngineConfig, bytes_per_block: int, max_model_len: int, available_bytes: Callable[[], int]
) -> tuple[int, int]:
    """How many blocks the device and the host pool get.

    `num_blocks` is taken at its word; a pool sized by memory is never larger than `max_num_seqs` sequences
    of `max_model_len` tokens could fill. `available_bytes` is called only if the settings do not say.

    Raises:
        ConfigError: the memory holds no block.
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
                f"{memory} bytes for the KV pool hold no block of {bytes_per_block} bytes; raise {source}"
            )
    if num_blocks * bytes_per_block > ADDRESSABLE:
        raise ConfigError(
            f"num_blocks is {num_blocks}: of {bytes_per_block} bytes each, more than a machine addresses; "
            f"give at most {ADDRESSABLE // bytes_per_block}, or kv_cache_memory"
        )
    if 0 < config.swap_space < bytes_per_block:
        raise ConfigError(
            f"swap_space is {config.swap_space} bytes, and a block has {bytes_per_block}; the unit is bytes "
            f"(vLLM's is GiB): give at least a block, e.g. {4 << 30} for 4 GiB, or 0 to swap nothing"
        )
    return num_blocks, min(num_blocks, config.swap_space // bytes_per_block)


def gpu_budget(total: int, free: int, peak: int, utilization: float) -> int:
    """Bytes of a GPU for the pool.

    Args:
        total: its memory.
        free: what is unused once the weights are in place.
        peak: what the largest step takes on top.
        utilization: share of the memory that may be used, by other programs too.
    """
    return max(0, int(total * utilization) - (total - free) - peak)
