"""A worker process: `python -m minipaged.execution.distributed.worker`, started by `launch.Workers`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path


def main() -> None:
    """Read the job from standard input and compute steps until rank 0 ends or closes it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group, but meant for rank 0
        signal.signal(number, signal.SIG_IGN)
    job = json.loads(sys.stdin.readline())
    folder = Path(job["store"]).parent
    threading.Thread(target=_leave_with_rank_0, args=(folder,), daemon=True).start()
    from minipaged.environment import prepare_process

    prepare_process()
    from minipaged.execution.distributed.start import serve_local

    serve_local(job)


def _leave_with_rank_0(folder: Path) -> None:
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)  # as rank 0 does, if it can
    os._exit(0)


if __name__ == "__main__":
    main()
