"""From a model's name to an executor over several ranks: started here, or by torchrun."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from socket import getaddrinfo
from threading import Event, Thread, current_thread, main_thread
from typing import Any

import torch
import torch.distributed as dist

from minipaged.config import ConfigError, EngineConfig
from minipaged.execution import loading
from minipaged.execution.distributed import RankError
from minipaged.execution.distributed.group import (
    Group,
    check_free,
    connecting_over,
    give_up,
    interface_to,
    one_machine,
)
from minipaged.execution.distributed.launch import LOST_OTHERS, TO_NOTICE, Workers
from minipaged.execution.distributed.message import PlanDecoder
from minipaged.execution.distributed.place import Place
from minipaged.execution.distributed.runner import RankRunner, keep_part
from minipaged.execution.distributed.stages import Link
from minipaged.execution.distributed.threads import SharedThreads
from minipaged.execution.load_errors import in_one_line
from minipaged.execution.loading import find_device

logger = logging.getLogger(__name__)

OUTSIDE = "start all ranks with torchrun, or unset WORLD_SIZE to have them started on this machine"
"""What to do about an environment that is not one of torchrun."""


def load(name: str, config: EngineConfig) -> RankRunner:
    """Rank 0's executor, connected to all others.

    Starts the other ranks on this machine. A process that torchrun started is a rank itself: on rank 0 this
    returns the executor; on others it computes until rank 0 ends, and then ends the process.

    Raises:
        RankError: a rank died while it started, the ranks differ, or do not meet.
        ConfigError: no such device, more ranks than GPUs, other ranks than torchrun started, variables that
            it would not set, or a second `LLM` with ranks.
        UnsupportedModelError, ModelLoadError: as `ModelRunner.load`.
    """
    size = config.num_ranks
    what = (
        f"tensor_parallel_size {config.tensor_parallel_size} x pipeline_parallel_size "
        f"{config.pipeline_parallel_size} is {size} ranks"
    )
    started = _variable("WORLD_SIZE", 1)
    if started > 1:
        if started != size:
            raise ConfigError(f"{what}, but torchrun started {started}; use the same number for both")
        return _join(name, config, what)
    check_free()
    device = _device(0, size, config, what)
    place = Place.of(0, config)
    shapes = loading.load_model(name, config, torch.device("meta"))
    keep_part(shapes, place, Link(place))  # refuses, before anything is started
    with ExitStack() as undo:
        undo.callback(give_up)
        threads = SharedThreads(size)
        undo.callback(threads.give_back)
        workers = Workers(size - 1, {"model": name, "config": asdict(config)}, threads.count)
        undo.callback(workers.stop)
        try:
            runner = RankRunner(name, config, place, device)
            store = dist.FileStore(str(workers.store_file), size)
            while not store.check([_loaded(rank) for rank in range(1, size)]):
                workers.check()
                time.sleep(0.02)
            with _watched(workers, store):
                group = _local_group(place, store, device)
            runner.connect(group, workers, threads)
        except RankError:
            raise
        except RuntimeError as error:
            raise workers.failure(in_one_line(error)) from error
        undo.pop_all()
    return runner


def serve_local(job: dict[str, Any]) -> None:
    """Run one of the ranks that `load` started; returns when rank 0 has ended."""
    config, rank = EngineConfig(**job["config"]), job["rank"]
    place = Place.of(rank, config)
    torch.set_num_threads(job["threads"])
    device = _device(rank, place.size, config, "")
    runner = RankRunner(job["model"], config, place, device)
    store = dist.FileStore(job["store"], place.size)
    store.set(_loaded(rank), "")
    runner.connect(_local_group(place, store, device))
    _follow(runner)


def _join(name: str, config: EngineConfig, what: str) -> RankRunner:
    """Join the ranks in the place that torchrun gave this process."""
    place = Place.of(_variable("RANK"), config)
    if not 0 <= place.rank < place.size:
        raise ConfigError(f"RANK is {place.rank}; number the {place.size} ranks from 0 to {place.size - 1}")
    port, address = _variable("MASTER_PORT"), os.environ.get("MASTER_ADDR")
    if not address:
        raise ConfigError(f"WORLD_SIZE is {place.size}, but MASTER_ADDR is not set; {OUTSIDE}")
    local_size = _variable("LOCAL_WORLD_SIZE", place.size)
    check_free()
    device = _device(_variable("LOCAL_RANK", place.rank), local_size, config, what)
    threads = SharedThreads(local_size)
    runner = RankRunner(name, config, place, device)
    logger.info("rank %d of %d meets the others at %s, port %d", place.rank, place.size, address, port)
    try:
        getaddrinfo(address, port)
    except OSError as error:  # a cluster's may come later
        logger.warning("MASTER_ADDR %s has no address yet (%s): is it the host of rank 0?", address, error)
    try:
        with connecting_over(interface_to(address)):
            group = Group(place, None, device)
    except RankError:
        raise
    except RuntimeError as error:
        raise RankError(
            f"rank {place.rank} cannot meet the others at {address}, port {port} ({in_one_line(error)}); "
            f"start all {place.size} ranks, each with another RANK, and give all the same MASTER_ADDR (the "
            "host of rank 0) and a free MASTER_PORT; if it tries 127.0.0.1 or a port is blocked between "
            "machines, set GLOO_SOCKET_IFNAME to the interface that connects them, and open all ports there"
        ) from error
    runner.connect(group, threads=threads)
    if place.rank == 0:
        return runner
    if current_thread() is main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # torchrun sends them to all; rank 0 ends the others
            signal.signal(number, signal.SIG_IGN)
    _follow(runner)
    raise SystemExit(0)


def _variable(name: str, default: int | None = None) -> int:
    """A number that torchrun puts into the environment."""
    text = os.environ.get(name, default)
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = "is not set" if text is None else f"is {text!r}, which is no number"
        raise ConfigError(f"the variable {name} {found}; {OUTSIDE}") from None


def _follow(runner: RankRunner) -> None:
    try:
        runner.follow(PlanDecoder(runner.block_size))
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, dist.DistError):
            raise
        print(f"lost the other ranks: {in_one_line(error)}", file=sys.stderr, flush=True)
        time.sleep(TO_NOTICE)
        os._exit(LOST_OTHERS)


def _local_group(place: Place, store: Any, device: torch.device) -> Group:
    """The connections of ranks on one machine; those on a CPU share memory, in a file beside the store's."""
    shared_file = Path(store.path).with_name("shared") if device.type == "cpu" else None
    with one_machine():
        return Group(place, store, device, shared_file)


@contextmanager
def _watched(workers: Workers, store: Any) -> Iterator[None]:
    """Inside the block, a wait for a worker that has died fails: the store loses its file."""
    over = Event()

    def watch() -> None:
        while not over.wait(0.1):
            if workers.loss:
                store.set_timeout(timedelta(milliseconds=1))  # (0 would mean none)
                workers.store_file.unlink(missing_ok=True)

    Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _loaded(rank: int) -> str:
    return f"rank {rank} has loaded"


def _device(local_rank: int, local_size: int, config: EngineConfig, what: str) -> torch.device:
    """The device of a rank among those of its machine."""
    device = find_device(config.device)
    if device.type == "mps":
        raise ConfigError("device is 'mps', but ranks run on cuda or cpu; choose one of these")
    if device.type == "cpu":
        return device
    if local_size > torch.cuda.device_count():
        raise ConfigError(
            f"{what}, {local_size} of them on this machine, which has {torch.cuda.device_count()} GPUs; "
            "use at most one rank per GPU"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
