"""The lessons: every task is specified, every stub is red, every solution green, every wrong variant caught.

And every command and code block of a lesson runs, in a copy of the repository whose exercises are solved.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import logging
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from minipaged.cli.main import main
from minipaged.learn.contracts import CONCEPTS, ContractError
from minipaged.learn.lessons import Lesson, read_lessons
from minipaged.learn.solutions import worked_file
from minipaged.learn.stubs import is_stub, missing, stubs, task_of
from minipaged.learn.trials import Outcome, Trial, run_trials
from tests.docs.solutions import solve
from tests.overrides import replaced_by

# The fixtures run hundreds of trials before the first test: minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
LESSONS = read_lessons(ROOT)
HAS_TRITON = importlib.util.find_spec("triton") is not None  # there is none for macOS
LESSONS = [lesson for lesson in LESSONS if HAS_TRITON or "TRITON_INTERPRET" not in lesson.environment]
WITH_TASKS = [lesson for lesson in LESSONS if lesson.tasks]
QUICK = {"01", "02", "04", "06"}
"""Lessons that the README's test command solves."""


def name(value):
    return value.number if isinstance(value, Lesson) else str(value)


TASKS = [
    pytest.param(lesson, number, marks=[] if lesson.number in QUICK else [pytest.mark.slow])
    for lesson in WITH_TASKS
    for number in range(1, len(lesson.tasks) + 1)
]


class Variant(NamedTuple):
    """A wrong solution."""

    use: str  # a `--use` option
    tests: tuple[str, ...]  # one of which must catch it
    first_red: str = ""  # the name of the first that does, if that is known
    says: str = ""  # a part of what this one says


