"""`minipaged learn`: what a student sees before, while and after lesson 05, in a copy of the repository."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minipaged.cli.main import app
from minipaged.learn import command, trials, words
from minipaged.learn.lessons import LearnError, Task, find, read_lessons
from minipaged.learn.solutions import solution_of
from minipaged.learn.stubs import missing, stubs
from minipaged.learn.trials import Outcome
from tests.docs.solutions import solve
from tests.processes import is_alive, needs_proc, started, wait_until
from tests.slow import slow_but
from tests.trials import at_most

ROOT = Path(__file__).parents[2]
NUMBERS = [lesson.number for lesson in read_lessons(ROOT)]


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A copy with lesson 05 alone."""
    for folder in ("tests", "tutorials/.start", "tutorials/05_page_growth"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for link in ("minipaged", "kernels", "pyproject.toml"):
        (tmp_path / link).symlink_to(ROOT / link)
    monkeypatch.chdir(tmp_path)
    exercise = tmp_path / "tutorials/05_page_growth/exercise.py"
    shutil.copyfile(tmp_path / "tutorials/.start/05_page_growth.py", exercise)
    return exercise


def learn(*arguments):
    result = CliRunner().invoke(app, ["learn", *arguments], env={"COLUMNS": "160"})
    return result.exit_code, result.output


def do_task_one(exercise):
    text = exercise.read_text()
    for what in ("the blocks of the tokens that exist", "the block of the next token"):
        text = text.replace(f'raise NotImplementedError("Lesson 5, task 1: {what}")', "return (needed,)")
    exercise.write_text(text)


def test_progress_is_what_the_tests_say(clone):
    """Catches progress that is stored: it must follow the exercise."""
    code, output = learn("check", "05")
    assert code == 1
    assert output.count("✗") == 3
    do_task_one(clone)
    code, output = learn("check", "5")
    assert code == 1
    assert "✓ task 1: on demand  (4 of 4 tests)" in output
    assert output.count("✗") == 2
    assert "Not written yet. Lesson 5, task 2: all that the sequence could ever use" in output
    assert "1 of 3 tasks are green" in learn()[1]


@pytest.mark.slow
def test_a_method_that_is_not_there_is_reported_though_the_given_one_would_do(clone):
    """Catches a green lesson without a line of the student's: the base class has all methods."""
    lesson = shutil.copytree(ROOT / "tutorials/01_block_table", clone.parents[1] / "01_block_table")
    exercise = lesson / "exercise.py"
    exercise.write_text("from minipaged.memory import BlockTable\n")
    code, output = learn("check", "01")
    assert code == 1
    assert re.findall(r"exercise.py has no (BlockTable.\w+) of its own; write it", output) == [
        "BlockTable.capacity",
        "BlockTable.blocks_to_append",
        "BlockTable.truncate",
    ]
    solved = solve(find("01"), clone.parent / "solved").read_text()
    exercise.write_text(solved.replace("def truncate", "def trunkate"))
    code, output = learn("check", "01")
    assert code == 1
    assert output.count("✓") == 2
    assert "exercise.py has no BlockTable.truncate of its own (is it trunkate?); write it" in output
    tasks = json.loads(learn("report", "--json")[1])["lessons"][0]["tasks"]
    assert [task["green"] for task in tasks] == [True, True, False]
    exercise.write_text(solved.replace("def slot(", "def x("))
    [lacking] = trials.with_missing(find("01"), {}).values()
    assert lacking.failure == "exercise.py has no BlockTable.slot of its own; write it"  # not: is it slots?


@pytest.mark.parametrize("start", ["", "\ufeff"], ids=["plain", "byte order mark"])
def test_a_file_that_only_imports_the_given_class_is_red_in_any_editors_encoding(clone, start):
    """Catches a green lesson of one import, saved by an editor that puts a byte order mark before it."""
    lesson = shutil.copytree(ROOT / "tutorials/01_block_table", clone.parents[1] / "01_block_table")
    text = f"{start}from minipaged.memory import BlockTable\n"
    (lesson / "exercise.py").write_text(text, encoding="utf-8")
    assert len(trials.with_missing(find("01"), {})) == 3


def test_line_endings_of_another_system_are_nothing_written(clone):
    """Catches a lesson that counts as begun because its file went through an editor of Windows."""
    clone.write_bytes(clone.read_bytes().replace(b"\n", b"\r\n"))
    assert find("05").is_untouched
    clone.write_bytes(clone.read_bytes() + b"x = 1\r\n")
    assert not find("05").is_untouched


@pytest.mark.parametrize(
    "text",
    [
        "class Mine:\n    def at_admission(self): ...\n    def while_running(self): ...\n"
        "class OnDemand(Mine): ...\nReserve = Chunked = Mine\n",
        "from mine import Chunked, Reserve, OnDemand\n",
        "import mine\nclass OnDemand(mine.One): ...\nclass Reserve(mine.One): ...\nChunked = mine.One\n",
        "class OnDemand: ...\nOnDemand.at_admission = OnDemand.while_running = print\n",
        "@made\nclass Reserve: ...\nclass Chunked(metaclass=Made): ...\nOnDemand = Chunked\n",
        "from . import mine\nfrom .mine import Chunked, Reserve, OnDemand\n",
        "from minipaged.memory import OnDemand\nclass Mine(OnDemand): ...\n"
        "OnDemand = Reserve = Chunked = Mine\n",
        "from minipaged.memory import OnDemand\n"
        "class OnDemand(OnDemand):\n    at_admission = while_running = print\n"
        "Reserve = Chunked = OnDemand\n",
        "syntax error",
    ],
    ids=[
        "base",
        "imported",
        "imported base",
        "set later",
        "made",
        "relative",
        "another name",
        "same name",
        "syntax error",
    ],
)
def test_a_method_may_be_defined_in_any_way(text):
    """Catches code that is right, and taken for missing."""
    assert missing(find("05"), text) == {}


def test_a_class_of_the_name_that_it_derives_from_lacks_what_the_given_one_has():
    """Catches a search that goes round in circles."""
    text = "from minipaged.memory import OnDemand\nclass OnDemand(OnDemand): ...\n"
    assert set(missing(find("05"), text)) >= {"OnDemand.at_admission", "OnDemand.while_running"}


@pytest.mark.parametrize(
    ("body", "is_missing"),
    [
        ("return super().capacity", True),
        ('"Slots."\n        return super().capacity', True),
        ("return super(BlockTable, self).capacity", True),
        ("return super().capacity()", True),
        ("super().capacity(self, *rest, count=count)", True),
        ("return Given.capacity(self)", True),
        ("return super().capacity(count + 1)", False),
        ("self.size = super().capacity", False),
        ("return len(self.blocks) * super().block_size", False),
        ("self.seen = True\n        return super().capacity", False),
        ("return self.pool.capacity", False),
    ],
)
def test_a_method_that_only_passes_on_is_not_written(body, is_missing):
    """Catches a green lesson of one-line methods that call those of the given class."""
    text = "from minipaged.memory import BlockTable as Given\nclass BlockTable(Given):\n"
    text += f"    @property\n    def capacity(self):\n        {body}\n"
    assert ("BlockTable.capacity" in missing(find("01"), text)) is is_missing


def test_a_function_may_have_the_name_of_one_that_is_imported():
    """Catches a function taken for the given one, which another function imports to compare."""
    text = "".join(f"def {name}(): ...\n" for name in stubs(find("03")))
    text += "def compare():\n    from minipaged.kernels.reference.attention import paged_attention\n"
    assert missing(find("03"), text) == {}
    assert missing(find("03"), "".join(f"{name} = print\n" for name in stubs(find("03")))) == {}


def test_hint_and_next_are_about_the_first_task_that_is_not_green(clone):
    """Catches a hint for what is done."""
    assert "Task 1, on demand, hint 1 of 3" in learn("hint", "05")[1]
    do_task_one(clone)
    first, third = (learn("hint", "05", *level)[1] for level in ((), ("3",)))
    assert "Task 2, reserve, hint 1 of 3" in first
    assert "Task 2, reserve, hint 3 of 3" in third
    assert "(remaining, needed)" not in first
    assert "(remaining, needed)" in third
    named = learn("next")[1]
    assert "reserve (task 2)" in named
    assert "All lessons are green" not in named


def test_a_red_test_is_reported_in_words_with_the_students_own_line(clone):
    """Catches a check that leaves a student alone with `assert (4,) == (3,)`."""
    text = clone.read_text()
    for what in ("the blocks of the tokens that exist", "the block of the next token"):
        stub = f'raise NotImplementedError("Lesson 5, task 1: {what}")'
        text = text.replace(stub, "return (needed + 1,)")
    clone.write_text(text)
    code, output = learn("check", "05")
    assert code == 1
    assert "On demand asks for what the tokens need." in output
    assert "Catches " in output
    assert "Expected (3,), got (4,)." in output
    assert "at_admission, line " in output
    assert ": return (needed + 1,)" in output


def test_an_error_is_reported_with_the_line_that_raised_it(clone):
    """Catches the line of the test alone, which no student can fix; brackets of code that are taken for
    markup, and lines broken where the terminal ends; and -v without the green tests."""
    stub = 'raise NotImplementedError("Lesson 5, task 1: the block of the next token")'
    do_task_one(clone)
    clone.write_text(clone.read_text().replace("return (needed,)", "return [nedded]", 1))
    assert stub not in clone.read_text()
    output = CliRunner().invoke(app, ["learn", "check", "05", "-v"], env={"COLUMNS": "40"}).output
    assert "Expected no error, got NameError: name 'nedded' is not defined" in output
    assert "Yours return [nedded]    (exercise.py, line " in output
    assert "✗ task 1: on demand" in output
    assert "✓ What is needed is never cut (on demand)." in output


def test_an_error_of_the_engine_is_reported_with_the_engines_line(tmp_path):
    """Catches "too many values to unpack" with nothing that says what the engine asked for."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from minipaged.scheduling import Recompute\n\n\nclass Mine(Recompute):\n"
        "    def choose_mode(self, victim, kv):\n        return 'recompute'\n"
    )
    test = "tests/concepts/test_preemption.py::test_the_latest_is_preempted_even_if_it_needs_the_block_itself"
    [outcome] = trials.run_trials(ROOT, [trials.Trial("", [f"preemption={file}:Mine"], [test])])[""].values()
    assert outcome.failed_line is not None
    where, _, code = outcome.failed_line
    assert (where, code.partition(" = ")[0]) == ("minipaged/scheduling/scheduler.py", "mode, reason")
    lines = words.explain(find("06"), 1, test, outcome)
    assert any(line.startswith("Where mode, reason = ") for line in lines)


def test_what_an_exercise_prints_in_a_red_test_is_shown(clone):
    """Catches a student who debugs with `print`, and sees nothing, and prints of tests that passed."""
    do_task_one(clone)
    text = clone.read_text().replace("return (needed,)", "print('asked for', needed); return (needed,)")
    stub = 'raise NotImplementedError("Lesson 5, task 2: all that the sequence could ever use")'
    assert stub in text
    clone.write_text(text.replace(stub, "print('of', remaining); return ()", 1))
    output = learn("check", "05")[1]
    assert "Print of " in output
    assert "asked for" not in output


def test_a_solution_is_shown_after_a_try(clone):
    """Catches an answer that nobody asked for, and one that is not the code which the tests ran."""
    asked = CliRunner().invoke(app, ["learn", "solution", "05"])
    assert isinstance(asked.exception, LearnError)
    assert "try it first" in str(asked.exception)
    assert "return (remaining, needed)" in learn("solution", "05", "--anyway")[1]
    do_task_one(clone)
    code, output = learn("solution", "05")
    assert code == 0
    assert output.count("class Reserve:") == 2
    assert "no request ever runs out" in output


@pytest.mark.parametrize("number", [n for n in NUMBERS if n not in ("00", "11", "12")])
def test_every_task_has_a_solution(number):
    """Catches a task whose solution is empty: each has words, and the code of what its stubs name."""
    lesson = find(number)
    for task in range(1, len(lesson.tasks) + 1):
        named = [name for name, of in stubs(lesson).items() if of == task]
        assert len(solution_of(lesson, task)) == len(named)
        for name, code in zip(named, solution_of(lesson, task)):
            assert f"def {name.rpartition('.')[2]}(" in code
            assert "NotImplementedError" not in code


def test_reset_keeps_what_was_written(clone):
    """Catches an hour of work that is gone."""
    do_task_one(clone)
    written = clone.read_text()
    assert learn("reset", "05")[0] == 0
    assert clone.read_text() == (ROOT / "tutorials/.start/05_page_growth.py").read_text()
    assert clone.with_name("exercise.backup.py").read_text() == written
    clone.write_text(written)
    backup = clone.with_name("exercise.backup2.py")
    assert f"exercise.py is reset; your version is {backup}" in learn("reset", "05")[1]


def test_a_syntax_error_is_reported_as_such(clone):
    """Catches a traceback of the test runner."""
    clone.write_text("class OnDemand(:\n")
    code, output = learn("check", "05")
    assert code == 1
    assert "line 1 cannot be loaded: SyntaxError" in output


def test_an_unknown_lesson_is_reported():
    """Catches a KeyError."""
    result = CliRunner().invoke(app, ["learn", "check", "99"])
    assert isinstance(result.exception, LearnError)
    assert "there is no lesson 99; choose one of 00, 01" in str(result.exception)


@pytest.mark.parametrize("command", ["check", "hint", "solution"])
def test_a_lesson_without_tasks_is_reported_as_such(command):
    """Catches a lesson with nothing to write that is called green."""
    result = CliRunner().invoke(app, ["learn", command, "00"])
    assert isinstance(result.exception, LearnError)
    assert "lesson 00 has no tasks; read " in str(result.exception)


def test_a_lesson_without_tasks_is_to_read_and_no_task_is_counted(clone):
    """Catches a line without a word, a grade for nothing to do, and a reset that fails with a traceback."""
    shutil.copytree(ROOT / "tutorials/00_kv_cache", clone.parents[1] / "00_kv_cache")
    assert "to read and run" in learn()[1]
    assert [lesson["number"] for lesson in json.loads(learn("report", "--json")[1])["lessons"]] == ["05"]
    assert "0 of 3 tasks are green." in learn("report")[1]
    asked = CliRunner().invoke(app, ["learn", "reset", "00"])
    assert isinstance(asked.exception, LearnError)
    assert "lesson 00 has no exercise to reset" in str(asked.exception)


def test_when_all_is_green_every_command_says_so(clone, monkeypatch):
    """Catches a hint, or a next task, for someone who is done; and an exit code that fails a script."""
    green = {"05": [{"a": Outcome()}] * 3}
    monkeypatch.setattr(trials, "progress", lambda *args: green)
    code, output = learn("check", "05")
    assert code == 0
    assert "Lesson 05 is green." in output
    assert "no hint is left" in learn("hint", "05")[1]
    assert "All lessons are green." in learn("next")[1]


@pytest.mark.parametrize("number", ["01", "05"])
def test_code_is_shown_as_it_is(number):
    """Catches `[logical]` taken for markup, and lines that are broken where the terminal ends."""
    lesson = find(number)
    arguments = ["learn", "solution", number, "--anyway"]
    solution = CliRunner().invoke(app, arguments, env={"COLUMNS": "40"}).output
    for i, task in enumerate(lesson.tasks, start=1):
        assert task.solution in solution
        for code in solution_of(lesson, i):
            assert code in solution


def test_a_hint_is_shown_as_it_is(clone, monkeypatch):
    """Catches `[self.slot(position)]` taken for markup, and a hint for more where there is none."""
    hints = ("[a]", "[b]", "[c]")
    task = Task("x", hints, "", ("t",))
    monkeypatch.setattr(command, "open_task", lambda lesson: (1, task))
    shown = [learn("hint", "05", level)[1] for level in "123"]
    for text, own in zip(shown, hints):
        assert own in text
    assert [re.findall("More: minipaged learn hint 05 (.)", text) for text in shown] == [["2"], ["3"], []]


def test_tests_that_cannot_be_run_are_reported_with_what_pytest_says(tmp_path):
    """Catches a traceback about a file of results that is not there."""
    trial = trials.Trial("", [], ["tests/test_x.py::test_y"])
    with pytest.raises(LearnError, match=r"could not be run; .*\[learn\].*: .*unrecognized arguments"):
        trials.run_trials(tmp_path, [trial])


def test_a_hint_that_is_not_there_is_reported_by_its_number():
    """Catches a task's number taken for a level, and a message that does not name it."""
    result = CliRunner().invoke(app, ["learn", "hint", "05", "4"])
    assert "level is 4; give 1 (a nudge), 2" in str(result.exception)


def test_a_second_reset_keeps_the_first_backup(clone):
    """Catches the student's work overwritten by the exercise as it was at the start."""
    for text in ("# one\n", "# two\n", "# three\n"):
        clone.write_text(text)
        assert learn("reset", "05")[0] == 0
        code, output = learn("reset", "05")  # nothing is written in it: nothing to keep
        assert code == 0
        assert "is unchanged" in output
    kept = sorted(path.name for path in clone.parent.glob("exercise.backup*"))
    assert kept == ["exercise.backup.py", "exercise.backup2.py", "exercise.backup3.py"]
    assert [clone.with_name(name).read_text() for name in kept] == ["# one\n", "# two\n", "# three\n"]


def test_a_reset_brings_back_an_exercise_that_was_deleted(clone):
    """Catches a FileNotFoundError where help is asked for."""
    clone.unlink()
    assert learn("reset", "05")[0] == 0
    assert clone.exists()


def test_an_error_of_the_whole_file_is_reported_once(clone):
    """Catches the same line under every task."""
    clone.write_text("class OnDemand(:\n")
    assert learn("check", "05")[1].count("SyntaxError") == 1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["while True:\n    pass\n", None], ids=["in the file", "in a method"])
