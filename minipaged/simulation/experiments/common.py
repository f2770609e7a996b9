"""What several experiments share: names on the page, cases, sustained rates, latency by rate."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

from minipaged.simulation.measure import on_trace, saturate
from minipaged.simulation.results import Case, Curve, Panel
from minipaged.simulation.run import Simulation
from minipaged.simulation.workloads import ALPACA, SHAREGPT, Chat, Independent

LABELS = {
    "faster-transformer": "FasterTransformer",
    "orca-max": "Orca (Max)",
    "orca-pow2": "Orca (Pow2)",
    "orca-oracle": "Orca (Oracle)",
    "paged": "paged",
}
DATA = {"sharegpt": SHAREGPT, "alpaca": ALPACA}

LoadCurve = tuple[float, list[tuple[float, float]]]
"""The sustained rate of a system, and (rate, normalized latency) at fractions of it."""


def grid(run: Callable[..., Any], *axes: Iterable[Any]) -> dict[Any, Case]:
    """A case for each combination of values: key -> run(*key); with one axis the key is the value."""
    return {key if len(axes) > 1 else key[0]: partial(run, *key) for key in product(*axes)}


def capacity(simulation: Simulation, workload: Independent | Chat, warm_up: int, steps: int) -> float:
    """Requests a second that the system sustains."""
    return saturate(simulation, workload, warm_up, steps).token_rate / workload.output.mean


def load_curve(
    build: Callable[[], Simulation],
    workload: Independent | Chat,
    warm_up: int,
    steps: int,
    seconds: float,
    fractions: tuple[float, ...] = (0.4, 0.7, 0.9, 1.0, 1.1),
) -> LoadCurve:
    """Measure a system: with its queue full, then on traces of this many seconds."""
    sustained = capacity(build(), workload, warm_up, steps)
    rates = [fraction * sustained for fraction in fractions]
    return sustained, [(r, on_trace(build(), workload, r, seconds).normalized_latency) for r in rates]


def latency_panel(title: str, systems: dict[str, LoadCurve], y_limit: float) -> Panel:
    """Normalized latency against request rate, one curve a label."""
    curves = [Curve(label, [x for x, _ in c], [y for _, y in c]) for label, (_, c) in systems.items()]
    return Panel(title, "request rate [req/s]", "normalized latency [s/token]", curves, y_limit=y_limit)
