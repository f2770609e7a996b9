"""Solved exercises, made of the exercise as it ships and the bodies of the project's own methods.

That such a file passes its lesson proves that what an exercise gives is enough, and that what it asks for is
what the module does which the lesson shows at its end.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from minipaged.learn.contracts import CONCEPTS
from minipaged.learn.lessons import Lesson


def originals(lesson: Lesson) -> dict[str, Any]:
    """Name of a class or function of the exercise -> the worked one of the project."""
    used = [use.partition(":") for use in lesson.use]
    worked = [(name, original) for concept, _, name in used for original in CONCEPTS[concept].originals]
    return {name: original for name, original in worked if original.__name__ == name}


def is_stub(node: ast.AST) -> bool:
    """Whether a function does nothing but say that it is to be written."""
    if not isinstance(node, ast.FunctionDef):
        return False
    # A GPU kernel cannot raise; its stub fails to compile.
    return ast.unparse(node.body[-1]).startswith(("raise NotImplementedError(", "tl.static_assert(False"))


def task_of(stub: ast.AST) -> int:
    """The number of the task in the words of a stub."""
    found = re.search(r"Lesson \d+, task (\d+): ", ast.unparse(stub))
    assert found is not None, f"a stub that names no task: {ast.unparse(stub)}"
    return int(found.group(1))


def stubs(lesson: Lesson) -> list[str]:
    """What the exercise as it ships leaves to write: "Class.method" or "function"."""
    tree = ast.parse(lesson.start.read_text())
    names = []
    for node in tree.body:
        if is_stub(node):
            names.append(node.name)  # type: ignore[attr-defined]
        elif isinstance(node, ast.ClassDef):
            names += [f"{node.name}.{n.name}" for n in node.body if is_stub(n)]  # type: ignore[attr-defined]
    return names


def solve(lesson: Lesson, folder: Path, leave: int | None = None) -> Path:
    """Write the solved exercise into a folder; `leave`: a task that stays as it is. Returns its path."""
    file = folder / f"{lesson.folder.name}.py"
    folder.mkdir(parents=True, exist_ok=True)
    worked = Path(__file__).parent / "worked" / file.name
    if worked.exists():  # the project has no such module
        file.write_text(worked.read_text())
        return file
    tree = ast.parse(lesson.start.read_text())
    worked_ones = originals(lesson)
    for node in tree.body:
        if is_stub(node) and task_of(node) != leave:
            node.body = _body(worked_ones[node.name])  # type: ignore[attr-defined]
        elif isinstance(node, ast.ClassDef) and node.name in worked_ones:
            for method in node.body:
                if is_stub(method) and task_of(method) != leave:
                    method.body = _body(inspect.getattr_static(worked_ones[node.name], method.name))  # type: ignore
    # The bodies use names of the modules that they come from.
    lines = ["import importlib as _importlib"]
    for module in sorted({original.__module__ for original in worked_ones.values()}):
        lines.append(f"for _name, _value in vars(_importlib.import_module({module!r})).items():")
        lines.append("    globals().setdefault(_name, _value)")
    file.write_text(ast.unparse(tree) + "\n\n" + "\n".join(lines) + "\n")
    return file


def _body(worked: object) -> list[ast.stmt]:
    function = worked.fget if isinstance(worked, property) else worked
    source = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    return ast.parse(source).body[0].body  # type: ignore[attr-defined]
