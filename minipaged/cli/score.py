"""`minipaged learn score`: how good your own policy is, on a leaderboard."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from typer import Option

from minipaged.cli.options import AsJson
from minipaged.learn.apart import call_apart
from minipaged.learn.contracts import CONCEPTS
from minipaged.learn.lessons import LearnError, find, repository
from minipaged.learn.overrides import components_from, parse_use
from minipaged.simulation.scripts import IDLE

if TYPE_CHECKING:
    from minipaged.simulation.score import Marks

CAPSTONE = "13"
LEAST_SECONDS, TIMES_AS_LONG = 60, 20
"""Classes that take longer than this, and this many times as long as the project's own, are given up."""


def score(
    use: Annotated[
        list[str] | None,
        Option(help="CONCEPT=FILE.py:Class, as in `generate`; default: your class from lesson 13."),
    ] = None,
    name: Annotated[str, Option(help="Your name on the leaderboard.")] = "you",
    key: Annotated[
        str | None, Option(help="A word from which the seeds are derived; all competitors use the same one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run three workloads on your classes and on the project's own, and compare."""
    from minipaged.simulation.score import CONTESTS, REQUESTS, Leaderboard, points

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
    if key is not None and not key.strip():
        raise LearnError(f"key is {key!r}; give a word, or drop --key")
    key = leaderboard.key if key is None else key
    began = time.perf_counter()
    own = _marks([], key, REQUESTS)
    seconds = max(LEAST_SECONDS, TIMES_AS_LONG * (time.perf_counter() - began))
    yours = call_apart(_marks, use, key, REQUESTS, seconds=seconds)
    scored = points(yours, own)
    leaderboard.enter(key, name, scored)
    rows = leaderboard.rows(key)
    if as_json:
        marks = {contest: yours[contest]._asdict() for contest in CONTESTS}
        print(json.dumps({"name": name, "points": scored, "marks": marks, "leaderboard": dict(rows)}))
        return
    names = ("workload", "throughput", "wait, 95 %", "waste", "preemptions")
    table = Table(*names, title="yours (the project's own)")
    for contest in CONTESTS:
        mine, theirs = yours[contest], own[contest]
        table.add_row(
            contest,
            f"{mine.throughput:.2f}/s ({theirs.throughput:.2f})",
            f"{mine.wait:.2f} s ({theirs.wait:.2f})",
            f"{mine.waste:.1%} ({theirs.waste:.1%})",
            f"{mine.preemptions} ({theirs.preemptions})",
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{name}: {scored:.1f} points; the project's own engine has 100.", markup=False)
    for place, (who, best) in enumerate(rows, start=1):
        console.print(f"{place:3}. {who:20} {best:6.1f}", markup=False)


def _marks(use: list[str], key: str, count: int) -> dict[str, Marks]:
    from minipaged.simulation.score import CONTESTS, run_contest

    # Thousands of preemptions are part of the game.
    logging.getLogger("minipaged").setLevel(logging.ERROR)
    components = components_from(parse_use(use))
    return {contest: run_contest(contest, key, components, count) for contest in CONTESTS}
