"""A worker process: `python -m minipaged.execution.distributed.worker`, started by `launch.Workers`."""

from __future__ import annotations

import signal

from minipaged.child_process import read_job


def main() -> None:
    """Read the job from standard input and compute steps until rank 0 ends or closes it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group, but meant for rank 0
        signal.signal(number, signal.SIG_IGN)
    job = read_job("store")
    from minipaged.execution.distributed.start import serve_local

    serve_local(job)


if __name__ == "__main__":
    main()
