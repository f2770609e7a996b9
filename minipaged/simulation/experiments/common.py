"""What several experiments share: names on the page, capacity of a system, latency along rates."""

from __future__ import annotations

from collections.abc import Callable

from minipaged.simulation.measure import on_trace, saturate
from minipaged.simulation.run import Simulation
from minipaged.simulation.systems import RESERVATIONS, SYSTEMS, Setup, system
from minipaged.simulation.workloads import ALPACA, SHAREGPT, Independent

LABELS = {
    "faster-transformer": "FasterTransformer",
    "orca-max": "Orca (Max)",
    "orca-pow2": "Orca (Pow2)",
    "orca-oracle": "Orca (Oracle)",
    "paged": "paged",
}
DATA = {"sharegpt": SHAREGPT, "alpaca": ALPACA}
ORCAS = tuple(RESERVATIONS)

__all__ = ["DATA", "LABELS", "ORCAS", "SYSTEMS", "capacity", "capacity_and_curve", "percent"]


def percent(share: float) -> float:
    """0.5 -> 50."""
    return 100 * share


def capacity(simulation: Simulation, workload: Independent, warm_up: int, steps: int) -> float:
    """Requests a second that the system sustains."""
    return saturate(simulation, workload, warm_up, steps).token_rate / workload.output.mean


def capacity_and_curve(
    name: str,
    setup: Setup,
    data: str,
    warm_up: int,
    steps: int,
    seconds: float,
    fractions: tuple[float, ...] = (0.3, 0.6, 0.8, 1.0, 1.1, 1.25, 1.5),
) -> tuple[float, list[tuple[float, float]]]:
    """The sustained rate of a system, and (rate, normalized latency) at fractions of it."""
    workload = DATA[data]

    def build() -> Simulation:
        return system(name, setup)

    sustained = capacity(build(), workload, warm_up, steps)
    return sustained, curve(build, workload, [f * sustained for f in fractions], seconds)


def curve(
    build: Callable[[], Simulation], workload: Independent, rates: list[float], seconds: float
) -> list[tuple[float, float]]:
    """(rate, normalized latency) on traces of so many seconds."""
    return [(rate, on_trace(build(), workload, rate, seconds).normalized_latency) for rate in rates]
