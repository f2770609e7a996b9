"""The claims of an experiment's JSON as text: a table for the terminal, and its cells for the docs page."""

from typing import Any

from rich.markup import escape
from rich.table import Table

NARROW = 80
"""In fewer columns, sources have no room."""


def claims_table(result: dict[str, Any], width: int, measured: str) -> Table:
    """An experiment's claims: source, published, measured, ratio; no source if the terminal is narrow."""
    title = f"{result['title']}, published and simulated"
    table = Table(title=escape(title), title_justify="left")
    names = ["claim", "source"] if width >= NARROW else ["claim"]
    for name in names:
        table.add_column(name, overflow="fold")
    for name in ("published", measured, "ratio"):
        table.add_column(name, justify="right", overflow="fold", min_width=len(name))
    for claim in result["claims"]:
        source, *numbers = claim_row(claim)
        table.add_row(*(claim["claim"], source)[: len(names)], *numbers)
    return table


def claim_row(claim: dict[str, Any]) -> tuple[str, str, str, str]:
    """Source, published, measured and ratio of a claim as texts."""
    ratio = "holds" if claim["paper"] is not None else ""
    if claim["ratio"] is not None:
        ratio = f"{claim['ratio']:.2f}"
        if ratio == "1.00" and claim["ratio"] != 1 and not isinstance(claim["paper"], (int, float)):
            ratio = f"{claim['ratio']:.3f}"  # (1.00 would say that it is within the range)
    reading = f" ({claim['reading']})" if claim["reading"] else ""
    return claim["source"], published_text(claim) + reading, measured_text(claim), ratio


def measured_text(claim: dict[str, Any]) -> str:
    """A number and its unit."""
    return f"{number_text(claim['measured'])} {claim['unit']}".strip()


def published_text(claim: dict[str, Any]) -> str:
    """A number or a range with open ends, and its unit; or a dash."""
    if (paper := claim["paper"]) is None:
        return "-"
    low, high = (paper, paper) if isinstance(paper, (int, float)) else paper
    if low is None:
        text = f"up to {number_text(high)}"
    elif high is None:
        text = f"above {number_text(low)}"
    elif low == high:
        text = number_text(low)
    else:
        text = f"{number_text(low)} to {number_text(high)}"
    return f"{text} {claim['unit']}".strip()


def number_text(value: float) -> str:
    """Three significant digits, no exponent for what people say in words."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
