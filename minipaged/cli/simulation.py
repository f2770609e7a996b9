"""`minipaged reproduce`, `simulate` and `calibrate`: options and printing; errors are one-line `ValueError`s.

matplotlib is needed only where a figure is asked for.
"""

import json
import time
from dataclasses import asdict, astuple, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minipaged.config import config_from
from minipaged.progress import progress_bar
from minipaged.simulation.experiments import EXPERIMENTS
from minipaged.simulation.hardware import CHIPS, CONSTANTS, MODELS, Deployment, find
from minipaged.simulation.page import write_page
from minipaged.simulation.plots import check_figures, save_figure, save_figures
from minipaged.simulation.reproduce import claims_table, find_experiments, run_experiments
from minipaged.simulation.sensitivity import sensitivity
from minipaged.simulation.serving import Load, Report, check_settings, parse_sweep, sweep_panels

MOST_REQUESTS, MOST_REPLICAS, MOST_HOST_MS = 10_000_000, 1_000, 1_000_000

FRAME = 3
"""Characters of a table's column beside its text."""

LABEL = 16 + FRAME + 1
"""Characters that the names of figures are left at least; the longest word has 11."""


def reproduce(
    experiments: Annotated[list[str] | None, typer.Argument(help="Names of experiments; see --list.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Run every experiment.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the claims as JSON.")] = False,
    figures: Annotated[Path | None, typer.Option(help="Draw each experiment into this folder.")] = None,
    figure_format: Annotated[str, typer.Option(help="svg or png.")] = "svg",
    docs: Annotated[
        Path | None, typer.Option(help="Write a page of the results, with SVG figures, into this folder.")
    ] = None,
) -> None:
    """Run the experiments of the sources on a simulated clock; paper beside measured."""
    console = Console()
    if list_ or not (experiments or all_):
        for experiment in EXPERIMENTS.values():
            print(f"{experiment.name:16} {experiment.title} ({experiment.source})")
        if not list_:
            print("\nName some of them, or give --all.")
        return
    if figure_format not in ("svg", "png"):
        raise ValueError(f"figure_format is {figure_format!r}; choose svg or png")
    chosen = find_experiments(list(EXPERIMENTS) if all_ else experiments or [])
    for folder in (figures, docs):
        if folder is not None:
            check_figures(folder, make=True)
    with progress_bar("simulating") as progress:
        results = run_experiments(chosen, progress)
    changes = []
    if docs is not None and all_:
        with progress_bar("moving what is fitted") as progress:
            changes = sensitivity(progress)
    if as_json:
        print(json.dumps([claim for result in results for claim in result["claims"]], indent=1))
    else:
        console.print(claims_table(results))
    if figures is not None:
        save_figures(results, figures, figure_format)
    if docs is not None:
        save_figures(results, docs, "svg")
        write_page(results, changes, docs)


