"""Options of the test run."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

from minipaged.learn.lessons import read_lessons
from tests.overrides import put, replacements
from tests.trials import TrialRunner, matching

# The same examples in every run, so that a red test is red for everybody; `--hypothesis-seed` draws others.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
# A trial reports that a test is red, in one line: no need for the smallest example.
settings.register_profile("trials", derandomize=True, phases=[Phase.explicit, Phase.generate])

# Without a GPU the kernels run in Triton's interpreter. It is chosen when triton is first imported, once for
# a process, hence here. With TRITON_INTERPRET=0 they are compiled, for chips that need not be there.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell lets background jobs ignore Ctrl-C; tests send it, to themselves and to children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LESSONS = read_lessons(Path(__file__).parent.parent)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Sizes of the random tests, and overrides of the project's own classes."""
    parser.addoption("--fuzz-steps", type=int, default=3000, help="Random steps in each of the fuzz tests.")
    parser.addoption(
        "--interrupts", type=int, default=200, help="SIGINTs to send in tests/engine/test_survives.py."
    )
    parser.addoption("--fuzz-seed", type=int, default=0, help="Seed of the first random scenario.")
    parser.addoption(
        "--use",
        action="append",
        default=[],
        metavar="CONCEPT=FILE.py:Class",
        help="Run the concept tests on this class; may be repeated.",
    )
    parser.addoption("--trials", type=Path, help="A file of trials to run instead; see tests/trials.py.")
    parser.addoption("--trials-out", type=Path, help="Where their results go.")


def pytest_configure(config: pytest.Config) -> None:
    """A marker per task of the lessons; the overrides of `--use` before any test is imported."""
    for lesson in LESSONS:
        for number, task in enumerate(lesson.tasks, start=1):
            config.addinivalue_line(
                "markers", f"{lesson.marker(number)}: {lesson.title}, task {number}: {task.name}"
            )
    try:
        put(replacements(config.getoption("--use")))
    except (ValueError, NotImplementedError) as error:
        raise pytest.UsageError(str(error)) from error
    if config.getoption("--trials"):
        runner = TrialRunner(config.getoption("--trials"), config.getoption("--trials-out"))
        config.pluginmanager.register(runner, "trials")
        settings.load_profile("trials")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a task carry its marker."""
    for lesson in LESSONS:
        for number, task in enumerate(lesson.tasks, start=1):
            for name in task.tests:
                for item in matching(items, name):
                    item.add_marker(lesson.marker(number))


@pytest.fixture
def no_gc_callbacks() -> Iterator[None]:
    """Python swallows an interrupt that is raised in one (Hypothesis has one): the test would not see it."""
    before, gc.callbacks[:] = gc.callbacks[:], []
    yield
    gc.callbacks[:] = before


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """What one test silences (the simulator's warnings, say) the next one hears again."""
    loggers = [logging.getLogger(name) for name in ("minipaged", "minipaged.scheduling")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.NOTSET)
    yield
    for logger, level in zip(loggers, before):
        logger.setLevel(level)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small operations are slower on many threads, and CPU seconds of one survive a busy machine."""
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