def test_an_endless_loop_is_reported_within_ten_seconds_a_test(clone, where, monkeypatch):
    """Catches a check that never ends."""
    monkeypatch.setattr(trials, "SECONDS_PER_TEST", 2)
    if where is None:
        text = clone.read_text()
        stub = 'raise NotImplementedError("Lesson 5, task 1: the blocks of the tokens that exist")'
        assert stub in text
        clone.write_text(text.replace(stub, "while True: pass"))
    else:
        clone.write_text(where)
    code, output = learn("check", "05")
    assert code == 1
    assert "endless loop" in output


@pytest.mark.slow
def test_an_endless_loop_is_reported_with_its_line(clone, monkeypatch):
    """Catches the line of whatever the loop happened to call when it was stopped."""
    monkeypatch.setattr(trials, "SECONDS_PER_TEST", 1)
    text = clone.read_text()
    stub = 'raise NotImplementedError("Lesson 5, task 1: the blocks of the tokens that exist")'
    assert stub in text
    loop = "while not self.is_done:\n            pass\n\n"
    called = "    @property\n    def is_done(self):\n        return sum(range(1000)) < 0"
    clone.write_text(text.replace(stub, loop + called))
    assert "Yours while not self.is_done:" in learn("check", "05")[1]


@pytest.mark.slow
def test_a_loop_that_cannot_be_stopped_is_reported(clone, monkeypatch):
    """Catches a check that never ends because the loop catches what should end it."""
    monkeypatch.setattr(trials, "SECONDS_PER_TEST", 1)
    clone.write_text(
        "while True:\n    try:\n        while True:\n            pass\n    except:\n        pass\n"
    )
    assert "an endless loop catches every exception" in learn("check", "05")[1]


