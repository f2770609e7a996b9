"""`minipaged bench`: measure a workload, and show where the time of a step went."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from typer import Exit, Option

from minipaged.cli.options import ApiKey, AsJson, Model, Use, check_threads, files_of, load
from minipaged.progress import progress_bar
from minipaged.text_io import check_writable, without_controls, write_text

if TYPE_CHECKING:
    from minipaged.viewer.profile import StepProfile
    from minipaged.workload import WorkloadItem

USERS = 32

NARROW = 60
"""In fewer columns, a table has one column of numbers."""


def bench(
    options: dict[str, Any],
    workload: Annotated[
        Path | None,
        Option(
            help='JSON list of {"prompt": TEXT, "max_tokens": N} entries ("prompt_token_ids" works, too); '
            "or give the sizes below."
        ),
    ] = None,
    prompt_tokens: Annotated[int | None, Option(help="Random tokens per prompt.")] = None,
    output_tokens: Annotated[int | None, Option(help="Tokens to generate per request.")] = None,
    requests: Annotated[
        int | None,
        Option("--requests", "--batch", help="Number of requests of that size [default: 1; 100 with --url]."),
    ] = None,
    shared_prefix: Annotated[int | None, Option(help="Length of the prefix that all prompts share.")] = None,
    model: Model = None,
    threads: Annotated[int | None, Option(help="Threads for matrix multiplications.")] = None,
    rate: Annotated[float | None, Option(help="Mean arrival rate, in requests per second.")] = None,
    tokens_out: Annotated[Path | None, Option(help="Write the generated token ids to this file.")] = None,
    repeat: Annotated[
        int | None, Option(help="Timed runs after one warm-up run; the median and the spread are shown.")
    ] = None,
    limits: Annotated[
        bool, Option("--limits", help="Compare with the limits of memory bandwidth and GEMM (CPU).")
    ] = False,
    profile: Annotated[
        bool, Option("--profile", help="Show where the time of a step goes, summed over all counted runs.")
    ] = False,
    as_json: AsJson = False,
    url: Annotated[str | None, Option(help="Measure a running server over HTTP instead.")] = None,
    users: Annotated[
        int,
        Option(
            help="Concurrent clients, one request each; with --rate, the maximum number of requests at once."
        ),
    ] = USERS,
    seconds: Annotated[float | None, Option(help="Repeat the workload for this many seconds.")] = None,
    until_eos: Annotated[bool, Option("--until-eos", help="Let texts end at the end token.")] = False,
    stream: Annotated[
        bool, Option("--stream/--no-stream", help="Ask for one event per token, or for whole answers.")
    ] = True,
    ttft_target: Annotated[
        float | None, Option(help="For goodput: maximum time to first token, in seconds.")
    ] = None,
    itl_target: Annotated[
        float | None, Option(help="For goodput: maximum inter-token latency, in seconds.")
    ] = None,
    api_key: ApiKey = None,
    use: Use = None,
) -> None:
    """Run a workload and report speed, latency and memory; with --url, what clients see of a server.

    --seed also draws the random token ids and the arrivals.

    With --use, a first run checks the contracts of your classes; the measured runs do not.
    """
    asked = {
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "shared_prefix": shared_prefix,
    }
    sizes = {name: number for name, number in asked.items() if number is not None}
    if workload and sizes:
        name, number = next(iter(sizes.items()))
        raise ValueError(f"{name} is {number} with a workload file; give one or the other")
    if url is not None:
        own = {"--use": use, "--profile": profile, "--tokens-out": tokens_out, "--threads": threads}
        own |= {f"--{name.replace('_', '-')}": True for name in options if name != "seed"}
        if given := [name for name, value in own.items() if value]:
            raise ValueError(
                f"--url measures a running server; drop {given[0]}, or give settings to minipaged serve"
            )
        if repeat is not None or limits:
            name = "--limits" if limits else "--repeat"
            raise ValueError(f"--url measures a server in one run; drop {name}")
        sent = {"users": users, "rate": rate, "seconds": seconds, "api_key": api_key, "model": model}
        sent |= {"stream": stream, "ignore_eos": not until_eos}
        sent |= {"ttft_target": ttft_target, "itl_target": itl_target}
        sent["seed"] = options.get("seed", secrets.randbits(32))
        _measure_server(url, workload, {"prompt_tokens": 64, "output_tokens": 64} | sizes, sent, as_json)
        return
    for_servers = {
        "--users": users != USERS,
        "--seconds": seconds is not None,
        "--until-eos": until_eos,
        "--no-stream": not stream,
        "--ttft-target": ttft_target is not None,
        "--itl-target": itl_target is not None,
        "--api-key": api_key not in (None, os.environ.get("MINIPAGED_API_KEY")),
    }
    if given := [option for option, is_given in for_servers.items() if is_given]:
        raise ValueError(f"{given[0]} measures a server; give its --url, too")
    check_threads(threads)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    from minipaged.bench import check_contracts, repeat_workload, run_workload, tokenized
    from minipaged.learn.overrides import parse_use
    from minipaged.viewer.profile import StepProfile
    from minipaged.workload import random_workload, read_workload

    items = read_workload(workload) if workload else []
    if not workload and (prompt_tokens is None or output_tokens is None):
        raise ValueError("no workload; give --workload FILE, --prompt-tokens and --output-tokens, or --url")
    if rate is not None and not 0 < rate < float("inf"):
        raise ValueError(f"rate is {rate}; give a number of requests per second above 0")
    check_writable("tokens", tokens_out, workload, *files_of(use))
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    llm = load(model, {"disable_log_stats": True, **options}, use)
    if limits and llm.config.num_ranks > 1:
        raise ValueError(f"--limits measures one process, not {llm.config.num_ranks} ranks; drop it")
    parts = StepProfile() if profile else None
    if not workload:
        drawn = {"vocab_size": llm.engine.executor.vocab_size, "seed": llm.config.seed}
        items = random_workload(sizes.pop("requests", 1), **sizes, **drawn)
    items = tokenized(llm, items)
    spread: dict[str, tuple[float, float]] = {}
    with _preemptions_only_counted(), progress_bar("generating", len(items)) as advance:
        if use:
            check_contracts(llm, items, parse_use(use))
        run: dict[str, Any] = {"rate": rate, "seed": llm.config.seed, "profile": parts, "progress": advance}
        if repeat is None:
            result = run_workload(llm, items, **run)
        else:
            result, spread = repeat_workload(llm, items, repeat, **run)
    tokens = result.pop("tokens")
    if limits:
        from minipaged.execution.accel.limits import shares_of_limits

        model_run: Any = llm.engine.executor
        kv_tokens = result["decode_kv_tokens"]
        kv_bytes = None if kv_tokens is None else kv_tokens * model_run.block_bytes / llm.config.block_size
        speeds = result["decode_steps_per_s"], result["prefill_tok_per_s"]
        result |= shares_of_limits(model_run.model, kv_bytes, *speeds, llm.config.quantization)
    name = workload.name if workload else f"{len(items)} x ({prompt_tokens} + {output_tokens}) tokens"
    _print(result, name, parts, as_json, spread)
    if tokens_out is not None:
        write_text("tokens", tokens_out, json.dumps(tokens))


@contextmanager
def _preemptions_only_counted() -> Iterator[None]:
    """No warning of each preemption inside the `with`: the figures have their number."""

    def keep(record: logging.LogRecord) -> bool:
        return "is preempted" not in str(record.msg)

    log = logging.getLogger("minipaged.scheduling.limits")
    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def _measure_server(
    url: str, workload: Path | None, sizes: dict[str, int], sent: dict[str, Any], as_json: bool
) -> None:
    try:
        from minipaged.serving.load import Load, run_load
    except ImportError as error:
        raise ValueError(
            f'--url needs {error.name}; in your clone, run pip install -c constraints.txt -e ".[serve]"'
        ) from error
    from minipaged.workload import random_requests, random_workload, read_workload

    items: Iterable[WorkloadItem]
    requests, seed = sizes.pop("requests", None), sent["seed"]
    if workload is not None:
        items = read_workload(workload)
    elif sent["seconds"] is not None and requests is None:  # none twice: the server may have a prefix cache
        items = random_requests(**sizes, seed=seed)
    else:
        items = random_workload(100 if requests is None else requests, **sizes, seed=seed)
    load = Load(url=url, items=items, **sent)
    count = len(items) if load.seconds is None and isinstance(items, list) else None
    with progress_bar("sending", count, enabled=not as_json) as show:
        figures = run_load(load, show)
    if workload is None or load.rate is not None:
        figures["seed"] = seed
    num_failed, is_interrupted = figures["failed"], "interrupted" in figures
    if not as_json:
        figures.pop("interrupted", None)
    _print(figures, url if workload is None else workload.name, None, as_json)
    if is_interrupted:
        print("minipaged: interrupted; these are the requests until then", file=sys.stderr)
        raise Exit(130)
    if num_failed:
        raise Exit(1)


def _print(
    result: dict[str, Any],
    name: str,
    parts: StepProfile | None,
    as_json: bool,
    spread: Mapping[str, tuple[float, float]] = {},
) -> None:
    if as_json:
        more = ({"profile": parts.seconds} if parts else {}) | ({"spread": spread} if spread else {})
        print(json.dumps(result | more, indent=2))
        return
    console = Console()
    names = ("median", "least", "most") if spread else ("value",)
    if console.width < NARROW:  # (with three, the figures would have no room for their names)
        names = names[:1]
    values = [Column(name, no_wrap=True) for name in names]
    table = Table(Column("figure", no_wrap=True), *values, title=escape(name))
    error = result.pop("first_error", None)
    if "seed" in result:
        result["seed"] = str(result["seed"])  # (as the option takes it)
    for figure, value in result.items():
        shown = [value, *spread.get(figure, ())]
        table.add_row(figure, *map(_shown, shown[: len(names)]))
    console.print(table)
    if error is not None:
        console.print(f"first error: {escape(without_controls(error, console.is_terminal))}")
    if parts:
        table = Table("part of a step", "CPU s", "share")
        total = sum(parts.seconds.values())
        for part, seconds in sorted(parts.seconds.items(), key=lambda item: -item[1]):
            table.add_row(part, f"{seconds:.3f}", f"{seconds / total:.1%}")
        console.print(table)


def _shown(value: float | str | None) -> str:
    if isinstance(value, float | int):
        is_small = isinstance(value, float) and abs(value) < 1000
        return f"{value:.4g}" if is_small else f"{value:,.0f}"
    return "not reported" if value is None else escape(value)
