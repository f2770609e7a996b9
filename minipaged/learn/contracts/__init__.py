"""What a part must do to run in the engine, concept by concept, and how a breach is told. No torch.

Each module has a Protocol whose docstring numbers the rules, and a watcher that stands between the engine
and a part that is not the project's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from minipaged.learn.contracts import (
    allocator,
    block_table,
    decoding,
    page_growth,
    paged_attention,
    prefix_cache,
    scheduling,
)
from minipaged.learn.contracts.rules import ContractError, Rules, check_interface
from minipaged.scheduling import FCFSScheduler

__all__ = ["CONCEPTS", "Concept", "ContractError", "Rules"]


class Concept(NamedTuple):
    """One concept that can be swapped.

    Attributes:
        originals: the project's own, "module:name"; the first stands for the concept.
        protocol: its contract; the docstring has the rules.
        watch: puts a watcher around a part.
    """

    originals: tuple[str, ...]
    protocol: type
    watch: Callable[[Any], Any]

    def check(self, name: str, part: Any) -> None:
        """Raise `ContractError` unless the part looks like the contract."""
        if self.protocol is paged_attention.PagedAttention:
            paged_attention.check(part)
            return
        check_interface(name, self.protocol, part)
        if self.protocol is scheduling.Scheduler and not issubclass(part, FCFSScheduler):
            raise ContractError(f"{name}: {part.__name__} must be a subclass of FCFSScheduler")


CONCEPTS: dict[str, Concept] = {
    "allocator": Concept(
        ("minipaged.memory.allocator:BlockAllocator",), allocator.Allocator, allocator.watch
    ),
    "block_table": Concept(
        ("minipaged.memory.block_table:BlockTable",), block_table.Table, block_table.watch
    ),
    "page_growth": Concept(
        (
            "minipaged.memory.page_growth:OnDemand",
            "minipaged.memory.page_growth:Chunked",
            "minipaged.memory.page_growth:Reserve",
        ),
        page_growth.Growth,
        page_growth.watch,
    ),
    "prefix_cache": Concept(
        ("minipaged.memory.prefix_cache:PrefixCache",), prefix_cache.Cache, prefix_cache.watch
    ),
    "scheduler": Concept(
        ("minipaged.scheduling.scheduler:FCFSScheduler",), scheduling.Scheduler, scheduling.watch_scheduler
    ),
    "prefill_first": Concept(
        ("minipaged.scheduling.policies:PrefillFirst",),
        scheduling.Batch,
        scheduling.watch_batch("prefill_first"),
    ),
    "chunked_prefill": Concept(
        ("minipaged.scheduling.policies:ChunkedPrefill",),
        scheduling.Batch,
        scheduling.watch_batch("chunked_prefill"),
    ),
    "preemption": Concept(
        (
            "minipaged.scheduling.preemption:Recompute",
            "minipaged.scheduling.preemption:Swap",
            "minipaged.scheduling.preemption:Auto",
        ),
        scheduling.Preemption,
        scheduling.watch_preemption,
    ),
    "parallel_sampling": Concept(
        ("minipaged.decoding.methods:SamplingMethod",),
        decoding.Method,
        decoding.watch("parallel_sampling"),
    ),
    "beam_search": Concept(
        ("minipaged.decoding.beam_search:BeamSearch",), decoding.BeamMethod, decoding.watch("beam_search")
    ),
    "paged_attention": Concept(
        ("minipaged.kernels.reference.attention:paged_attention",),
        paged_attention.PagedAttention,
        paged_attention.watch,
    ),
}