@pytest.mark.slow
def test_after_an_endless_loop_the_other_tests_have_a_second_each(clone, monkeypatch):
    """Catches minutes of waiting for tests that all meet the same loop."""
    monkeypatch.setattr(trials, "SECONDS_PER_TEST", 2)
    clone.write_text(re.sub(r"raise NotImplementedError\(.*\)", "while True: pass", clone.read_text()))
    lesson = find("05")
    trial = trials.Trial("05", lesson.use_options(), [task.tests[0] for task in lesson.tasks])
    first, *others = trials.run_trials(Path.cwd(), [trial])["05"].values()
    assert first.failure == "not done after 2 s; is there an endless loop?"
    message = "not done after 1 s, and an earlier test was not done; is there an endless loop?"
    assert [other.failure for other in others] == [message, message]


def test_threads_that_wait_take_no_time_of_an_exercise(tmp_path, monkeypatch):
    """Catches OpenMP's threads that spin on a busy machine, whose time is then that of an endless loop."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    file = tmp_path / "mine.py"
    file.write_text("import os\n\nraise ValueError(os.environ.get('OMP_WAIT_POLICY'))\n")
    test = "tests/concepts/test_preemption.py::test_the_latest_is_preempted_even_if_it_needs_the_block_itself"
    [outcome] = trials.run_trials(ROOT, [trials.Trial("", [f"preemption={file}:Mine"], [test])])[""].values()
    assert "ValueError: passive" in outcome.failure


@pytest.mark.slow
def test_waiting_for_a_busy_machine_is_not_an_endless_loop():
    """Catches a correct exercise refused because something else had the processor."""

    @at_most(1)
    def work_forever():
        while True:
            pass

    with at_most(1):
        time.sleep(1.2)
    with pytest.raises(pytest.fail.Exception, match="not done after 1 s"):
        work_forever()


@pytest.mark.slow
@pytest.mark.parametrize("waiting", [False, True])
def test_an_endless_loop_is_stopped_where_the_system_has_no_timers(waiting, monkeypatch):
    """Catches a check that never ends on Windows."""
    monkeypatch.delattr(signal, "setitimer", raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    before = signal.getsignal(signal.SIGINT)

    @at_most(1, waiting=waiting)
    def work_forever():
        while True:
            pass

    with pytest.raises(pytest.fail.Exception, match="not done after 1 s"):
        work_forever()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loop_that_is_stopped_between_two_lines_is_reported_with_a_line():
    """Catches a TypeError of pytest: on Python 3.11 the jump back in such a loop has no line number."""

    def drop_negative(blocks):
        for block in blocks:
            if block < 0:
                blocks.remove(block)

    with pytest.raises(pytest.fail.Exception, match="not done after 1 s") as failed, at_most(1):
        drop_negative(itertools.cycle([1, 2]))
    [line] = [entry.lineno for entry in failed.traceback if entry.name == "drop_negative"]
    assert line - drop_negative.__code__.co_firstlineno in (0, 1, 2)  # from 0


def test_marks_are_readable_on_an_ascii_terminal(clone, monkeypatch):
    """Catches marks that are both replaced by the same character."""
    green, red = {"a": Outcome()}, {"a": Outcome("no")}
    monkeypatch.setattr(trials, "progress", lambda *args: {"05": [green, red, red]})
    result = CliRunner(charset="ascii").invoke(app, ["learn", "check", "05"])
    assert "ok task 1" in result.output
    assert "x task 2" in result.output


def test_a_lesson_without_torch_is_checked_without_it(clone):
    """Catches a second and a half of loading at every check."""
    do_task_one(clone)
    clone.write_text(f"import sys\nassert 'torch' not in sys.modules\n{clone.read_text()}")
    assert "✓ task 1" in learn("check", "05")[1]


def test_a_report_is_what_the_tests_say(clone):
    """Catches grades that differ from `learn check`, and a report that a script cannot read."""
    do_task_one(clone)
    code, output = learn("report", "--json")
    report = json.loads(output)
    [lesson] = report["lessons"]
    assert code == 0
    assert (report["green"], report["tasks"]) == (1, 3)
    assert (lesson["number"], lesson["begun"]) == ("05", True)
    assert [task["green"] for task in lesson["tasks"]] == [True, False, False]
    assert [task["passed"] for task in lesson["tasks"]] == [4, 0, 0]
    assert [task["tests"] for task in lesson["tasks"]] == [len(task.tests) for task in find("05").tasks]
    assert lesson["tasks"][0]["red"] == []
    assert all(fact.endswith(".") for fact in lesson["tasks"][1]["red"])
    assert "05 Dynamic page growth: 1 of 3" in learn("report")[1]


def test_a_score_asks_for_a_policy_first(clone):
    """Catches a run of many seconds that ends in `NotImplementedError`."""
    shutil.copytree(ROOT / "tutorials/13_your_policy", clone.parents[1] / "13_your_policy")
    shutil.copyfile(
        clone.parents[1] / ".start/13_your_policy.py", clone.parents[1] / "13_your_policy/exercise.py"
    )
    asked = CliRunner().invoke(app, ["learn", "score"])
    assert isinstance(asked.exception, LearnError)
    assert "solve lesson 13 first" in str(asked.exception)


def test_a_score_is_reported_beside_the_own_engine_and_kept(clone, monkeypatch):
    """Catches a score without anything to compare it with, and a board that forgets."""
    monkeypatch.setattr("minipaged.simulation.score.REQUESTS", 30)
    use = f"scheduler={ROOT}/tests/docs/worked/13_your_policy.py:ShortestFirst"
    code, output = learn("score", "--use", use, "--name", "Ada", "--key", "k")
    assert code == 0
    assert "questions" in output
    assert "Ada: " in output
    score = json.loads(learn("score", "--use", use, "--name", "Bob", "--key", "k", "--json")[1])
    assert list(score["leaderboard"]) == ["Ada", "Bob"]
    assert set(score["marks"]) == {"questions", "chat", "documents"}
    assert (clone.parents[1] / ".leaderboard.json").exists()


def test_an_exercise_that_kills_the_tests_is_reported_with_what_may_be_wrong(clone):
    """Catches advice to install pytest for a kernel that reads outside its arrays."""
    do_task_one(clone)
    text = clone.read_text()
    for number, reason in ((11, "outside an array"), (15, "run the check again")):
        clone.write_text(f"import os\n\nos.kill(os.getpid(), {number})\n{text}")
        code, output = learn("check", "05")
        assert code == 1
        assert f"signal {number}" in output
        assert reason in output


@pytest.mark.parametrize("status", slow_but([0], [0, 1, 7]))
def test_an_exercise_that_exits_is_reported(clone, status):
    """Catches advice to install pytest for an exercise that ends the process."""
    do_task_one(clone)
    clone.write_text(f"import os\n\nos._exit({status})\n" + clone.read_text())
    code, output = learn("check", "05")
    assert code == 1
    assert f"your code ended their process with status {status}" in output
    assert "os._exit" in output


@pytest.mark.parametrize(
    "how",
    slow_but(
        ["os._exit(0)"],
        ["os._exit(0)", "print('@done')", "os.kill(os.getpid(), 9)", "raise KeyboardInterrupt"],
    ),
)
def test_an_exercise_that_ends_the_tests_costs_no_other_lesson_its_grade(clone, how):
    """Catches a report that fails as a whole because of one file."""
    do_task_one(clone)
    folder = clone.parents[1]
    shutil.copytree(ROOT / "tutorials/04_scheduler", folder / "04_scheduler")
    start = (folder / ".start/04_scheduler.py").read_text()
    (folder / "04_scheduler/exercise.py").write_text(f"import os\n\n{how}\n{start}")
    ran = CliRunner().invoke(app, ["learn", "report", "--json"])
    assert ran.exit_code == 0
    four, five = json.loads(ran.stdout)["lessons"]
    assert [task["passed"] for task in five["tasks"]] == [4, 0, 0]
    assert [task["passed"] for task in four["tasks"]] == [0, 0, 0]


POLICY = """
import os, sys, time
from minipaged.scheduling import FCFSScheduler
{}
class Mine(FCFSScheduler):
    {}
