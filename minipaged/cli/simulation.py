"""`minipaged reproduce`, `simulate` and `calibrate`: options and printing; errors are one-line `ValueError`s.

matplotlib is needed only where a figure is asked for.
"""

import json
import math
import sys
import time
from dataclasses import asdict, astuple, fields, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from typer import Argument, Option

from minipaged.cli.options import AsJson, Model, Use, check_threads, files_of, load
from minipaged.config import config_from
from minipaged.learn.overrides import parse_use
from minipaged.progress import progress_bar
from minipaged.simulation.claims import claims_table
from minipaged.simulation.experiments import EXPERIMENTS
from minipaged.simulation.fleet import find_router
from minipaged.simulation.hardware import CHIPS, CONSTANTS, MODELS, Deployment, find
from minipaged.simulation.page import write_page
from minipaged.simulation.plots import check_figures, save_figure, save_figures
from minipaged.simulation.report import Report
from minipaged.simulation.reproduce import find_experiments, run_experiments
from minipaged.simulation.results import OWN
from minipaged.simulation.sensitivity import sensitivity
from minipaged.simulation.serving import SPECULATION, Load, check_settings, parse_sweep, sweep_panels
from minipaged.text_io import check_writable

MOST_REQUESTS, MOST_REPLICAS, MOST_HOST_MS = 10_000_000, 1_000, 1_000_000
HOST_MS = 1e3 * CONSTANTS.step_seconds

FRAME = 3
"""Characters of a table's column besides its text."""

LABEL = 16 + FRAME + 1
"""Minimum characters for the names of figures; the longest word has 11."""


def reproduce(
    experiments: Annotated[list[str] | None, Argument(help="Names of experiments; see --list.")] = None,
    all_: Annotated[bool, Option("--all", help="Run every experiment.")] = False,
    list_: Annotated[bool, Option("--list", help="List the experiments.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the claims as JSON.")] = False,
    figures: Annotated[Path | None, Option(help="Draw each experiment into this folder.")] = None,
    figure_format: Annotated[str | None, Option(help="svg or png. [default: svg]")] = None,
    docs: Annotated[
        Path | None,
        Option(help="With --all: write a page of the results, with SVG figures, into this folder."),
    ] = None,
    use: Use = None,
) -> None:
    """Rerun the published experiments on a simulated clock, and show both results.

    With --use, the paged system runs with your classes.
    """
    names = " ".join(experiments or ())
    if list_ and (names or all_):
        raise ValueError(f"--list runs nothing; leave it or {names or '--all'} out")
    if all_ and names:
        raise ValueError(f"experiments is {names}, but --all runs every one; leave one of the two out")
    if docs is not None and not all_:
        raise ValueError(
            f"docs is '{docs}', the page of all experiments; give --all too, or --figures instead"
        )
    if docs is not None and use:
        raise ValueError(f"docs is '{docs}', the page of the project's own classes; leave it or --use out")
    yours = parse_use(use or ())
    if figure_format is not None and figures is None:
        raise ValueError(f"figure_format is {figure_format!r}, but no figure is drawn; give --figures too")
    if not (experiments or all_):
        listed = [{"name": e.name, "title": e.title, "source": e.source} for e in EXPERIMENTS.values()]
        if as_json and list_:
            print(json.dumps(listed, indent=1))
            return
        for entry in listed:
            print(f"{entry['name']:16} {entry['title']} ({entry['source']})")
        if not list_:
            print("\nName some of them, or give --all.")
        return
    figure_format = figure_format or "svg"
    if figure_format not in ("svg", "png"):
        raise ValueError(f"figure_format is {figure_format!r}; choose svg or png")
    chosen = find_experiments(list(EXPERIMENTS) if all_ else experiments or [])
    for folder in (figures, docs):
        if folder is not None:
            check_figures(folder, make=True)
    console = Console()

    def show(result: dict[str, Any]) -> None:
        if not as_json:
            with console.capture() as table:
                console.print(claims_table(result, console.width, "yours" if use else "measured"))
            print(table.get(), end="", flush=True)

    with progress_bar("simulating", prints=True) as progress:
        results = run_experiments(chosen, progress, show, yours)
    changes = []
    if docs is not None:
        with progress_bar("varying fitted values") as progress:
            changes = sensitivity(progress)
    if as_json:
        print(json.dumps([claim for result in results for claim in result["claims"]], indent=1))
    if figures is not None:
        save_figures(results, figures, figure_format)
    if docs is not None:
        save_figures(results, docs, "svg")
        write_page(results, changes, docs)


