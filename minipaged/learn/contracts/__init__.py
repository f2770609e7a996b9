"""What an override must do to run in the engine, concept by concept, and how a breach is reported. No torch.

A contract is a class whose docstring numbers the rules; it stands between the engine and an override.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from minipaged.decoding.speculation import Drafter
from minipaged.learn.contracts.allocator import AllocatorContract
from minipaged.learn.contracts.block_table import BlockTableContract
from minipaged.learn.contracts.kv_manager import KVManagerContract
from minipaged.learn.contracts.paged_attention import check_paged_attention, watch_paged_attention
from minipaged.learn.contracts.policies import (
    BatchPolicyContract,
    DecodingMethodContract,
    DrafterContract,
    PageGrowthContract,
    PreemptionContract,
)
from minipaged.learn.contracts.prefix_cache import PrefixCacheContract
from minipaged.learn.contracts.returns import with_returns
from minipaged.learn.contracts.rules import ContractError, Rules, check_interface
from minipaged.learn.contracts.scheduler import SchedulerContract
from minipaged.memory import BlockAllocator, BlockTable, KVManager, PageGrowth, PrefixCache
from minipaged.scheduling import BatchPolicy, DecodingMethod, FCFSScheduler, PreemptionPolicy

__all__ = ["CONCEPTS", "Concept", "ContractError", "Rules"]

INHERITED = (FCFSScheduler, KVManager)
"""Of these two a student writes a method or two; no contract could watch all the others."""


class Concept(NamedTuple):
    """One concept that can be overridden."""

    name: str  # as in `--use NAME=...` and the fields of `Components`
    own: str  # the project's own, "module:Class Class"; the first stands for the concept
    interface: type | None  # whose methods an override must have; None for paged attention, a function
    contract: Any  # a `Watcher`, a subclass of an interface that is `INHERITED`, or a function that watches

    @property
    def originals(self) -> list[Any]:
        """The project's own classes."""
        module, _, names = self.own.partition(":")
        return [getattr(import_module(f"minipaged.{module}"), name) for name in names.split()]

    def check(self, override: Any) -> None:
        """Raise `ContractError` unless the override looks like the interface."""
        if self.interface is None:
            return check_paged_attention(self.name, override)
        is_class = isinstance(override, type)
        if self.interface in INHERITED and is_class and not issubclass(override, self.interface):
            base = self.interface.__name__
            raise ContractError(f"{self.name}: {override.__name__} must be a subclass of {base}")
        check_interface(self.name, self.interface, override)

    def watch(self, override: Any) -> Callable[..., Any]:
        """What makes watched objects of the override."""
        if self.interface is None:
            return self.contract(self.name, override)
        override = with_returns(self.name, self.interface, self.contract, override)
        if self.interface in INHERITED:  # the checks come before its own methods
            return type(override.__name__, (self.contract, override), {})
        return partial(self.contract, self.name, override)


CONCEPTS = {
    name: Concept(name, own, interface, contract)
    for name, own, interface, contract in (
        ("allocator", "memory.allocator:BlockAllocator", BlockAllocator, AllocatorContract),
        ("block_table", "memory.block_table:BlockTable", BlockTable, BlockTableContract),
        ("page_growth", "memory.page_growth:OnDemand Chunked Reserve", PageGrowth, PageGrowthContract),
        ("prefix_cache", "memory.prefix_cache:PrefixCache", PrefixCache, PrefixCacheContract),
        ("kv_manager", "memory.kv_manager:KVManager", KVManager, KVManagerContract),
        ("scheduler", "scheduling.scheduler:FCFSScheduler", FCFSScheduler, SchedulerContract),
        ("prefill_first", "scheduling.policies:PrefillFirst", BatchPolicy, BatchPolicyContract),
        ("chunked_prefill", "scheduling.policies:ChunkedPrefill", BatchPolicy, BatchPolicyContract),
        ("preemption", "scheduling.preemption:Recompute Swap Auto", PreemptionPolicy, PreemptionContract),
        ("parallel_sampling", "decoding.methods:SamplingMethod", DecodingMethod, DecodingMethodContract),
        ("beam_search", "decoding.beam_search:BeamSearch", DecodingMethod, DecodingMethodContract),
        ("drafter", "decoding.speculation:PromptLookup", Drafter, DrafterContract),
        ("paged_attention", "kernels.reference.attention:paged_attention", None, watch_paged_attention),
    )
}
