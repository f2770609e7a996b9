"""The lessons of a clone, as data: `tutorials/NN_name/` with text, exercise and tasks. No torch here."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class LearnError(ValueError):
    """What a student asks for cannot be done; the message says what to do."""


class Task(NamedTuple):
    """One thing to write, and the node ids of the tests that specify it."""

    name: str
    hints: tuple[str, ...]  # three: a nudge, the idea, nearly the code
    solution: str  # why the solution is as it is; the code is the project's own
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Lesson:
    """One folder of `tutorials/`."""

    folder: Path  # its name begins with the number: "00", "01", ...
    title: str
    minutes: int
    use: tuple[tuple[str, str], ...]  # (concept, class of the exercise)
    environment: dict[str, str]  # variables that the tests need
    tasks: tuple[Task, ...]  # in the order in which they are done

    @property
    def number(self) -> str:
        """Two digits."""
        return self.folder.name[:2]

    @property
    def root(self) -> Path:
        """The clone."""
        return self.folder.parents[1]

    @property
    def exercise(self) -> Path:
        """The file to write in."""
        return self.folder / "exercise.py"

    @property
    def start(self) -> Path:
        """The exercise as it was at the start."""
        return start_of(self.folder)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was written yet."""
        return is_untouched(self.exercise)

    @property
    def tests(self) -> list[str]:
        """The tests of all tasks."""
        return [test for task in self.tasks for test in task.tests]

    def use_options(self, file: Path | None = None) -> list[str]:
        """The `--use` options that put the exercise (or another file of its kind) in place."""
        return [f"{concept}={file or self.exercise}:{name}" for concept, name in self.use]

    def marker(self, task: int) -> str:
        """The pytest marker of a task; the first is 1."""
        return f"lesson{self.number}_task{task}"


def start_of(folder: Path) -> Path:
    """The exercise of a lesson's folder as it was at the start."""
    return folder.parent / ".start" / f"{folder.name}.py"


def is_untouched(exercise: Path) -> bool:
    """Whether a file is an exercise in which nothing was written yet, whatever ends its lines."""
    start = start_of(exercise.parent)
    if not start.is_file() or not exercise.is_file():
        return False
    return start.read_bytes().splitlines() == exercise.read_bytes().splitlines()


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
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        tasks = tuple(
            Task(t["name"], tuple(h.strip() for h in t["hints"]), t["solution"].strip(), tuple(t["tests"]))
            for t in data.get("task", ())
        )
        use = tuple((concept, name) for concept, name in (pair.split(":") for pair in data.get("use", ())))
        environment = data.get("environment", {})
        lessons.append(Lesson(file.parent, data["title"], data["minutes"], use, environment, tasks))
    return lessons


def find(number: str) -> Lesson:
    """The lesson with a number like "02" or "2". Raises `LearnError` if there is none."""
    known = {lesson.number: lesson for lesson in read_lessons(repository())}
    if number.zfill(2) not in known:
        raise LearnError(f"there is no lesson {number}; choose one of {', '.join(known)}")
    return known[number.zfill(2)]
