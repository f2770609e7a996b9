"""How many blocks the pools get: from the settings or, on a GPU, what the largest step leaves.

    total x gpu_memory_utilization
    | weights, other programs | a step's peak: activations, logits, partial results | KV pool |

The pools are reserved at the start (paper, section 4.2).
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from minipaged.config import ConfigError, EngineConfig
from minipaged.decoding.sampling import take_memory
from minipaged.execution.attention import LayerSpec
from minipaged.execution.load_errors import in_one_line
from minipaged.execution.probe import Probe

DEFAULT_CPU_MEMORY = 1 << 30
"""Bytes of a pool on a CPU by default."""

KEPT_SHARE, LEAST_KEPT = 0.25, 8
"""States of recurrent layers for cached prefixes: as a share of the pool's bytes, and at least so many."""

ADDRESSABLE = 1 << 47
"""Bytes that a process can address on today's 64-bit processors."""


def block_bytes(specs: dict[int, LayerSpec], block_size: int) -> int:
    """Bytes of one block: keys and values, all layers."""
    return sum(
        block_size * spec.num_kv_heads * (spec.key_dim + spec.value_dim) * spec.dtype.itemsize
        for spec in specs.values()
    )


def pool_size(
    config: EngineConfig,
    bytes_per_block: int,
    max_model_len: int,
    available_bytes: Callable[[], int],
    num_spare_blocks: int = 0,
) -> tuple[int, int]:
    """How many blocks the device and the host pool get, besides spare ones on the device.

    `num_blocks` is used as given; a pool sized by memory is never larger than `max_num_seqs` sequences of
    `max_model_len` tokens could fill. Raises ConfigError if the memory or the swap space holds no
    block, or no machine has memory for so many.
    """
    num_blocks = config.num_blocks
    if num_blocks is None:
        memory = config.kv_cache_memory or available_bytes()
        useful = config.max_num_seqs * -(-max_model_len // config.block_size)
        num_blocks = min(memory // bytes_per_block - num_spare_blocks, useful)
        if num_blocks < 1:
            is_budget = not config.kv_cache_memory and memory != DEFAULT_CPU_MEMORY
            setting = "gpu_memory_utilization" if is_budget else "kv_cache_memory"
            if num_spare_blocks:
                setting += f", or turn async_scheduling off (it takes {num_spare_blocks} spare blocks)"
            raise ConfigError(
                f"{memory} bytes for the KV pool cannot hold a block of {bytes_per_block} bytes; "
                f"raise {setting}"
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


def num_kept_states(config: EngineConfig, pool_bytes: int, state_bytes: int) -> int:
    """How many states of recurrent layers are kept for cached prefixes."""
    if not state_bytes or not config.enable_prefix_caching:
        return 0
    return max(LEAST_KEPT, int(pool_bytes * KEPT_SHARE) // state_bytes)


def gpu_budget(total: int, free: int, peak: int, utilization: float) -> int:
    """Bytes of a GPU for the pool: what the weights (in place), other programs and a step's peak leave."""
    return max(0, int(total * utilization) - (total - free) - peak)


def step_bytes(
    config: EngineConfig,
    probe: Probe,
    specs: dict[int, LayerSpec],
    uses_triton: bool,
    keeps_graphs: bool,
    num_logits: int,
) -> int:
    """Bytes of a GPU that steps take besides the weights and the pool.

    Args:
        config: limits of a step.
        probe: runs a step as large as they allow.
        specs: of the model's layers.
        uses_triton: its attention splits long contexts, whose partial results take memory.
        keeps_graphs: captured decodes keep what they use.
        num_logits: the most rows that have logits.

    Raises:
        ConfigError: such a step does not fit beside the model.
    """
    device = probe.device
    gc.collect()  # (an engine that was dropped may still hold its pool)
    torch.cuda.empty_cache()
    num_decodes = config.max_sampling_rows
    peaks = []
    for count, apart in ((num_decodes, True), (config.max_num_batched_tokens, False)):
        torch.cuda.reset_peak_memory_stats(device)
        resting = torch.cuda.memory_allocated(device)
        try:
            _, logits = probe.run([0] * count, min(count, num_logits), apart=apart)
            take_memory(logits[:num_decodes])
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of {count} tokens does not fit in the memory of {device} beside the model: lower "
                f"max_num_batched_tokens or max_num_seqs, or end other programs ({in_one_line(error)})"
            ) from error
        del logits
        peaks.append(torch.cuda.max_memory_allocated(device) - resting)
    torch.cuda.empty_cache()
    partial_results = _partial_result_bytes(probe, specs, num_decodes) if uses_triton else 0
    decode, largest = (peak + partial_results for peak in peaks)  # (there are decodes in either kind of step)
    # A pool of captured decodes keeps its memory; without graphs the two kinds of step take turns.
    peak = decode + largest if keeps_graphs else max(decode, largest)
    return peak + 2 * config.max_num_seqs * probe.state_bytes  # a step makes new states from the old ones


def available_bytes(config: EngineConfig, probe: Probe, measure: Callable[[int], int]) -> int:
    """Default bytes for the pool: on a GPU, what the largest step leaves.

    `measure` is `step_bytes` for a number of rows with logits.
    """
    if probe.device.type != "cuda":
        return DEFAULT_CPU_MEMORY
    peak = measure(config.max_num_batched_tokens)  # prompt_logprobs ask for all rows' logits
    free, total = torch.cuda.mem_get_info(probe.device)
    budget = gpu_budget(total, free, peak, config.gpu_memory_utilization)
    return int(budget / (1 + KEPT_SHARE)) if probe.state_bytes and config.enable_prefix_caching else budget


def _partial_result_bytes(probe: Probe, specs: dict[int, LayerSpec], num_decodes: int) -> int:
    """Bytes that the splits of the largest layer take in a decode step, each context as long as possible."""
    from minipaged.kernels.triton.config import architecture_of, decode_config, split_bytes

    architecture, num_heads = architecture_of(probe.device), probe.text_config.num_attention_heads
    shapes = {(spec.dtype, spec.num_kv_heads, spec.key_dim, spec.value_dim) for spec in specs.values()}
    return max(
        split_bytes(
            decode_config(architecture, max(key_dim, value_dim), dtype, rows * num_kv_heads),
            *(rows, num_heads, value_dim, probe.max_model_len),
        )
        for dtype, num_kv_heads, key_dim, value_dim in shapes
        for rows in range(1, num_decodes + 1)  # (fewer rows may have more splits)
    )