def simulate(
    options: dict[str, Any],
    model: Annotated[
        str, Option(help="Model to simulate; an unknown name lists all of them.")
    ] = "llama-3-8b",
    hardware: Annotated[
        str, Option(help="Chip to simulate; an unknown name lists all of them.")
    ] = "a100-80gb",
    chips: Annotated[int, Option(help="Chips per replica (tensor parallel).")] = 1,
    rate: Annotated[
        float | None, Option(help="Mean arrivals per second; inf means all at once. [default: 1.0]")
    ] = None,
    workload: Annotated[
        str,
        Option(
            help="Lengths: sharegpt, alpaca, chat, translation, or a .json file of [prompt, output] pairs. "
            "Only translation has a prefix to share: the rounds of a chat come as separate requests."
        ),
    ] = "sharegpt",
    requests: Annotated[int, Option(help="Number of requests in the trace.")] = 1000,
    host_ms: Annotated[
        float, Option(help="Host time per step in ms, on top of the time per sequence.")
    ] = HOST_MS,
    replicas: Annotated[int, Option(help="Engines behind the router.")] = 1,
    router: Annotated[
        str | None, Option(help="round-robin, least-loaded or prefix-aware. [default: least-loaded]")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        Option(help="Run once for each value of an engine flag or of the rate: FLAG=V1,V2,..."),
    ] = None,
    plot: Annotated[
        Path | None, Option(help="Plot the sweep and write it to this .svg or .png file.")
    ] = None,
    as_json: AsJson = False,
    use: Use = None,
) -> None:
    """Estimate how a model would perform on given hardware under a load; needs no GPU and no weights.

    With --use, the same load also runs without your classes, for comparison.

    Requests do not limit their outputs, so --page-growth reserve takes max_model_len tokens for each, and
    chunked always a whole grant.
    """
    for name, value, most in (("requests", requests, MOST_REQUESTS), ("replicas", replicas, MOST_REPLICAS)):
        if not 1 <= value <= most:
            raise ValueError(f"{name} is {value}; give a number from 1 to {most:,}")
    if router is not None:
        find_router(router)
        if replicas == 1:
            raise ValueError(f"router is {router!r}, but there is 1 replica; give --replicas 2 or more")
    if plot is not None and (not sweep or plot.suffix not in (".svg", ".png")):
        raise ValueError(f"plot is {plot}; give a .svg or .png file, and --sweep to have something to draw")
    if not 0 <= host_ms <= MOST_HOST_MS:
        raise ValueError(f"host_ms is {host_ms}; give a number from 0 to {MOST_HOST_MS:,}")
    if plot is not None:
        check_figures(plot.parent)
        check_writable("plot", plot, workload, *files_of(use))
    check_settings(options)
    # A remote call to each further chip is the paper's system, not today's engines.
    constants = replace(CONSTANTS, step_seconds=host_ms / 1e3, worker_seconds=0.0)
    deployment = Deployment(find("model", MODELS, model), find("chip", CHIPS, hardware), chips, constants)
    config = config_from(options)
    load = Load(deployment, workload, requests, replicas, router or "least-loaded")
    given = options if rate is None else {**options, "rate": rate}
    rate = 1.0 if rate is None else rate
    uses = [OWN, parse_use(use)] if use else [OWN]
    flag, values = _sweep_of(sweep, given) if sweep else ("rate", [rate])
    if sweep or use:
        with progress_bar("simulating") as progress:
            reports = load.sweep(rate, config, flag, values, progress, uses)
    else:
        load.check(rate, config)
        reports = [load.run(rate, config)]
    if not as_json:
        print_reports(reports, flag if sweep else "metric", _headings(values if sweep else [], use))
    elif sweep or use:
        shown = [str(value) if value == math.inf else value for value in values]  # (JSON has none)
        settings = [{flag: value, **({"use": one} if use else {})} for value in shown for one in uses]
        print(json.dumps([about | asdict(report) for about, report in zip(settings, reports)], indent=1))
    else:
        print(json.dumps(asdict(reports[0]), indent=1))
    if plot is not None:
        rows = {", yours" if one else "": reports[i :: len(uses)] for i, one in enumerate(uses)}
        save_figure({"panels": [asdict(panel) for panel in sweep_panels(flag, values, rows)]}, plot)


