"""How ranks communicate. Plans are sent over gloo, even where tensors are sent over NCCL."""

from __future__ import annotations

import gc
import os
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from ctypes import py_object, pythonapi
from datetime import timedelta
from functools import partial
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM, if_nameindex, inet_aton, socket
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from minipaged.config import ConfigError
from minipaged.execution.distributed import RankError
from minipaged.execution.distributed.place import Place
from minipaged.execution.distributed.shared_sum import SharedSum, make_shared_file

STEP_TIMEOUT = timedelta(minutes=10)
"""A rank that does not answer within a step for this long is given up. (One that dies is noticed at once.)"""

IDLE_TIMEOUT = timedelta(days=3650)
"""How long workers wait for the next plan."""

FIRST_PART = 2048
"""Numbers of a message in one broadcast; a longer one takes a second."""

SIOCGIFADDR = 0x8915
"""Linux's number for "which address has this interface"."""


class Group:
    """This rank's connections. There is one at a time in a process.

    Raises:
        RankError: the ranks split the model in different ways.
    """

    def __init__(
        self, place: Place, store: Any, device: torch.device, shared_file: Path | None = None
    ) -> None:
        self.place = place
        if shared_file and place.rank == 0:
            make_shared_file(shared_file, place)
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backend,
                store=store,  # (None: the addresses are in the environment, from torchrun)
                rank=place.rank,
                world_size=place.size,
                timeout=STEP_TIMEOUT,
                device_id=device if backend == "nccl" else None,
            )
        except BaseException:
            _number_from_0()
            raise
        self._control: Any = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        self._check_sizes()
        stages: list[Any] = [  # (every rank takes part in creating each group)
            dist.new_group(list(range(first, first + place.tensor_size)), timeout=STEP_TIMEOUT)
            for first in range(0, place.size, place.tensor_size)
        ]
        stage = stages[place.stage]
        self.add_up: Callable[[Tensor], object] = (
            SharedSum(shared_file, place, stage) if shared_file else partial(dist.all_reduce, group=stage)
        )
        """Replace a rank's partial result by the sum over the ranks of its stage."""
        self._buffer = torch.empty(FIRST_PART, dtype=torch.int32)
        groups = (dist.group.WORLD, self._control, stage)
        self.close = finalize(self, _close, os.getpid(), place.rank, groups)
        """Close the connections; rank 0 tells the others first."""

    def _check_sizes(self) -> None:
        """Raise RankError unless all split the model alike: otherwise they would wait in different groups."""
        first, *others = self.gather(self.place)
        for rank, other in enumerate(others, 1):
            for name in ("tensor", "pipeline"):
                here, there = (getattr(place, f"{name}_size") for place in (first, other))
                if here != there:
                    raise RankError(
                        f"rank {rank} differs from rank 0 in {name}_parallel_size: {there} instead of "
                        f"{here}; make all ranks agree"
                    )

    def send(self, message: array[int]) -> None:
        """Rank 0: send to all others; an empty message ends them."""
        first = array("i", [len(message)]) + message[: FIRST_PART - 1]
        self._buffer[: len(first)] = torch.frombuffer(first, dtype=torch.int32)
        dist.broadcast(self._buffer, 0, group=self._control)
        if len(message) >= FIRST_PART:
            rest = torch.frombuffer(message, dtype=torch.int32, offset=4 * (FIRST_PART - 1))
            dist.broadcast(rest, 0, group=self._control)

    def receive(self) -> list[int]:
        """Other ranks: wait for the next message."""
        dist.broadcast(self._buffer, 0, group=self._control)
        length, *message = self._buffer.tolist()
        if length >= FIRST_PART:
            rest = torch.empty(length - FIRST_PART + 1, dtype=torch.int32)
            dist.broadcast(rest, 0, group=self._control)
            return message + rest.tolist()
        return message[:length]

    def gather(self, report: Any) -> list[Any]:
        """What every rank reports, by rank."""
        reports: list[Any] = [None] * self.place.size
        dist.all_gather_object(reports, report, group=self._control)
        return reports


def check_free() -> None:
    """Raise ConfigError if this process is connected already."""
    if dist.is_initialized():
        gc.collect()  # it may be an `LLM` that nothing refers to
    if dist.is_initialized():
        raise ConfigError(
            "another LLM with several ranks exists in this process, or torch.distributed is in use; "
            "shut it down first"
        )


def give_up() -> None:
    """Drop this process's connections, if it has any, without telling the others: they are lost."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _number_from_0() -> None:
    """Give this process's next group the number 0, as its workers' first has.

    Torch numbers the groups of a process, counts one that failed to connect, and begins again only when it
    destroys all. Ranks that number them differently wait for each other in vain.
    """
    if not dist.is_initialized():  # (it is if a Ctrl-C came late)
        with one_machine():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def _close(pid: int, rank: int, groups: tuple[Any, ...]) -> None:
    world, control, _ = groups
    if os.getpid() != pid:  # a fork has no threads that could end these: it must never destroy them
        for group in groups:
            pythonapi.Py_IncRef(py_object(group))
    elif dist.group.WORLD is world:  # not given up
        if rank == 0:
            with suppress(RuntimeError):  # the others are gone
                dist.broadcast(torch.zeros(FIRST_PART, dtype=torch.int32), 0, group=control)
        dist.destroy_process_group()


def one_machine() -> AbstractContextManager[None]:
    """Inside the block, groups connect over loopback: no host names, no network."""
    return connecting_over({"linux": "lo", "darwin": "lo0"}.get(sys.platform))


@contextmanager
def connecting_over(interface: str | None) -> Iterator[None]:
    """Inside the block, groups connect over this network interface, unless the user has named one.

    Without a name, gloo takes the address of the host's own name, which on many machines is 127.0.1.1.
    """
    name = "GLOO_SOCKET_IFNAME"
    if interface is None or name in os.environ:
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:
        del os.environ[name]


def interface_to(host: str) -> str | None:
    """The network interface over which this machine reaches another, or has its address; None: unknown."""
    with suppress(OSError), socket(AF_INET, SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # (sends nothing)
        own: str = probe.getsockname()[0]
        return None if own.startswith("127.") else interface_of(own)
    return None


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an IPv4 address; None: unknown, or not on Linux."""
    if sys.platform != "linux":
        return None
    from fcntl import ioctl

    with socket(AF_INET, SOCK_DGRAM) as asked:
        for _, name in if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = ioctl(asked, SIOCGIFADDR, name.encode().ljust(40, b"\0"))
                if answer[20:24] == inet_aton(address):
                    return name
    return None
