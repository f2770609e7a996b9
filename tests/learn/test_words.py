"""What a failed test says in words."""

import ast
from pathlib import Path

import pytest

from minipaged.learn.lessons import read_lessons
from minipaged.learn.trials import Outcome
from minipaged.learn.words import (
    awaited,
    expected_and_got,
    explain,
    mentioned_in,
    names_of,
    report,
    sentence,
    without_error,
)

ROOT = Path(__file__).parents[2]
INVARIANTS = ("allocator", "kv_manager", "prefix_cache")  # modules with a `check_invariants`


def test_a_name_is_a_sentence():
    """Catches underscores, and a case that is lost."""
    assert sentence("tests/x.py::test_a_full_block_is_one_block") == "A full block is one block."
    assert sentence("tests/x.py::test_a_fork[3-False]") == "A fork (3-False)."
    assert sentence("tests/x.py::test_figure_12_a_fork_shares") == "Figure 12: a fork shares."


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("AssertionError: assert 3 == 2", "Expected 2, got 3."),
        ("assert (4,) == (3,)\n  \n  At index 0 diff: 4 != 3", "Expected (3,), got (4,)."),
        (
            "AssertionError: assert 3 == 2\n  +  where 3 = <m.BlockTable object at 0x7f>.num_filled_blocks",
            "Expected 2, got 3. (3 came from num_filled_blocks)",
        ),
        (
            "AssertionError: assert 6 == 4\n +  where 6 = admit_waiting(<p>, 6, False)\n",
            "Expected 4, got 6. (6 came from admit_waiting)",
        ),
        ("AssertionError: assert [1] is None", "Expected None, got [1]."),
        ("assert <generator object A.<locals>.<genexpr> at 0x7f> == 2", "Expected 2, got <generator>."),
        ("assert 9 <= 8", "Expected at most 8, got 9."),
        ("assert 4 > 4", "Expected more than 4, got 4."),
        ("assert 1 != 1", "Expected anything but 1."),
        ("assert not True\n + where True = busy(0)", "Expected False, got True. (True came from busy)"),
        ("assert False\n + where False = busy(0)", "Expected True, got False. (False came from busy)"),
        ("assert not {3}", "This should not hold: {3}."),
        ("assert 3 in [1, 2]", "This should hold: 3 in [1, 2]."),
        ("assert 0 <= 5 < 4", "This should hold: 0 <= 5 < 4."),
        ("Failed: DID NOT RAISE <class 'm.OutOfBlocksError'>", "Expected OutOfBlocksError, got no error."),
        ("Failed: DID NOT RAISE ValueError", "Expected ValueError, got no error."),
        ("NameError: name 'x' is not defined", "Expected no error, got NameError: name 'x' is not defined"),
        ("NotImplementedError: Lesson 2, task 1: x", "Not written yet. Lesson 2, task 1: x"),
        ("AssertionError: Tensor-likes are not close!", "Tensor-likes are not close!"),
        ("AssertionError", "Expected no error, got an assert that failed."),
        ("assert None\n +  where None = <function match at 0x7f>('a', 'b')", "Expected anything but None."),
        ("assert 0 == (7 - 6)", "Expected 1, got 0."),
        ("assert 9 == ((2 * 3) + 1)\n +  where 9 = f(2)", "Expected 7, got 9. (9 came from f)"),
        ("assert '(1 + 1)' == (1, 2)", "Expected (1, 2), got '(1 + 1)'."),
        ("not done after 10 s; is there an endless loop?", "not done after 10 s; is there an endless loop?"),
    ],
)  # fmt: skip
def test_expected_and_got_are_put_into_words(message, expected):
    """Catches sides that are exchanged, and a comparison that is not one."""
    assert expected_and_got(message) == expected


def test_a_long_value_is_cut():
    """Catches a screen full of numbers before the line that matters."""
    text = expected_and_got(f"assert {list(range(500))} == []")
    assert text.startswith("Expected [], got [0, 1, 2")
    assert len(text) < 200


@pytest.mark.parametrize("lesson", read_lessons(ROOT), ids=lambda lesson: lesson.number)
def test_every_task_names_what_it_leaves_to_write(lesson):
    """Catches a message that names nothing for the second task of a method."""
    for task in range(1, len(lesson.tasks) + 1):
        assert names_of(lesson, task)


@pytest.fixture
def file(tmp_path):
    """An exercise with two methods of one name."""
    file = tmp_path / "exercise.py"
    file.write_text(
        "class A:\n    def f(self):\n        return 1\n\nclass B:\n    def f(self):\n        return 2\n"
    )
    return file


def test_of_equal_names_that_of_the_class_in_the_test_is_reported(file):
    """Catches a line of another policy shown as yours: all of them have the method."""
    assert mentioned_in(file, "assert B().f() == 3", ["f"]) == ["f, line 7: return 2"]
    assert mentioned_in(file, "assert it.f() == 3", ["f"]) == ["f, line 3: return 1", "f, line 7: return 2"]