"""
RETURNS = "def has_room_for(self, request): {}; return super().has_room_for(request)"


@pytest.mark.parametrize(
    ("top", "method", "message"),
    [
        ("", RETURNS.format("sys.exit(0)"), "scheduler: schedule() raised SystemExit: 0 (mine.py, line 6)"),
        ("", RETURNS.format("os._exit(0)"), "ended its process with status 0"),
        ("os._exit(3)", "", "ended its process with status 3"),
        pytest.param("", RETURNS.format("time.sleep(1000)"), "is not done after", marks=pytest.mark.slow),
        ("raise KeyboardInterrupt", "", "ended its process with status 1"),
    ],
)
def test_a_policy_that_leaves_or_never_returns_is_reported(clone, monkeypatch, top, method, message):
    """Catches a score that ends without an error, or never."""
    monkeypatch.setattr("minipaged.simulation.score.REQUESTS", 30)
    monkeypatch.setattr("minipaged.cli.score.LEAST_SECONDS", 8)
    clone.with_name("mine.py").write_text(POLICY.format(top, method or "pass"))
    ran = CliRunner().invoke(app, ["learn", "score", "--use", f"scheduler={clone.with_name('mine.py')}:Mine"])
    assert isinstance(ran.exception, LearnError)
    assert message in str(ran.exception)
    assert not (clone.parents[1] / ".leaderboard.json").exists()


def test_what_a_policy_prints_is_not_part_of_its_score(clone, monkeypatch, capfd):
    """Catches JSON that no script can read, and prints lost with the process that held them back."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setattr("minipaged.simulation.score.REQUESTS", 30)
    clone.with_name("mine.py").write_text(POLICY.format("print('top')", RETURNS.format("print('in')")))
    code, output = learn("score", "--use", f"scheduler={clone.with_name('mine.py')}:Mine", "--json")
    assert code == 0
    assert json.loads(output)["name"] == "you"
    assert "top\nin\n" in capfd.readouterr().err


