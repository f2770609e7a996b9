"""A GPU that is not there: CUDA tensors whose data lie in host memory, for tests of all but the kernels.

    model.to("cuda")     every weight is a `PretendTensor`: its device is cuda, its data are a CPU tensor
    an operation         runs on the CPU, if a GPU would run it with the same arguments
    a Triton kernel      runs in the interpreter
    a CUDA graph         a list of what was computed while it was captured; a replay computes it again

So a test sees what no run on a CPU shows: host and device tensors in one operation, a wait for the device
where there should be none, a graph that repeats what the host computed when it was captured. It sees nothing
of races between streams, of memory or of speed.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

MOVES = {"to", "_to_copy", "copy_"}
PINNING = {"pin_memory", "_pin_memory"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
WAITING = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"}
WAITING |= {"_unique2", "unique_dim", "unique_consecutive"}
"""Operations whose results, or their sizes, the host reads."""


class PretendTensor(Tensor):
    """A tensor on the device; `on_host` is the CPU tensor with its values, shape and strides."""

    on_host: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> PretendTensor:
        """Shares `data`."""
        with torch.inference_mode(False):  # (it is viewed in either mode)
            self = Tensor._make_wrapper_subclass(
                *(cls, data.shape, data.stride(), data.storage_offset()), dtype=data.dtype, device="cuda:0"
            )
        self.on_host = data
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Without the mode nothing may be done with it."""
        raise RuntimeError(f"{func} outside `pretend_gpu`")

    def __repr__(self, **_: Any) -> str:
        return f"on the device: {self.on_host}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copy = PretendTensor(self.on_host.detach().clone())
            memo[id(self)] = nn.Parameter(copy, False) if isinstance(self, nn.Parameter) else copy
        return memo[id(self)]

    def data_ptr(self) -> int:
        """For the interpreter."""
        return self.on_host.data_ptr()

    def tolist(self) -> Any:
        """PyTorch has none for subclasses."""
        return self.cpu().tolist()


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value.on_host if isinstance(value, PretendTensor) else value


