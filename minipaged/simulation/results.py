"""The results of an experiment: claims (published and measured values), panels (a figure's numbers), notes.

Plain data that is written to JSON unchanged; tables, figures and the docs page are made only from that JSON.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

Published = float | tuple[float | None, float | None] | None
"""A number, a range (either end open), or None: the source gives none."""

NOT_READ = "not read off"
"""The reading of a claim whose number is plotted in the source and that we did not read off."""


@dataclass(frozen=True)
class Claim:
    """One number of a source and ours, in the same unit."""

    claim: str  # what is measured, in words
    source: str  # figure or table
    paper: Published
    measured: float
    unit: str = "x"  # a ratio
    note: str = ""  # why it differs, where that was checked
    reading: str = ""  # how we read it where no number is printed: off the "plot", out of "words"

    @property
    def ratio(self) -> float | None:
        """Measured / published number; in a range 1; outside, relative to its nearer end. Nothing to score:
        None, also where a bound with an open end holds."""
        if self.paper is None:
            return None
        low, high = self.paper if isinstance(self.paper, tuple) else (self.paper, self.paper)
        if low is not None and self.measured < low:
            return self.measured / low
        if high is not None and self.measured > high:
            return self.measured / high
        return None if low is None or high is None else 1.0


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


OWN: Mapping[str, str] = {}
"""For `use`: the project's own classes."""

Outcome = tuple[list[Claim], list[Panel]]
Case = Callable[[], Any]
"""An independent part of an experiment: picklable, deterministic, answers with plain data."""


@dataclass(frozen=True)
class Experiment:
    """One result of a source."""

    name: str  # what `reproduce` calls it
    title: str
    source: str  # figure or document
    setup: str  # what is run, and what is not known of the original
    cases: dict[Any, Case]  # its independent parts
    conclude: Callable[[dict[Any, Any]], Outcome]  # from their results by key
    chooses: tuple[str, ...] = ()  # concepts whose classes its cases name


def as_json(experiment: Experiment, results: dict[Any, Any], use: Mapping[str, str] = OWN) -> dict[str, Any]:
    """Everything about an experiment as JSON values, from the results of its cases by key.

    With other classes in `use`, no reason is given for a difference: those were found for the project's own.
    """
    claims, panels = experiment.conclude(results)
    options = [f" --use {name}={where}" for name, where in use.items()]
    shown = [
        {
            "experiment": experiment.name,
            **asdict(claim),
            "note": "" if use else claim.note,
            "ratio": claim.ratio,
            "command": f"minipaged reproduce {experiment.name}" + "".join(options),
        }
        for claim in claims
    ]
    axes = [asdict(panel) for panel in panels]
    for panel in axes:
        for curve in panel["curves"]:
            curve["y"] = [rounded(y) for y in curve["y"]]
            curve["x"] = [rounded(x) if isinstance(x, float) else x for x in curve["x"]]
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "setup": experiment.setup,
        "claims": shown,
        "panels": axes,
    }


def rounded(value: float) -> float:
    """Four significant digits: enough to draw."""
    return float(f"{value:.4g}")