@needs_proc
def test_what_a_policy_leaves_running_ends_with_its_score(clone, monkeypatch):
    """Catches processes that somebody's code started, one more with every score."""
    monkeypatch.setattr("minipaged.simulation.score.REQUESTS", 30)
    mine, number = clone.with_name("mine.py"), clone.with_name("number")
    child = "import subprocess; pid = subprocess.Popen(['sleep', '1000']).pid\n"
    child += f"with open({str(number)!r}, 'w') as file: file.write(str(pid))"
    mine.write_text(POLICY.format(child, RETURNS.format("pass")))
    assert learn("score", "--use", f"scheduler={mine}:Mine")[0] == 0
    wait_until(lambda: not is_alive(int(number.read_text())), 10, "the end of its child")


@pytest.mark.slow
def test_a_report_says_why_nothing_is_green(clone):
    """Catches 17 red tests, and no word of the module that is not installed."""
    do_task_one(clone)
    tasks = json.loads(learn("report", "--json")[1])["lessons"][0]["tasks"]
    assert [task["why"] for task in tasks[:2]] == [
        "",
        "NotImplementedError: Lesson 5, task 2: all that the sequence could ever use",
    ]
    clone.write_text("import not_there\n" + clone.read_text())
    tasks = json.loads(learn("report", "--json")[1])["lessons"][0]["tasks"]
    assert all("needs not_there, which is not installed; install it" in task["why"] for task in tasks)


