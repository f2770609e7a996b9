"""`minipaged simulate`: what a set-up would do under a load, in the words of people who serve.

The scheduler and memory manager are built from an `EngineConfig` exactly as for a real model; only the
executor is simulated. Knows configs and runs; draws nothing and prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minipaged.components import build_scheduler
from minipaged.config import ConfigError, EngineConfig
from minipaged.scheduling import PreemptionCosts
from minipaged.simulation.costs import CostModel
from minipaged.simulation.executor import SimulatedExecutor
from minipaged.simulation.hardware import CONSTANTS, Constants, Deployment
from minipaged.simulation.records import Run, queue_time, time_to_first_token
from minipaged.simulation.run import Simulation


@dataclass
class Limits:
    """What the scheduler must know of model and memory (see `components.ModelLimits`)."""

    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    preemption_costs: PreemptionCosts


def engine_simulation(
    deployment: Deployment, config: EngineConfig, constants: Constants = CONSTANTS
) -> Simulation:
    """The engine of `config` over a simulated deployment.

    Raises:
        ConfigError: a length beyond the model's, or a pool that cannot hold a block.
        DoesNotFitError: no room for a KV cache.
    """
    model = deployment.model
    longest = config.max_model_len or model.max_model_len
    if longest > model.max_model_len:
        raise ConfigError(f"max_model_len is {longest}; {model.name} was trained for {model.max_model_len}")
    block_bytes = config.block_size * model.kv_bytes
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_cache_memory is not None:
        num_blocks = config.kv_cache_memory // block_bytes
    else:
        num_blocks = deployment.num_kv_slots(config.gpu_memory_utilization) // config.block_size
    if num_blocks < 1:
        raise ConfigError(f"kv_cache_memory is {config.kv_cache_memory}; one block takes {block_bytes} bytes")
    costs = CostModel(deployment, config.block_size, constants=constants)
    num_host_blocks = min(num_blocks, config.swap_space // block_bytes)
    limits = Limits(num_blocks, num_host_blocks, longest, costs.preemption_costs())
    return Simulation(build_scheduler(config, limits), SimulatedExecutor(costs), usage_every=8)


@dataclass(frozen=True)
class Report:
    """What came out of a run. Times in seconds.

    Attributes:
        requests: finished.
        refused: that could never run.
        seconds: simulated.
        request_rate: finished a second.
        token_rate: generated tokens a second.
        ttft_p50, ttft_p95: from arrival to the first token.
        itl_mean, itl_p99: between two tokens of a request.
        normalized_latency: mean over requests of end-to-end latency / output length (the paper's metric).
        queue_p95: from arrival to the first blocks.
        preemptions: how often a request gave way.
        cached_tokens: prompt tokens found in the prefix cache.
        running: requests at the same time, mean over time.
        kv_usage: share of the KV memory handed out, mean over time.
        kv_waste: share of what is handed out that holds no token, mean over time.
    """

    requests: int
    refused: int
    seconds: float
    request_rate: float
    token_rate: float
    ttft_p50: float
    ttft_p95: float
    itl_mean: float
    itl_p99: float
    normalized_latency: float
    queue_p95: float
    preemptions: int
    cached_tokens: int
    running: float
    kv_usage: float
    kv_waste: float


def report(runs: Sequence[Run]) -> Report:
    """One report over the runs of one or several replicas.

    Raises:
        ValueError: nothing finished.
    """
    total = Run()
    for run in runs:
        total.records += run.records
        total.gaps += run.gaps
        total.seconds = max(total.seconds, run.seconds)
    if not total.records:
        raise ValueError("no request finished; give a longer trace, or lengths that the model can take")
    held = sum(run.usage.held for run in runs) / len(runs)
    tokens = sum(run.usage.tokens for run in runs) / len(runs)
    return Report(
        requests=len(total.records),
        refused=sum(run.num_refused for run in runs),
        seconds=total.seconds,
        request_rate=total.throughput,
        token_rate=total.output_tokens / total.seconds,
        ttft_p50=total.quantile(time_to_first_token, 0.5),
        ttft_p95=total.quantile(time_to_first_token, 0.95),
        itl_mean=total.gap_mean,
        itl_p99=total.gap_quantile(0.99),
        normalized_latency=total.normalized_latency,
        queue_p95=total.quantile(queue_time, 0.95),
        preemptions=sum(run.num_preemptions for run in runs),
        cached_tokens=sum(run.num_cached_tokens for run in runs),
        running=sum(run.usage.requests for run in runs),
        kv_usage=held,
        kv_waste=1 - tokens / held if held else 0.0,
    )
