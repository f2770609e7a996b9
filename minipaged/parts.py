"""Which class plays which concept, and how the parts are put together.

The one place where a part is swapped: `parts_from({"allocator": "mine.py:BlockAllocator"})` runs the whole
engine on another allocator, watched by the contract of its concept (`minipaged.contracts`). No torch.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from minipaged.config import EngineConfig
from minipaged.contracts import CONCEPTS
from minipaged.contracts.scheduling import make_preemption
from minipaged.decoding.beam_search import BeamSearch
from minipaged.decoding.methods import SamplingMethod
from minipaged.decoding.params import BeamSearchParams, SamplingParams
from minipaged.decoding.stopping import StopChecker
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
    """The classes of the engine, a field a concept. None: chosen by the config, or by the executor."""

    allocator: Callable[[int], BlockAllocator] = BlockAllocator
    block_table: Callable[[BlockPool, int], BlockTable] = BlockTable
    prefix_cache: Callable[[BlockAllocator, int], PrefixCache] = PrefixCache
    page_growth: Callable[[], PageGrowth] | None = None
    prefill_first: Callable[[], BatchPolicy] = PrefillFirst
    chunked_prefill: Callable[[], BatchPolicy] = ChunkedPrefill
    preemption: Callable[..., PreemptionPolicy] | None = None
    scheduler: Callable[..., FCFSScheduler] = FCFSScheduler
    parallel_sampling: Callable[[SamplingParams, StopChecker], SamplingMethod] = SamplingMethod
    beam_search: Callable[[BeamSearchParams, StopChecker], BeamSearch] = BeamSearch
    paged_attention: Callable[..., Any] | None = None


class PartError(ValueError):
    """A part that cannot be found or loaded; the message names it and the fix."""


def parts_from(use: Mapping[str, Any]) -> Parts:
    """The project's parts with some of them replaced.

    Args:
        use: concept -> a class (for paged attention also a function), or "FILE.py:Class".

    Raises:
        PartError: an unknown concept, or a file or class that cannot be loaded.
        ContractError: a part that lacks a method of its contract.
    """
    replaced = {}
    for name, given in use.items():
        concept = CONCEPTS.get(check_concept(name))
        assert concept is not None
        part = load_part(given) if isinstance(given, str) else given
        if not getattr(part, "__module__", "").startswith("minipaged."):
            concept.check(name, part)
            part = concept.watch(part)
        replaced[name] = part
    return Parts(**replaced)


def check_concept(name: str) -> str:
    """The name of a concept. Raises `PartError` for an unknown one."""
    if name in CONCEPTS:
        return name
    near = difflib.get_close_matches(name, CONCEPTS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(CONCEPTS)}"
    raise PartError(f"unknown concept {name!r}; {hint}")


def parse_use(values: Iterable[str]) -> dict[str, str]:
    """Read `--use CONCEPT=FILE.py:Class` options.

    Raises:
        PartError: not of that form, or a concept given twice.
    """
    use: dict[str, str] = {}
    for value in values:
        name, equals, where = value.partition("=")
        if not equals or ":" not in where:
            raise PartError(f"--use {value} is not CONCEPT=FILE.py:Class, e.g. allocator=mine.py:MyAllocator")
        if check_concept(name) in use:
            raise PartError(f"--use {name} is given twice: {use[name]} and {where}; drop one")
        use[name] = where
    return use


def load_part(where: str) -> Any:
    """Load "FILE.py:Class".

    Raises:
        PartError: no such file or class, or the file fails when it is run.
    """
    file, _, name = where.rpartition(":")
    module = _load_file(Path(file))
    if not hasattr(module, name):
        known = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
        raise PartError(f"{file} has no {name}; it defines {', '.join(known) or 'nothing'}")
    return getattr(module, name)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PartError(f"there is no file {path}; give the path from where you are ({Path.cwd()})")
    name = "part_of_" + "_".join(path.resolve().with_suffix("").parts[-2:])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look for it there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        line = getattr(error, "lineno", None)
        where = f"{path}, line {line}" if line else str(path)
        raise PartError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


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
        block_table=parts.block_table,
    )
    return parts.scheduler(
        kv,
        (parts.chunked_prefill if config.enable_chunked_prefill else parts.prefill_first)(),
        make_preemption(parts.preemption, limits.preemption_costs)
        if parts.preemption
        else _preemption(config, limits),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
    )


def _preemption(config: EngineConfig, limits: ModelLimits) -> PreemptionPolicy:
    if config.preemption_mode == "recompute":
        return Recompute()
    return Swap() if config.preemption_mode == "swap" else Auto(limits.preemption_costs)
