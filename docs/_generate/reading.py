"""What the pages take from the code: docstrings, pieces of source, test facts, error messages, a test report.

Everything is read with `ast`; nothing of the project is imported here.
"""

from __future__ import annotations

import ast
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


def docstring_as_markdown(path: str) -> str:
    """The docstring of a module: paragraphs as text, its indented drawings as code."""
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text()))
    assert docstring is not None, f"{path} has no docstring"
    lines: list[str] = []
    for block in re.split(r"\n\n(?=\S)", docstring):
        text, _, drawing = block.partition("\n\n    ")
        lines.append(text)
        if drawing:
            shown = re.sub(r"^    ", "", "    " + drawing, flags=re.MULTILINE)
            lines.append(f"```text\n{shown}\n```")
    return "\n\n".join(lines) + "\n"


def piece_of_source(path: str, name: str) -> str:
    """The source of one function, class or method ("Class.method"), without the indentation of its class.

    Raises:
        ValueError: there is no such thing in the module.
    """
    source = (ROOT / path).read_text()
    body: list[ast.stmt] = ast.parse(source).body
    node: ast.AST | None = None
    for part in name.split("."):
        node = next((n for n in body if getattr(n, "name", None) == part), None)
        if node is None:
            raise ValueError(f"{path} has no {name}")
        body = getattr(node, "body", [])
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] for line in lines) + "\n"


@dataclass(frozen=True)
class Fact:
    """One test: what it says, and the bug that it would catch.

    Attributes:
        section: the heading of the test file under which it stands, "" for none.
        name: of the test function.
        catches: the first paragraph of its docstring.
    """

    section: str
    name: str
    catches: str

    @property
    def statement(self) -> str:
        """The name as a sentence."""
        words = self.name.removeprefix("test_").replace("_", " ")
        words = re.sub(r"^figure (\d+) (.*)", r"figure \1: \2", words)
        words = re.sub(r"\bpapers\b", "paper's", words)
        return words[0].upper() + words[1:]


def read_facts(path: Path) -> list[Fact]:
    """The tests of a file, in its order."""
    source = path.read_text()
    headings = {
        number: match[1].strip(" -")
        for number, line in enumerate(source.splitlines(), 1)
        if (match := re.match(r"# -- (.*?)-*$", line))
    }
    facts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            section = [title for line, title in headings.items() if line < node.lineno]
            docstring = (ast.get_docstring(node) or "").split("\n\n")[0]
            facts.append((node.lineno, Fact(section[-1] if section else "", node.name, docstring)))
    return [fact for _, fact in sorted(facts, key=lambda pair: pair[0])]


class Outcome(NamedTuple):
    """How the cases of one test ended."""

    passed: int
    failed: int
    skipped: int


def read_report(path: Path) -> dict[tuple[str, str], Outcome]:
    """(file name without suffix, test name) -> outcome, from pytest's `--junit-xml`."""
    counts: dict[tuple[str, str], list[int]] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        module = next((part for part in case.get("classname", "").split(".") if part.startswith("test_")), "")
        key = module, case.get("name", "").partition("[")[0]
        count = counts.setdefault(key, [0, 0, 0])
        failed = case.find("failure") is not None or case.find("error") is not None
        count[1 if failed else 2 if case.find("skipped") is not None else 0] += 1
    return {key: Outcome(*count) for key, count in counts.items()}


class Message(NamedTuple):
    """Something the project says when it refuses or warns; `…` stands for a value."""

    kind: str
    text: str
    path: str


def read_messages() -> list[Message]:
    """Every message of a `raise Error("...")` and of a logged warning, in the order of the files."""
    messages = []
    # (`**` does not follow the link minipaged/kernels.)
    for file in sorted((*ROOT.glob("minipaged/**/*.py"), *ROOT.glob("kernels/**/*.py"))):
        path = str(file.relative_to(ROOT))
        for node in ast.walk(ast.parse(file.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            kind = _kind(call, isinstance(node, ast.Raise))
            text = _template(call.args[0])
            if kind and text and len(text.replace("…", "").split()) > 2:
                messages.append(Message(kind, text, path))
    return list(dict.fromkeys(messages))


def _kind(call: ast.Call, raised: bool) -> str:
    function = call.func
    if raised and isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute) and function.attr == "warning":
        return "warning"
    return ""


def _template(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[\d.]*[a-z]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "…"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return ""