def test_of_equal_names_that_of_the_task_is_reported(file):
    """Catches `SamplingMethod.advance` shown beside `BeamSearch.advance`, which the task asks for."""
    assert mentioned_in(file, "assert it.f() == 3", ["B.f"]) == ["f, line 7: return 2"]
    assert mentioned_in(file, "assert it.f() == 3", ["C.f"]) == ["f, line 3: return 1", "f, line 7: return 2"]


def test_every_red_task_is_explained():
    """Catches a task that is red without an explanation because another failed with the same values."""
    lesson = next(lesson for lesson in read_lessons(ROOT) if lesson.number == "05")
    failed = Outcome("assert [] == [0]", "assert [] == [0]", "Catches x.")
    outcomes = [dict.fromkeys(task.tests, failed) for task in lesson.tasks]
    assert [len(task.tests) for task in report(lesson, outcomes)] == [1, 1, 1]


def test_the_end_of_what_a_test_printed_stands_below_its_message():
    """Catches a `print` that nobody sees, and one in a loop that hides the message."""
    lesson = next(lesson for lesson in read_lessons(ROOT) if lesson.number == "05")
    test = lesson.tasks[0].tests[0]
    failed = Outcome("assert [] == [0]", "assert [] == [0]", "Catches x.")
    silent = explain(lesson, 1, test, failed)
    assert explain(lesson, 1, test, failed._replace(printed="\n a\nb  c\n")) == [
        *silent,
        "Print a",
        "Print b c",
    ]
    printed = "\n".join(map(str, range(100)))
    shown = [f"Print {line}" for line in ("\u2026", *range(95, 100))]
    assert explain(lesson, 1, test, failed._replace(printed=printed)) == [*silent, *shown]
    assert len(explain(lesson, 1, test, failed._replace(printed="x" * 1000))[-1]) < 200


def test_only_what_the_task_asks_for_is_reported(tmp_path):
    """Catches `g` shown as yours, which an earlier task asked for, because the test calls it to look."""
    file = tmp_path / "exercise.py"
    file.write_text("def f():\n    return 1\n\ndef g():\n    return 2\n")
    assert mentioned_in(file, "assert f() == g()", ["f"]) == ["f, line 2: return 1"]
    assert mentioned_in(file, "assert g() == 3", ["f"]) == []


def test_the_exception_that_a_line_waits_for_is_read_in_the_test(tmp_path):
    """Catches "Expected no error" of a line that must raise."""
    file = tmp_path / "test_x.py"
    file.write_text(
        "def test_x():\n    free(0)\n    with pytest.raises(ValueError, match='x'):\n        free(1)\n"
        "    with open('x'), pytest.raises(errors.OutOfBlocksError):\n        free(2)\n    free(3)\n"
    )
    found = [awaited(file, number) for number in range(1, 8)]
    assert found == ["", "", "", "ValueError", "", "OutOfBlocksError", ""]
    assert awaited(tmp_path / "not_there.py", 1) == ""


def test_the_statement_that_raised_nothing_is_reported_instead_of_its_with(tmp_path):
    """Catches "Test with pytest.raises(ValueError):", which does not say what was called."""
    file = tmp_path / "test_x.py"
    file.write_text(
        "def test_x():\n    with pytest.raises(\n        ValueError\n    ):\n        free(1)\n"
        "    with open('x'):\n        free(2)\n"
    )
    assert [without_error(file, number) for number in (2, 5, 6)] == [(5, "free(1)"), None, None]
    assert without_error(tmp_path / "not_there.py", 2) is None


@pytest.mark.parametrize("path", ["tests/toy.py", *(f"minipaged/memory/{name}.py" for name in INVARIANTS)])
def test_an_assert_that_an_exercise_may_fail_says_what_is_wrong(path):
    """Catches "Expected no error, got an assert that failed": outside a test file pytest adds no values."""
    functions = [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if is_checking(node, path)]
    asserts = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.Assert)]
    assert asserts
    assert [ast.unparse(node) for node in asserts if node.msg is None] == []


def is_checking(node, path):
    """A function of the toy engine, or `check_invariants`."""
    return isinstance(node, ast.FunctionDef) and (path == "tests/toy.py" or node.name == "check_invariants")


@pytest.mark.parametrize("message", ["", "NotImplementedError: " + "y" * 100_000])
def test_a_reason_of_any_length_takes_a_few_lines(message):
    """Catches a hundred thousand letters of an exercise's own error, on the page and in the terminal."""
    lesson = next(lesson for lesson in read_lessons(ROOT) if lesson.number == "05")
    failed = Outcome("exercise.py cannot be loaded: ValueError: " + "y" * 100_000, message)
    [text] = explain(lesson, 1, lesson.tasks[0].tests[0], failed)
    assert "yyy" in text
    assert len(text) < 700
