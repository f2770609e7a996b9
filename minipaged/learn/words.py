"""What a failed test says, in words: the fact, the bug, expected and got, and the student's own line."""

from __future__ import annotations

import ast
import operator
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from minipaged.learn.contracts.rules import without_addresses
from minipaged.learn.lessons import Lesson
from minipaged.learn.stubs import stubs
from minipaged.learn.trials import BROKE_OFF, NOT_STARTED, Outcome

LONGEST = 160  # characters of a value or a line of code; the rest is cut
REASON = 600  # characters of a reason that is an exercise's own
PRINTED = 5  # lines of what a test printed, the last ones

SUM = re.compile(r"\((-?\d+) ([-+*]) (-?\d+)\)")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

SIGN = re.compile(r" (==|!=|<=|>=|<|>|is not|is|in|not in) ")
EXPECTED = {"==": "", "is": "", "<=": "at most ", "<": "less than ", ">=": "at least ", ">": "more than "}


def sentence(test: str) -> str:
    """The name of a test as a sentence: "tests/x.py::test_a_fact[case]" -> "A fact (case)."."""
    name, _, case = test.rpartition("::")[2].partition("[")
    words = name.removeprefix("test_").replace("_", " ")
    words = re.sub(r"^(figure \d+) ", r"\1: ", words)
    text = words[:1].upper() + words[1:]
    return f"{text} ({case.removesuffix(']')})." if case else f"{text}."


def expected_and_got(message: str) -> str:
    """What pytest says, as a sentence: "assert 3 == 2" -> "Expected 2, got 3."."""
    first, *others = message.strip().splitlines() or [""]
    kind, colon, text = first.partition(": ")
    if not colon or not re.fullmatch(r"[\w.]+", kind):
        kind, text = "", first
    kind = kind.rpartition(".")[2]
    if kind == "NotImplementedError":
        return f"Not written yet. {_cut(text, REASON)}"
    if (missed := re.search(r"DID NOT RAISE (?:<class ')?([\w.]+)", first)) is not None:
        return f"Expected {missed[1].rpartition('.')[2]}, got no error."
    if first == "AssertionError":
        return "Expected no error, got an assert that failed."
    if kind in ("", "AssertionError"):
        statement = text.removeprefix("assert ")
        if statement == text:
            return _cut(text, 240)
        return _comparison(statement) + _source(statement, others)
    if kind == "Failed":
        return _cut(text)
    return f"Expected no error, got {_cut(f'{kind}: {text}')}"


def _comparison(statement: str) -> str:
    left, *others = SIGN.split(statement)
    if len(others) == 2:  # it is the only comparison
        sign, right = others[0], _cut(_computed(others[1]))
        if sign in EXPECTED:
            return f"Expected {EXPECTED[sign]}{right}, got {_cut(_computed(left))}."
        if sign in ("!=", "is not"):
            return f"Expected anything but {right}."
    if statement in ("False", "not True"):
        return f"Expected {statement == 'False'}, got {statement != 'False'}."
    if statement in ("None", "''", "0", "[]", "()", "{}"):
        return f"Expected anything but {statement}."
    if statement.startswith("not "):
        return f"This should not hold: {_cut(statement[4:])}."
    return f"This should hold: {_cut(statement)}."


def _computed(side: str) -> str:
    """A sum or product of integers as pytest leaves it: "((2 * 3) + 1)" -> "7"; anything else as it is."""
    while re.fullmatch(r"[-+* \d()]+", side) and (found := SUM.search(side)) is not None:
        side = side.replace(found[0], str(OPERATORS[found[2]](int(found[1]), int(found[3]))))
    return side


def _source(statement: str, others: list[str]) -> str:
    """Which call the value came from, if pytest says so: "where 3 = <BlockTable>.num_filled_blocks"."""
    for line in others:
        where = re.match(r"\s*\+\s+where (.+?) = (.+)$", line)
        if where is None or not statement.removeprefix("not ").startswith(where[1]):
            continue
        expression = re.sub(r"<[^<>]*>", "x", where[2])
        name = re.search(r"(\w+)(?:\(.*\))?$", expression)
        if name is not None and not name[1].isdigit() and name[1] != "x":
            return f" ({_cut(where[1], 60)} came from {name[1]})"
    return ""


def _cut(text: str, longest: int = LONGEST) -> str:
    text = " ".join(without_addresses(text).split())
    return text if len(text) <= longest else f"{text[: longest - 1]}\u2026"


class TestReport(NamedTuple):
    """A test as a student reads it: its fact, then what it found."""

    is_green: bool
    lines: list[str]


class TaskReport(NamedTuple):
    """A task as a student reads it."""

    is_green: bool
    head: str
    tests: list[TestReport]  # the first red one; all of them if asked for


def report(lesson: Lesson, outcomes: Iterable[dict[str, Outcome]], verbose: bool = False) -> list[TaskReport]:
    """What `minipaged learn check` reports on a lesson's tasks: task -> test -> outcome, in words."""
    tasks = []
    shown: set[str] = set()
    for i, (task, outcome) in enumerate(zip(lesson.tasks, outcomes), start=1):
        failed = [test for test, result in outcome.items() if result.failure]
        tests = []
        for test, result in outcome.items():
            if verbose and not result.failure:
                tests.append(TestReport(True, [sentence(test)]))
            # A file that cannot be loaded fails every test without a message, and is shown once.
            elif result.failure and (verbose or test == failed[0]) and result.failure not in shown:
                if not result.message:
                    shown.add(result.failure)
                tests.append(TestReport(False, explain(lesson, i, test, result)))
        passed = f"{len(outcome) - len(failed)} of {len(outcome)} tests"
        tasks.append(TaskReport(not failed, f"task {i}: {task.name}  ({passed})", tests))
    return tasks


