"""What the lessons in the browser do, outside the browser: in a process that finds no torch."""

import json
import os
import subprocess
import sys
import zipfile

import pytest
from lesson_files import write_tests

from minipaged.learn.lessons import read_lessons
from minipaged.learn.trials import Trial, run_trials
from minipaged.learn.words import report
from minipaged.playground.lessons import DEMOS
from tests.docs.site import ROOT
from tests.docs.solutions import solve

LESSONS = {lesson.number: lesson for lesson in read_lessons(ROOT) if lesson.number in DEMOS}

DRIVER = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numpy", "hypothesis", "rich", "typer"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from minipaged.playground import lessons
out = sys.stdout
for call in json.loads(sys.argv[1]):
    announced = []
    try:
        if call["call"] == "check":
            with open("/dev/null", "w") as sys.stdout:
                answer = json.loads(lessons.check(call["number"], call["source"], announced.append))
            answer["announced"] = announced
        else:
            answer = json.loads(lessons.run(call["number"], call["source"], call["demo"]))
    except Exception as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), file=out)
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """What the page has of a clone, and no more; its exercises may be written."""
    root = tmp_path_factory.mktemp("clone")
    write_tests(ROOT, list(LESSONS.values()), root / "lessons.zip")
    with zipfile.ZipFile(root / "lessons.zip") as archive:
        archive.extractall(root)
    for link in ("minipaged", "kernels"):
        (root / link).symlink_to(ROOT / link)
    return root


def in_page(clone, *calls):
    """The answers of `minipaged.playground.lessons` to some calls, one after the other in one process."""
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(calls)],
        cwd=clone,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # a page has none
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def call(name, number, source, demo=0):
    return {"call": name, "number": number, "source": source, "demo": demo}


def solved(number, folder):
    return solve(LESSONS[number], folder).read_text()


def wrong(number, name, stands_for):
    """An exercise done wrong in a known way."""
    return (ROOT / f"tests/docs/wrong/lesson_{number}.py").read_text() + f"\n\n{stands_for} = {name}\n"


def test_every_lesson_without_torch_is_green_when_solved(clone, tmp_path):
    """Catches a lesson whose tests need what a browser has not: torch, numpy, hypothesis."""
    assert list(LESSONS) == ["01", "02", "04", "05", "06", "07", "08", "09", "13"]
    answers = in_page(clone, *(call("check", number, solved(number, tmp_path)) for number in LESSONS))
    for lesson, answer in zip(LESSONS.values(), answers, strict=True):
        assert "error" not in answer, (lesson.number, answer)
        assert answer["green"], (lesson.number, answer["tasks"])
        assert len(answer["tasks"]) == len(lesson.tasks)
        assert len(answer["announced"]) >= len(lesson.tests) - answer["elsewhere"]
    assert [answer["elsewhere"] for answer in answers] == [0, 0, 0, 0, 0, 0, 0, 2, 0]


def test_an_untouched_exercise_is_red_without_running_anything(clone):
    """Catches tests that run for nothing, and an exercise that is green because nothing ran."""
    (answer,) = in_page(clone, call("check", "01", LESSONS["01"].start.read_text()))
    assert not answer["green"]
    assert answer["announced"] == []
    assert answer["tasks"][0]["tests"] == [["Nothing is written in exercise.py yet."]]


def test_a_mistake_is_reported_in_words_and_forgotten_by_the_next_check(clone, tmp_path):
    """Catches `assert 3 == 28` for a student, and one check that spoils the next."""
    calls = [wrong("01", "CountsLogicalBlocks", "BlockTable"), solved("01", tmp_path)]
    bad, good = in_page(clone, *(call("check", "01", source) for source in calls))
    fact, *lines = bad["tasks"][0]["tests"][0]
    assert fact == "The slot of a token is found through the table."
    assert lines[1] == "Expected [28, 31, 4, 12], got [0, 3, 4, 8]."
    assert good["green"]


@pytest.mark.slow
def test_a_mistake_is_reported_as_by_learn_check(clone):
    """Catches other words in the page than in the terminal."""
    source = wrong("01", "CountsLogicalBlocks", "BlockTable")
    (answer,) = in_page(clone, call("check", "01", source))
    lesson = next(lesson for lesson in read_lessons(clone) if lesson.number == "01")
    lesson.exercise.write_text(source)
    outcomes = run_trials(ROOT, [Trial("01", lesson.use_options(), lesson.tests)])["01"]
    tasks = report(lesson, [{test: outcomes[test] for test in task.tests} for task in lesson.tasks])
    assert answer["tasks"] == [
        {"green": task.is_green, "head": task.head, "tests": [test.lines for test in task.tests]}
        for task in tasks
    ]


def test_a_file_that_cannot_be_loaded_is_reported_in_one_line(clone):
    """Catches a traceback of the runner in the page."""
    answer, ran = in_page(
        clone, call("check", "05", "class OnDemand(:\n"), call("run", "05", "class OnDemand(:\n")
    )
    (line,) = answer["tasks"][0]["tests"][0]
    assert "line 1 cannot be loaded: SyntaxError" in line
    assert "line 1 cannot be loaded: SyntaxError" in ran["error"]


def test_the_engine_runs_with_the_classes_of_every_lesson(clone, tmp_path):
    """Catches a run of the project's own classes, one that does not end, and one that shows nothing."""
    calls, places = [], []
    for number, demos in DEMOS.items():
        source = solved(number, tmp_path)
        for demo in range(len(demos)):
            places.append((number, demo))
            calls.append(call("run", number, source, demo))
    answers = in_page(clone, *calls)
    kinds = {}
    for place, answer in zip(places, answers, strict=True):
        assert answer.get("note") == "", (place, answer)
        lines = [json.loads(line) for line in answer["lines"]]
        assert lines[0]["format"] == "minipaged-trace"
        assert len(lines) > 5
        kinds[place] = {event["kind"] for line in lines for event in line.get("events", ())}
    assert all("preempted" in kinds["06", demo] for demo in range(3))
    assert any('"cached_tokens":16' in line for line in answers[places.index(("08", 0))]["lines"])
    assert any('"copies":[[' in line for line in answers[places.index(("02", 0))]["lines"])


def test_a_class_that_breaks_its_contract_is_told_which_rule(clone):
    """Catches a run that does not use the student's class."""
    source = (
        "from minipaged.memory import BlockAllocator as Given, BlockTable\n\n\n"
        "class BlockAllocator(Given):\n"
        "    def allocate(self, count=1):\n        return [0] * len(super().allocate(count))\n"
    )
    (answer,) = in_page(clone, call("run", "02", source))
    assert answer["error"] == "allocator: allocate(2) returned [0, 0]; each block may be handed out once"
