"""Solved exercises, made of the exercise as it ships and the bodies of the project's own methods.

That such a file passes its lesson proves that what an exercise gives is enough, and that what it asks for is
what the module does which the lesson shows at its end.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path

from minipaged.learn.lessons import Lesson
from minipaged.learn.solutions import originals, source_of, worked_file
from minipaged.learn.stubs import is_stub, task_of


def solve(lesson: Lesson, folder: Path, leave: Callable[[int], bool] = lambda task: False) -> Path:
    """Write the solved exercise into a folder; `leave`: which tasks stay as they are. Returns its path."""
    file = folder / f"{lesson.folder.name}.py"
    folder.mkdir(parents=True, exist_ok=True)
    if (worked := worked_file(lesson)) is not None:
        file.write_text(worked.read_text())
        return file
    tree = ast.parse(lesson.start.read_text())
    worked_ones = originals(lesson)
    for node in tree.body:
        if is_stub(node) and not leave(task_of(node)):
            node.body = _body(worked_ones[node.name])
        elif isinstance(node, ast.ClassDef) and node.name in worked_ones:
            for method in node.body:
                if is_stub(method) and not leave(task_of(method)):
                    method.body = _body(inspect.getattr_static(worked_ones[node.name], method.name))
    # The bodies use names of the modules that they come from.
    lines = ["import importlib as _importlib"]
    for module in sorted({original.__module__ for original in worked_ones.values()}):
        lines.append(f"for _name, _value in vars(_importlib.import_module({module!r})).items():")
        lines.append("    globals().setdefault(_name, _value)")
    file.write_text(ast.unparse(tree) + "\n\n" + "\n".join(lines) + "\n")
    return file


def _body(worked: object) -> list[ast.stmt]:
    return ast.parse(source_of(worked)).body[0].body  # type: ignore[attr-defined]