def _headings(swept: list[Any], use: list[str] | None) -> list[str]:
    whose = ["default", "yours"] if use else ["value"]
    if not swept:
        return whose
    return [f"{value}, {who}" if use else str(value) for value in swept for who in whose]


def _sweep_of(sweeps: list[str], given: dict[str, Any]) -> tuple[str, list[Any]]:
    if len(sweeps) > 1:
        raise ValueError(f"sweep is given {len(sweeps)} times; give it once")
    flag, values = parse_sweep(sweeps[0])
    if flag in given:
        option = flag.replace("_", "-")
        raise ValueError(f"{flag} is {given[flag]}, but the sweep has its own; leave --{option} out")
    return flag, values


def print_reports(reports: list[Report], name: str, values: list[Any]) -> None:
    """Reports side by side, a column for each value, in as many tables as the width requires."""
    console = Console()
    columns = [(str(value), *map(_figure, astuple(report))) for value, report in zip(values, reports)]
    taken = [max(map(len, column)) + FRAME for column in columns]
    start = 0
    while start < len(columns):
        stop, free = start + 1, console.width - LABEL - taken[start]
        while stop < len(columns) and taken[stop] <= free:
            free -= taken[stop]
            stop += 1
        numbers = (Column(header, justify="right", no_wrap=True) for header, *_ in columns[start:stop])
        table = Table(name, *numbers, title="simulated", title_justify="left")
        cells = zip(*(column[1:] for column in columns[start:stop]))
        for figure, row in zip(fields(Report), cells):
            table.add_row(escape(figure.metadata["label"]), *row)
        console.print(table)
        start = stop


def _figure(value: float) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def calibrate(
    options: dict[str, Any],
    model: Model = None,
    threads: Annotated[int, Option(help="CPU threads for the model.")] = 1,
    rounds: Annotated[int, Option(help="Runs of each workload; the fastest time of each step counts.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Fit the simulation's time of a step to this machine, and show how well it predicts held-out runs.

    This tests whether such a model can predict real runs at all; no other command uses the fitted numbers.
    """
    check_threads(threads)
    check_settings(name for name in options if name in SPECULATION)
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; give at least 1")
    with progress_bar("loading libraries"):
        import torch

        from minipaged.simulation.calibration import calibrate as fit_machine

    torch.set_num_threads(threads)
    # CPU time of several threads is not wall-clock time, and on Windows it has a resolution of 16 ms.
    clock = time.process_time if threads == 1 and sys.platform != "win32" else time.perf_counter
    llm = load(model, {"disable_log_stats": True, **options}, use=None)
    with progress_bar("measuring") as progress:
        result = fit_machine(llm.engine, rounds=rounds, clock=clock, progress=progress)
    costs = asdict(result.costs)
    if as_json:
        checks = [{**check._asdict(), "error": check.error} for check in result.checks]
        print(json.dumps({**costs, "median_error": result.median_error, "checks": checks}, indent=1))
        return
    for name, value in costs.items():
        print(f"{name:14} {1e6 * value:.4g} us")
    numbers = (Column(name, justify="right") for name in ("measured", "predicted", "error"))
    table = Table("workload", *numbers, title="held-out runs, seconds", title_justify="left")
    for check in result.checks:
        number, (least_in, most_in), (least_out, most_out) = check.mix
        text = f"{number} requests, {least_in}-{most_in} in, {least_out}-{most_out} out"
        table.add_row(text, f"{check.measured:.3f}", f"{check.predicted:.3f}", f"{check.error:.1%}")
    Console().print(table)
    print(f"median error {result.median_error:.1%}")
