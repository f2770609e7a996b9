"""Which class plays which concept, and how the parts are put together.

The one place where a part is swapped: `Parts(allocator=MyAllocator)` runs the whole engine on another
allocator. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from minipaged.config import EngineConfig
from minipaged.memory import (
    BlockAllocator,
    Chunked,
    KVManager,
    OnDemand,
    PageGrowth,
    PrefixCache,
    Reserve,
    SwapSpace,
)
from minipaged.scheduling import (
    Auto,
    BatchPolicy,
    ChunkedPrefill,
    FCFSScheduler,
    PreemptionCosts,
    PreemptionPolicy,
    PrefillFirst,
    Recompute,
    Swap,
)


class ModelLimits(Protocol):
    """What the scheduler must know of model and memory; an `Executor` has these attributes."""

    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    preemption_costs: PreemptionCosts


@dataclass(frozen=True, slots=True)
class Parts:
    """The classes of the engine. A field set to None is chosen by the config."""

    allocator: Callable[[int], BlockAllocator] = BlockAllocator
    prefix_cache: Callable[[BlockAllocator, int], PrefixCache] = PrefixCache
    page_growth: Callable[[], PageGrowth] | None = None
    batch_policy: Callable[[], BatchPolicy] | None = None
    preemption: Callable[[], PreemptionPolicy] | None = None
    scheduler: Callable[..., FCFSScheduler] = FCFSScheduler


PAGE_GROWTH: dict[str, Callable[[], PageGrowth]] = {
    "on_demand": OnDemand,
    "chunked": Chunked,
    "reserve": Reserve,
}


def build_scheduler(config: EngineConfig, limits: ModelLimits, parts: Parts | None = None) -> FCFSScheduler:
    """Put manager and scheduler together as the config says.

    Args:
        config: settings.
        limits: sizes of the pools and of the model.
        parts: classes that replace the project's own.
    """
    parts = parts or Parts()
    allocator = parts.allocator(limits.num_blocks)
    kv = KVManager(
        allocator,
        config.block_size,
        (parts.page_growth or PAGE_GROWTH[config.page_growth])(),
        parts.prefix_cache(allocator, config.block_size) if config.enable_prefix_caching else None,
        SwapSpace(limits.num_host_blocks, limits.num_blocks) if limits.num_host_blocks else None,
    )
    policy = parts.batch_policy or (ChunkedPrefill if config.enable_chunked_prefill else PrefillFirst)
    return parts.scheduler(
        kv,
        policy(),
        parts.preemption() if parts.preemption else _preemption(config, limits),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
    )


def _preemption(config: EngineConfig, limits: ModelLimits) -> PreemptionPolicy:
    if config.preemption_mode == "recompute":
        return Recompute()
    return Swap() if config.preemption_mode == "swap" else Auto(limits.preemption_costs)
