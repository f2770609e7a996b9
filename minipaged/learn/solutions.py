"""Solutions of the exercises: the bodies of the project's own methods, task by task.

A test shows that these bodies pass the lessons' tests: what a solution prints is code that was run.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

from minipaged.learn.contracts import CONCEPTS
from minipaged.learn.lessons import Lesson
from minipaged.learn.stubs import stubs

WORKED = Path("tests/docs/worked")
"""Solutions of the lessons whose exercise the project has no module for, in a clone."""


def originals(lesson: Lesson) -> dict[str, Any]:
    """Name of a class or function of the exercise -> the worked one of the project."""
    return {
        name: original
        for concept, name in lesson.use
        for original in CONCEPTS[concept].originals
        if original.__name__ == name
    }


def solution_of(lesson: Lesson, task: int) -> list[str]:
    """The source of what a task asks for, a function or method each.

    A stub that several tasks complete belongs to its first: later tasks then have no code of their own.
    """
    worked, known = worked_file(lesson), originals(lesson)
    sources = []
    for name in (name for name, number in stubs(lesson).items() if number == task):
        owner, _, method = name.rpartition(".")
        if worked is not None:
            source = source_in(worked.read_text(encoding="utf-8"), name)
        else:
            source = source_of(inspect.getattr_static(known[owner], method) if owner else known[name])
        sources.append(f"class {owner}:\n{textwrap.indent(source, '    ')}" if owner else source)
    return sources


def worked_file(lesson: Lesson) -> Path | None:
    """The worked exercise, if the project has no module like it."""
    file = lesson.root / WORKED / f"{lesson.folder.name}.py"
    return file if file.exists() else None


def source_of(function: Any) -> str:
    """The source of a function, method or property, its indentation taken away."""
    return textwrap.dedent(inspect.getsource(getattr(function, "fget", function))).rstrip()


def source_in(text: str, name: str) -> str:
    """The same of "Class.method" or "function" in the text of a module."""
    owner, _, last = name.rpartition(".")
    nodes: list[ast.stmt] = ast.parse(text).body
    if owner:
        nodes = next(n.body for n in nodes if isinstance(n, ast.ClassDef) and n.name == owner)
    node = next(n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == last)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
