"""A replica's process: `python -m minipaged.serving.replica`, started by `fleet.ReplicaProcess`."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from minipaged.child_process import read_job
from minipaged.serving.log_thread import log_thread

BETWEEN_LOOKS = 0.2
"""Seconds between two looks at whether the engine has stopped, as it does when it loses a rank."""


@log_thread()
def main() -> None:
    """Read the job from standard input and serve until SIGTERM, or until the router ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it without a traceback, as SIGTERM does
    job = read_job("report")
    line = f"%(asctime)s replica {job['number']}: %(levelname)s %(message)s"
    logging.basicConfig(format=line, level=logging.WARNING)
    logging.getLogger("minipaged").setLevel(logging.INFO)
    try:
        _serve(job)
    except ValueError as error:  # like the command line: what a user can fix, in one line
        _report(job, {"error": " ".join(str(error).split())})
        raise SystemExit(2) from None


def _serve(job: dict[str, Any]) -> None:
    options = job["options"]
    _take_gpus(job["number"], options)
    from minipaged.async_llm import AsyncLLM
    from minipaged.learn.overrides import parse_use
    from minipaged.serving.server import bind, make_server
    from minipaged.serving.settings import ServerSettings

    given = job["settings"]
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    settings = ServerSettings(**given | lists)
    listener = bind(settings)
    parts = parse_use(job["use"])
    with listener, AsyncLLM(job["model"], max_waiting=settings.max_waiting, use=parts, **options) as llm:
        server = make_server(llm, job["name"], settings)
        server.announce = lambda: _report(job, {"port": listener.getsockname()[1]})

        def end_with_the_engine() -> None:
            while llm.stopped is None:
                time.sleep(BETWEEN_LOOKS)
            server.should_exit = True

        threading.Thread(target=end_with_the_engine, daemon=True).start()
        server.run(sockets=[listener])
        if llm.stopped is not None:
            raise SystemExit(f"replica {job['number']}: {llm.stopped}")


def _take_gpus(number: int, options: dict[str, Any]) -> None:
    """Let this process see only its own GPUs, as many as it has ranks. Raises ConfigError for too few."""
    import torch

    from minipaged.config import ConfigError, config_from

    count, ranks = torch.cuda.device_count(), config_from(options).num_ranks
    if not count or options.get("device") == "cpu":
        return
    first = number * ranks
    if first + ranks > count:
        raise ConfigError(
            f"replica {number} needs {ranks} GPUs of its own, but this machine has {count}; "
            "give fewer --replicas, or --device cpu"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[first : first + ranks])


def _report(job: dict[str, Any], outcome: dict[str, Any]) -> None:
    """Written beside the target and renamed, so that a reader always finds the whole file."""
    report = Path(job["report"])
    draft = report.with_suffix(".draft")
    draft.write_text(json.dumps(outcome), encoding="utf-8")
    draft.replace(report)


if __name__ == "__main__":
    main()
