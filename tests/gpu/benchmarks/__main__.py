"""Benchmarks of a GPU machine: python3 tests/gpu/benchmarks --out DIR [--dry-run] (see run.sh beside)."""

import argparse
import json
from pathlib import Path

import torch

from tests.gpu.benchmarks.batches import Storage, storage_bytes
from tests.gpu.benchmarks.decode import decode_grid, decode_peers, read_ceiling
from tests.gpu.benchmarks.engine import engine
from tests.gpu.benchmarks.moves import moves
from tests.gpu.benchmarks.prefill import prefill
from tests.gpu.benchmarks.timing import Machine, shown

LARGEST = 256 * 32768  # tokens of the largest decode batch


def summary(machine: Machine) -> str:
    """The figures to quote: every ratio to a peer, and the range of decode's shares of the ceiling."""
    measured = [result for result in machine.results if "value" in result]
    lines = ["", "SUMMARY" + (" (dry run: these figures mean nothing)" if machine.dry_run else "")]
    for result in measured:
        if result["benchmark"] in ("read ceiling", "decode peers", "paging overhead", "prefill", "engine"):
            more = "  ".join(
                f"{key} {shown(result[key])}" for key in ("share", "SDPA", "ratio") if key in result
            )
            value = f"{shown(result['value'])} {result['unit']}"
            lines.append(f"  {result['benchmark']:<15} {result['parameters']:<68} {value:>14}  {more}")
    shares = [result["share"] for result in measured if result["benchmark"] == "decode"]
    if shares:
        lines.append(f"  decode          share of the ceiling: {min(shares):.2f} to {max(shares):.2f}")
    skipped = [result for result in machine.results if "not_measured" in result]
    lines.append(f"  {len(measured)} figures, {len(skipped)} not measured (see above)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    machine = Machine(arguments.dry_run)
    print(json.dumps(machine.describe()))

    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "results.json"
    try:
        measure(machine)
    finally:  # what was measured before a failure is kept
        path.write_text(json.dumps(machine.describe() | {"results": machine.results}, indent=1) + "\n")
    print(summary(machine))
    print(f"  written to {path}")


@torch.inference_mode()
def measure(machine: Machine) -> None:
    """Every benchmark, the largest storage that fits filled once for those of attention."""
    ceiling = read_ceiling(machine)
    tokens = 4096 if machine.dry_run else LARGEST
    while storage_bytes(tokens, machine.dtype) > 0.8 * machine.free_bytes:
        tokens //= 2
    storage = Storage.of(tokens, machine.dtype, machine.device)
    decode_peers(machine, ceiling, storage)
    decode_grid(machine, ceiling, storage)
    prefill(machine, storage)
    del storage
    moves(machine)
    engine(machine)


if __name__ == "__main__":
    main()
