"""Benchmarks of a GPU machine, each in a process of its own: a failure in one is no failure of the next.

    python -m tests.gpu.benchmarks [NAME ...] [--out DIR] [--seconds N]

With --dry-run and TRITON_INTERPRET=1, it runs on a pretend GPU.
Every figure is appended to DIR/benchmarks.jsonl as soon as it is known.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.gpu.benchmarks.batches import Storage, storage_bytes
from tests.gpu.benchmarks.timing import Machine, on_gpu, shown
from tests.gpu.records import Records

# By what one would miss most.
DEFAULT = ("ceiling", "prefill", "step", "peers", "moves", "flex", "decode")
ENGINES = ("engine", "transformers")  # three minutes more
LARGEST = 256 * 32768  # tokens of the largest decode batch


def summary(results: list[dict], dry_run: bool) -> str:
    """The figures to quote: every ratio to a peer, and the range of decode's shares of the ceiling."""
    measured = [result for result in results if "value" in result]
    lines = ["", "SUMMARY" + (" (dry run: these figures mean nothing)" if dry_run else "")]
    for result in measured:
        if result["benchmark"] in (
            "read ceiling",
            "decode peers",
            "paging overhead",
            "prefill",
            "engine",
            "step",
        ):
            more = "  ".join(
                f"{key} {shown(result[key])}" for key in ("share", "ratio", "launches") if key in result
            )
            value = f"{shown(result['value'])} {result['unit']}"
            lines.append(f"  {result['benchmark']:<15} {result['parameters']:<68} {value:>14}  {more}")
    shares = [result["share"] for result in measured if result["benchmark"] == "decode"]
    if shares:
        lines.append(f"  decode          share of the ceiling: {min(shares):.2f} to {max(shares):.2f}")
    skipped = [result for result in results if "not_measured" in result]
    lines.append(f"  {len(measured)} figures, {len(skipped)} not measured (see above)")
    return "\n".join(lines)


def main() -> int:
    """Exit status 0 if every benchmark came to its end."""
    parser = argparse.ArgumentParser()
    names = ", ".join((*DEFAULT, *ENGINES))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {names}; default: {', '.join(DEFAULT)}")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--seconds", type=float, default=220, help="for all of them together")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU: no figure counts")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {*DEFAULT, *ENGINES}:
        parser.error(f"unknown benchmarks {sorted(unknown)}: choose of {names}")
    machine = Machine(arguments.dry_run, Records(arguments.out / "benchmarks.jsonl"))
    if len(arguments.names) == 1:
        [name] = arguments.names
        with on_gpu(arguments.dry_run):
            try:
                measure(machine, name)
            except ModuleNotFoundError as error:  # those of the engine need more than torch and triton
                machine.skip(name, "all of it", f"{error}; install it")
        return 0
    print(json.dumps(machine.describe()))
    machine.records.add(machine.describe())
    failed, started = [], time.monotonic()
    options = [f"--out={arguments.out}", *["--dry-run"] * arguments.dry_run]
    for name in arguments.names or DEFAULT:
        left = arguments.seconds - (time.monotonic() - started)
        command = [sys.executable, "-m", "tests.gpu.benchmarks", name, *options]
        try:
            subprocess.run(command, check=True, timeout=max(left, 0))
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            reason = "its time is over"
            if isinstance(error, subprocess.CalledProcessError):
                reason = f"exit status {error.returncode}, see its output above"
            machine.skip(name, "the rest of it", reason)
            failed.append(name)
    print(summary(machine.records.last_run(), arguments.dry_run))
    return int(bool(failed))


@torch.inference_mode()
def measure(machine: Machine, name: str) -> None:
    """One benchmark; those of attention fill the largest storage that fits."""
    torch.manual_seed(0)
    if name in ("engine", "transformers"):
        from tests.gpu.benchmarks import engine

        return getattr(engine, name)(machine)
    if name == "step":
        from tests.gpu.benchmarks.step import step

        return step(machine)
    if name == "moves":
        from tests.gpu.benchmarks.moves import moves

        return moves(machine)
    from tests.gpu.benchmarks.decode import decode_flex, decode_grid, decode_peers, read_ceiling
    from tests.gpu.benchmarks.prefill import prefill

    if name == "ceiling":
        return machine.record("read ceiling", "stream of loads", read_ceiling(machine) / 1e6, "GB/s")
    tokens = 4096 if machine.dry_run else LARGEST
    while storage_bytes(tokens, machine.dtype) > 0.7 * machine.free_bytes:
        tokens //= 2
    storage = Storage.of(tokens, machine.dtype, machine.device)
    if name == "prefill":
        return prefill(machine, storage)
    run = {"peers": decode_peers, "flex": decode_flex, "decode": decode_grid}[name]
    return run(machine, read_ceiling(machine), storage)


if __name__ == "__main__":
    raise SystemExit(main())