def simulate(
    options: dict[str, Any],
    model: Annotated[
        str, typer.Option(help="Model to simulate; an unknown name lists all of them.")
    ] = "llama-3-8b",
    hardware: Annotated[
        str, typer.Option(help="Chip to simulate; an unknown name lists all of them.")
    ] = "a100-80gb",
    chips: Annotated[int, typer.Option(help="Chips per replica (tensor parallel).")] = 1,
    rate: Annotated[float, typer.Option(help="Mean arrivals per second; inf means all at once.")] = 1.0,
    workload: Annotated[
        str,
        typer.Option(
            help="Lengths: sharegpt, alpaca, chat, translation, or a .json file of [prompt, output] pairs."
        ),
    ] = "sharegpt",
    requests: Annotated[int, typer.Option(help="Number of requests in the trace.")] = 1000,
    host_ms: Annotated[
        float, typer.Option(help="Host time per step in ms, on top of the time per sequence.")
    ] = 1e3 * CONSTANTS.step_seconds,
    replicas: Annotated[int, typer.Option(help="Engines behind the router.")] = 1,
    router: Annotated[str, typer.Option(help="round-robin, least-loaded or prefix-aware.")] = "least-loaded",
    sweep: Annotated[
        str | None,
        typer.Option(help="Run once for each value of an engine flag or of the rate: FLAG=V1,V2,..."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot the sweep and write it to this .svg or .png file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a model on some hardware would do under a load; no GPU and no weights needed."""
    for name, value, most in (("requests", requests, MOST_REQUESTS), ("replicas", replicas, MOST_REPLICAS)):
        if not 1 <= value <= most:
            raise ValueError(f"{name} is {value}; give a number from 1 to {most:,}")
    if plot is not None and (sweep is None or plot.suffix not in (".svg", ".png")):
        raise ValueError(f"plot is {plot}; give a .svg or .png file, and --sweep to have something to draw")
    if not 0 <= host_ms <= MOST_HOST_MS:
        raise ValueError(f"host_ms is {host_ms}; give a number from 0 to {MOST_HOST_MS:,}")
    if plot is not None:
        check_figures(plot.parent)
    check_settings(options)
    constants = replace(CONSTANTS, step_seconds=host_ms / 1e3)
    deployment = Deployment(find("model", MODELS, model), find("chip", CHIPS, hardware), chips, constants)
    config = config_from(options)
    load = Load(deployment, workload, requests, replicas, router)
    if sweep is None:
        load.check(rate, config)
        flag, values, reports = "metric", ["value"], [load.run(rate, config)]
    else:
        flag, values = parse_sweep(sweep)
        with progress_bar("simulating") as progress:
            reports = load.sweep(rate, config, flag, values, progress)
    if not as_json:
        print_reports(reports, flag, values)
    elif sweep is None:
        print(json.dumps(asdict(reports[0]), indent=1))
    else:
        rows = [{flag: value, **asdict(report)} for value, report in zip(values, reports)]
        print(json.dumps(rows, indent=1))
    if plot is not None:
        save_figure({"panels": [asdict(panel) for panel in sweep_panels(flag, values, reports)]}, plot)


def print_reports(reports: list[Report], name: str, values: list[Any]) -> None:
    """Reports side by side, a column for each value, in as many tables as the width asks for."""
    console = Console()
    columns = [(str(value), *map(_figure, astuple(report))) for value, report in zip(values, reports)]
    taken = [max(map(len, column)) + FRAME for column in columns]
    start = 0
    while start < len(columns):
        stop, free = start + 1, console.width - LABEL - taken[start]
        while stop < len(columns) and taken[stop] <= free:
            free -= taken[stop]
            stop += 1
        table = Table(title="simulated", title_justify="left")
        table.add_column(name)
        for header, *_ in columns[start:stop]:
            table.add_column(header, justify="right", no_wrap=True)
        cells = zip(*(column[1:] for column in columns[start:stop]))
        for figure, row in zip(fields(Report), cells):
            table.add_row(escape(figure.metadata["label"]), *row)
        console.print(table)
        start = stop


def _figure(value: float) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def calibrate(
    options: dict[str, Any],
    model: Annotated[str | None, typer.Option(help="Model directory; default: the pocket model.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads for the model.")] = 1,
    rounds: Annotated[
        int, typer.Option(help="Runs of each workload; the fastest time of each step counts.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit the simulation's time of a step to this machine, and say how well it predicts held-out runs."""
    if threads < 1 or rounds < 1:
        raise ValueError(f"threads is {threads}, rounds is {rounds}; give at least 1 of each")
    with progress_bar("loading libraries"):
        import torch

        import minipaged.execution.model_runner  # noqa: F401
        from minipaged.llm import LLM
        from minipaged.simulation.calibration import calibrate as fit_machine

    torch.set_num_threads(threads)
    # CPU time of several threads is not the time that passes.
    clock = time.process_time if threads == 1 else time.perf_counter
    llm = LLM(model, **options)
    with progress_bar("measuring") as progress:
        result = fit_machine(llm.engine, rounds=rounds, clock=clock, progress=progress)
    costs = asdict(result.costs)
    if as_json:
        checks = [{**check._asdict(), "error": check.error} for check in result.checks]
        print(json.dumps({**costs, "median_error": result.median_error, "checks": checks}, indent=1))
        return
    for name, value in costs.items():
        print(f"{name:14} {1e6 * value:.4g} us")
    table = Table(title="held-out runs, seconds", title_justify="left")
    for name in ("workload", "measured", "predicted", "error"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for check in result.checks:
        number, (least_in, most_in), (least_out, most_out) = check.mix
        text = f"{number} requests, {least_in}-{most_in} in, {least_out}-{most_out} out"
        table.add_row(text, f"{check.measured:.3f}", f"{check.predicted:.3f}", f"{check.error:.1%}")
    Console().print(table)
    print(f"median error {result.median_error:.1%}")
