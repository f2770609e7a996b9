"""Two ways to measure a system: with a queue that never empties, and on a trace at a given rate.

    saturated    keep the queue full; after a warm-up, tokens a second / mean output length
    on a trace   Poisson arrivals for a given time, then until the last one is done

In the paper's Fig. 12, the sustained rate is where the latency of a long trace explodes. With the queue kept
full, the same number takes seconds instead of an hour.
"""

from typing import NamedTuple

from minipaged.simulation.records import Run, Usage
from minipaged.simulation.run import Simulation, simulate
from minipaged.simulation.workloads import Workload, poisson

QUEUE = 64


class Saturated(NamedTuple):
    """What a system does when the queue never empties, averaged over the measured steps."""

    token_rate: float  # generated tokens a second, one sample of each request counted
    usage: Usage


def saturate(simulation: Simulation, workload: Workload, warm_up: int, steps: int) -> Saturated:
    """Run `warm_up` steps, then measure `steps` steps with at least `QUEUE` requests waiting."""
    arrivals = poisson(workload, float("inf"), 10**9)

    def advance(count: int) -> None:
        for _ in range(count):
            while len(simulation.scheduler.waiting) < QUEUE:
                simulation.add(next(arrivals))
            simulation.engine.step()

    advance(warm_up)
    begin, before = simulation.executor.now, simulation.run.num_samples
    simulation.forget_usage()
    advance(steps)
    run = simulation.finish()
    return Saturated((run.num_samples - before) / (run.seconds - begin), run.usage)


def on_trace(simulation: Simulation, workload: Workload, rate: float, seconds: float) -> Run:
    """Poisson arrivals at `rate` for about `seconds`; runs until the last request is done."""
    count = max(1, round(rate * seconds))
    return simulate(simulation, poisson(workload, rate, count))
