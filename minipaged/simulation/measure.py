"""Two ways to measure a system: what it sustains when the queue never empties, and a trace at a rate.

    saturated    keep the queue full; after a warm-up, tokens a second / mean output length
    on a trace   Poisson arrivals for so many seconds, then until the last one is done

The sustained rate of the paper's Fig. 12 is read off where the latency of a long trace explodes; with the
queue kept full the same number comes out of seconds instead of an hour. Knows systems only as simulations.
"""

from __future__ import annotations

from typing import NamedTuple

from minipaged.simulation.records import Run, Usage
from minipaged.simulation.run import Simulation, simulate
from minipaged.simulation.workloads import Workload, poisson

SEED = 0
QUEUE = 64


class Saturated(NamedTuple):
    """What a system does when the queue never empties.

    Attributes:
        token_rate: generated tokens a second, one sample of each request counted.
        usage: averages over the measured steps.
        preemptions_per_request: among the requests finished in the measured steps.
    """

    token_rate: float
    usage: Usage
    preemptions_per_request: float


def saturate(
    simulation: Simulation, workload: Workload, warm_up: int, steps: int, seed: int = SEED
) -> Saturated:
    """Run `warm_up` steps, then measure `steps` steps with at least `QUEUE` requests waiting."""
    arrivals = poisson(workload, float("inf"), 10**9, seed)
    scheduler, executor, run = simulation.scheduler, simulation.executor, simulation.run

    def advance(count: int) -> int:
        tokens = 0
        for _ in range(count):
            while len(scheduler.waiting) < QUEUE:
                simulation.add(next(arrivals))
            tokens += len(simulation.step().sampling)
        return tokens

    advance(warm_up)
    begin, finished, preempted = executor.now, len(run.records), run.num_preemptions
    simulation.forget_usage()
    tokens = advance(steps)
    seconds = executor.now - begin
    usage = simulation.finish().usage
    finished = len(run.records) - finished
    return Saturated(tokens / seconds, usage, (run.num_preemptions - preempted) / max(1, finished))


def on_trace(
    simulation: Simulation, workload: Workload, rate: float, seconds: float, seed: int = SEED
) -> Run:
    """Poisson arrivals at `rate` for about `seconds`; runs until the last request is done."""
    count = max(1, round(rate * seconds))
    return simulate(simulation, poisson(workload, rate, count, seed))
