"""The playground: the engine over the simulator's executor and clock, a few steps at a time.

    run = SimulatedRun({"block_size": 16, "num_blocks": 24, "requests": 8, "rate": 4})
    run.advance(50)     lines of a trace, for the viewer; none when the run is over
    run.counts()        its results

Costs are those of OPT-13B on an A100, as in the paper's experiments.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from minipaged.components import build_scheduler
from minipaged.config import ConfigError, EngineConfig, config_from
from minipaged.scheduling import DecodingMethod
from minipaged.simulation.costs import CostModel
from minipaged.simulation.executor import SimulatedExecutor
from minipaged.simulation.records import time_to_first_token
from minipaged.simulation.run import WatchedSimulation
from minipaged.simulation.scripts import ScriptedSampling
from minipaged.simulation.systems import OPT_13B
from minipaged.simulation.workloads import FIRST_OWN, Arrival, Independent, Lognormal, poisson
from minipaged.viewer.trace import TraceLines

LONGEST = 256
"""Most tokens of a prompt, and of the output each request asks for: more would not fit on a screen."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests: lengths are lognormal with these means, and arrivals are Poisson."""

    requests: int = 8
    rate: float = 2.0  # requests a second
    prompt: float = 40.0  # tokens, mean
    output: float = 60.0
    prefix: int = 0  # tokens that every prompt begins with
    samples: int = 1  # outputs of a request, which share its prompt's blocks

    def __post_init__(self) -> None:
        for name, least, most in (
            ("requests", 1, 200),
            ("rate", 0.01, 1000),
            ("prompt", 1, LONGEST - 1),
            ("output", 1, LONGEST - 1),
            ("prefix", 0, LONGEST),
            ("samples", 1, 8),
        ):
            value = getattr(self, name)
            is_whole = type(getattr(Load, name)) is int
            if not isinstance(value, int if is_whole else int | float) or not least <= value <= most:
                what = "a whole number" if is_whole else "a number"
                raise ConfigError(f"{name} is {value!r}; give {what} from {least} to {most}")

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        """The requests, in the order of time."""
        prompt, output = (Lognormal(mean, 0.5, LONGEST) for mean in (self.prompt, self.output))
        return poisson(Independent(prompt, output, self.prefix), self.rate, self.requests, seed)

    def method_of(self, arrival: Arrival) -> DecodingMethod:
        """As many samples as were asked for, all as long as the output drawn."""
        return ScriptedSampling(arrival.lengths.output, self.samples)


DEFAULTS: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": 32,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "preemption_mode": "recompute",
}
"""Where the engine's defaults would fill more than a screen."""

LOAD = [option.name for option in fields(Load)]


def split(settings: Mapping[str, Any]) -> tuple[Load, EngineConfig]:
    """A page's settings, in one object. Raises `ConfigError` for an invalid value."""
    load = {name: value for name, value in settings.items() if name in LOAD}
    engine = {name: value for name, value in settings.items() if name not in LOAD}
    return Load(**load), config_from(DEFAULTS | engine)


def text_of(token: int) -> str:
    """A letter for the viewer: p for a prompt's own token, a dot for one that is shared or generated."""
    return "p " if token >= FIRST_OWN else "· "


class SimulatedRun:
    """A run of the engine that waits to be advanced; its trace begins with the header."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        logging.getLogger("minipaged").setLevel(logging.ERROR)  # the page reports preemptions itself
        self.load, config = split(settings)
        if config.num_blocks is None or config.num_blocks > 4096:
            raise ConfigError(f"num_blocks is {config.num_blocks}; give a number from 1 to 4096")
        costs = CostModel(OPT_13B.deployment, config.block_size)
        host = config.num_blocks if config.preemption_mode != "recompute" else 0
        limits = (config.num_blocks, host, OPT_13B.max_model_len, costs.preemption_costs())
        executor = SimulatedExecutor(costs, *limits, block_size=config.block_size)
        scheduler = build_scheduler(config, executor)
        self.simulation = WatchedSimulation(scheduler, executor, self.load.method_of, LONGEST, usage_every=1)
        self._lines: list[str] = []
        self._trace = TraceLines(self.simulation.engine, self._lines.append, text_of)
        self._steps = self._run(self.load.arrivals(config.seed))

    def _run(self, arrivals: Iterator[Arrival]) -> Iterator[None]:
        simulation, scheduler = self.simulation, self.simulation.scheduler
        for arrival in arrivals:
            while scheduler.has_unfinished and simulation.executor.now < arrival.time:
                simulation.engine.step()
                yield
            simulation.add(arrival)
        while scheduler.has_unfinished:
            simulation.engine.step()
            yield
        self._trace.close()

    def advance(self, steps: int) -> list[str]:
        """Run this many steps; returns what they add to the trace. Empty once the run is over."""
        for _ in zip(range(steps), self._steps):
            pass
        lines = self._lines[:]
        self._lines.clear()
        return lines

    @property
    def refusal(self) -> str:
        """Why the last request that was refused can never run, in the page's terms; "" if none was."""
        reason = self.simulation.refusal.replace("num_blocks or kv_cache_memory", "num_blocks")
        return re.sub(r"\b1 tokens", "1 token", reason)

    def counts(self) -> dict[str, float]:
        """The results so far."""
        run = self.simulation.finish()
        waits = [time_to_first_token(record) for record in run.records]
        return {
            "steps": run.num_steps,
            "finished": len(run.records),
            "cut_short": run.num_cut_short,  # of the finished: the pool was too small for their outputs
            "refused": run.num_refused,
            "preemptions": run.num_preemptions,
            "cached_tokens": run.num_cached_tokens,
            "peak_blocks": self.simulation.peak_blocks,
            "seconds": run.seconds,
            "ttft": sum(waits) / len(waits) if waits else 0.0,
            "waste": 1 - run.usage.tokens / run.usage.held if run.usage.held else 0.0,
            "shared": run.usage.shared,
        }
