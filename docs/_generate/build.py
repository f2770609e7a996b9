"""Write the pages and page fragments that come from the code. Run before `mkdocs build --strict`.

    python docs/_generate/build.py [--junit FILE]

`FILE` is a report of `python -m pytest tests/concepts --junit-xml FILE`; with it the specification carries
the marks of that run. What is written is listed in docs/.gitignore and is not committed.
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
from pathlib import Path

import handouts
import moving
import pages
import play
import viewer_scenes
from reading import ROOT, docstring_as_markdown, piece_of_source, read_report

from minipaged.viewer.page import WEB

DOCS = ROOT / "docs"
FRAGMENTS = DOCS / "_fragments"


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--junit", type=Path, help="report of a run of tests/concepts")
    arguments = parser.parse_args()
    logging.getLogger("minipaged").setLevel(logging.ERROR)  # preemptions are meant to happen here
    report = read_report(arguments.junit) if arguments.junit else None
    shutil.rmtree(FRAGMENTS, ignore_errors=True)
    shutil.rmtree(DOCS / "learn", ignore_errors=True)

    written = {
        "engine/configuration.md": pages.configuration(),
        "specification.md": pages.specification(report),
        "guides/messages.md": pages.messages(),
        "benchmarks.md": pages.benchmarks(),
        "cpu-kernels.md": pages.cpu_kernels(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        **pages.lessons(),
        "learn/tour.md": pages.tour(),
        "teach/slides.html": handouts.slides(),
        "teach/cheat-sheet.html": handouts.cheat_sheet(),
    }
    for name, text in written.items():
        write(DOCS / name, text)
    for folder in sorted(file.parent for file in ROOT.glob("tutorials/*/lesson.md")):
        write(DOCS / "learn" / f"{folder.name}.ipynb", handouts.notebook(folder))
    write(FRAGMENTS / "abbreviations.md", pages.abbreviations())
    write(FRAGMENTS / "commands.md", pages.commands())
    write(FRAGMENTS / "headlines.md", pages.headlines())
    write(DOCS / "stylesheets/palette.css", pages.palette_css())
    write(DOCS / "stylesheets/viewer.css", (WEB / "viewer.css").read_text())
    for module in sorted(WEB.glob("*.js")):
        write(DOCS / "javascripts/viewer" / module.name, module.read_text())
    for name in viewer_scenes.SCENES:
        write(DOCS / "scenes" / f"{name}.jsonl", viewer_scenes.trace(name))
    play.write_play(ROOT, DOCS / "play")
    for page in sorted(DOCS.glob("**/*.md")):
        for name in re.findall(
            r'--8<-- "((?:spec|code|claims|drawing|moving|picture|scene)/[^"]+)"', page.read_text()
        ):
            write(FRAGMENTS / name, fragment(name, report))


def fragment(name: str, report: pages.Report) -> str:
    """What a page includes by name.

    spec/test_allocator.md                                          the facts of a test file
    code/minipaged/memory/block_table.py/BlockTable.append.py       a piece of source
    claims/fig02.md                                                 an experiment: published, measured
    drawing/kernels/triton/decode.py.md                             the docstring of a module
    picture/preemption.html                                         a picture of docs/assets
    moving/home.html                                                figure 6 of the paper, as a row of frames
    scene/fig8.html                                                 a run of the engine in the viewer
    """
    kind, _, rest = name.partition("/")
    if kind == "spec":
        return pages.facts(rest.removesuffix(".md"), report)
    if kind == "claims":
        return pages.claims(rest.removesuffix(".md"))
    if kind == "picture":
        return pages.picture(rest.removesuffix(".html"))
    if kind == "drawing":
        return docstring_as_markdown(rest.removesuffix(".md"))
    if kind == "moving":
        label = "Figure 6 of the paper, step by step, from a trace of the engine"
        return moving.frames_html(moving.figure_6(), label)
    if kind == "scene":
        return viewer_scenes.scene_html(rest.removesuffix(".html"))
    path, _, piece = rest.rpartition("/")
    return piece_of_source(path, piece.removesuffix(".py"))


def write(path: Path, text: str) -> None:
    """Write a file, and the folder it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main()
