"""Which class implements which concept, and how they are put together. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from minipaged.config import ConfigError, EngineConfig
from minipaged.decoding.beam_search import BeamSearch
from minipaged.decoding.methods import SamplingMethod
from minipaged.decoding.params import BeamSearchParams, DecodingParams, SamplingParams
from minipaged.decoding.speculation import Drafter, PromptLookup, SpeculativeScheduler
from minipaged.decoding.stopping import StopChecker
from minipaged.execution.executor import Executor
from minipaged.memory import (
    BlockAllocator,
    BlockPool,
    BlockTable,
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
    DecodingMethod,
    FCFSScheduler,
    PreemptionCosts,
    PreemptionPolicy,
    PrefillFirst,
    Recompute,
    Swap,
)


@dataclass(frozen=True, slots=True)
class Components:
    """The engine's classes, one field per concept. None: chosen by the config or by the executor."""

    allocator: Callable[[int], BlockAllocator] = BlockAllocator
    block_table: Callable[[BlockPool, int], BlockTable] = BlockTable
    prefix_cache: Callable[[BlockAllocator, int], PrefixCache] = PrefixCache
    kv_manager: Callable[..., KVManager] = KVManager
    page_growth: Callable[[], PageGrowth] | None = None
    prefill_first: Callable[[], BatchPolicy] = PrefillFirst
    chunked_prefill: Callable[[], BatchPolicy] = ChunkedPrefill
    preemption: Callable[[PreemptionCosts], PreemptionPolicy] | None = None
    scheduler: Callable[..., FCFSScheduler] = FCFSScheduler
    parallel_sampling: Callable[[SamplingParams, StopChecker], DecodingMethod] = SamplingMethod
    beam_search: Callable[[BeamSearchParams, StopChecker], DecodingMethod] = BeamSearch
    drafter: Callable[[], Drafter] = PromptLookup
    paged_attention: Callable[..., Any] | None = None

    def decoding_method(self, params: DecodingParams, stop: StopChecker) -> DecodingMethod:
        """The decoding method for these parameters."""
        if isinstance(params, BeamSearchParams):
            return self.beam_search(params, stop)
        return self.parallel_sampling(params, stop)


PAGE_GROWTH = {"on_demand": OnDemand, "chunked": Chunked, "reserve": Reserve}


def build_scheduler(
    config: EngineConfig, executor: Executor, components: Components | None = None
) -> FCFSScheduler:
    """Manager and scheduler for an executor, as the config says; `components` replace the project's own."""
    if executor.block_size != config.block_size:
        raise ConfigError(
            f"block_size is {config.block_size}, but the executor's blocks have {executor.block_size} "
            "tokens; use one size for both"
        )
    components = components or Components()
    allocator = components.allocator(executor.num_blocks)
    prefix_cache = None
    if config.enable_prefix_caching:
        prefix_cache = components.prefix_cache(allocator, config.block_size)
    kv = components.kv_manager(
        allocator,
        config.block_size,
        (components.page_growth or PAGE_GROWTH[config.page_growth])(),
        prefix_cache,
        SwapSpace(executor.num_host_blocks, executor.num_blocks) if executor.num_host_blocks else None,
        block_table=components.block_table,
    )
    kv.kept_states = executor.kept_states
    scheduler = components.scheduler
    if config.num_speculative_tokens:
        scheduler = _speculative(config, executor, components)
    return scheduler(
        kv,
        (components.chunked_prefill if config.enable_chunked_prefill else components.prefill_first)(),
        _preemption(config, executor, components),
        config.max_num_seqs,
        config.max_num_batched_tokens,
        executor.max_model_len,
    )


def check_drafts(config: EngineConfig, components: Components) -> None:
    """Raise ConfigError if drafts are configured, but these classes make none."""
    if config.num_speculative_tokens and components.scheduler is not FCFSScheduler:
        raise ConfigError(
            f"num_speculative_tokens is {config.num_speculative_tokens}, but a scheduler of your own makes "
            "no drafts; give 0"
        )


def _speculative(
    config: EngineConfig, executor: Executor, components: Components
) -> Callable[..., SpeculativeScheduler]:
    check_drafts(config, components)
    if executor.kept_states is not None:
        config.check_states()
    return partial(
        SpeculativeScheduler,
        drafter=components.drafter(),
        num_speculative_tokens=config.num_speculative_tokens,
        vocab_size=executor.vocab_size,
    )


def _preemption(config: EngineConfig, executor: Executor, components: Components) -> PreemptionPolicy:
    if components.preemption is not None:
        return components.preemption(executor.preemption_costs)
    if config.preemption_mode == "recompute":
        return Recompute()
    return Swap() if config.preemption_mode == "swap" else Auto(executor.preemption_costs)
