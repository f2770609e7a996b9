"""Fig. 15: blocks saved by sharing, parallel sampling and beam search."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from minipaged.simulation.experiments.common import DATA, percent
from minipaged.simulation.experiments.fig14 import METHODS, WIDTHS, shared
from minipaged.simulation.results import Case, Claim, Curve, Experiment, Outcome, Panel

PUBLISHED = {"sampling": (6.09, 8.53, 9.79), "beams": (37.56, 53.13, 55.16)}
TITLES = {"sampling": "parallel sampling, n =", "beams": "beam search, width"}


def cases() -> dict[tuple[str, str, int], Case]:
    """One a data set, method and width."""
    return {
        (data, method, n): partial(shared, data, method, n)
        for data in DATA
        for method in METHODS
        for n in WIDTHS
    }


def conclude(results: Mapping[tuple[str, str, int], float]) -> Outcome:
    """Savings by width; published for Alpaca."""
    claims, panels = [], []
    for data, label in (("alpaca", "Alpaca"), ("sharegpt", "ShareGPT")):
        for method, published in PUBLISHED.items():
            for n, paper in zip(WIDTHS, published):
                known = paper if data == "alpaca" else None
                text = f"blocks saved, {label}, {TITLES[method]} {n}"
                claims.append(Claim(text, "Fig. 15", known, percent(results[data, method, n]), "%"))
    for method, published in PUBLISHED.items():
        widths = [str(n) for n in WIDTHS]
        curves = [
            Curve(label, widths, [percent(results[data, method, n]) for n in WIDTHS])
            for data, label in (("alpaca", "Alpaca"), ("sharegpt", "ShareGPT"))
        ]
        curves.append(Curve("published (Alpaca)", widths, list(published), published=True))
        title = "parallel sampling" if method == "sampling" else "beam search"
        panels.append(Panel(title, "samples or beam width", "blocks saved [%]", curves, kind="bar"))
    return Outcome(claims, panels)


EXPERIMENT = Experiment(
    "fig15",
    "Blocks saved by sharing",
    "PagedAttention paper, Fig. 15",
    "OPT-13B on an A100 40 GB, queue kept full; block-table entries without a block of their own / all "
    "entries, averaged over time.",
    cases,
    conclude,
)
