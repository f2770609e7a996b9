"""The notebook tour: it runs from beginning to end, and shows what it showed when it was written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.docs.run_notebook import execute, read

TOUR = Path(__file__).parents[2] / "tutorials" / "tour.ipynb"
COMMITTED = read(TOUR)


@pytest.fixture(scope="module")
def executed() -> dict[str, Any]:
    """The tour after a run of all its cells."""
    return execute(COMMITTED)


def outputs(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


def pictures(notebook: dict[str, Any]) -> Iterator[str]:
    for cell in outputs(notebook):
        for output in cell:
            if "image/svg+xml" in output.get("data", {}):
                yield "".join(output["data"]["image/svg+xml"])


def printed(notebook: dict[str, Any]) -> str:
    return "".join("".join(o["text"]) for cell in outputs(notebook) for o in cell if "text" in o)


def titles(notebook: dict[str, Any]) -> list[str]:
    return [ElementTree.fromstring(picture)[0].text or "" for picture in pictures(notebook)]


def test_every_cell_runs_and_shows_what_the_file_shows(executed):
    """A tour that no longer works, or whose pictures are of an older engine. After a change on purpose:
    python -m tests.docs.run_notebook tutorials/tour.ipynb"""
    for number, (now, then) in enumerate(zip(outputs(executed), outputs(COMMITTED), strict=True), start=1):
        assert now == then, f"cell {number} shows something else"


def test_every_picture_is_whole_and_says_in_words_what_it_shows(executed):
    """A notebook full of pictures, and nothing for a reader who does not see them."""
    found = list(pictures(executed))
    assert len(found) >= 15
    for picture in found:
        assert len(ElementTree.fromstring(picture)[1].text or "") > 20


def test_it_meets_what_it_is_about(executed):
    """A preemption that does not happen any more, a prefix that misses: text beside the wrong picture."""
    shown = titles(executed)
    assert [t for t in shown if t.endswith("is preempted (swap)")]
    assert [t for t in shown if t.endswith("is resumed (swap)")]
    assert "Block 1 is full: \u201cbrought\u201d takes block 3" in shown
    text = printed(executed)
    assert text.count("True |") == 3
    assert "False" not in text
    assert re.search(r"[1-9]\d* blocks saved in that step; [1-9]", text)
    assert "42: forty two   (0 of" in text
    assert re.search(r"205: two hundred five   \([1-9]\d* of", text)
    budgets = [t for t in shown if t.endswith("24 tokens of a budget of 24")]
    assert len(budgets) == 2, "the prompts no longer need two full steps"


def test_it_says_nothing_of_the_machine_it_ran_on():
    """Paths, times and warnings of whoever ran it last."""
    text = TOUR.read_text()
    assert not re.search(r"/home/|/tmp/|/work|Traceback|stderr|Warning", text)
    assert len(text) < 500_000