def wrong_variants(lesson: Lesson) -> dict[str, Variant]:
    """The wrong variants of a lesson by name.

    `caught_by` names a single test. `task` stands for the tests of a task: the mistake was drawn up from the
    exercise's text, without a look at them. A variant may also have `first_red` and `says`.
    """
    file = ROOT / f"tests/docs/wrong/lesson_{lesson.number}.py"
    spec = importlib.util.spec_from_file_location(f"wrong_{lesson.number}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    named = {test.rpartition("::")[2].partition("[")[0]: test for test in lesson.tests}
    found = {}
    for variant_name, variant in vars(module).items():
        if hasattr(variant, "caught_by") or hasattr(variant, "task"):
            [concept] = {concept for concept, _ in lesson.use if is_for(concept, variant)}
            task = getattr(variant, "task", None)
            tests = lesson.tasks[task - 1].tests if task else (named[variant.caught_by],)
            first = {key: getattr(variant, key, "") for key in ("first_red", "says")}
            found[variant_name] = Variant(f"{concept}={file}:{variant_name}", tests, **first)
    return found


def is_for(concept: str, variant: object) -> bool:
    """Whether a variant derives from the concept's own (a function belongs to its lesson's only one)."""
    original = replaced_by(variant, CONCEPTS[concept].originals)
    return not isinstance(variant, type) or issubclass(variant, original)


VARIANTS = {lesson.number: wrong_variants(lesson) for lesson in WITH_TASKS}


ANOTHER_WAY = [
    (
        "14",
        (
            "all_tokens_at_once",
            (
                "        for token, slot in enumerate(slots):\n"
                "            block, place = slot // block_size, slot % block_size\n"
                "            self.key_pool[block, :, place] = keys[token, self.own(keys.shape[1])]\n"
                "            self.value_pool[block, :, place] = values[token, self.own(values.shape[1])]\n",
                "        slots = torch.tensor(slots)\n"
                "        block, place = slots // block_size, slots % block_size\n"
                "        self.key_pool[block, :, place] = keys[:, self.own(keys.shape[1])]\n"
                "        self.value_pool[block, :, place] = values[:, self.own(values.shape[1])]\n",
            ),
        ),
    ),
]
"""Lesson -> name of a right solution, and each (worked, other) that it is made with."""


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory) -> Callable[[Lesson], dict[str, dict[str, Outcome]]]:
    """Of a lesson, the trials "stub" and "solved" -> test -> outcome."""
    folder = tmp_path_factory.mktemp("solved")
    known: dict[str, dict[str, dict[str, Outcome]]] = {}

    def outcomes_of(lesson: Lesson) -> dict[str, dict[str, Outcome]]:
        if lesson.number not in known:
            trials = [
                Trial("stub", lesson.use_options(lesson.start), lesson.tests),
                Trial("solved", lesson.use_options(solve(lesson, folder)), lesson.tests),
            ]
            known[lesson.number] = run_trials(ROOT, trials, lesson.environment)
        return known[lesson.number]

    return outcomes_of


@pytest.mark.parametrize(("lesson", "number"), TASKS, ids=name)
def test_every_test_of_a_task_fails_on_the_stub(outcomes, lesson, number):
    """Catches a task that is green before anything is written, and a test that does not exist."""
    for test in lesson.tasks[number - 1].tests:
        assert f"Lesson {int(lesson.number)}, task " in outcomes(lesson)["stub"][test].failure, test


@pytest.mark.parametrize(("lesson", "number"), TASKS, ids=name)
def test_every_test_of_a_task_passes_on_the_solution(outcomes, lesson, number):
    """Catches an exercise whose given half does not fit the worked methods."""
    for test in lesson.tasks[number - 1].tests:
        assert outcomes(lesson)["solved"][test].failure == "", test


@pytest.mark.slow
@pytest.mark.parametrize("lesson", [lesson for lesson in WITH_TASKS if not worked_file(lesson)], ids=name)
def test_a_task_is_green_before_the_next_one_is_begun(lesson, tmp_path):
    """Catches a test that needs what a later task asks for."""
    trials = []
    for number in range(1, len(lesson.tasks)):
        file = solve(lesson, tmp_path / str(number), leave=lambda task, last=number: task > last)
        tests = [test for task in lesson.tasks[:number] for test in task.tests]
        trials.append(Trial(f"up to task {number}", lesson.use_options(file), tests))
    for trial, outcomes in run_trials(ROOT, trials, lesson.environment).items():
        assert {test: outcome.failure for test, outcome in outcomes.items() if outcome.failure} == {}, trial


@pytest.mark.slow
@pytest.mark.parametrize("lesson", WITH_TASKS, ids=name)
def test_a_wrong_variant_is_caught_by_the_test_named_for_it_or_by_its_task(lesson):
    """Catches a specification that a plausible mistake passes, or that appears in a later task only."""
    variants = VARIANTS[lesson.number]
    trials = [Trial(name, [v.use], v.tests, until_red=True) for name, v in variants.items()]
    for variant, outcomes in run_trials(ROOT, trials, lesson.environment).items():
        failures = [outcome.failure for outcome in outcomes.values()]
        assert any(failures), f"{', '.join(outcomes)} pass on {variant}"
        assert "there is no such test" not in failures
        assert not any("NotImplementedError" in failure for failure in failures)
        first = next(test for test, outcome in outcomes.items() if outcome.failure)
        assert variants[variant].first_red in first, variant
        assert variants[variant].says in outcomes[first].failure, variant


@pytest.mark.slow
def test_what_the_text_allows_is_accepted(tmp_path):
    """Catches a specification that asks for the worked solution, where the exercise's text allows others."""
    trials = []
    for number, (name, *changes) in ANOTHER_WAY:
        lesson = next(lesson for lesson in WITH_TASKS if lesson.number == number)
        source = solve(lesson, tmp_path).read_text()
        for worked, other in changes:
            assert source.count(worked) == 1, worked
            source = source.replace(worked, other)
        file = tmp_path / f"{name}.py"
        file.write_text(source)
        trials.append(Trial(name, lesson.use_options(file), lesson.tests))
    for trial, outcomes in run_trials(ROOT, trials).items():
        assert {test: outcome.failure for test, outcome in outcomes.items() if outcome.failure} == {}, trial


@pytest.mark.parametrize("lesson", WITH_TASKS, ids=name)
def test_a_lesson_has_at_least_eight_variants_drawn_from_its_text(lesson):
    """Catches a lesson whose tests were tried on the mistakes they were made for, and on no other."""
    assert sum(len(variant.tests) > 1 for variant in VARIANTS[lesson.number].values()) >= 8


@pytest.mark.parametrize("lesson", WITH_TASKS, ids=name)
def test_neither_an_exercise_nor_its_solution_lacks_a_definition(lesson, tmp_path):
    """Catches a definition that is looked for in the wrong place."""
    assert missing(lesson, lesson.start.read_text()) == {}
    assert missing(lesson, solve(lesson, tmp_path).read_text()) == {}


@pytest.mark.parametrize("lesson", WITH_TASKS, ids=name)
def test_every_stub_belongs_to_a_task_and_every_task_has_stubs_tests_and_a_hint(lesson):
    """Catches a task that nothing in the exercise mentions, or a stub that no test looks at."""
    tree = ast.parse(lesson.start.read_text())
    numbers = {task_of(node) for node in ast.walk(tree) if is_stub(node)}
    mentioned = {int(n) for n in re.findall(r"[Tt]ask (\d+)", lesson.start.read_text())}
    assert stubs(lesson)
    assert numbers <= mentioned == set(range(1, len(lesson.tasks) + 1))
    for task in lesson.tasks:
        assert task.tests
        assert len(task.hints) == 3
        assert all(task.hints)
        assert task.solution
        assert task.name


def test_a_lesson_needs_only_lessons_before_it():
    """Catches a map of the lessons that cannot be walked from left to right."""
    for number, _, needs in lessons_and_needs():
        assert all(need < number for need in needs), number
    assert [number for number, _, needs in lessons_and_needs() if not needs] == ["00"]


@pytest.mark.parametrize("lesson", [lesson for lesson in LESSONS if lesson.number != "00"], ids=name)
def test_a_lesson_names_at_its_top_what_it_needs(lesson):
    """Catches "any of lessons 01 to 09" over a lesson that stands behind lesson 04 in the table."""
    [needed] = [needs for number, _, needs in lessons_and_needs() if number == lesson.number]
    top = (lesson.folder / "lesson.md").read_text().split("\n\n")[1]
    assert set(needed) <= set(re.findall(r"\]\(\.\./(\d\d)_\w+/lesson\.md\)", top))


def lessons_and_needs() -> list[tuple[str, str, list[str]]]:
    """Number, title and the numbers of the lessons before it, from each `tasks.toml`."""
    tables = {
        file.parent.name[:2]: tomllib.loads(file.read_text()) for file in ROOT.glob("tutorials/*/tasks.toml")
    }
    return [(number, table["title"], table["needs"]) for number, table in sorted(tables.items())]


@pytest.mark.parametrize("lesson", WITH_TASKS, ids=name)
def test_a_task_has_a_marker_that_selects_its_tests(lesson, request):
    """Catches `pytest -m lesson02_task1` that runs nothing."""
    registered = request.config.getini("markers")
    for number in range(1, len(lesson.tasks) + 1):
        assert any(line.startswith(lesson.marker(number) + ":") for line in registered)


@pytest.mark.slow
@pytest.mark.parametrize("lesson", WITH_TASKS, ids=name)
def test_the_exercise_ships_as_its_start(lesson):
    """Catches an exercise that was committed half solved; solve a copy to work on the lessons."""
    assert lesson.exercise.read_text() == lesson.start.read_text()


# -- the text ------------------------------------------------------------------------------------------------

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(#[^)]*)?\)")


def blocks(lesson: Lesson) -> list[tuple[str, str]]:
    """(language, content) of every fenced block."""
    return FENCE.findall((lesson.folder / "lesson.md").read_text())


@pytest.fixture(scope="session")
def clone(tmp_path_factory) -> Path:
    """A copy of the repository in which somebody has done all exercises."""
    root = tmp_path_factory.mktemp("clone")
    for item in ROOT.iterdir():
        if item.name in ("tests", "tutorials"):
            shutil.copytree(item, root / item.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif item.name not in (".venv", ".git"):
            (root / item.name).symlink_to(item)
    for lesson in WITH_TASKS:
        solved = solve(lesson, root / "solved")
        shutil.copyfile(solved, root / "tutorials" / lesson.folder.name / "exercise.py")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("lesson", LESSONS, ids=name)
def test_every_block_of_the_lesson_runs_and_prints_what_it_says(lesson, clone, monkeypatch):
    """Catches a command that has another name by now, and a figure that is not what the code prints."""
    monkeypatch.chdir(clone)
    for variable, value in lesson.environment.items():
        monkeypatch.setenv(variable, value)
    names: dict[str, object] = {"__name__": "lesson"}
    printed = None
    for language, content in blocks(lesson):
        if language == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(content, str(lesson.folder / "lesson.md"), "exec"), names)
            printed = output.getvalue()
        elif language == "bash":
            printed = "".join(run(command) for command in content.replace("\\\n", " ").splitlines())
        elif language == "text":
            assert printed is not None, "a block of output that follows no code"
            assert printed.strip() == content.strip()
            printed = None
        else:
            assert language == "console", f"unknown kind of block {language!r}"


def session(number: str) -> str:
    """What the Python blocks of a lesson print, one after the other."""
    lesson = next(lesson for lesson in LESSONS if lesson.number == number)
    names: dict[str, object] = {"__name__": "lesson"}
    output, logger = io.StringIO(), logging.getLogger("minipaged")
    level = logger.level
    try:
        with contextlib.redirect_stdout(output):
            for _, content in (block for block in blocks(lesson) if block[0] == "python"):
                exec(compile(content, str(lesson.folder / "lesson.md"), "exec"), names)
    finally:
        logger.setLevel(level)
    return output.getvalue()


LEAKS = """
class BlockAllocator(BlockAllocator):
    def reclaim(self, block):
        pass

    def free(self, block):
        self.release(block)
"""


@pytest.mark.slow
def test_the_figures_session_reports_a_leak_as_the_engine_does(clone, tmp_path, monkeypatch):
    """Catches a session that drives a student's classes unchecked: the leak ended in a division by zero."""
    shutil.copytree(clone / "tutorials", tmp_path / "tutorials")
    with (tmp_path / "tutorials/02_allocator/exercise.py").open("a") as exercise:
        exercise.write(LEAKS)
    monkeypatch.chdir(tmp_path)
    leak = r"allocator: num_free is \d+ after free\(\d+\); \d+ blocks are free"
    with pytest.raises(ContractError, match=leak):
        session("12")


@pytest.mark.slow
def test_the_figures_session_says_when_a_class_is_the_projects_own(monkeypatch, caplog):
    """Catches a warning that is silenced before it is given: "yours" would be nobody's."""
    monkeypatch.chdir(ROOT)
    assert "yours" in session("12")
    for name in ("BlockAllocator", "BlockTable", "FCFSScheduler", "PrefillFirst"):
        assert f"has not been started, so the project's own {name} is used" in caplog.text


def run(command: str) -> str:
    """A command of a lesson, in this process if it is ours and needs no other environment."""
    words = shlex.split(command)
    first, *arguments = [word for word in words if not word.startswith("TRITON_INTERPRET=")]
    if first != "minipaged" or len(arguments) + 1 < len(words):
        words = [sys.executable, *([] if first == "python" else ["-m", first]), *arguments]
        ran = subprocess.run(words, capture_output=True, text=True)
        assert ran.returncode == 0, f"{command}: {ran.stdout} {ran.stderr}"
        return ran.stdout
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["minipaged", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0, f"{command}: {output.getvalue()}"
    return output.getvalue()


@pytest.mark.parametrize("lesson", LESSONS, ids=name)
def test_the_links_of_a_lesson_lead_somewhere(lesson):
    """Catches a module that was moved, or a lesson that was renamed."""
    for target, _ in LINK.findall((lesson.folder / "lesson.md").read_text()):
        if not target.startswith("https://"):
            assert (lesson.folder / target).exists(), target


@pytest.mark.parametrize("lesson", LESSONS, ids=name)
def test_a_lesson_has_its_sections(lesson):
    """Catches a lesson that begins with code, or ends without the engine run."""
    text = (lesson.folder / "lesson.md").read_text()
    assert text.startswith(f"# Lesson {lesson.number}: {lesson.title}\n")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[0] == "The problem"
    assert "Questions" in headings
    assert "Compare" in headings
    assert re.search(r"^!\[.{20,}\]\(\.\./\.\./docs/.+\.svg\)$", text, re.MULTILINE), "no picture"
    assert text.count("<details>") == text.count("</details>") >= 3
    assert f"{lesson.minutes} minutes" in text
    if lesson.tasks:
        assert "Tasks" in headings
        assert f"minipaged learn check {lesson.number}" in text


# -- all components together ---------------------------------------------------------------------------------


def solved_classes(clone: Path) -> dict[str, str]:
    """Concept -> a class of the solved exercises; of several the last one's."""
    use = {}
    for lesson in WITH_TASKS:
        for option in lesson.use_options(clone / "tutorials" / lesson.folder.name / "exercise.py"):
            concept, _, where = option.partition("=")
            if concept == "block_table" and lesson.number > "02":
                continue  # the engine calls neither method of lesson 15
            if concept == "paged_attention" and lesson.number != "03":
                continue  # (lesson 10 needs the interpreter, lesson 14 attends twice)
            if concept == "scheduler" and lesson.number > "07":
                continue  # lesson 13 breaks the rule of first come, first served
            use[concept] = where  # the later lesson's: the table of lesson 02, the scheduler of 07
    return use


@pytest.mark.slow
def test_the_specification_holds_for_all_solved_exercises(clone):
    """Catches a test of a concept that demands more than a lesson, or looks into the project's own class."""
    use = [f"--use={concept}={where}" for concept, where in solved_classes(clone).items()]
    command = [sys.executable, "-m", "pytest", "tests/concepts", *use]
    ran = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:]


def test_all_solved_exercises_in_one_engine_change_nothing(clone, monkeypatch):
    """Catches classes that pass their own tests and do not work with each other."""
    from minipaged import LLM, BeamSearchParams, SamplingParams

    monkeypatch.chdir(clone)
    use = solved_classes(clone)
    prompts = [f"{'The fox said. ' * i}One day {who}" for i, who in enumerate(("Tom", "Mia", "Ada", "Otto"))]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=12),
        BeamSearchParams(beam_width=3, max_tokens=12),
        SamplingParams(temperature=0.0, max_tokens=24),
    ]
    for options in (
        {"num_blocks": 256},
        {"num_blocks": 17, "block_size": 8, "max_num_batched_tokens": 40, "enable_chunked_prefill": False},
        {"num_blocks": 17, "block_size": 8, "max_num_batched_tokens": 40},
    ):
        own = LLM(disable_log_stats=True, **options).generate(prompts, params)
        theirs = LLM(disable_log_stats=True, use=use, **options).generate(prompts, params)
        for ours, mine in zip(own, theirs):
            assert [o.token_ids for o in ours.outputs] == [o.token_ids for o in mine.outputs]
    assert set(use) >= set(CONCEPTS) - {"prefill_first", "chunked_prefill", "drafter"}
