"""What the pages tell readers to run is run: Python blocks, and the commands of the project."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.site import ROOT

pytestmark = pytest.mark.slow

PAGES = [ROOT / "README.md", *sorted(p for p in ROOT.glob("docs/**/*.md") if "_fragments" not in p.parts)]
PAGES = [
    page for page in PAGES if page.parent.name not in ("learn", "reproduce")
]  # those have their own tests
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

NOT_RUN = {
    "path/to/model": "a model of the reader's",
    "FILE": "a file of the reader's",
    "--model DIR": "a model of the reader's",
    "pytest tests/concepts": "the tests themselves",
    "reproduce": "minutes; tests/simulation runs it",
    "minipaged serve": "tests/serving runs it",
    "learn": "tests/docs/test_tutorials.py runs it",
}


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """(title, text) of the code blocks of a language, included files left out."""
    return [
        (title, text)
        for found, title, text in FENCE.findall(page.read_text())
        if found == language and "--8<--" not in text
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
def test_python_blocks_run_and_print_what_the_page_says(page, tmp_path):
    """Catches an example whose names have changed, and an output that was never seen."""
    text = page.read_text()
    for title, code in blocks(page, "python"):
        (tmp_path / "block.py").write_text(code)
        ran = subprocess.run(
            [sys.executable, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, f"{title}\n{ran.stderr}"
        shown = re.search(re.escape(code) + r"```\n\n```text\n(.*?)```", text, re.DOTALL)
        if shown:
            assert ran.stdout == shown[1]


def commands(page: Path) -> list[str]:
    lines = [line for _, text in blocks(page, "bash") for line in text.splitlines()]
    return [line for line in lines if line.startswith("minipaged ") and not any(w in line for w in NOT_RUN)]


@pytest.mark.parametrize(
    ("page", "command"),
    [(page, command) for page in PAGES for command in commands(page)],
    ids=lambda value: name_of(value) if isinstance(value, Path) else value,
)
def test_commands_of_the_pages_end_well(page, command, tmp_path):
    """Catches a flag that was renamed under the page that recommends it."""
    for title, code in blocks(page, "python"):
        if named := re.search(r'title="([\w.]+)"', title):
            (tmp_path / named[1]).write_text(code)
    for part in command.split(" && "):
        arguments = shlex.split(part, comments=True)[1:]
        ran = subprocess.run(
            [sys.executable, "-m", "minipaged", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 0, ran.stderr