class PretendGPU(TorchDispatchMode):
    """While it is active, every operation of PyTorch passes through it.

    Attributes:
        waits: how often the host waited for the device, by reason.
        sync_debug_mode: as torch.cuda.set_sync_debug_mode sets it.
        copies: data on their way to pinned tensors of the host, in order; they arrive when it waits for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.sync_debug_mode: int | str = 0
        self.stream = Stream()
        self.captured: list[Callable[[], object]] | None = None
        self.copies: list[tuple[Tensor, Tensor]] = []  # (data, target)
        self._pinned: set[int] = set()  # addresses

    def wait(self, reason: str) -> None:
        """The host waits, which a capture does not survive."""
        if self.captured is not None or self.sync_debug_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {reason}")
        self.waits[reason] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of an operation, if a GPU can run it."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
        tensors = [value for value in tree_leaves(given) if isinstance(value, Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
        if name == "_has_compatible_shallow_copy_type":
            return len(ours) != 1
        if name == "is_pinned":
            return not ours and self._is_pinned(args[0])
        device = given.get("device")
        on_device = bool(ours) if device is None else torch.device(device).type == "cuda"
        is_moved = False
        if name in MOVES and (device is None or torch.device(device).type != "meta"):
            target, source = (args[0], args[1]) if name == "copy_" else (given.get("other"), args[0])
            on_device = on_device if target is None else isinstance(target, PretendTensor)
            is_moved = on_device != isinstance(source, PretendTensor)
            non_blocking = given.get("non_blocking", False)
            if is_moved and name == "copy_" and not on_device and non_blocking and self._is_pinned(target):
                return self._copy_later(source, target)
            if is_moved:
                self._check_move(source, non_blocking)
        elif ours or on_device:
            self._check(name, given, tensors)
        to_pin = kwargs.get("pin_memory") or name in PINNING
        if name in PINNING:
            func, args, kwargs = torch.ops.aten.clone.default, args[:1], {}
        elif to_pin:
            kwargs = kwargs | {"pin_memory": False}
        elif name == "histc":
            func = _histogram
        host_args, host_kwargs = tree_map(_to_host, (args, kwargs))

        def compute() -> Any:
            with _disable_current_modes():
                result = func(*host_args, **host_kwargs)
                return result.clone() if is_moved and name != "copy_" else result

        result = compute()
        if to_pin and not on_device:
            self._pinned.add(result.untyped_storage().data_ptr())
        if not on_device:
            return result
        if self.captured is not None:
            self.captured.append(functools.partial(_repeat, compute, tree_leaves(result)))
        known = {id(tensor.on_host): tensor for tensor in ours}  # (results of operations in place)
        return tree_map_only(
            Tensor, lambda data: known[id(data)] if id(data) in known else PretendTensor(data), result
        )

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _copy_later(self, source: Tensor, target: Tensor) -> Tensor:
        if self.captured is not None:
            raise RuntimeError("a captured copy to the host writes there at each replay")
        with _disable_current_modes():
            self.copies.append((_to_host(source).clone(), target))
            return target.fill_(-7)  # nobody knows what is there now

    def finish(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """The host has waited for these copies."""
        with _disable_current_modes():
            for data, target in copies:
                target.copy_(data)
        self.copies = self.copies[len(copies) :]

    def _check_move(self, source: Tensor, non_blocking: bool) -> None:
        if isinstance(source, PretendTensor):
            self.wait("a copy to the host")
        elif not (non_blocking and self._is_pinned(source)):
            self.wait("a copy from memory that is not pinned, or that is waited for")
        elif self.captured is not None:
            raise RuntimeError("a captured copy from the host reads what is there at each replay")

    def _check(self, name: str, given: dict[str, Any], tensors: list[Tensor]) -> None:
        if name in INDEXING:
            tensors = self._check_indices(given)
        elif name in WAITING or (name == "repeat_interleave" and self._has_unknown_size(given)):
            self.wait(name)
        elif name == "where" and any(tensor.device.type == "cpu" for tensor in tensors):
            self.wait("a number of `where` on the host")
        elif name.startswith("masked_fill") and isinstance(given["value"], PretendTensor):
            self.wait("a number of `masked_fill` on the device")
        for tensor in tensors:  # (one without dimensions counts as a number)
            if tensor.device.type == "cpu" and tensor.dim() > 0:
                raise RuntimeError(f"{name} expects all tensors on the device, one is on the CPU")

    def _check_indices(self, given: dict[str, Any]) -> list[Tensor]:
        """Returns what must not be on the host."""
        indices = [index for index in given["indices"] if index is not None]
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        values = [given["values"]] if "values" in given else []
        is_number = any(value.device.type == "cpu" and value.dim() == 0 for value in values)
        if is_number and len(masks) == len(indices) == 1 and not given.get("accumulate"):
            return masks  # (it is masked_fill)
        if any(index.device.type == "cpu" for index in indices):
            self.wait("indices on the host")
        if masks:
            self.wait("a mask as an index")
        if is_number:
            self.wait("a number for some indices")
        return values

    @staticmethod
    def _has_unknown_size(repeated: dict[str, Any]) -> bool:
        return repeated.get("output_size") is None and not isinstance(repeated["repeats"], int)

    def launch(self, executor: Any, *args: Any, **kwargs: Any) -> None:
        """Run a Triton kernel."""
        for tensor in tree_leaves((args, kwargs)):
            on_host = isinstance(tensor, Tensor) and not isinstance(tensor, PretendTensor)
            if on_host and not self._is_pinned(tensor):
                raise ValueError("a Triton kernel cannot access a CPU tensor")
        args, kwargs = tree_map(_to_host, (args, kwargs))

        def compute() -> None:
            with _disable_current_modes():
                _run_kernel(executor, *args, **kwargs)

        compute()
        if self.captured is not None:
            self.captured.append(compute)

    @contextmanager
    def capture(self, graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
        """As torch.cuda.graph, but it computes what it captures, too."""
        assert self.captured is None
        self.captured = graph.steps
        try:
            yield
        finally:
            self.captured = None

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """As torch.cuda.stream."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


