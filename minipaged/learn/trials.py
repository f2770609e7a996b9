"""The tests of the lessons, run on exercises: progress is what the tests say now. Nothing is stored.

The tests run in a process of their own (tests/trials.py plays them): no torch here.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from minipaged.learn.apart import kill_group
from minipaged.learn.lessons import LearnError, Lesson, Task
from minipaged.learn.stubs import missing, stubs

SECONDS_PER_TEST = 10
"""An exercise that computes for longer has an endless loop; one that only waits has six times as long."""

ENDLESS = 99
"""How the process ends if a loop cannot be stopped."""

BROKE_OFF = "the tests broke off: "

OUTSIDE = "read or write outside an array, for instance a kernel with a wrong address or without a mask?"

NOT_RUN = "not run, because a test before it broke off"


class Trial(NamedTuple):
    """Tests to run on the overrides of some `--use` options."""

    name: str
    use: Sequence[str]
    tests: Sequence[str]
    until_red: bool = False  # the first failure is enough; the tests after it are not run


class Outcome(NamedTuple):
    """How a test went."""

    failure: str = ""  # "" if it passed, else one line that says what went wrong
    message: str = ""  # the same as pytest has it, with all lines
    says: str = ""  # the test's docstring: the bug that it catches
    test_line: tuple[str, int, str] | None = None  # where the test failed: file, line number, code
    your_line: tuple[str, int, str] | None = None  # the same of the innermost call of the override
    failed_line: tuple[str, int, str] | None = None  # of what failed, if it is neither of the two
    printed: str = ""  # the end of what was printed in a test that failed


NOT_STARTED = Outcome("not started")
"""Of every test of an exercise in which nothing is written: each stub would fail its tests."""


def run_trials(
    root: Path,
    trials: Sequence[Trial],
    environment: dict[str, str] | None = None,
    on_test: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, Outcome]]:
    """Run the tests of each trial in one fresh process; `on_test` is called after each.

    If an exercise ends the process, that test has failed, the trial's other tests are not run, and the trials
    after it get a new process. Returns trial -> test -> outcome.

    Raises:
        LearnError: the tests could not be run.
    """
    if find_spec("pytest") is None:
        raise LearnError(
            'lessons are checked with pytest; in your clone, run pip install -c constraints.txt -e ".[learn]"'
        )
    outcomes: dict[str, dict[str, Outcome]] = {}
    left = list(trials)
    while left:
        found, why = _run(root, left, environment or {}, on_test)
        outcomes |= found
        if why is None:
            break
        at = [trial.name for trial in left].index(list(found)[-1])
        broken, left = left[at], left[at + 1 :]
        undone = [test for test in broken.tests if test not in found[broken.name]]
        reasons = [why, *[NOT_RUN] * len(undone)]  # of the first, of the others
        outcomes[broken.name] |= {test: Outcome(reason) for test, reason in zip(undone, reasons)}
    return outcomes


def _run(
    root: Path, trials: Sequence[Trial], environment: dict[str, str], on_test: Callable[[], object]
) -> tuple[dict[str, dict[str, Outcome]], str | None]:
    """Outcomes, and why there are no more than these; None: there are all."""
    from minipaged.progress import restored_at_end  # (a browser has neither signals nor rich)

    with tempfile.TemporaryDirectory() as folder:
        destination = Path(folder, "out.json")
        command = [sys.executable, "-u", "-m", "pytest", *pytest_arguments(trials, Path(folder), destination)]
        command += ["-o", f"timeout={6 * SECONDS_PER_TEST}"]
        last = deque[str](maxlen=3)
        why: str | None = None
        with subprocess.Popen(
            command,
            cwd=root,
            # (OpenMP's threads spin while they wait, which would count as an endless loop's time.)
            env={**os.environ, "OMP_WAIT_POLICY": "passive", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            assert process.stdout is not None

            def clean_up() -> None:
                kill_group(process.pid)
                shutil.rmtree(folder, ignore_errors=True)

            with restored_at_end(clean_up):
                try:
                    for line in process.stdout:
                        if line.startswith("@done") and destination.with_suffix(".done").exists():
                            break  # (an exercise may print it, too)
                        if line.endswith("@ran\n"):  # (after the mark that pytest prints of the test)
                            on_test()
                        elif line.strip():
                            last.append(line.strip())
                    else:
                        why = _why(process.wait())
                finally:
                    kill_group(process.pid)  # with what an exercise has started; it may catch Ctrl-C
        if not destination.exists():
            output = " / ".join(last)
            raise LearnError(
                "the tests could not be run; if a package is missing, run "
                f'pip install -c constraints.txt -e ".[learn]" in your clone: {output}'
            )
        return read_outcomes(destination), why


def _why(status: int) -> str:
    """What ended a process, from its exit status."""
    if status == ENDLESS:
        return (
            f"{BROKE_OFF}an endless loop catches every exception, even the one that should end it; "
            "catch only what you expect"
        )
    if -status in (1, 15):  # what a closed terminal and `kill` send
        return f"{BROKE_OFF}signal {-status} ended their process, perhaps from outside; run the check again"
    if status < 0:
        asked = "take more and more memory?" if status == -9 else OUTSIDE
        return f"{BROKE_OFF}signal {-status} ended their process; does your code {asked}"
    return (
        f"{BROKE_OFF}your code ended their process with status {status}; "
        "drop the call of os._exit, or whatever else ends it"
    )


def pytest_arguments(trials: Sequence[Trial], folder: Path, destination: Path) -> list[str]:
    """What pytest runs trials with: they are written into `folder`, their outcomes to `destination`."""
    source = folder / "in.json"
    source.write_text(json.dumps([trial._asdict() for trial in trials]), encoding="utf-8")
    files = sorted({test.partition("::")[0] for trial in trials for test in trial.tests})
    options = ["-q", "-p", "no:cacheprovider", "-m", ""]
    options += ["-p", "no:schemathesis", "-p", "no:benchmark", "-p", "no:anyio"]  # slow to load, unused here
    options += ["--tb=native"]  # (the other styles parse the source of every line: a third of the time)
    options += ["-o", "verbosity_assertions=2"]  # values of any length: they are cut where they are shown
    options += ["--trials", str(source), "--trials-out", str(destination)]
    return [*files, *options, "--trials-seconds", str(SECONDS_PER_TEST)]


def read_outcomes(destination: Path) -> dict[str, dict[str, Outcome]]:
    """Trial -> test -> outcome, as pytest has written them."""
    return {
        trial: {test: Outcome(**outcome) for test, outcome in outcomes.items()}
        for trial, outcomes in json.loads(destination.read_text(encoding="utf-8")).items()
    }


def progress(
    lessons: Sequence[Lesson], on_test: Callable[[], object] = lambda: None
) -> dict[str, list[dict[str, Outcome]]]:
    """Lesson number -> per task, test -> outcome. Only exercises that somebody has touched are run."""
    outcomes = {lesson.number: dict.fromkeys(lesson.tests, NOT_STARTED) for lesson in lessons}
    groups: dict[tuple[tuple[str, str], ...], list[Trial]] = {}
    for lesson in begun(lessons):
        trials = groups.setdefault(tuple(lesson.environment.items()), [])
        trials.append(Trial(lesson.number, lesson.use_options(), lesson.tests))
    for environment, trials in groups.items():
        outcomes |= run_trials(lessons[0].root, trials, dict(environment), on_test)
    for lesson in begun(lessons):
        outcomes[lesson.number] = with_missing(lesson, outcomes[lesson.number])
    return {
        lesson.number: [{test: outcomes[lesson.number][test] for test in task.tests} for task in lesson.tasks]
        for lesson in lessons
    }


def with_missing(lesson: Lesson, outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """The outcomes of a lesson's tests, with a failure in each task whose exercise lacks a definition."""
    if not lesson.exercise.is_file():
        return outcomes
    source = lesson.exercise.read_text(encoding="utf-8-sig", errors="replace")
    lacking: dict[str, Outcome] = {}
    for name, task in missing(lesson, source).items():
        method = name.rpartition(".")[2]
        words = set(re.findall(r"def (\w+)", source)) - {n.rpartition(".")[2] for n in stubs(lesson)}
        near = difflib.get_close_matches(method, words, n=1)
        hint = f" (is it {near[0]}?)" if near else ""
        text = f"{lesson.exercise.name} has no {name} of its own{hint}; write it"
        lacking.setdefault(lesson.tasks[task - 1].tests[0], Outcome(text))
    return outcomes | lacking


def begun(lessons: Sequence[Lesson]) -> list[Lesson]:
    """The lessons whose exercise somebody has touched."""
    return [lesson for lesson in lessons if lesson.tasks and not lesson.is_untouched]


def is_green(outcomes: dict[str, Outcome]) -> bool:
    """Whether all tests of a task passed."""
    return not any(outcome.failure for outcome in outcomes.values())


def open_task(lesson: Lesson) -> tuple[int, Task] | None:
    """The first task that is not green, with its number."""
    outcomes = zip(lesson.tasks, progress([lesson])[lesson.number])
    return next(((i, task) for i, (task, found) in enumerate(outcomes, 1) if not is_green(found)), None)
