"""`minipaged reproduce`, `simulate` and `calibrate`, for the command line to register.

They parse, call, print and save; errors are `ValueError`s with one clear line. matplotlib is needed only
where a figure is asked for.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from minipaged.config import ConfigError, EngineConfig, config_from
from minipaged.simulation.experiments import EXPERIMENTS
from minipaged.simulation.fleet import find_router, simulate_fleet
from minipaged.simulation.hardware import CONSTANTS, Constants, Deployment, find_chip, find_model
from minipaged.simulation.page import page
from minipaged.simulation.plots import save_figure
from minipaged.simulation.reproduce import (
    claims_of,
    claims_table,
    find_experiments,
    run_cases,
    run_experiments,
)
from minipaged.simulation.results import Curve, Panel
from minipaged.simulation.serving import Report, engine_simulation, report
from minipaged.simulation.workloads import find_workload, poisson


def reproduce(
    experiments: Annotated[list[str] | None, typer.Argument(help="Names; see --list.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Run every experiment.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Say which experiments there are.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the claims as JSON.")] = False,
    figures: Annotated[Path | None, typer.Option(help="Draw each experiment into this folder.")] = None,
    figure_format: Annotated[str, typer.Option(help="svg or png.")] = "svg",
    docs: Annotated[
        Path | None, typer.Option(help="Write index.md, results.json and SVG figures into this folder.")
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
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=None)
        results = run_experiments(
            chosen, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    if as_json:
        print(json.dumps(claims_of(results), indent=1))
    else:
        console.print(claims_table(results))
    if figures is not None:
        _draw(results, figures, figure_format)
    if docs is not None:
        _draw(results, docs, "svg")
        (docs / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (docs / "index.md").write_text(page(results))


def _draw(results: list[dict[str, Any]], folder: Path, suffix: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        save_figure(result, folder / f"{result['experiment']}.{suffix}")


def simulate(
    options: dict[str, Any],
    model: Annotated[str, typer.Option(help="Model; a wrong name lists them.")] = "llama-3-8b",
    hardware: Annotated[str, typer.Option(help="Chip; a wrong name lists them.")] = "a100-80gb",
    chips: Annotated[int, typer.Option(help="Chips of a replica, tensor parallel.")] = 1,
    rate: Annotated[float, typer.Option(help="Arrivals a second on average; inf: all at once.")] = 1.0,
    workload: Annotated[
        str,
        typer.Option(help="Lengths: sharegpt, alpaca, chat, translation, or a .json of [prompt, output]."),
    ] = "sharegpt",
    requests: Annotated[int, typer.Option(help="Requests of the trace.")] = 1000,
    host_ms: Annotated[
        float, typer.Option(help="Host time of a step in ms, beside what each sequence takes.")
    ] = 1e3 * CONSTANTS.step_seconds,
    replicas: Annotated[int, typer.Option(help="Engines behind the router.")] = 1,
    router: Annotated[str, typer.Option(help="round-robin, least-loaded or prefix-aware.")] = "least-loaded",
    sweep: Annotated[
        str | None, typer.Option(help="Run once per value of an engine flag or rate: FLAG=V1,V2,...")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the sweep to this .svg or .png file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a model on some hardware would do under a load; no GPU and no weights needed."""
    if requests < 1 or replicas < 1:
        raise ValueError(f"requests is {requests}, replicas is {replicas}; give at least 1 of each")
    if plot is not None and (sweep is None or plot.suffix not in (".svg", ".png")):
        raise ValueError(f"plot is {plot}; give a .svg or .png file, and --sweep to have something to draw")
    find_router(router)
    deployment = Deployment(find_model(model), find_chip(hardware), chips)
    config = config_from(options)
    engine_simulation(deployment, config)
    if not host_ms >= 0:
        raise ValueError(f"host_ms is {host_ms}; give at least 0")
    constants = replace(CONSTANTS, step_seconds=host_ms / 1e3)
    run = partial(_run, deployment, constants, workload, requests, replicas, router)
    if sweep is None:
        result = run(rate, config)
        _print([result], {}, as_json)
        return
    flag, values = _parse_sweep(sweep)
    if flag == "rate":
        cases = [partial(run, value, config) for value in values]
    else:
        cases = [partial(run, rate, replace(config, **{flag: value})) for value in values]
    results = run_cases(cases)
    _print(results, {flag: values}, as_json)
    if plot is not None:
        save_figure({"panels": [asdict(panel) for panel in _panels(flag, values, results)]}, plot)


