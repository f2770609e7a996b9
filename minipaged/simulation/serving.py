"""`minipaged simulate`: how a set-up would behave under a load, in the terms that operators use.

The scheduler and memory manager are built from an `EngineConfig` exactly as for a real model; only the
executor is simulated.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from minipaged.components import Components, build_scheduler
from minipaged.config import MOST, ConfigError, EngineConfig
from minipaged.simulation.costs import CostModel
from minipaged.simulation.executor import SimulatedExecutor
from minipaged.simulation.fleet import find_router, simulate_fleet
from minipaged.simulation.hardware import Deployment
from minipaged.simulation.report import Report, report
from minipaged.simulation.reproduce import quiet, run_cases, simulated_components
from minipaged.simulation.results import OWN, Curve, Panel
from minipaged.simulation.run import Simulation, WatchedSimulation, explained_hidden_fields
from minipaged.simulation.workloads import find_workload, poisson
from minipaged.text_io import to_count

MOST_BLOCKS = 10_000_000
"""Blocks in all pools of a simulation: some 100 bytes each."""

MOST_VALUES = 1000
"""Values of a sweep."""

SPECULATION = ("num_speculative_tokens", "speculative_model")

WITHOUT_EFFECT = (
    *SPECULATION,
    *("attention_backend", "enable_cuda_graphs", "async_scheduling", "dtype", "revision"),
    *("device", "quantization", "trust_remote_code", "generation_config", "disable_log_stats"),
    *("tensor_parallel_size", "pipeline_parallel_size"),
)


def check_settings(names: Iterable[str]) -> None:
    """`ConfigError` for a setting without effect here."""
    for name in names:
        if name in WITHOUT_EFFECT:
            fix = "use --chips" if name == "tensor_parallel_size" else "leave it out"
            raise ConfigError(f"{name} has no effect in a simulation; {fix}")


def engine_simulation(
    deployment: Deployment, config: EngineConfig, replicas: int, components: Components
) -> Simulation:
    """An engine over a simulated deployment; `ConfigError` or `DoesNotFitError` if there cannot be one."""
    model = deployment.model
    longest = config.max_model_len or model.max_model_len
    if longest > model.max_model_len:
        raise ConfigError(
            f"max_model_len is {longest}; {model.name} was trained for {model.max_model_len}; give no more"
        )
    block_bytes = config.block_size * model.kv_bytes
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_cache_memory is not None:
        num_blocks = config.kv_cache_memory // block_bytes
    else:
        num_blocks = deployment.num_kv_slots(config.gpu_memory_utilization) // config.block_size
    if num_blocks < 1:
        name = "block_size" if config.kv_cache_memory is None else "kv_cache_memory"
        raise ConfigError(
            f"{name} is {getattr(config, name)}; one block takes {block_bytes} bytes, more than the pool has"
        )
    if num_blocks * replicas > MOST_BLOCKS:
        raise ConfigError(
            f"num_blocks is {num_blocks} in {replicas} replicas; give at most {MOST_BLOCKS:,} blocks in all"
        )
    most = deployment.num_kv_slots(1.0) // config.block_size
    if most < 1:
        raise ConfigError(
            f"block_size is {config.block_size}; one block takes {block_bytes} bytes, more than the memory "
            "has beside the weights"
        )
    if num_blocks > most:
        name = "num_blocks" if config.num_blocks is not None else "kv_cache_memory"
        raise ConfigError(
            f"{name} is {getattr(config, name)}; beside the weights, the memory has room for {most} blocks "
            f"of {block_bytes} bytes; give at most that"
        )
    costs = CostModel(deployment, config.block_size)
    num_host_blocks = min(num_blocks, config.swap_space // block_bytes)
    executor = SimulatedExecutor(
        costs, num_blocks, num_host_blocks, longest, costs.preemption_costs(), config.block_size
    )
    return WatchedSimulation(build_scheduler(config, executor, components), executor, usage_every=1)


@dataclass(frozen=True)
class Load:
    """A trace over a fleet of equal replicas."""

    deployment: Deployment
    workload: str  # see `find_workload`
    requests: int
    replicas: int
    router: str  # see `find_router`

    def run(self, rate: float, config: EngineConfig, use: Mapping[str, str] = OWN) -> Report:
        """Arrivals at `rate` a second, engines with these settings and these classes."""
        quiet()
        if use:  # (a file of classes is loaded where they run: they cannot be sent to a process)
            logging.getLogger("minipaged.learn").setLevel(logging.ERROR)
        parts = simulated_components(use)
        fleet = [
            engine_simulation(self.deployment, config, self.replicas, parts) for _ in range(self.replicas)
        ]
        arrivals = poisson(find_workload(self.workload), rate, self.requests, config.seed)
        with explained_hidden_fields():
            runs = simulate_fleet(fleet, arrivals, find_router(self.router))
        if not any(run.records for run in runs):
            why = next(replica.refusal for replica in fleet if replica.refusal)
            raise ValueError(f"no request finished: {why}")
        return report(runs)

    def check(self, rate: float, config: EngineConfig, use: Mapping[str, str] = OWN) -> None:
        """Raise at once what `run` would raise."""
        engine_simulation(self.deployment, config, self.replicas, simulated_components(use))
        next(poisson(find_workload(self.workload), rate, self.requests))
        find_router(self.router)

    def sweep(
        self,
        rate: float,
        config: EngineConfig,
        flag: str,
        values: Sequence[Any],
        progress: Callable[[int, int], None],
        uses: Sequence[Mapping[str, str]] = (OWN,),
    ) -> list[Report]:
        """A run for each value of a setting (or of the rate if the flag is "rate") and each of `uses`."""
        if flag == "rate":
            settings = [(value, config) for value in values]
        else:
            settings = [(rate, replace(config, **{flag: value})) for value in values]
        for setting in settings:
            self.check(*setting)
        for use in uses:
            self.check(*settings[0], use)
        cases = [partial(self.run, *setting, use) for setting in settings for use in uses]
        return run_cases(cases, progress)


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """FLAG=V1,V2 -> field name and values of its type; `ConfigError` for an unknown flag or no values."""
    flag, _, values = text.partition("=")
    name = flag.strip().lstrip("-").replace("-", "_")
    known = [option.name for option in fields(EngineConfig)]
    if name not in (*known, "rate") or not values:
        offered = ", ".join(option for option in known if option not in WITHOUT_EFFECT)
        raise ConfigError(f"sweep is {text!r}; give FLAG=V1,V2,... with rate or one of {offered}")
    check_settings([name])
    parsed = [_parse_value(value.strip()) for value in values.split(",")]
    if len(parsed) > MOST_VALUES:
        raise ConfigError(f"sweep has {len(parsed)} values; give 1 to {MOST_VALUES:,}")
    if name == "rate" and not all(type(value) in (int, float) for value in parsed):
        raise ConfigError(f"sweep is {text!r}; give rates in requests per second")
    return name, [float(value) for value in parsed] if name == "rate" else parsed


_WORDS = {"true": True, "false": False, "none": None}


def _parse_value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for read in (int, to_count):
        with suppress(ValueError):
            return read(text)
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() and abs(value) < MOST else value


def _named(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def sweep_panels(flag: str, values: Sequence[Any], rows: Mapping[str, Sequence[Report]]) -> list[Panel]:
    """Throughput and latencies along a sweep, for each row; bars where a value has no place on an axis.

    `rows` has a suffix for the labels of each row of reports, as ", yours".
    """
    numeric = all(type(value) in (int, float) and math.isfinite(value) for value in values)
    x = list(values) if numeric else [_named(value) for value in values]
    label = {figure.name: figure.metadata["label"].partition(" [")[0] for figure in fields(Report)}
    panels = []
    for title, *names in (
        ("throughput [tok/s]", "token_rate"),
        ("time to first token [s]", "ttft_p50", "ttft_p95"),
        ("inter-token latency [s]", "itl_mean", "itl_p99"),
    ):
        curves = [
            Curve(label[name] + suffix, x, [getattr(report, name) for report in reports])
            for suffix, reports in rows.items()
            for name in names
        ]
        x_label = "request rate [req/s]" if flag == "rate" else flag
        panels.append(Panel(title.partition(" [")[0], x_label, title, curves, "line" if numeric else "bar"))
    return panels
