"""The machine, its clock and its results: what every benchmark shares."""

import importlib.metadata
import platform
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.gpu.records import Records, reason_of


@dataclass
class Machine:
    """Where the benchmarks run. A dry run is tiny, and pretends: every step is taken, no figure counts."""

    dry_run: bool
    records: Records
    results: list[dict[str, Any]] = field(default_factory=list)

    device = torch.device("cuda")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry_run else torch.bfloat16

    @property
    def cache_bytes(self) -> int:
        """The last-level cache: what is measured must not fit in it."""
        return torch.cuda.get_device_properties(0).L2_cache_size

    @property
    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def describe(self) -> dict[str, Any]:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        for name in ("triton", "transformers"):
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = "not installed"
        name = "dry run" if self.dry_run else torch.cuda.get_device_name()
        return {"device": name, "dry_run": self.dry_run, "versions": versions}

    def record(self, benchmark: str, parameters: str, value: float, unit: str, **more: Any) -> None:
        """Keep one figure and print it as it comes."""
        self._keep({"benchmark": benchmark, "parameters": parameters, "value": value, "unit": unit} | more)
        notes = "  ".join(f"{key} {shown(number)}" for key, number in more.items())
        print(f"  {benchmark:<24} {parameters:<52} {shown(value):>9} {unit:<8} {notes}", flush=True)

    def skip(self, benchmark: str, parameters: str, reason: str) -> None:
        """Say what was not measured, and why."""
        self._keep({"benchmark": benchmark, "parameters": parameters, "not_measured": reason})
        print(f"  {benchmark:<24} {parameters:<52} not measured: {reason}", flush=True)

    @contextmanager
    def attempt(self, benchmark: str, parameters: str) -> Iterator[None]:
        """What fails within, a kernel or a peer that this version lacks, is recorded and ends no more."""
        try:
            yield
        except Exception as error:
            self.skip(benchmark, parameters, reason_of(error))

    def _keep(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        self.records.add(result)

    def time_ms(self, run: Callable[[int], Any], *, reads: int, repeat: int = 20) -> float:
        """Median milliseconds of run(i) on the device, which reads so many bytes.

        Calls are recorded once and replayed, so the host's launches are not in the figure. There are enough
        of them that, i counting up and each reading other bytes, none finds its own in the cache.
        """
        calls = min(128, max(4, 3 * self.cache_bytes // reads))
        if self.dry_run:
            calls = repeat = 1
        for i in range(min(3, calls)):
            run(i)
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            for i in range(calls):
                run(i)
        recorded.replay()
        return statistics.median(self._elapsed(recorded.replay) for _ in range(repeat)) / calls

    def time_with_host_ms(self, run: Callable[[], Any], *, repeat: int = 5) -> float:
        """Median milliseconds of a call with what its launches and transfers of arguments cost."""
        run()
        torch.cuda.synchronize()
        return statistics.median(self._elapsed(run) for _ in range(1 if self.dry_run else repeat))

    @staticmethod
    def _elapsed(run: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


@contextmanager
def on_gpu(dry_run: bool) -> Iterator[None]:
    """In a dry run, a GPU that is not there."""
    if not dry_run:
        yield
        return
    from tests.gpu.interpreter import accept_new_numpy
    from tests.gpu.pretend import pretend_gpu

    accept_new_numpy()
    with pretend_gpu():
        yield


def shown(value: Any) -> str:
    """Three significant digits for numbers."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
