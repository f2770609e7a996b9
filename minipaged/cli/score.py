"""`minipaged learn score`: how good your own policy is, on a leaderboard."""

from __future__ import annotations

import json
import logging
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from minipaged.components import Components
from minipaged.learn.contracts import CONCEPTS
from minipaged.learn.lessons import LearnError, find, repository
from minipaged.learn.overrides import components_from, parse_use

CAPSTONE = "13"
IDLE = ("parallel_sampling", "beam_search", "paged_attention")
"""Concepts that the workloads never call: their requests follow a script, without a model."""


def score(
    use: Annotated[
        list[str] | None,
        typer.Option(help="CONCEPT=FILE.py:Class, as in `generate`; default: your class from lesson 13."),
    ] = None,
    name: Annotated[str, typer.Option(help="Your name on the leaderboard.")] = "you",
    key: Annotated[
        str, typer.Option(help="A word from which the seeds are derived; all competitors use the same one.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run three workloads on your classes and on the project's own, and compare."""
    from minipaged.simulation.score import CONTESTS, Leaderboard, points, run_contest

    root = repository()
    if not use:
        lesson = find(CAPSTONE)
        if lesson.is_untouched:
            raise LearnError(
                f"{lesson.exercise} has not been started; solve lesson {CAPSTONE} first, or name "
                "classes with --use CONCEPT=FILE.py:Class"
            )
        use = lesson.use_options()
    chosen = parse_use(use)
    for concept in IDLE:
        if concept in chosen:
            counted = ", ".join(name for name in CONCEPTS if name not in IDLE)
            raise LearnError(f"{concept} counts for nothing in the workloads; give one of {counted}")
    leaderboard = Leaderboard(root / "tutorials" / ".leaderboard.json")
    key = key or leaderboard.key
    # Thousands of preemptions are part of the game.
    logging.getLogger("minipaged").setLevel(logging.ERROR)
    components = components_from(chosen)
    own = {contest: run_contest(contest, key, Components()) for contest in CONTESTS}
    yours = {contest: run_contest(contest, key, components) for contest in CONTESTS}
    scored = points(yours, own)
    leaderboard.enter(key, name, scored)
    rows = leaderboard.rows(key)
    if as_json:
        marks = {contest: yours[contest]._asdict() for contest in CONTESTS}
        print(json.dumps({"name": name, "points": scored, "marks": marks, "leaderboard": dict(rows)}))
        return
    table = Table("workload", "throughput", "wait, 95 %", "waste", title="yours (the project's own)")
    for contest in CONTESTS:
        mine, theirs = yours[contest], own[contest]
        table.add_row(
            contest,
            f"{mine.throughput:.2f}/s ({theirs.throughput:.2f})",
            f"{mine.wait:.2f} s ({theirs.wait:.2f})",
            f"{mine.waste:.1%} ({theirs.waste:.1%})",
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{name}: {scored:.1f} points; the project's own engine has 100.", markup=False)
    for place, (who, best) in enumerate(rows, start=1):
        console.print(f"{place:3}. {who:20} {best:6.1f}", markup=False)