def calibrate(
    options: dict[str, Any],
    model: Annotated[str | None, typer.Option(help="Model directory; default: the pocket model.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of the model.")] = 1,
    rounds: Annotated[int, typer.Option(help="Runs of each workload; a step counts with its fastest.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit the simulation's time of a step to this machine, and say how well it predicts held-out runs."""
    if threads < 1 or rounds < 1:
        raise ValueError(f"threads is {threads}, rounds is {rounds}; give at least 1 of each")
    import torch

    from minipaged.llm import LLM
    from minipaged.simulation.calibration import calibrate as fit_machine

    torch.set_num_threads(threads)
    # CPU time of several threads is not the time that passes.
    clock = time.process_time if threads == 1 else time.perf_counter
    result = fit_machine(LLM(model, **options), rounds=rounds, clock=clock)
    checks = [{**check._asdict(), "error": check.error} for check in result.checks]
    if as_json:
        fitted = {**asdict(result.costs), "median_error": result.median_error, "checks": checks}
        print(json.dumps(fitted, indent=1))
        return
    for name, value in asdict(result.costs).items():
        print(f"{name:14} {1e6 * value:.4g} us")
    table = Table(title="held-out runs, seconds", title_justify="left")
    for name in ("workload", "measured", "predicted", "error"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for check in result.checks:
        mix = check.mix
        (least_in, most_in), (least_out, most_out) = mix.prompt, mix.output
        text = f"{mix.requests} requests, {least_in}-{most_in} in, {least_out}-{most_out} out"
        table.add_row(text, f"{check.measured:.3f}", f"{check.predicted:.3f}", f"{check.error:.1%}")
    Console().print(table)
    print(f"median error {result.median_error:.1%}")


def _run(
    deployment: Deployment,
    constants: Constants,
    workload: str,
    requests: int,
    replicas: int,
    router: str,
    rate: float,
    config: EngineConfig,
) -> Report:
    logging.getLogger("minipaged.scheduling").setLevel(logging.ERROR)
    fleet = [engine_simulation(deployment, config, constants) for _ in range(replicas)]
    arrivals = poisson(find_workload(workload), rate, requests, config.seed)
    return report(simulate_fleet(fleet, arrivals, find_router(router)))


def _parse_sweep(text: str) -> tuple[str, list[Any]]:
    """FLAG=V1,V2 -> field name and values of its type."""
    flag, _, values = text.partition("=")
    name = flag.strip().lstrip("-").replace("-", "_")
    known = [option.name for option in fields(EngineConfig)]
    if name not in (*known, "rate") or not values:
        raise ConfigError(f"sweep is {text!r}; give FLAG=V1,V2,... with rate or one of {', '.join(known)}")
    parsed = [_parse_value(value.strip()) for value in values.split(",")]
    return name, [float(value) for value in parsed] if name == "rate" else parsed


def _parse_value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


LABELS = {
    "requests": "requests finished",
    "refused": "requests refused",
    "seconds": "simulated time [s]",
    "request_rate": "throughput [req/s]",
    "token_rate": "throughput [tok/s]",
    "ttft_p50": "time to first token, median [s]",
    "ttft_p95": "time to first token, p95 [s]",
    "itl_mean": "inter-token latency, mean [s]",
    "itl_p99": "inter-token latency, p99 [s]",
    "normalized_latency": "normalized latency [s/token]",
    "queue_p95": "queue time, p95 [s]",
    "preemptions": "preemptions",
    "cached_tokens": "prompt tokens from the prefix cache",
    "running": "running requests, mean",
    "kv_usage": "KV memory handed out, mean",
    "kv_waste": "of that without a token, mean",
}


def _print(results: list[Report], sweep: Mapping[str, list[Any]], as_json: bool) -> None:
    rows = [asdict(result) for result in results]
    if as_json:
        named = [{**{flag: values[i] for flag, values in sweep.items()}, **row} for i, row in enumerate(rows)]
        print(json.dumps(named if sweep else named[0], indent=1))
        return
    flag = next(iter(sweep), "")
    table = Table(title="simulated", title_justify="left")
    table.add_column(flag or "metric")
    for value in sweep.get(flag, ["value"]):
        table.add_column(str(value), justify="right")
    for name, label in LABELS.items():
        shown = (f"{row[name]:,.4g}" if isinstance(row[name], float) else f"{row[name]:,}" for row in rows)
        table.add_row(escape(label), *shown)
    Console().print(table)


def _panels(flag: str, values: list[Any], results: list[Report]) -> list[Panel]:
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    x = values if numeric else [str(value) for value in values]
    shown = {
        "throughput [tok/s]": ("token_rate",),
        "time to first token [s]": ("ttft_p50", "ttft_p95"),
        "inter-token latency [s]": ("itl_mean", "itl_p99"),
    }
    return [
        Panel(
            title.split(" [")[0],
            flag,
            title,
            [Curve(name, x, [getattr(result, name) for result in results]) for name in names],
            kind="line" if numeric else "bar",
        )
        for title, names in shown.items()
    ]
