"""Executes a notebook without Jupyter: its cells, in order, in one namespace.

    python -m tests.docs.run_notebook tutorials/tour.ipynb     run it and write the outputs into it

What a cell prints, what it gives to `display`, and the value of its last line become its outputs, as Jupyter
would write them. Cells are plain Python: no magics, no input, no kernel.
"""

from __future__ import annotations

import ast
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from minipaged.viewer.displays import DISPLAYS
from minipaged.viewer.pictures.svg import Svg


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with fresh outputs.

    Raises:
        Exception: what a cell raised, with a note that names the cell.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            try:
                outputs = _run("".join(cell["source"]), namespace, count)
            except Exception as error:
                error.add_note(f"in cell {count} ({cell['id']}) of the notebook")
                raise
            cell = {**cell, "outputs": outputs, "execution_count": count}
        cells.append(cell)
    return {**notebook, "cells": cells}


def _run(source: str, namespace: dict[str, Any], count: int) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    printed = io.StringIO()

    def flush() -> None:
        if printed.getvalue():
            text = printed.getvalue().splitlines(keepends=True)
            outputs.append({"output_type": "stream", "name": "stdout", "text": text})
            printed.seek(0)
            printed.truncate()

    def display(value: Any) -> None:
        flush()
        outputs.append({"output_type": "display_data", "data": _data(value), "metadata": _metadata(value)})

    namespace["display"] = display
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), namespace)
        value = None
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    flush()
    if value is not None:
        result = {
            "output_type": "execute_result",
            "data": _data(value),
            "metadata": _metadata(value),
            "execution_count": count,
        }
        outputs.append(result)
    return outputs


def _data(value: Any) -> dict[str, Any]:
    if isinstance(value, Svg):
        kind, text = "image/svg+xml", value._repr_svg_()
    else:
        kind, text = "text/html", html_of(value)
    if text is not None:
        return {kind: text.splitlines(keepends=True), "text/plain": [f"<{type(value).__name__}>"]}
    return {"text/plain": repr(value).splitlines(keepends=True)}


def html_of(value: object) -> str | None:
    """The picture of an object, by the nearest of its types, as in IPython; None if there is none."""
    draw = next((DISPLAYS[kind] for kind in type(value).__mro__ if kind in DISPLAYS), None)
    return None if draw is None else draw(value)


def _metadata(value: Any) -> dict[str, Any]:
    """The narrow form of a picture, for the site."""
    narrow = getattr(value, "narrow", None)
    return {} if narrow is None else {"narrow": narrow}


def read(path: Path) -> dict[str, Any]:
    """A notebook file."""
    return json.loads(path.read_text())


def write(path: Path, notebook: dict[str, Any]) -> None:
    """Write a notebook file as Jupyter does."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name), execute(read(Path(name))))
