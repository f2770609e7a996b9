"""`minipaged bench`: the figures of a workload, and where the time of a step went."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from minipaged.cli.options import AsJson, Model, Use, check_threads, load
from minipaged.text_io import check_writable, write_text

if TYPE_CHECKING:
    from minipaged.viewer.profile import StepProfile


def bench(
    workload: Annotated[Path, typer.Option(help="JSON list of {prompt_token_ids, max_tokens}.")],
    model: Model = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the matrix products.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests arrive at this mean rate a second.")] = None,
    tokens_out: Annotated[Path | None, typer.Option(help="Write the generated ids to this file.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time of a step goes.")] = False,
    as_json: AsJson = False,
    use: Use = None,
    options: dict[str, Any] = {},  # noqa: B006 (filled by the decorator)
) -> None:
    """Run a workload and report speed, latency and memory."""
    check_threads(threads)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    from minipaged.bench import read_workload, run_workload
    from minipaged.progress import progress_bar
    from minipaged.viewer.profile import StepProfile

    items = read_workload(workload)
    if rate is not None and not 0 < rate < float("inf"):
        raise ValueError(f"rate is {rate}; give requests a second, above 0")
    check_writable("tokens", tokens_out)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    llm = load(model, {"disable_log_stats": True, **options}, use)
    parts = StepProfile() if profile else None
    with progress_bar("generating", len(items)) as advance:
        result = run_workload(llm, items, rate=rate, profile=parts, progress=advance)
    tokens = result.pop("tokens")
    _print(result, workload.name, parts, as_json)
    if tokens_out is not None:
        write_text("tokens", tokens_out, json.dumps(tokens))


def _print(result: dict[str, Any], name: str, parts: StepProfile | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result | ({"profile": parts.seconds} if parts else {}), indent=2))
        return
    table = Table(Column("figure", overflow="fold"), Column("value", no_wrap=True), title=escape(name))
    for figure, value in result.items():
        table.add_row(figure, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)
    if parts:
        table = Table("part of a step", "CPU s", "share")
        total = sum(parts.seconds.values())
        for part, seconds in sorted(parts.seconds.items(), key=lambda item: -item[1]):
            table.add_row(part, f"{seconds:.3f}", f"{seconds / total:.1%}")
        Console().print(table)
