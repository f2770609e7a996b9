"""Solved exercises, made of the exercise as it ships and the bodies of the project's own methods.

That such a file passes its lesson proves that what an exercise gives is enough, and that what it asks for is
what the module does which the lesson shows at its end.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

from minipaged.learn.contracts import CONCEPTS
from minipaged.learn.lessons import Lesson


def originals(lesson: Lesson) -> dict[str, str]:
    """Name of a class or function of the exercise -> the module of the project that has the worked one."""
    found = {}
    for use in lesson.use:
        concept, _, name = use.partition(":")
        for original in CONCEPTS[concept].originals:
            module, _, attribute = original.partition(":")
            if attribute == name:
                found[name] = module
    return found


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
    homes = originals(lesson)
    for node in tree.body:
        if is_stub(node) and task_of(node) != leave:
            node.body = _body(getattr(importlib.import_module(homes[node.name]), node.name))  # type: ignore
        elif isinstance(node, ast.ClassDef) and node.name in homes:
            own = getattr(importlib.import_module(homes[node.name]), node.name)
            for method in node.body:
                if is_stub(method) and task_of(method) != leave:
                    method.body = _body(inspect.getattr_static(own, method.name))  # type: ignore
    # The bodies use names of the modules that they come from.
    lines = ["import importlib as _importlib"]
    for module in sorted(set(homes.values())):
        lines.append(f"for _name, _value in vars(_importlib.import_module({module!r})).items():")
        lines.append("    globals().setdefault(_name, _value)")
    file.write_text(ast.unparse(tree) + "\n\n" + "\n".join(lines) + "\n")
    return file


def _body(worked: object) -> list[ast.stmt]:
    function = worked.fget if isinstance(worked, property) else worked
    source = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    return ast.parse(source).body[0].body  # type: ignore[attr-defined]
