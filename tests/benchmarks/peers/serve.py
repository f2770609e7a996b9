"""The driver's side of a comparison: load, warm up, then run once a line, until the input ends.

    parent -> driver   one line: the task, as JSON; later an empty line for each run
    driver -> parent   one line: who I am; later one line a run, see `Run` in contest.py

Standard library only: drivers run in environments that have nothing else in common. What libraries print to
standard output goes to standard error, so that it cannot come between.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

Start = Callable[[SimpleNamespace], tuple[Callable[[], dict[str, Any]], dict[str, Any]]]
"""task -> (run once, what there is to say about the engine: "versions" and, optionally, "kv_slots")."""


def serve(start: Start) -> None:
    """Answer the parent until it closes the input."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task = json.loads(sys.stdin.readline(), object_hook=lambda fields: SimpleNamespace(**fields))
    run, about = start(task)
    print(json.dumps(about), file=answers)
    for _ in sys.stdin:
        print(json.dumps(run()), file=answers)


class Stopwatch:
    """Wall and CPU seconds of a `with` block. CPU seconds are the process's, all threads together."""

    def __enter__(self) -> Stopwatch:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.cpu_s = time.process_time() - self._cpu
        self.wall_s = time.perf_counter() - self._wall

    def figures(self, tokens: list[list[int]], times: list[list[float]] | None = None) -> dict[str, Any]:
        """A run's line: the tokens of each request and, where they came one by one, when."""
        line = {"wall_s": self.wall_s, "cpu_s": self.cpu_s, "tokens": tokens}
        if times is not None:
            gaps = [after - before for own in times for before, after in pairwise(own)]
            line["itl_ms_p99"] = percentile_ms(gaps, 0.99)
        return line


def percentile_ms(seconds: list[float], share: float) -> float:
    """Nearest rank, in milliseconds, as `minipaged bench` counts."""
    return 1e3 * sorted(seconds)[max(0, math.ceil(share * len(seconds)) - 1)]
