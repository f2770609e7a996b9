"""Processes that read a job, as JSON, from the first line of standard input, and exit when it is closed:
the system closes it however the parent ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from minipaged.environment import prepare_process


def start(
    module: str, job: dict[str, Any], environment: dict[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m module`, which calls `read_job`; `options` are those of `Popen`.

    It imports nothing from the working directory (`-P`), where a random.py would replace Python's own.
    """
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), environment.get("PYTHONPATH"))))
    command, variables = [sys.executable, "-P", "-m", module], {**environment, "PYTHONPATH": path}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=variables, **options)
    assert process.stdin is not None
    with suppress(OSError):  # it is dead, which the caller notices (on Windows: an invalid argument)
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
    return process


def hang_up(process: subprocess.Popen[bytes]) -> None:
    """Close its standard input: it exits, unless it is dead already."""
    with suppress(OSError):  # (what it has not read cannot be sent)
        if process.stdin is not None:
            process.stdin.close()


def read_job(file: str) -> dict[str, Any]:
    """The job of this process, which removes the folder of `job[file]` and exits when its parent ends."""
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_leave, args=(Path(job[file]).parent,), daemon=True).start()
    prepare_process()
    return job


def _leave(folder: Path) -> None:
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)  # as the parent does, if it can
    os._exit(0)


def how_it_ended(code: int) -> str:
    """The return code of a process in words."""
    if code >= 0:
        return f"ended with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"
