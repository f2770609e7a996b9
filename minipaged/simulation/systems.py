"""The systems that the experiments compare: one scheduler each, built over the same memory.

    paged          blocks on demand                         this project's own manager, unchanged
    orca-*         contiguous regions from a buddy allocator       under this project's scheduler
    faster-transformer  the same, one batch after the other

Knows how to put the parts together; the parts do the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from minipaged.memory import BlockAllocator, KVManager, OnDemand, PageGrowth, PrefixCache, SwapSpace
from minipaged.scheduling import BatchPolicy, FCFSScheduler, PreemptionPolicy, PrefillFirst, Recompute
from minipaged.simulation.baselines.contiguous import (
    ContiguousKVManager,
    Reservation,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)
from minipaged.simulation.baselines.prefix_unaware import PrefixUnawareKVManager
from minipaged.simulation.baselines.static_batch import StaticBatchScheduler
from minipaged.simulation.costs import CostModel
from minipaged.simulation.executor import SimulatedExecutor
from minipaged.simulation.hardware import GIB, Deployment, find_chip, find_model
from minipaged.simulation.run import MethodOf, Simulation, one_sample

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2048

RESERVATIONS: dict[str, Reservation] = {
    "orca-max": reserve_max,
    "orca-pow2": reserve_pow2,
    "orca-oracle": reserve_oracle,
}
SYSTEMS = ("faster-transformer", *RESERVATIONS, "paged")


@dataclass(frozen=True)
class Setup:
    """A model on chips with a KV pool of `num_slots` tokens."""

    deployment: Deployment
    num_slots: int

    @property
    def max_model_len(self) -> int:
        """Longest sequence of the model."""
        return self.deployment.model.max_model_len


def setup(model: str, chip: str, num_chips: int = 1, num_slots: int | None = None) -> Setup:
    """A set-up by name; the pool is what fits beside the weights, unless given."""
    deployment = Deployment(find_model(model), find_chip(chip), num_chips)
    return Setup(deployment, num_slots or deployment.num_kv_slots())


def _slots(gib: float, model: str) -> int:
    return int(gib * GIB // find_model(model).kv_bytes)


# Table 1 of the paper: 12 GB, 21 GB and 264 GB for KV, 15.7K, 9.7K and 60.1K slots.
OPT_13B = setup("opt-13b", "a100-40gb", 1, _slots(12, "opt-13b"))
OPT_66B = setup("opt-66b", "a100-40gb", 4, 9_700)
OPT_175B = setup("opt-175b", "a100-80gb", 8, _slots(264, "opt-175b"))
LLAMA_13B = setup("llama-13b", "a100-40gb", 1, _slots(12, "llama-13b"))


def paged(
    setup: Setup,
    *,
    block_size: int = 16,
    growth: PageGrowth | None = None,
    policy: BatchPolicy | None = None,
    preemption: PreemptionPolicy | None = None,
    prefix_caching: bool = False,
    prefix_aware: bool = True,
    swap: bool = False,
    max_num_seqs: int = MAX_NUM_SEQS,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    method_of: MethodOf = one_sample,
    max_output: int | None = None,
    usage_every: int = 0,
) -> Simulation:
    """The paged system; defaults are those of the paper: prefills first, blocks on demand, recompute."""
    num_blocks = setup.num_slots // block_size
    allocator = BlockAllocator(num_blocks)
    manager = KVManager if prefix_aware else PrefixUnawareKVManager
    kv = manager(
        allocator,
        block_size,
        growth or OnDemand(),
        PrefixCache(allocator, block_size) if prefix_caching else None,
        SwapSpace(num_blocks, num_blocks) if swap else None,
    )
    scheduler = FCFSScheduler(
        kv,
        policy or PrefillFirst(),
        preemption or Recompute(),
        max_num_seqs,
        max_num_batched_tokens,
        setup.max_model_len,
    )
    executor = SimulatedExecutor(CostModel(setup.deployment, block_size))
    return Simulation(scheduler, executor, method_of, max_output, usage_every)


def orca(
    setup: Setup, reserve: Reservation, *, method_of: MethodOf = one_sample, usage_every: int = 0
) -> Simulation:
    """Iteration-level batches over contiguous memory."""
    kv = ContiguousKVManager(setup.num_slots, setup.max_model_len, reserve)
    scheduler = FCFSScheduler(
        kv, PrefillFirst(), Recompute(), MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, setup.max_model_len
    )
    executor = SimulatedExecutor(CostModel(setup.deployment, 1, paged=False))
    return Simulation(scheduler, executor, method_of, usage_every=usage_every)


def faster_transformer(setup: Setup, *, usage_every: int = 0) -> Simulation:
    """Static batches over memory reserved to the maximum."""
    kv = ContiguousKVManager(setup.num_slots, setup.max_model_len, reserve_max)
    scheduler = StaticBatchScheduler(kv, setup.num_slots // setup.max_model_len, setup.max_model_len)
    executor = SimulatedExecutor(CostModel(setup.deployment, 1, paged=False))
    return Simulation(scheduler, executor, usage_every=usage_every)


def system(name: str, setup: Setup, *, method_of: MethodOf = one_sample, usage_every: int = 0) -> Simulation:
    """A system by name, with the defaults of the paper."""
    if name == "paged":
        return paged(setup, method_of=method_of, usage_every=usage_every)
    if name == "faster-transformer":
        return faster_transformer(setup, usage_every=usage_every)
    return orca(setup, RESERVATIONS[name], method_of=method_of, usage_every=usage_every)
