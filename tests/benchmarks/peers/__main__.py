"""Compare minipaged with transformers, and with engines in environments of their own.

Prints a line a comparison and writes everything to a JSON file, from which `report` makes the page's table.
Exit status 1: some engine's greedy float32 tokens differ; 2: a row could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.contest import ENVIRONMENTS, OURS, DriverError, compare
from tests.benchmarks.peers.rows import ROWS


def parse() -> argparse.Namespace:
    """The command line."""
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers", description=__doc__)
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=names,
        default=names,
        metavar="ROW",
        help=f"which rows; default all: {', '.join(names)}",
    )
    parser.add_argument("--pairs", type=int, help="rounds of every row; default 5, 2 or 3 for the slow ones")
    for name in ENVIRONMENTS:
        option = f"--{name.replace('.', '-')}-python"
        parser.add_argument(
            option, dest=name, metavar="FILE", help=f"the interpreter of {name}'s environment"
        )
    parser.add_argument(
        "--models",
        type=Path,
        required=True,
        help="folder of the checkpoints tiny, llama19m and m100; made there if missing",
    )
    parser.add_argument(
        "--workloads",
        type=Path,
        help="folder with workload_NAME.json files to use instead of those drawn here",
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    arguments = parser.parse_args()
    if arguments.pairs is not None and arguments.pairs < 1:
        parser.error(f"pairs is {arguments.pairs}; give at least 1")
    if not arguments.out.parent.is_dir():
        parser.error(f"--out: there is no folder {arguments.out.parent}")
    for name in ENVIRONMENTS:
        python = vars(arguments)[name]
        if python and shutil.which(python) is None:
            parser.error(f"--{name.replace('.', '-')}-python: there is no {python} that can be run")
    return arguments


def main() -> int:
    """Run the rows; the file is written after each, so that nothing is lost."""
    arguments = parse()
    pythons = {name: python for name in ENVIRONMENTS if (python := vars(arguments)[name])}
    result: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine(),
        "command": command(),
        "rows": [],
    }
    failed = []
    for row in ROWS:
        if row.name not in arguments.rows:
            continue
        print(f"{row.name}: {row.title}, {row.dtype}, threads {row.threads}", flush=True)
        try:
            outcome = compare(
                row,
                pythons=pythons,
                models=arguments.models,
                workloads=arguments.workloads,
                pairs=arguments.pairs,
                report=lambda line: print(line, file=sys.stderr, flush=True),
            )
        except DriverError as error:
            print(error, file=sys.stderr)
            failed.append(row.name)
            continue
        result["rows"].append(outcome)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print_row(outcome)
    wrong = [row["row"] for row in result["rows"] if row["is_exact"] and not tokens_agree(row)]
    if wrong:
        print(f"greedy float32 tokens differ in: {', '.join(wrong)}", file=sys.stderr)
    if failed:
        print(f"not measured, see above: {', '.join(failed)}", file=sys.stderr)
    return 2 if failed else 1 if wrong else 0


def print_row(outcome: dict[str, Any]) -> None:
    """A line an engine: its seconds, and how many times as long as ours it took."""
    for engine, figures in outcome["engines"].items():
        seconds = figures[outcome["figure"]]
        speed = outcome["output_tokens"] / seconds["median"]
        text = f"  {engine:<10} {outcome['figure']} {seconds['median']:8.3f}  {speed:7.0f} tokens/s"
        if "itl_ms_p99" in figures:
            text += f"  ITL p99 {figures['itl_ms_p99']['median']:5.0f} ms"
        if "kv_slots" in figures:
            text += f"  KV slots {figures['kv_slots']:6d}"
        if engine != OURS:
            peer = outcome["peers"][engine]
            ratio = peer["ratio"]
            text += f"  ratio {ratio['min']:.2f} / {ratio['median']:.2f} / {ratio['max']:.2f}"
            if peer["goal"]:
                text += f" (goal {peer['goal']})"
            if "same_tokens" in peer:
                text += f"  tokens {peer['same_tokens']} of {peer['compared_tokens']} equal"
        print(text, flush=True)


def tokens_agree(outcome: dict[str, Any]) -> bool:
    """Whether every engine gave our tokens."""
    return all(peer["same_tokens"] == peer["compared_tokens"] for peer in outcome["peers"].values())


def machine() -> str:
    """Processor, cores and memory, as far as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (OSError, StopIteration):
        name, memory = platform.processor() or platform.machine(), ""
    return f"{name}, {os.cpu_count()} cores{memory}, Python {platform.python_version()}"


def command() -> str:
    """This command, with folders left out."""
    words = [word if word.startswith("-") else Path(word).name for word in sys.argv[1:]]
    return shlex.join(["python", "-m", "tests.benchmarks.peers", *words])


if __name__ == "__main__":
    sys.exit(main())
