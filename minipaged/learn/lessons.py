"""`minipaged learn`: the lessons of a clone, `tutorials/NN_name/`; progress is what the tests say now.

The tests run in a process of their own: no torch here.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

SECONDS_PER_TEST = 10
"""An exercise that has not answered by then has an endless loop."""


class LearnError(ValueError):
    """No lessons here, or no such lesson; the message says what to do."""


class Task(NamedTuple):
    """One thing to write: its name, a hint, and the node ids of the tests that specify it."""

    name: str
    hint: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Lesson:
    """One folder of `tutorials/`."""

    folder: Path  # its name begins with the number, "00" to "13"
    title: str
    minutes: int
    use: tuple[str, ...]  # "concept:class of the exercise"
    environment: dict[str, str]  # variables that the tests need
    tasks: tuple[Task, ...]  # in the order in which they are done

    @property
    def number(self) -> str:
        """Two digits."""
        return self.folder.name[:2]

    @property
    def exercise(self) -> Path:
        """The file to write in."""
        return self.folder / "exercise.py"

    @property
    def start(self) -> Path:
        """The exercise as it was at the start."""
        return self.folder.parent / ".start" / f"{self.folder.name}.py"

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was written yet."""
        both = (self.start, self.exercise)
        return all(file.exists() for file in both) and self.start.read_bytes() == self.exercise.read_bytes()

    @property
    def tests(self) -> list[str]:
        """The tests of all tasks."""
        return [test for task in self.tasks for test in task.tests]

    def use_options(self, file: Path | None = None) -> list[str]:
        """The `--use` options that put the exercise (or another file of its kind) in place."""
        used = (use.partition(":") for use in self.use)
        return [f"{concept}={file or self.exercise}:{name}" for concept, _, name in used]

    def marker(self, task: int) -> str:
        """The pytest marker of a task; the first is 1."""
        return f"lesson{self.number}_task{task}"


def repository() -> Path:
    """The clone you stand in, or the one this package runs from. Raises `LearnError` if there is none."""
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parents[2]):
        if (folder / "tutorials" / ".start").is_dir():
            return folder
    raise LearnError("the lessons are not here; clone the repository and run `minipaged learn` in it")


def read_lessons(root: Path) -> list[Lesson]:
    """All lessons of a clone, in order."""
    lessons = []
    for file in sorted(root.glob("tutorials/*/tasks.toml")):
        data = tomllib.loads(file.read_text())
        tasks = tuple(Task(t["name"], t["hint"].strip(), tuple(t["tests"])) for t in data.get("task", ()))
        use, environment = tuple(data.get("use", ())), data.get("environment", {})
        lessons.append(Lesson(file.parent, data["title"], data["minutes"], use, environment, tasks))
    return lessons


class Trial(NamedTuple):
    """Tests to run on the overrides of some `--use` options."""

    name: str
    use: Sequence[str]
    tests: Sequence[str]