def _histogram(values: Tensor, *bins: float) -> Tensor:
    return torch.histc(values.float(), *bins)  # (CUDA takes integers)


def _repeat(compute: Callable[[], Any], results: list[Any]) -> None:
    for old, new in zip(results, tree_leaves(compute())):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


class Graph:
    """What was captured, in its order."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []

    def replay(self) -> None:
        """With the tensors of the capture, whatever they hold now."""
        with _disable_current_modes():
            for step in self.steps:
                step()


class Stream:
    """All work is done at once."""

    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        """The host waits all the same."""
        torch.cuda.synchronize()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self  # (its events, too)


class Event(Stream):
    """When work was done."""

    def __init__(self, gpu: PretendGPU, **_: Any) -> None:
        self._gpu = gpu
        self._copies: list[tuple[Tensor, Tensor]] = []

    def record(self, *_: Any) -> None:
        """Now."""
        self._time = time.perf_counter()
        self._copies = self._gpu.copies[:]

    def synchronize(self) -> None:
        """Wait for the copies before it, and for nothing after it."""
        super().synchronize()
        self._gpu.finish(self._copies)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return (end._time - self._time) * 1e3


@functools.cache
def _set_guard() -> None:
    """Register what PyTorch calls to make a CUDA device current; builds for CPUs have none."""
    if torch.version.cuda is not None:
        torch._C._ensureCUDADeviceGuardSet()
        return
    package = Path(torch.__file__).parent
    with TemporaryDirectory() as directory:
        source, library = Path(directory) / "guard.cpp", Path(directory) / "guard.so"
        source.write_text(
            "#include <c10/core/impl/DeviceGuardImplInterface.h>\n"
            "static const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;\n"
            "static const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);\n"
        )
        command = ["c++", "-std=c++20", "-shared", "-fPIC", "-I", package / "include", source]
        subprocess.run([*command, "-L", package / "lib", "-lc10", "-o", library], check=True)
        ctypes.CDLL(str(library))


@contextmanager
def pretend_gpu(capability: tuple[int, int] = (9, 0), memory: int = 1 << 30) -> Iterator[PretendGPU]:
    """Let torch find a GPU in this block, in its thread and those that it starts."""
    from triton.runtime import interpreter

    global _run_kernel
    _set_guard()
    gpu, run_thread = PretendGPU(), threading.Thread.run
    _run_kernel = interpreter.GridExecutor.__call__
    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132, L2_cache_size=0
    )

    def run(thread: threading.Thread) -> None:
        with _active(gpu):
            run_thread(thread)

    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (memory, memory),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "Stream": Stream,
        "Event": functools.partial(Event, gpu),
        "current_stream": lambda *_: gpu.stream,
        "stream": gpu.use,
        "CUDAGraph": Graph,
        "graph": gpu.capture,
        "graph_pool_handle": lambda: (0, 0),
        "set_sync_debug_mode": lambda mode: setattr(gpu, "sync_debug_mode", mode),
        "get_sync_debug_mode": lambda: gpu.sync_debug_mode,
        "synchronize": lambda *_: gpu.wait("synchronize"),
        "device": nullcontext,
    }
    without_effect = "_lazy_init set_device empty_cache reset_peak_memory_stats _sleep"
    without_effect += " get_rng_state set_rng_state manual_seed manual_seed_all"
    for name in without_effect.split():
        fakes[name] = lambda *_, **__: None  # (PyTorch wants each to be another object)
    overwritten = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            patch.multiple(torch.cuda, **fakes),
            patch.object(threading.Thread, "run", run),
            patch.object(interpreter.GridExecutor, "__call__", lambda *args, **kw: gpu.launch(*args, **kw)),
            _active(gpu),
        ):
            yield gpu
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwritten)


_run_kernel: Any = None


@contextmanager
def _active(gpu: PretendGPU) -> Iterator[None]:
    # Without it, torch.tensor(.., device="cuda") fills the device's memory behind the mode's back.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with gpu:
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
