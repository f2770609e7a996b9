"""What an experiment hands over: claims (paper beside measured), panels (numbers of a figure), notes.

Plain data that goes to JSON as it is; tables, figures and the docs page are made from that JSON alone.
Knows no simulation and no drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

Published = float | tuple[float | None, float | None] | None
"""A number, a range (either end open), or None: the source gives none."""


@dataclass(frozen=True)
class Claim:
    """One number of a source and ours.

    Attributes:
        claim: what is measured, in words.
        source: figure or table.
        paper: what is published.
        measured: what came out here.
        unit: of both.
        note: why it differs, where it does.
    """

    claim: str
    source: str
    paper: Published
    measured: float
    unit: str
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured / published number; in a range 1; outside, relative to its nearer end."""
        if self.paper is None:
            return None
        low, high = self.paper if isinstance(self.paper, tuple) else (self.paper, self.paper)
        if low is not None and self.measured < low:
            return self.measured / low
        if high is not None and self.measured > high:
            return self.measured / high
        return 1.0


@dataclass(frozen=True)
class Curve:
    """Points of one label; `x` are numbers, or names for bars. Dashed: published."""

    label: str
    x: list[Any]
    y: list[float]
    published: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    kind: str = "line"
    x_scale: str = "linear"
    y_scale: str = "linear"
    y_limit: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What came out of an experiment."""

    claims: list[Claim]
    panels: list[Panel]


Case = Callable[[], Any]
"""An independent part of an experiment: picklable, deterministic, answers with plain data."""


@dataclass(frozen=True)
class Experiment:
    """One result of a source.

    Attributes:
        name: what `reproduce` calls it.
        title: of its figure.
        source: which figure or document.
        setup: what is run, in a sentence or two; what is not known of the original is said here.
        cases: its independent parts by key.
        conclude: from their results to claims and panels.
    """

    name: str
    title: str
    source: str
    setup: str
    cases: Callable[[], Mapping[Any, Case]]
    conclude: Callable[[Mapping[Any, Any]], Outcome]


def as_json(experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    """Everything about a finished experiment as JSON values."""
    claims = []
    for claim in outcome.claims:
        ratio = claim.ratio
        entry = {"experiment": experiment.name, **asdict(claim)}
        entry["measured"] = _rounded(claim.measured)
        entry["ratio"] = None if ratio is None else round(ratio, 3)
        entry["command"] = f"minipaged reproduce {experiment.name}"
        claims.append(entry)
    panels = [asdict(panel) for panel in outcome.panels]
    for panel in panels:
        for curve in panel["curves"]:
            curve["y"] = [_rounded(y) for y in curve["y"]]
            curve["x"] = [_rounded(x) if isinstance(x, float) else x for x in curve["x"]]
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "setup": experiment.setup,
        "claims": claims,
        "panels": panels,
    }


def _rounded(value: float) -> float:
    """Four significant digits: more would be noise on the page."""
    return float(f"{value:.4g}")
