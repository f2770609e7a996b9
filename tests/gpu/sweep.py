"""Times the attention kernels under every tiling and names the best ones, for kernels/triton/config.py.

    python -m tests.gpu.sweep [--out DIR] [--seconds N] [--head-dim N] [--jobs N]

With --dry-run and TRITON_INTERPRET=1, it runs on a pretend GPU.
First `--jobs` processes compile the kernels, which takes longer than timing them. Each figure is appended
to DIR/sweep.jsonl at once; a tiling that is there already is not timed again, so that calls of a few minutes
add up.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from minipaged.kernels.layout import cache_shape
from minipaged.kernels.triton.config import DecodeConfig, PrefillConfig, architecture_of
from minipaged.kernels.triton.decode import paged_decode
from minipaged.kernels.triton.prefill import paged_prefill
from tests.gpu.benchmarks.batches import KV_HEADS, metadata
from tests.gpu.benchmarks.timing import Machine, on_gpu
from tests.gpu.records import Records, reason_of

BLOCK_SIZE = 16
DECODES = {  # query heads of a KV head, lengths
    "1 x 4096, GQA 4": (4, [(1, 4096)]),
    "16 x 4096, GQA 4": (4, [(1, 4096)] * 16),
    "64 x 4096, GQA 4": (4, [(1, 4096)] * 64),
    "64 x 512, GQA 4": (4, [(1, 512)] * 64),
    "64 x 1024, GQA 4": (4, [(1, 1024)] * 64),
    "8 x 1500, GQA 4": (4, [(1, 1500)] * 8),
    "256 x 200 to 2137, GQA 4": (4, [(1, 200 + 13 * i % 1900) for i in range(256)]),
    "64 x 4096, GQA 1": (1, [(1, 4096)] * 64),
}
PREFILLS = {
    "1 x 8192, GQA 4": (4, [(8192, 8192)]),
    "8 x 1024, GQA 4": (4, [(1024, 1024)] * 8),
    "32 x 512, GQA 4": (4, [(512, 512)] * 32),
    "512 of 16384, GQA 4": (4, [(512, 16384)]),
}
# Tile, warps, stages: on sm_90 the first eleven spill no registers at head size 128; the twelfth suits 64.
DECODE_SHAPES = ((64, 4, 5), (32, 4, 5), (64, 4, 3), (32, 2, 5), (128, 4, 3), (32, 4, 9), (64, 2, 5))
DECODE_SHAPES += (128, 8, 3), (64, 4, 7), (32, 1, 5), (64, 8, 5), (128, 4, 5), (64, 4, 2)
EARLY_REDUCE = torch.cuda.is_available() and architecture_of(torch.device("cuda")) == "sm_90"
SPLIT_LENGTHS = (512, 1024), (512, 0), (256, 0), (1024, 0), (128, 0), (2048, 0)  # and those of long contexts
DECODE_CONFIGS = [
    DecodeConfig(tile, split_length, num_warps, num_stages, long_split_length, early_reduce=EARLY_REDUCE)
    for (split_length, long_split_length), (tile, num_warps, num_stages) in product(
        SPLIT_LENGTHS, DECODE_SHAPES
    )
]
PREFILL_CONFIGS = [
    PrefillConfig(rows, tile, num_warps, num_stages)
    for rows, num_warps, (tile, num_stages) in (
        *product((128,), (8,), ((64, 5), (64, 3), (32, 5), (64, 7), (32, 3))),
        *product((64,), (4,), ((64, 3), (64, 5), (32, 3), (32, 5))),
    )
]


Batch = tuple[int, list[tuple[int, int]]]


def trials(dry_run: bool) -> Iterator[tuple[str, str, Batch, Any]]:
    """(kernel, batch's name, batch, tiling), the two kernels in turn: a short run has something of each."""
    if dry_run:
        yield "decode", "2 x 40, GQA 4", (4, [(1, 40)] * 2), DecodeConfig(16, 32, 1, 1)
        yield "prefill", "1 x 20, GQA 1", (1, [(20, 20)]), PrefillConfig(16, 16, 1, 1)
        return
    for place, decode in enumerate(DECODE_CONFIGS):
        yield from (("decode", *batch, decode) for batch in DECODES.items())
        if place < len(PREFILL_CONFIGS):
            prefill = PREFILL_CONFIGS[place]
            yield from (("prefill", *batch, prefill) for batch in PREFILLS.items())


def compile_share(machine: Machine, share: int, jobs: int, head_dim: int) -> None:
    """Launch every jobs-th kernel once: what Triton compiles it keeps on disk, for the process that times."""
    kernels: dict[tuple, tuple[Batch, Any]] = {}
    for kernel, _, (group, lengths), tiling in trials(machine.dry_run):
        is_split = kernel == "decode" and tiling.num_splits(lengths[0][1]) > 1
        kernels.setdefault((kernel, group, tiling, is_split), ((group, lengths[:1]), tiling))
    for batch, tiling in list(kernels.values())[share::jobs]:
        with suppress(Exception):  # the process that times it says so
            prepare(machine, batch, tiling, head_dim)[0](0)


def time_ms(machine: Machine, batch: Batch, tiling: Any, head_dim: int) -> float:
    """Median milliseconds of one call."""
    run, nbytes = prepare(machine, batch, tiling, head_dim)
    return machine.time_ms(run, reads=nbytes)


def prepare(machine: Machine, batch: Batch, tiling: Any, head_dim: int) -> tuple[Callable[[int], Any], int]:
    """A call, with several pools in rotation, and the bytes it reads."""
    group, lengths = batch
    heads = 1 if machine.dry_run else KV_HEADS
    attend = paged_decode if isinstance(tiling, DecodeConfig) else paged_prefill
    step = metadata(lengths, BLOCK_SIZE, machine.device)
    num_blocks = int(step.block_tables.max()) + 1
    shape = cache_shape(num_blocks, BLOCK_SIZE, heads, head_dim)
    nbytes = 2 * num_blocks * BLOCK_SIZE * heads * head_dim * machine.dtype.itemsize
    copies = 2 + 2 * machine.cache_bytes // nbytes
    pools = [
        [torch.randn(shape, device=machine.device, dtype=machine.dtype) for _ in range(2)]
        for _ in range(copies)
    ]
    rows = step.query_start_list[-1]
    query = torch.randn(rows, heads * group, head_dim, device=machine.device, dtype=machine.dtype)
    output, scale = torch.empty_like(query), head_dim**-0.5
    return lambda i: attend(output, query, *pools[i % copies], step, tiling, scale), nbytes


def best_tilings(records: list[dict[str, Any]]) -> list[str]:
    """The tiling of prompts least behind the best of any batch, and the best for each batch of decodes."""
    groups: dict[tuple, dict[tuple, dict[str, float]]] = {}
    for record in records:
        if "ms" in record:
            key = tuple(record[name] for name in ("kernel", "chip", "head_dim", "dtype"))
            key += (record["batch"] if record["kernel"] == "decode" else "all prompts",)
            tiling = tuple(record["tiling"].items())
            groups.setdefault(key, {}).setdefault(tiling, {})[record["batch"]] = record["ms"]
    rows = []
    for (kernel, chip, head_dim, dtype, batches), found in groups.items():
        fastest: dict[str, float] = {}
        for times in found.values():
            for batch, ms in times.items():
                fastest[batch] = min(ms, fastest.get(batch, ms))
        complete = {tiling: times for tiling, times in found.items() if len(times) == len(fastest)}
        if complete:
            slowdown = {
                tiling: max(ms / fastest[batch] for batch, ms in times.items())
                for tiling, times in complete.items()
            }
            tiling = min(slowdown, key=slowdown.__getitem__)
            arguments = ", ".join(f"{name}={value}" for name, value in tiling)
            rows.append(
                f"{chip}, head size {head_dim}, {dtype}, {batches}: {kernel.title()}Config({arguments}), "
                f"at most {100 * slowdown[tiling] - 100:.0f} % behind the best of each batch"
            )
    return rows


def main() -> None:
    """Time what is not timed yet, then print the best."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--share", type=int, help="compile only: which of the jobs this is")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    with on_gpu(arguments.dry_run), torch.inference_mode():
        sweep(arguments)


def sweep(arguments: argparse.Namespace) -> None:
    """See `main`."""
    records = Records(arguments.out / "sweep.jsonl")
    machine = Machine(arguments.dry_run, records)
    started = time.monotonic()
    if arguments.share is not None:
        return compile_share(machine, arguments.share, arguments.jobs, arguments.head_dim)
    command = [sys.executable, "-m", "tests.gpu.sweep", *sys.argv[1:], f"--jobs={arguments.jobs}"]
    compiling = [subprocess.Popen([*command, f"--share={share}"]) for share in range(arguments.jobs)]
    print(
        f"compiled by {arguments.jobs} processes, exit statuses {[job.wait() for job in compiling]}",
        flush=True,
    )
    chip = "dry run" if arguments.dry_run else architecture_of(machine.device)
    dtype = str(machine.dtype)
    about = {"chip": chip, "head_dim": arguments.head_dim, "dtype": dtype}
    done = [
        {key: record.get(key) for key in ("kernel", "batch", "tiling", *about)} for record in records.read()
    ]
    for kernel, name, batch, tiling in trials(arguments.dry_run):
        trial = {"kernel": kernel, "batch": name, "tiling": asdict(tiling)} | about
        if trial in done:
            continue
        if time.monotonic() - started > arguments.seconds:
            print(f"{arguments.seconds:.0f} seconds are over: call it again for the other tilings")
            break
        try:
            result: dict[str, Any] = {"ms": time_ms(machine, batch, tiling, arguments.head_dim)}
        except Exception as error:  # a tiling that does not fit this chip
            result = {"not_measured": reason_of(error)}
        records.add(trial | result)
        print(f"  {kernel:<8} {name:<20} {tiling} {result}", flush=True)
    print("\n".join(["", "The best so far, for kernels/triton/config.py:", *best_tilings(records.read())]))


if __name__ == "__main__":
    main()