def explain(lesson: Lesson, task: int, test: str, outcome: Outcome) -> list[str]:
    """The lines that a student needs to fix what a failed test found."""
    if outcome == NOT_STARTED:
        return [f"Nothing is written in {lesson.exercise.name} yet."]
    if not outcome.message:  # the file could not be loaded, or the process ended
        # (In the first test, or before it: that is not known.)
        is_inside = outcome.failure.startswith(BROKE_OFF) and test != lesson.tests[0]
        reason = _cut(outcome.failure, REASON)
        return [sentence(test), reason] if is_inside else [reason]
    got = expected_and_got(outcome.message)
    if outcome.message.startswith("NotImplementedError"):
        return [got]
    if outcome.test_line is not None and not outcome.message.startswith(("Failed", "not done")):
        file, number, _ = outcome.test_line
        if expected := awaited(lesson.root / file, number):
            raised = outcome.message.strip().splitlines()[0]
            kind = "AssertionError: " if raised.startswith("assert") else ""
            got = f"Expected {expected}, got {_cut(kind + raised)}"
    lines = [sentence(test), outcome.says, got]
    names = names_of(lesson, task)
    mentioned = mentioned_in(lesson.exercise, outcome.message, names)
    if outcome.test_line is not None:
        file, number, code = outcome.test_line
        number, code = without_error(lesson.root / file, number) or (number, code)
        lines.append(f"Test  {_cut(code)}    ({file}, line {number})")
        mentioned = mentioned_in(lesson.exercise, code, names) or mentioned
    if outcome.failed_line is not None and not outcome.failed_line[2].startswith("raise "):
        file, number, code = outcome.failed_line
        lines.append(f"Where {_cut(code)}    ({file}, line {number})")
    if outcome.your_line is not None:
        file, number, code = outcome.your_line
        lines.append(f"Yours {_cut(code)}    ({Path(file).name}, line {number})")
    else:
        methods = [name.rpartition(".")[2] for name in names]
        lines.append(f"Yours {'; '.join(mentioned or methods)}    ({lesson.exercise.name})")
    printed = [line for line in outcome.printed.splitlines() if line.strip()]
    last = ["\u2026"] * (len(printed) > PRINTED) + printed[-PRINTED:]
    return [line for line in lines if line] + [f"Print {_cut(line)}" for line in last]


def awaited(test_file: Path, number: int) -> str:
    """The exception that a line of a test must raise, inside `with pytest.raises(...):`; "" if none."""
    for exception, node in raises_in(test_file):
        if node.body[0].lineno <= number <= (node.end_lineno or 0):
            return exception
    return ""


def without_error(test_file: Path, number: int) -> tuple[int, str] | None:
    """Line and code of the statement that should have raised, by the line of `with pytest.raises(...):`."""
    for _, node in raises_in(test_file):
        if node.lineno == number:
            return node.body[0].lineno, ast.unparse(node.body[0])
    return None


def raises_in(test_file: Path) -> Iterator[tuple[str, ast.With]]:
    """Exception and statement of each `with pytest.raises(...):` of a file, if it is there."""
    try:
        tree = ast.parse(test_file.read_text(encoding="utf-8"))
    except OSError:
        return
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.With)):
        for call in (item.context_expr for item in node.items):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.raises":
                yield ast.unparse(call.args[0]).rpartition(".")[2], node


def mentioned_in(exercise: Path, text: str, names: Iterable[str]) -> list[str]:
    """The functions of `names` that a text mentions, as "slot, line 42: return position" or "slot, line 42".

    If several classes have such a method, it is that of the classes that the text mentions, too; else that of
    the class in `names`, as in "BlockTable.slot".
    """
    try:
        with tokenize.open(exercise) as file:  # (in the encoding that it declares)
            source = file.read()
    except (SyntaxError, UnicodeDecodeError):
        return []
    words = set(re.findall(r"\w+", text))
    tree = ast.parse(source)
    methods = {name.rpartition(".")[2] for name in names}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    of_names = [node for node in classes if any(name.startswith(f"{node.name}.") for name in names)]
    for scope in ([node for node in classes if node.name in words], of_names, [tree]):
        lines = []
        for node in (node for part in scope for node in ast.walk(part)):
            if isinstance(node, ast.FunctionDef) and node.name in words & methods:
                statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
                line = statements[0].lineno if len(statements) == 1 else node.lineno
                code = f": {source.splitlines()[line - 1].strip()}" if len(statements) == 1 else ""
                lines.append(f"{node.name}, line {line}{code}")
        if lines:
            return lines
    return []


def names_of(lesson: Lesson, task: int) -> list[str]:
    """What a task leaves to write: the functions whose stub names it; if none does, those whose text does."""
    names = [name for name, number in stubs(lesson).items() if number == task]
    source, mentioned = lesson.start.read_text(encoding="utf-8"), re.compile(rf"[Tt]ask {task}\b")
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return names or [n.name for n in functions if mentioned.search(ast.get_source_segment(source, n) or "")]
