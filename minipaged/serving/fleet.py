"""Replicas as processes on this machine: started, watched, restarted when they die, ended with the router."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from minipaged.child_process import hang_up, how_it_ended, start
from minipaged.serving.exchange import Replica
from minipaged.serving.settings import ServerSettings

logger = logging.getLogger(__name__)

REPLICA = "minipaged.serving.replica"

PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Seconds before a replica is restarted, by how often in a row it died before it could serve."""

ILL_FOR = 30.0
"""Seconds a live process may be unable to serve before it is killed and restarted."""

SLOW_START = 60.0
"""Seconds between two lines in the log about a replica that is being restarted."""

TO_LEAVE = 10.0
"""Seconds from the end of its last request to the end of a replica's process."""


class ReplicaError(ValueError):
    """A replica cannot start; one line that names it and the cause."""


class ReplicaProcess(Replica):
    """A replica that this process starts.

    Args:
        number: its index, from 0.
        job: what `replica.main` reads.
        threads: for PyTorch.
    """

    def __init__(self, number: int, job: dict[str, Any], threads: int) -> None:
        super().__init__(number, is_up=False, num_starts=0)
        self._job = {**job, "number": number}
        self._environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # where it reports its address
        self._num_failures = 0  # in a row
        self._ill_since: float | None = None

    def start(self) -> None:
        """Start the process; it reports when it can serve."""
        self._remove_folder()
        # (Each start has a new one: until a restart, a cleaner of temporary files may remove it.)
        self._folder = tempfile.TemporaryDirectory(prefix="minipaged-replicas-")
        self.num_starts += 1
        job = {**self._job, "report": str(self._report)}
        # (In a session of its own, because Ctrl-C is for the router.)
        self._process = start(REPLICA, job, self._environment, start_new_session=True)

    @property
    def _report(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / "replica.json"

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def has_reported(self) -> bool:
        """Whether it serves, at `url`. Raises ReplicaError if it never will."""
        assert self._process is not None
        code, has_report = self._process.poll(), self._report.exists()
        if has_report:
            report = json.loads(self._report.read_text(encoding="utf-8"))
            if "error" in report:
                raise ReplicaError(f"replica {self.number} cannot start: {report['error']}")
            self.url = f"http://127.0.0.1:{report['port']}"
        if code is not None:
            raise ReplicaError(
                f"replica {self.number} {how_it_ended(code)} before it could serve; see its log above"
            )
        return has_report

    async def tend(self) -> None:
        """Restart it if it has died, or kill it if it has been unable to serve for too long."""
        assert self._process is not None
        code, now = self._process.poll(), time.monotonic()
        if self.is_up:
            self._ill_since = None
        elif code is None:
            self._ill_since = self._ill_since or now
            if now - self._ill_since > ILL_FOR:
                logger.error("Replica %d is alive but cannot serve; killing it", self.number)
                self._process.kill()
                code = self._process.wait()
        if code is not None:
            self.is_up = False
            await self._start_again(code)

    async def _start_again(self, code: int) -> None:
        pause = PAUSES[min(self._num_failures, len(PAUSES) - 1)]
        logger.error("Replica %d %s; restarting it in %g s", self.number, how_it_ended(code), pause)
        await asyncio.sleep(pause)
        try:
            self.start()
            begin = last = time.monotonic()
            while not self.has_reported():
                await asyncio.sleep(0.05)
                if (now := time.monotonic()) - last >= SLOW_START:  # (no limit: a model may load for long)
                    logger.warning("Replica %d has been starting for %.0f s", self.number, now - begin)
                    last = now
            self._num_failures, self._ill_since = 0, None
        except (ReplicaError, OSError) as error:
            self._num_failures += 1
            logger.error("%s", error)

    async def end(self, seconds: float) -> None:
        """SIGTERM: it finishes what runs. Killed if still alive a little after `seconds`."""
        assert self._process is not None
        self._process.terminate()
        deadline = time.monotonic() + seconds + TO_LEAVE
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self._process.poll() is None:
            message = "Replica %d did not end within %g s; killing it"
            logger.warning(message, self.number, seconds + TO_LEAVE)
        self.kill()

    def leave(self) -> None:
        """Tell it to end at once."""
        if self._process is not None:
            hang_up(self._process)

    def kill(self, patience: float = 0.0) -> None:
        """End it, now or after `patience` seconds; returns when it is gone."""
        if self._process is None:
            return
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.leave()
        self._remove_folder()


class Fleet:
    """Replicas that serve within the `with` block and are ended after it.

    Args:
        count: how many.
        model: as for `AsyncLLM`.
        name: what clients call the model.
        options: fields of `EngineConfig`.
        use: replaced parts, as on the command line.
        settings: of the server; replicas listen on addresses of their own.

    Raises:
        ReplicaError: on entering the block: one of them cannot start.
    """

    def __init__(
        self,
        count: int,
        model: str | None,
        name: str,
        options: dict[str, Any],
        use: Sequence[str],
        settings: ServerSettings,
    ) -> None:
        own = asdict(settings) | {"host": "127.0.0.1", "port": 0}
        job = {"model": model, "name": name, "options": options, "use": list(use), "settings": own}
        threads = max(1, (os.cpu_count() or 1) // count)
        self.replicas = [ReplicaProcess(i, job, threads) for i in range(count)]

    def __enter__(self) -> Self:
        try:
            for replica in self.replicas:
                replica.start()
            while sum(replica.has_reported() for replica in self.replicas) < len(self.replicas):
                time.sleep(0.02)
        except BaseException:
            self.stop()
            raise
        for replica in self.replicas:
            replica.is_up = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End them all at once."""
        for replica in self.replicas:
            replica.leave()
        for replica in self.replicas:
            replica.kill(patience=5.0)
