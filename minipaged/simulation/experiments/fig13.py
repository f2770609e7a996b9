"""Fig. 13: how many requests a system runs at the same time."""

from minipaged.simulation.experiments.common import DATA, LABELS, grid
from minipaged.simulation.results import Claim, Curve, Experiment, Outcome, Panel
from minipaged.simulation.run import simulate
from minipaged.simulation.systems import OPT_13B, system
from minipaged.simulation.workloads import poisson

PARTS = {
    "a": ("ShareGPT, 2 req/s", "sharegpt", 2.0, 1200.0),
    "b": ("Alpaca, 30 req/s", "alpaca", 30.0, 120.0),
}
SYSTEMS = ("orca-max", "orca-pow2", "orca-oracle", "paged")
PUBLISHED = {
    "a": dict(zip(SYSTEMS, (7.00, 9.81, 13.62, 30.42))),
    "b": dict(zip(SYSTEMS, (7.00, 43.24, 72.75, 132.44))),
}
"""Printed above the bars."""
LONGER = (
    "a request takes longer here, because new prompts, however short, get a step of their own before the "
    "decodes go on (checked: 71 requests if prompts share a step with decodes, 145 if the host time of a "
    "step is halved); how the paper's system spaced them is unknown"
)


def batched(part: str, name: str, seconds: float | None = None) -> float:
    """Mean number of running requests while the trace of a panel arrives."""
    _, data, rate, all_seconds = PARTS[part]
    seconds = seconds or all_seconds
    arrivals = poisson(DATA[data], rate, round(rate * seconds))
    return simulate(system(name, OPT_13B, usage_every=5), arrivals, until=seconds).usage.requests


def conclude(results: dict[tuple[str, str], float]) -> Outcome:
    """Bars, with the published ones beside them."""
    claims, panels = [], []
    names = [LABELS[name] for name in SYSTEMS]
    for part, (title, *_) in PARTS.items():
        published = PUBLISHED[part]
        curves = [
            Curve("measured", names, [results[part, name] for name in SYSTEMS]),
            Curve("published", names, list(published.values()), published=True),
        ]
        for name, paper in published.items():
            text = f"batched requests, {LABELS[name]}, {title}"
            note = LONGER if (part, name) == ("b", "paged") else ""
            claims.append(Claim(text, f"Fig. 13 {part}", paper, results[part, name], "requests", note))
        panels.append(Panel(f"({part}) {title}", "", "mean running requests", curves, kind="bar"))
    return claims, panels


EXPERIMENT = Experiment(
    "fig13",
    "Requests batched together",
    "PagedAttention paper, Fig. 13",
    "We simulate OPT-13B on an A100 40 GB. We average over the time in which a trace of 20 min "
    "(ShareGPT-like) or 2 min (Alpaca-like) arrives.",
    grid(batched, PARTS, SYSTEMS),
    conclude,
)
