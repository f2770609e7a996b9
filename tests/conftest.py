"""Options of the test run."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, settings

# The same examples in every run, so that a red test is red for everybody; `--hypothesis-seed` draws others.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
# A trial reports that a test is red, in one line: no need for the smallest example.
settings.register_profile("trials", derandomize=True, phases=[Phase.explicit, Phase.generate])

if "--trials" not in sys.argv:  # most of which need no torch, and it takes longer to load than they run
    import torch

    # Without a GPU the kernels run in Triton's interpreter. It is chosen when triton is first imported, once
    # for a process, hence here. With TRITON_INTERPRET=0 they are compiled, for chips that need not be there.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

    # Two workers with a thread for each core would wait for each other most of the time.
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))
        gc.disable()  # until all tests are collected, which makes next to no garbage

# A shell lets background jobs ignore Ctrl-C; tests send it, to themselves and to children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.plain"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Sizes of the random tests."""
    parser.addoption("--fuzz-steps", type=int, default=3000, help="Random steps in each of the fuzz tests.")
    parser.addoption(
        "--interrupts", type=int, default=200, help="SIGINTs to send in tests/engine/test_survives.py."
    )
    parser.addoption("--fuzz-seed", type=int, default=0, help="Seed of the first random scenario.")


def pytest_configure(config: pytest.Config) -> None:
    """Trials need no smallest example."""
    if config.getoption("--trials"):
        settings.load_profile("trials")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Triton's interpreter may be older than numpy."""
    if item.get_closest_marker("interpreter"):
        from tests.gpu.interpreter import accept_new_numpy

        accept_new_numpy()


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: no garbage collection of a test need walk through them all."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker begins with a part in one piece: neighbours share fixtures, some of which take a minute."""
    if config.getoption("dist") != "load":  # what `-n` alone means
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture
def no_gc_callbacks() -> Iterator[None]:
    """Python swallows an interrupt that is raised in one (Hypothesis has one): the test would not see it."""
    before, gc.callbacks[:] = gc.callbacks[:], []
    yield
    gc.callbacks[:] = before


@pytest.fixture
def hangups_end() -> Iterator[None]:
    """A run under nohup ignores hangups, and so would the processes that it starts."""
    hangup = getattr(signal, "SIGHUP", None)  # (Windows has none)
    before = hangup and signal.signal(hangup, signal.SIG_DFL)
    yield
    if before is not None:
        signal.signal(hangup, before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small operations are slower on many threads, and CPU seconds of one survive a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fuzz_steps(pytestconfig: pytest.Config) -> int:
    """How many random engine steps to take at least."""
    return pytestconfig.getoption("--fuzz-steps")


@pytest.fixture
def fuzz_seed(pytestconfig: pytest.Config) -> int:
    """The seed of the first scenario; the next one has the next seed."""
    return pytestconfig.getoption("--fuzz-seed")


@pytest.fixture
def interrupts(pytestconfig: pytest.Config) -> int:
    """How many SIGINTs to send at least."""
    return pytestconfig.getoption("--interrupts")
