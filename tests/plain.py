"""What every run of the tests needs, with torch or without: overrides, trials, markers, log levels.

A pytest plugin: tests/conftest.py loads it, and so do the lessons in the browser, where torch is not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from minipaged.learn.lessons import read_lessons
from minipaged.learn.trials import SECONDS_PER_TEST
from tests.overrides import put, replacements
from tests.trials import TrialRunner, by_name

LESSONS = read_lessons(Path(__file__).parent.parent)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Overrides of the project's own classes."""
    parser.addoption(
        "--use",
        action="append",
        default=[],
        metavar="CONCEPT=FILE.py:Class",
        help="Run the concept tests on this class; may be repeated.",
    )
    parser.addoption("--trials", type=Path, help="A file of trials to run instead; see tests/trials.py.")
    parser.addoption("--trials-out", type=Path, help="Where their results go.")
    parser.addoption(
        "--trials-seconds", type=int, default=SECONDS_PER_TEST, help="How long a test may compute."
    )


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
        runner = TrialRunner(*map(config.getoption, ("--trials", "--trials-out", "--trials-seconds")))
        config.pluginmanager.register(runner, "trials")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a task carry its marker."""
    named = by_name(items)
    for lesson in LESSONS:
        for number, task in enumerate(lesson.tasks, start=1):
            for name in task.tests:
                for item in named.get(name, []):
                    item.add_marker(lesson.marker(number))


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