@needs_proc
@pytest.mark.usefixtures("hangups_end")
@pytest.mark.parametrize("name", slow_but(["SIGTERM"], ["SIGTERM", "SIGHUP"]))
def test_tests_end_with_the_command_that_runs_them(clone, name):
    """Catches a loop that goes on after `timeout 60 minipaged learn report`, and the files it leaves."""
    mine, files, number = clone.with_name("number"), clone.with_name("files"), getattr(signal, name)
    files.mkdir()
    top = f"import os, time; open({str(mine)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(1000)"
    clone.write_text(f"{top}\n{clone.read_text()}")
    with started("-m", "minipaged", "learn", "report", env={**os.environ, "TMPDIR": str(files)}) as process:
        wait_until(lambda: mine.exists() and mine.read_text().endswith(" "), 60, "the exercise")
        process.send_signal(number)
        assert process.wait(10) == -number
        wait_until(lambda: not is_alive(int(mine.read_text())), 10, "the end of the tests")
    assert list(files.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "top",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(10**6,)).start()",
        "import subprocess; subprocess.Popen(['sleep', '1000'])",
    ],
)
def test_what_an_exercise_leaves_running_ends_with_its_tests(clone, top):
    """Catches a check that waits for a thread or a process of the exercise."""
    do_task_one(clone)
    clone.write_text(f"{top}\n{clone.read_text()}")
    assert "✓ task 1" in learn("check", "05")[1]


