"""Worker processes of rank 0 on the same machine: started, watched, ended.

The output of a worker goes to a file, whose last lines are reported if it dies.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import finalize

from minipaged.child_process import hang_up, how_it_ended, start
from minipaged.execution.distributed import RankError

logger = logging.getLogger(__name__)

WORKER = "minipaged.execution.distributed.worker"

LOST_OTHERS = 75
"""Exit code of a worker that lost another rank: not the one to blame."""

TO_NOTICE = 0.5
"""Seconds before a worker ends with that code: if it was rank 0, the worker cleans up instead."""

LOG_LINES = 8
PATIENCE = 5.0
"""Seconds that a dying rank may take to exit."""


class Workers:
    """Ranks 1 to `count` as child processes. `job` is what `worker.main` reads, without the rank."""

    def __init__(self, count: int, job: dict[str, Any], threads: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="minipaged-ranks-"))
        self.store_file = self.folder / "store"
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.stop = finalize(self, _stop, os.getpid(), self._processes, self.folder)
        try:
            for rank in range(1, count + 1):
                own = {**job, "rank": rank, "store": str(self.store_file), "threads": threads}
                with self._log(rank).open("wb") as log:
                    process = start(WORKER, own, environment, stdout=log, stderr=log)
                self._processes.append(process)
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raise RankError if one has ended."""
        if any(process.poll() is not None for process in self._processes):
            raise self.failure("")

    def failure(self, reason: str) -> RankError:
        """Which rank ended the run, and why; `reason` is reported if all are alive. Ends them all."""
        deadline = time.monotonic() + PATIENCE
        while not (guilty := self._guilty()) and time.monotonic() < deadline:
            time.sleep(0.02)
        message = self.loss or f"the ranks lost each other: {reason}; create a new LLM or restart the server"
        for line in self._last_lines(guilty):
            logger.error("rank %d: %s", guilty, line)
        self.stop()
        return RankError(message)

    @property
    def loss(self) -> str | None:
        """Which rank has ended, and how; None: all live. (Only looks, so any thread may ask.)"""
        if not (rank := self._guilty()):
            return None
        how = how_it_ended(self._processes[rank - 1].returncode)
        *_, last = self._last_lines(rank) or ["its log is empty"]
        return f"rank {rank} {how}: {last.strip()}; the run is lost: create a new LLM or restart the server"

    def _guilty(self) -> int:
        """The first rank that ended by itself; 0: none."""
        codes = [process.poll() for process in self._processes]
        return next((rank for rank, code in enumerate(codes, 1) if code not in (None, LOST_OTHERS)), 0)

    def _last_lines(self, rank: int) -> list[str]:
        with suppress(FileNotFoundError):  # rank 0, or stopped
            return self._log(rank).read_text(encoding="locale", errors="replace").splitlines()[-LOG_LINES:]
        return []

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"


def _stop(pid: int, processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """End all workers and delete their files."""
    if os.getpid() != pid:
        return  # a fork's copy
    for process in processes:
        hang_up(process)
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)
