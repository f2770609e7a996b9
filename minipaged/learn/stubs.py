"""What an exercise leaves to write, and which of it a student's file no longer defines; read, never run."""

from __future__ import annotations

import ast
import re
from typing import TypeGuard

from minipaged.learn.lessons import Lesson


def is_stub(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    """Whether a function only raises that it is to be written."""
    # A GPU kernel cannot raise; its stub fails to compile.
    ends = ("raise NotImplementedError(", "tl.static_assert(False")
    return isinstance(node, ast.FunctionDef) and ast.unparse(node.body[-1]).startswith(ends)


def task_of(stub: ast.AST) -> int:
    """The number of the task in the words of a stub."""
    found = re.search(r"Lesson \d+, task (\d+): ", ast.unparse(stub))
    assert found is not None, f"a stub that names no task: {ast.unparse(stub)}"
    return int(found.group(1))


def stubs(lesson: Lesson) -> dict[str, int]:
    """What the exercise as it ships leaves to write, "Class.method" or "function" -> number of its task."""
    names = {}
    for node in ast.parse(lesson.start.read_text(encoding="utf-8")).body:
        if is_stub(node):
            names[node.name] = task_of(node)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{n.name}": task_of(n) for n in node.body if is_stub(n)}
    return names


def missing(lesson: Lesson, source: str) -> dict[str, int]:
    """What an exercise no longer has of its `stubs`, or only passes on to `super()`: the class that it
    derives from has a method of its own, which would be tested in its place. Empty for a file that is not
    Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    tree = WithoutDelegates().visit(tree)
    return {name: task for name, task in stubs(lesson).items() if not _defines(tree, name)}


class WithoutDelegates(ast.NodeTransformer):
    """Takes away the methods that only return, or call, what the given class has under their name."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        """None: taken away."""
        body = node.body[ast.get_docstring(node) is not None :]
        if len(body) == 1 and isinstance(body[0], ast.Return | ast.Expr) and body[0].value is not None:
            given = rf"(super\([^)]*\)|[A-Z]\w*)\.{node.name}"
            arguments = r"\([\w*=, ]*\)"  # as they came
            if re.fullmatch(f"{given}({arguments})?", ast.unparse(body[0].value)):
                return None
        return node


def _defines(tree: ast.Module, name: str) -> bool:
    """Whether a module has a function, or a class with a method: its own, of a base, or set from outside."""
    owner, _, method = name.rpartition(".")
    nodes = list(ast.walk(tree))
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    given = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minipaged")
        for alias in node.names
    } - {node.id for node in nodes if isinstance(node, ast.Name) and _is_set(node)}
    if not owner:
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        return method in functions | (_bound(tree) - given)
    if any(isinstance(node, ast.Attribute) and node.attr == method and _is_set(node) for node in nodes):
        return True

    def has(name: str, seen: frozenset[str] = frozenset()) -> bool:
        if name not in classes or name in seen:  # (`class X(X)` derives from one that is imported)
            return name not in given  # made or imported in some way of the student's own
        node = classes[name]
        is_plain = not node.decorator_list and not node.keywords
        bases = [base.id if isinstance(base, ast.Name) else "" for base in node.bases]
        return not is_plain or method in _bound(node) or any(has(base, seen | {name}) for base in bases)

    return has(owner)


def _bound(scope: ast.Module | ast.ClassDef) -> set[str]:
    """The names of functions and variables that a module or class defines, roughly."""
    names = set()
    for node in (inner for statement in scope.body for inner in ast.walk(statement)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and _is_set(node):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def _is_set(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)