@pytest.mark.slow
def test_a_file_that_waits_is_reported_in_time(clone, monkeypatch):
    """Catches no limit while the file is read."""
    monkeypatch.setattr(trials, "SECONDS_PER_TEST", 1)
    clone.write_text(f"import time\ntime.sleep(10**6)\n{clone.read_text()}")
    assert "is there an endless loop?" in learn("check", "05")[1]


@pytest.mark.slow
def test_a_method_that_waits_is_reported_in_time(clone, monkeypatch):
    """Catches a minute for each of twenty tests."""
    monkeypatch.setattr(trials, "SECONDS_PER_TEST", 2)
    text = re.sub(r"raise NotImplementedError\(.*\)", "time.sleep(10**6)", clone.read_text())
    clone.write_text(f"import time\n{text}")
    lesson = find("05")
    trial = trials.Trial("05", lesson.use_options(), [task.tests[0] for task in lesson.tasks])
    failures = [test.failure for test in trials.run_trials(Path.cwd(), [trial])["05"].values()]
    message = "not done after {} s; is there an endless loop?"
    assert failures == [message.format(seconds) for seconds in (12, 6, 6)]


@pytest.mark.slow
def test_every_test_that_ran_is_counted(clone, monkeypatch):
    """Catches a progress bar that stays at 0, and one that waits for exercises that are not begun."""
    do_task_one(clone)
    shutil.copytree(ROOT / "tutorials/06_preemption", clone.parents[1] / "06_preemption")
    shutil.copyfile(
        clone.parents[1] / ".start/06_preemption.py", clone.parents[1] / "06_preemption/exercise.py"
    )
    totals, counted = [], []

    @contextlib.contextmanager
    def progress_bar(what, total):
        totals.append(total)
        yield counted.append

    monkeypatch.setattr(command, "progress_bar", progress_bar)
    command.play([find("05"), find("06")])
    assert totals == [len(find("05").tests)]
    assert counted == list(range(1, totals[0] + 1))


