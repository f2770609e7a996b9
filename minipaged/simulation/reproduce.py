"""Run experiments on all cores; print, save and draw the results.

Cases are independent and have separate seeds, so the results do not depend on the number of processes or on
which one runs which case.
"""

import logging
import os
import signal
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from typing import Any

from rich.table import Table

from minipaged.simulation.experiments import EXPERIMENTS
from minipaged.simulation.hardware import find
from minipaged.simulation.results import Case, Experiment, as_json


def find_experiments(names: Sequence[str]) -> list[Experiment]:
    """Experiments by name, in the order of the page; `UnknownNameError` for an unknown name."""
    for name in names:
        find("experiment", EXPERIMENTS, name)
    return [experiment for name, experiment in EXPERIMENTS.items() if name in names]


def run_experiments(
    experiments: Sequence[Experiment], progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Run them and report (cases done, cases in all); one JSON-able dict each (see `results.as_json`)."""
    jobs: list[tuple[int, Hashable, Case]] = [
        (i, key, case) for i, experiment in enumerate(experiments) for key, case in experiment.cases.items()
    ]
    results: list[dict[Hashable, Any]] = [{} for _ in experiments]
    answers = run_cases([case for *_, case in jobs], progress)
    for (i, key, _), answer in zip(jobs, answers):
        results[i][key] = answer
    return [as_json(e, result) for e, result in zip(experiments, results)]


def run_cases(
    cases: Sequence[Case], progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Any]:
    """The results of independent cases, in order. Any exception ends the workers: nobody waits."""
    others = set(active_children())
    progress(0, len(cases))
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), quiet) as pool:
        try:
            with _interrupts_stay_here():
                futures = [pool.submit(case) for case in cases]
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()
                progress(done, len(cases))
        except BaseException:
            for worker in set(active_children()) - others:
                worker.kill()
            raise
    return [future.result() for future in futures]


@contextmanager
def _interrupts_stay_here() -> Iterator[None]:
    """Ctrl-C goes to all processes of a terminal; those started meanwhile leave it to this one."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def quiet() -> None:
    """Every preemption is a warning; here they are counted instead."""
    logging.getLogger("minipaged.scheduling").setLevel(logging.ERROR)


NARROW = 80
"""In fewer columns, sources have no room."""


def claims_table(results: Sequence[dict[str, Any]], width: int) -> Table:
    """Claim, source, published, measured, ratio; without the source if the terminal is narrow."""
    table = Table(title="published and simulated", title_justify="left")
    names = ["claim", "source"] if width >= NARROW else ["claim"]
    for name in names:
        table.add_column(name, overflow="fold")
    for name in ("published", "measured", "ratio"):
        table.add_column(name, justify="right", overflow="fold", min_width=len(name))
    for result in results:
        table.add_section()
        for claim in result["claims"]:
            source, *numbers = claim_row(claim)
            table.add_row(*(claim["claim"], source)[: len(names)], *numbers)
    return table


def claim_row(claim: dict[str, Any]) -> tuple[str, str, str, str]:
    """Source, published, measured and ratio of a claim as texts."""
    ratio = "holds" if claim["paper"] is not None else ""
    if claim["ratio"] is not None:
        ratio = f"{claim['ratio']:.2f}"
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
