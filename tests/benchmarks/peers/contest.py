"""Engines in turn over the same requests: A B C A B C, each in a process of its own that stays warm.

Whatever changes on the machine during a row (another process, the clock of the processor) meets all engines
alike, and each ratio is taken between neighbours in time: its spread says how far to trust it.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.peers.materials import model_directory, workload
from tests.benchmarks.peers.rows import Row

HERE = Path(__file__).parent
OURS = "minipaged"
DRIVERS = {
    OURS: "with_minipaged.py",
    "vllm": "with_vllm.py",
    "vllm-compiled": "with_vllm.py",
    "openvino": "with_openvino.py",
    "ort": "with_ort.py",
    "llama.cpp": "with_llama_cpp.py",
    "padded": "with_transformers.py",
    "continuous": "with_transformers.py",
}

ENVIRONMENTS = ("vllm", "openvino", "ort", "llama.cpp")
"""Those that run in an environment of their own."""


def environment_of(engine: str) -> str | None:
    """Which of the `ENVIRONMENTS` an engine runs in; None: in this one."""
    return next((name for name in ENVIRONMENTS if engine.startswith(name)), None)


class DriverError(RuntimeError):
    """An engine's process ended before its time; the message has its last words."""


class Spread(NamedTuple):
    """Of ratios or seconds, over the rounds."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The spread of at least one value."""
        return cls(min(values), statistics.median(values), max(values))


class Driver:
    """One engine's process; `run` measures the whole workload once.

    Args:
        python: the interpreter of the engine's environment.
        script: the driver.
        task: what to load and run; see `serve.py`.
    """

    def __init__(self, python: str, script: str, task: dict[str, Any]) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": str(task["threads"]),
            "TOKENIZERS_PARALLELISM": "false",
        }
        # Spinning threads make every engine slow on a machine with other work, by up to 100x.
        environment["OMP_WAIT_POLICY"] = "passive"
        self._engine = task["engine"]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            [python, str(HERE / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        try:
            self.about = self._ask(json.dumps(task))
        except DriverError:
            self.close()
            raise

    def run(self) -> dict[str, Any]:
        """One measured run: at least "wall_s", "cpu_s" and "tokens" (the first completion of each request).

        Raises:
            DriverError: the process has ended.
        """
        return self._ask("")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its log says why
        answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            last = "".join(self._log.readlines()[-15:])
            status = self._process.wait()
            how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
            raise DriverError(f"{self._engine} ended early ({how}):\n{last}")
        return json.loads(answer)


def compare(
    row: Row,
    *,
    pythons: dict[str, str],
    models: Path,
    workloads: Path | None,
    pairs: int | None,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Run one row.

    Args:
        row: what to compare.
        pythons: the interpreter of each of the `ENVIRONMENTS` there is; peers of the others are left out.
        models: folder of the checkpoints; missing ones are made there.
        workloads: folder with workload files of one's own.
        pairs: rounds, instead of the row's own number.
        report: gets what happens, line by line.

    Returns:
        What goes into the JSON file: the row's settings, per engine its figures, per peer its ratios.

    Raises:
        DriverError: an engine failed.
    """
    requests = workload(row.workload, workloads)
    task = vars(row) | {"model": str(model_directory(row.model, models)), "requests": requests}
    interpreters = pythons | {None: sys.executable}
    engines = [engine for engine in (OURS, *row.goals) if environment_of(engine) in interpreters]
    absent = [peer for peer in row.goals if peer not in engines]
    if absent:
        report(f"  left out, as no interpreter is given: {', '.join(absent)}")
    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    about = {}
    with ExitStack() as stack:
        drivers = {}
        for engine in engines:
            report(f"  {engine}: loading and warming up")
            python = interpreters[environment_of(engine)]
            drivers[engine] = Driver(python, DRIVERS[engine], task | {"engine": engine})
            stack.callback(drivers[engine].close)
            about[engine] = drivers[engine].about
        for number in range(pairs or row.pairs):
            # Peers without a goal are far away: two rounds suffice.
            in_turn = [engine for engine in engines if row.goals.get(engine, 1) or number < 2]
            for engine in in_turn:
                runs[engine].append(drivers[engine].run())
            seconds = "  ".join(f"{engine} {runs[engine][-1][row.figure]:.3f}" for engine in in_turn)
            report(f"  round {number + 1}, {row.figure}: {seconds}")
    return {
        "row": row.name,
        "title": row.title,
        "model": row.model,
        "workload": row.workload,
        "requests": len(requests),
        "prompt_tokens": sum(len(one["prompt_token_ids"]) for one in requests),
        "output_tokens": row.width * sum(one["max_tokens"] for one in requests),
        "dtype": row.dtype,
        "absent": absent,
        "threads": row.threads,
        "figure": row.figure,
        "is_exact": row.is_exact,
        "engines": {engine: about[engine] | _figures(runs[engine]) for engine in engines},
        "peers": {peer: _against(row, peer, runs[OURS], runs[peer]) for peer in engines if peer != OURS},
    }


def _figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name in ("cpu_s", "wall_s", "itl_ms_p99") if name in runs[0]]
    return {name: Spread.of([run[name] for run in runs])._asdict() for name in names}


def _against(row: Row, peer: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times as long the peer takes, and how many tokens are the same in the first run."""
    ratios = [their[row.figure] / our[row.figure] for our, their in zip(ours, theirs)]
    pairs = list(zip(ours[0]["tokens"], theirs[0]["tokens"], strict=True))
    result = {"ratio": Spread.of(ratios)._asdict(), "goal": row.goals[peer]}
    if row.method != "sample":
        result["same_tokens"] = sum(a == b for our, their in pairs for a, b in zip(our, their))
        result["compared_tokens"] = sum(max(len(our), len(their)) for our, their in pairs)
    return result
