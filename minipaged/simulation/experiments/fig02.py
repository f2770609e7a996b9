"""Fig. 2: how much of the KV memory holds token states when the queue never empties."""

from minipaged.simulation.experiments.common import LABELS, grid
from minipaged.simulation.measure import saturate
from minipaged.simulation.results import Claim, Curve, Experiment, Outcome, Panel
from minipaged.simulation.systems import OPT_13B, system
from minipaged.simulation.workloads import SHAREGPT

PUBLISHED = {"orca-max": 20.4, "orca-pow2": 26.8, "orca-oracle": 38.2, "paged": 96.3}


def effective(name: str) -> tuple[float, float]:
    """Shares of the memory: holding token states, and allocated."""
    usage = saturate(system(name, OPT_13B, usage_every=5), SHAREGPT, 2000, 8000).usage
    return usage.tokens, usage.held


def conclude(results: dict[str, tuple[float, float]]) -> Outcome:
    """Bars of three parts."""
    names = [LABELS[name] for name in PUBLISHED]
    tokens, held = ([100 * results[name][i] for name in PUBLISHED] for i in (0, 1))
    claims = [
        Claim(f"KV memory holding token states, {name}", "Fig. 2", paper, measured, "%")
        for name, paper, measured in zip(names, PUBLISHED.values(), tokens)
    ]
    curves = [
        Curve("token states", names, tokens),
        Curve("reserved or rounded up", names, [h - t for h, t in zip(held, tokens)]),
        Curve("free", names, [100 - h for h in held]),
    ]
    axes = ("", "share of the KV memory [%]")
    panel = Panel("KV memory by use, queue never empty", *axes, curves, "stacked", y_limit=100)
    return claims, [panel]


EXPERIMENT = Experiment(
    "fig02",
    "Memory that holds token states",
    "PagedAttention paper, Fig. 2",
    "We simulate OPT-13B on an A100 40 GB with ShareGPT-like lengths and a queue that never empties. We "
    "measure 8,000 steps after 2,000 steps of warm-up.",
    grid(effective, PUBLISHED),
    conclude,
)
