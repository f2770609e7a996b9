"""`minipaged learn`: what a student types."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from minipaged.learn import trials, words
from minipaged.learn.lessons import LearnError, Lesson, find, read_lessons, repository
from minipaged.learn.solutions import solution_of
from minipaged.learn.trials import Outcome, begun, is_green, open_task
from minipaged.progress import progress_bar

app = typer.Typer(
    help="Lessons: write the components yourself, then run the engine with them.", add_completion=False
)
Number = Annotated[str, typer.Argument(help="The lesson, e.g. 02.")]


@app.callback(invoke_without_command=True)
def overview(context: typer.Context) -> None:
    """List the lessons, and show which tasks are green and which are red."""
    if context.invoked_subcommand is None:
        lessons = read_lessons(repository())
        done = play(lessons)
        table = Table("lesson", "minutes", "tasks")
        for lesson in lessons:
            marks = " ".join(_mark(is_green(outcomes)) for outcomes in done[lesson.number])
            table.add_row(f"{lesson.number} {lesson.title}", str(lesson.minutes), marks or "to read and run")
        Console().print(table)
        tasks = [is_green(outcomes) for lesson in lessons for outcomes in done[lesson.number]]
        print(f"{sum(tasks)} of {len(tasks)} tasks are green.")
        print(
            "`minipaged learn next` names the first task that is not green; "
            "then use `learn check NN` and `learn hint NN`."
        )


@app.command()
def check(
    number: Number,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every test, not only the first red one.")
    ] = False,
) -> None:
    """Run the tests of a lesson on your exercise."""
    lesson = find_with_tasks(number)
    if not lesson.exercise.is_file():
        raise LearnError(
            f"{lesson.exercise} is missing; `minipaged learn reset {lesson.number}` restores the original"
        )
    outcomes = play([lesson])[lesson.number]
    console = Console(highlight=False, soft_wrap=True)
    for task in words.report(lesson, outcomes, verbose):
        console.print(f"{_mark(task.is_green)} {task.head}")
        for test in task.tests:
            first, *others = test.lines
            if test.is_green:
                console.print(f"    {_mark(True)} {first}")
            else:
                console.print(f"    {first}", markup=False)
            for line in others:
                console.print(f"        {line}", markup=False)
    if not all(map(is_green, outcomes)):
        raise typer.Exit(1)
    console.print(f"Lesson {lesson.number} is green. Now compare with the real module, linked in the lesson.")


@app.command()
def hint(
    number: Number,
    level: Annotated[
        int, typer.Argument(help="How much help: 1 is a nudge, 2 the idea, and 3 almost the code.")
    ] = 1,
) -> None:
    """A hint for the first task that is not green."""
    if level not in (1, 2, 3):
        raise ValueError(f"level is {level}; give 1 (a nudge), 2 (the idea) or 3 (almost the code)")
    lesson = find_with_tasks(number)
    text = f"Lesson {lesson.number} is green; no hint is left."
    if found := open_task(lesson):
        i, task = found
        text = f"Task {i}, {task.name}, hint {level} of 3:\n{task.hints[level - 1]}"
        if level < 3:
            text += f"\nMore: minipaged learn hint {lesson.number} {level + 1}"
    Console(highlight=False, soft_wrap=True).print(text, markup=False)


@app.command()
def solution(
    number: Number,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Show the solution even if you have not tried yet.")
    ] = False,
) -> None:
    """Show a solution, task by task, and explain it."""
    lesson = find_with_tasks(number)
    if lesson.is_untouched and not anyway:
        raise LearnError(
            f"{lesson.exercise} has not been started; try it first, or run "
            f"`minipaged learn solution {lesson.number} --anyway`"
        )
    console = Console(highlight=False, soft_wrap=True)
    for i, task in enumerate(lesson.tasks, start=1):
        console.print(f"Task {i}: {task.name}", style="bold", markup=False)
        console.print(f"{task.solution}\n", markup=False)
        for code in solution_of(lesson, i):
            console.print(f"{code}\n", markup=False)


@app.command()
def report(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for a grading script.")] = False,
) -> None:
    """Show which tasks are green and which tests are red, for all lessons."""
    lessons = [lesson for lesson in read_lessons(repository()) if lesson.tasks]
    done = play(lessons)
    green = {number: sum(map(is_green, outcomes)) for number, outcomes in done.items()}
    num_green, num_tasks = sum(green.values()), sum(len(lesson.tasks) for lesson in lessons)
    if not as_json:
        for lesson in lessons:
            count = f"{green[lesson.number]} of {len(lesson.tasks)} tasks are green"
            print(f"{lesson.number} {lesson.title}: {count}")
        print(f"{num_green} of {num_tasks} tasks are green.")
        return
    reports = [
        {
            "number": lesson.number,
            "title": lesson.title,
            "begun": not lesson.is_untouched,
            "tasks": [
                {
                    "name": task.name,
                    "green": is_green(outcome),
                    "passed": sum(not result.failure for result in outcome.values()),
                    "tests": len(outcome),
                    "red": [words.sentence(test) for test, result in outcome.items() if result.failure],
                    "why": next((result.failure for result in outcome.values() if result.failure), ""),
                }
                for task, outcome in zip(lesson.tasks, done[lesson.number])
            ],
        }
        for lesson in lessons
    ]
    print(json.dumps({"green": num_green, "tasks": num_tasks, "lessons": reports}, indent=2))


@app.command()
def reset(number: Number) -> None:
    """Start a lesson over; your version is kept as exercise.backup.py, exercise.backup2.py, ..."""
    lesson = find(number)
    if not lesson.start.exists():
        raise LearnError(f"lesson {lesson.number} has no exercise to reset; choose another")
    console = Console(soft_wrap=True, highlight=False)
    if lesson.is_untouched:
        console.print(f"{lesson.exercise} is unchanged; you have not written anything in it", markup=False)
        return
    kept = f"; your version is {back_up(lesson.exercise)}" if lesson.exercise.exists() else ""
    shutil.copyfile(lesson.start, lesson.exercise)
    console.print(f"{lesson.exercise} is reset{kept}", markup=False)


def back_up(exercise: Path) -> Path:
    """Copy an exercise to exercise.backup.py, exercise.backup2.py, ...: the first that is not there yet."""
    for number in itertools.count(1):
        backup = exercise.with_name(f"exercise.backup{number if number > 1 else ''}.py")
        with suppress(FileExistsError), backup.open("xb") as file:
            file.write(exercise.read_bytes())
            return backup
    raise AssertionError("numbers do not end")


@app.command(name="next")
def next_lesson() -> None:
    """Show which lesson and task come next."""
    for lesson in read_lessons(repository()):
        if found := open_task(lesson):
            print(f"Lesson {lesson.number}, {lesson.title}, about {lesson.minutes} minutes.")
            print(f"Read   {lesson.folder / 'lesson.md'}")
            print(f"Write  {lesson.exercise}: {found[1].name} (task {found[0]})")
            print(f"Check  minipaged learn check {lesson.number}")
            return
    print("All lessons are green.")


def find_with_tasks(number: str) -> Lesson:
    """The lesson of a number as a student types it, if there is something to write in it."""
    lesson = find(number)
    if not lesson.tasks:
        raise LearnError(f"lesson {lesson.number} has no tasks; read {lesson.folder / 'lesson.md'}")
    return lesson


def play(lessons: Sequence[Lesson]) -> dict[str, list[dict[str, Outcome]]]:
    """What the tests of the lessons say now (see `trials.progress`), with a bar on a terminal."""
    total, number = sum(len(lesson.tests) for lesson in begun(lessons)), itertools.count(1)
    with progress_bar("running the tests", total) as show:
        return trials.progress(lessons, lambda: show(next(number)))


def _mark(passed: bool) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    cross, tick = ("✗", "✓") if encoding.lower().startswith("utf") else ("x", "ok")
    return f"[green]{tick}[/green]" if passed else f"[red]{cross}[/red]"
