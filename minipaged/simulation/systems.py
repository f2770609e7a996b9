"""The systems that the experiments compare, all driven by the real engine.

paged               blocks on demand                                 this project's own manager
orca-*              contiguous regions from a buddy allocator        under this project's scheduler
faster-transformer  the same, one batch after the other
"""

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from minipaged.components import Components, build_scheduler
from minipaged.config import EngineConfig
from minipaged.scheduling import FCFSScheduler, PrefillFirst, Recompute
from minipaged.simulation.baselines.contiguous import RESERVATIONS, ContiguousKVManager, reserve_max
from minipaged.simulation.baselines.prefix_unaware import PrefixUnawareKVManager
from minipaged.simulation.baselines.static_batch import StaticBatchScheduler
from minipaged.simulation.costs import CostModel
from minipaged.simulation.executor import SimulatedExecutor
from minipaged.simulation.hardware import CHIPS, GIB, MODELS, Deployment, find
from minipaged.simulation.run import MethodOf, Simulation, one_sample

PAPER: dict[str, Any] = {
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "preemption_mode": "recompute",
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
}
"""Settings of the paper's system, where the engine's defaults differ."""

OWN_CLASSES = Components()
PAGED: ContextVar[Components] = ContextVar("classes of the paged system", default=OWN_CLASSES)
"""The project's own, except with `reproduce --use`."""

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
    deployment = Deployment(find("model", MODELS, model), find("chip", CHIPS, chip), num_chips)
    return Setup(deployment, num_slots or deployment.num_kv_slots())


def _slots(gib: float, model: str) -> int:
    return int(gib * GIB // MODELS[model].kv_bytes)


# Table 1 of the paper: 12 GB, 21 GB and 264 GB for KV, 15.7K, 9.7K and 60.1K slots.
OPT_13B = setup("opt-13b", "a100-40gb", 1, _slots(12, "opt-13b"))
OPT_66B = setup("opt-66b", "a100-40gb", 4, 9_700)
OPT_175B = setup("opt-175b", "a100-80gb", 8, _slots(264, "opt-175b"))
LLAMA_13B = setup("llama-13b", "a100-40gb", 1, _slots(12, "llama-13b"))


def paged(
    setup: Setup,
    *,
    method_of: MethodOf = one_sample,
    max_output: int | None = None,
    usage_every: int = 0,
    components: Components | None = None,
    **options: Any,
) -> Simulation:
    """The paged system (prefills first, blocks on demand, recompute) except for these settings."""
    config = EngineConfig(**PAPER | options)
    num_blocks = setup.num_slots // config.block_size
    costs = CostModel(setup.deployment, config.block_size)
    limits = (num_blocks, num_blocks, setup.max_model_len, costs.preemption_costs())
    executor = SimulatedExecutor(costs, *limits, block_size=config.block_size)
    scheduler = build_scheduler(config, executor, components or PAGED.get())
    return Simulation(scheduler, executor, method_of, max_output, usage_every)


def prefix_unaware(setup: Setup) -> Simulation:
    """The paged system with a prefix cache, but cached blocks are charged like all others."""
    components = replace(PAGED.get(), kv_manager=PrefixUnawareKVManager)
    return paged(setup, enable_prefix_caching=True, components=components)


def system(name: str, setup: Setup, *, method_of: MethodOf = one_sample, usage_every: int = 0) -> Simulation:
    """A system by name, with the defaults of the paper."""
    if name == "paged":
        return paged(setup, method_of=method_of, usage_every=usage_every)
    longest = setup.max_model_len
    kv = ContiguousKVManager(setup.num_slots, longest, RESERVATIONS.get(name, reserve_max))
    if name == "faster-transformer":
        scheduler: FCFSScheduler = StaticBatchScheduler(kv, setup.num_slots // longest, longest)
    else:
        limits = (PAPER["max_num_seqs"], PAPER["max_num_batched_tokens"], longest)
        scheduler = FCFSScheduler(kv, PrefillFirst(), Recompute(), *limits)
    executor = SimulatedExecutor(CostModel(setup.deployment, 1, paged=False))
    return Simulation(scheduler, executor, method_of, usage_every=usage_every)