def run_trials(
    root: Path, trials: Sequence[Trial], environment: dict[str, str] | None = None
) -> dict[str, dict[str, str]]:
    """Run the tests of each trial in one fresh process; raises `LearnError` if that fails.

    Returns trial -> test -> "" if it passed, else one line that says what went wrong.
    """
    if find_spec("pytest") is None:
        raise LearnError("lessons are checked with pytest; install the extra: pip install 'minipaged[test]'")
    files = sorted({test.partition("::")[0] for trial in trials for test in trial.tests})
    with tempfile.TemporaryDirectory() as folder:
        source, destination = Path(folder, "in.json"), Path(folder, "out.json")
        source.write_text(json.dumps([trial._asdict() for trial in trials]))
        command = [sys.executable, "-m", "pytest", *files, "-q", "-p", "no:cacheprovider", "-m", ""]
        command += ["-o", f"timeout={SECONDS_PER_TEST}", "--trials", str(source)]
        command += ["--trials-out", str(destination)]
        ran = subprocess.run(
            command,
            cwd=root,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if not destination.exists():
            tail = " / ".join((ran.stdout + ran.stderr).strip().splitlines()[-3:])
            raise LearnError(f"the tests could not be run (is the extra `test` installed?): {tail}")
        return json.loads(destination.read_text())


def progress(lessons: Sequence[Lesson]) -> dict[str, list[dict[str, str]]]:
    """Lesson number -> per task, test -> what went wrong ("" when it passed).

    An exercise that nobody has touched is red without running anything: every stub fails its tests.
    """
    outcomes = {lesson.number: dict.fromkeys(lesson.tests, "not started") for lesson in lessons}
    groups: dict[tuple[tuple[str, str], ...], list[Trial]] = {}
    for lesson in lessons:
        if lesson.tasks and not lesson.is_untouched:
            trials = groups.setdefault(tuple(lesson.environment.items()), [])
            trials.append(Trial(lesson.number, lesson.use_options(), lesson.tests))
    for environment, trials in groups.items():
        outcomes |= run_trials(lessons[0].folder.parents[1], trials, dict(environment))
    return {
        lesson.number: [{test: outcomes[lesson.number][test] for test in task.tests} for task in lesson.tasks]
        for lesson in lessons
    }


def open_task(lesson: Lesson) -> tuple[int, Task] | None:
    """The first task that is not green, with its number."""
    outcomes = zip(lesson.tasks, progress([lesson])[lesson.number])
    return next(((i, task) for i, (task, told) in enumerate(outcomes, 1) if any(told.values())), None)


def find(number: str) -> Lesson:
    """The lesson with a number like "02" or "2". Raises `LearnError` if there is none."""
    known = {lesson.number: lesson for lesson in read_lessons(repository())}
    if number.zfill(2) not in known:
        raise LearnError(f"there is no lesson {number}; choose one of {', '.join(known)}")
    return known[number.zfill(2)]


# -- the command ---------------------------------------------------------------------------------------------

app = typer.Typer(
    help="Lessons: write the components yourself, then run the engine with them.", add_completion=False
)
Number = Annotated[str, typer.Argument(help="The lesson, e.g. 02.")]


@app.callback(invoke_without_command=True)
def overview(context: typer.Context) -> None:
    """List the lessons; every task is red or green, as its tests say now."""
    if context.invoked_subcommand is None:
        lessons = read_lessons(repository())
        with Console(stderr=True).status("running the tests of what you have begun"):
            done = progress(lessons)
        table = Table("lesson", "minutes", "tasks")
        for lesson in lessons:
            marks = " ".join(map(_mark, done[lesson.number]))
            table.add_row(f"{lesson.number} {lesson.title}", str(lesson.minutes), marks or "to read and run")
        Console().print(table)
        print("minipaged learn next opens the first that is not green; learn check 02, learn hint 02.")


@app.command()
def check(number: Number) -> None:
    """Run the tests of a lesson on your exercise."""
    lesson = find(number)
    if not lesson.tasks:
        raise LearnError(f"lesson {lesson.number} has no tasks; read {lesson.folder / 'lesson.md'}")
    with Console(stderr=True).status("running the tests"):
        outcomes = progress([lesson])[lesson.number]
    console = Console(highlight=False, soft_wrap=True)
    told: set[str] = set()
    for i, (task, outcome) in enumerate(zip(lesson.tasks, outcomes), start=1):
        failed = [f"    {test.partition('::')[2]}: {failure}" for test, failure in outcome.items() if failure]
        passed = len(outcome) - len(failed)
        console.print(f"{_mark(outcome)} task {i}: {task.name}  ({passed} of {len(outcome)} tests)")
        for failure in failed[:1]:
            reason = failure.partition(": ")[2]
            if reason not in told:  # a file that cannot be loaded fails every test, and is told once
                console.print(failure, markup=False)
            told.add(reason)
    if any(failure for outcome in outcomes for failure in outcome.values()):
        raise typer.Exit(1)
    console.print(f"Lesson {lesson.number} is green. Now compare with the real module, linked in the lesson.")


@app.command()
def hint(number: Number) -> None:
    """A hint for the first task that is not green."""
    lesson = find(number)
    told = f"Lesson {lesson.number} is green; no hint is left."
    if found := open_task(lesson):
        told = f"Task {found[0]}, {found[1].name}:\n{found[1].hint}"
    Console(highlight=False).print(told, markup=False)


@app.command()
def reset(number: Number) -> None:
    """Begin a lesson again; what you wrote is kept beside it: exercise.backup.py, exercise.backup2.py, ..."""
    lesson = find(number)
    if not lesson.start.exists():
        raise LearnError(f"lesson {lesson.number} has no exercise to reset; choose another")
    console = Console(soft_wrap=True, highlight=False)
    if lesson.is_untouched:
        console.print(f"{lesson.exercise} is as at the start; nothing was written in it", markup=False)
        return
    kept = f"; yours is {back_up(lesson.exercise)}" if lesson.exercise.exists() else ""
    shutil.copyfile(lesson.start, lesson.exercise)
    console.print(f"{lesson.exercise} is as at the start{kept}", markup=False)


def back_up(exercise: Path) -> Path:
    """Copy an exercise to exercise.backup.py, exercise.backup2.py, ...: the first that is not there yet."""
    for number in itertools.count(1):
        backup = exercise.with_name(f"exercise.backup{number if number > 1 else ''}.py")
        try:
            with backup.open("xb") as file:
                file.write(exercise.read_bytes())
        except FileExistsError:
            continue
        return backup
    raise AssertionError("numbers do not end")


@app.command(name="next")
def next_lesson() -> None:
    """Say which lesson and task come next."""
    for lesson in read_lessons(repository()):
        if found := open_task(lesson):
            print(f"Lesson {lesson.number}, {lesson.title}, about {lesson.minutes} minutes.")
            print(f"Read   {lesson.folder / 'lesson.md'}")
            print(f"Write  {lesson.exercise}: {found[1].name} (task {found[0]})")
            print(f"Check  minipaged learn check {lesson.number}")
            return
    print("All lessons are green.")


def _mark(outcome: dict[str, Any]) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    red, green = ("✗", "✓") if encoding.lower().startswith("utf") else ("x", "ok")
    return f"[red]{red}[/red]" if any(outcome.values()) else f"[green]{green}[/green]"