@pytest.mark.slow
def test_an_exercise_may_declare_its_encoding(clone):
    """Catches a check that cannot show the line of a red test."""
    do_task_one(clone)
    right = clone.read_bytes()
    for beginning in (b"# -*- coding: latin-1 -*-\n# caf\xe9\n", b"\xef\xbb\xbf"):
        clone.write_bytes(beginning + right)
        assert "✓ task 1" in learn("check", "05")[1]
    clone.write_bytes(right + b"TEXT = 'caf\xe9'\n")
    assert "SyntaxError" in learn("check", "05")[1]


def test_a_missing_exercise_can_be_brought_back(clone):
    """Catches advice about paths that nobody has typed, and a report that fails as a whole."""
    clone.unlink()
    ran = CliRunner().invoke(app, ["learn", "check", "05"])
    assert isinstance(ran.exception, LearnError)
    assert "`minipaged learn reset 05` restores the original" in str(ran.exception)
    code, output = learn("report")
    assert code == 0
    assert "05 Dynamic page growth: 0 of 3" in output


@pytest.mark.parametrize(
    "chunked",
    [
        "class Chunked:\n    __slots__ = ('grant',)\n    def __init__(self, grant=16): self.grant = grant\n",
        pytest.param(
            "import typing\nclass Chunked(typing.NamedTuple):\n    grant: int = 16\n", marks=pytest.mark.slow
        ),
        pytest.param(
            "class Chunked:\n    def __init__(self, grant=16): self.size = grant\n"
            "    grant = property(lambda self: self.size)\n",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_class_may_keep_its_attributes_as_it_likes(clone, chunked):
    """Catches a check that copies attributes into objects of the exercise, and dies if it cannot."""
    methods = """
    def at_admission(self, needed, remaining): return (max(needed, min(remaining, self.grant)), needed)
    def while_running(self, needed, remaining): return (max(needed, min(remaining, self.grant)), needed)
"""
    text = clone.read_text()
    clone.write_text(text[: text.index("class Chunked")] + chunked + methods)
    assert "task 3: in grants  (7 of 8 tests)" in learn("check", "05")[1]  # the last needs tasks 1 and 2


@pytest.mark.slow
def test_a_class_that_takes_other_arguments_is_reported(clone):
    """Catches a traceback, and a report without the other lessons."""
    clone.write_text(clone.read_text().replace("self, grant: int = 16", "self, size: int = 16"))
    assert "Chunked cannot be made with grant" in learn("check", "05")[1]


@pytest.mark.slow
def test_what_ran_before_an_exercise_ended_the_tests_is_kept(clone):
    """Catches a crash in the last task that hides the first ones."""
    do_task_one(clone)
    text = clone.read_text()
    stub = 'raise NotImplementedError("Lesson 5, task 2: all that the sequence could ever use")'
    assert stub in text
    clone.write_text(text.replace(stub, "import os; os._exit(0)"))
    output = learn("check", "05", "-v")[1]
    assert "✓ task 1: on demand  (4 of 4 tests)" in output
    assert output.count("your code ended their process with status 0") == 1
    assert "not run, because a test before it broke off" in output
    broken = re.search(r"(.+)\n +the tests broke off", learn("check", "05")[1])
    assert broken is not None
    assert broken[1].strip() == words.sentence(find("05").tasks[1].tests[0])


@pytest.mark.slow
def test_an_error_with_a_cause_is_reported_with_the_line_of_the_cause(clone):
    """Catches the launch of a kernel for the line in it: Triton's interpreter raises one from the other."""
    inner = "try: missing\n        except NameError as error: raise ValueError('outer') from error"
    text = clone.read_text()
    stub = 'raise NotImplementedError("Lesson 5, task 1: the blocks of the tokens that exist")'
    clone.write_text(text.replace(stub, inner))
    assert "Yours try: missing" in learn("check", "05")[1]
