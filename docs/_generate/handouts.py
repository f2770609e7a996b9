"""What a teacher shows and hands out: slides, cheat sheet, notebooks; each one file that needs nothing."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import markdown
from reading import ROOT

from minipaged.learn.lessons import start_of
from minipaged.viewer.pictures import palette

HERE = ROOT / "docs/_generate"
SYSTEM = "system-ui,'Segoe UI',Roboto,'Helvetica Neue','DejaVu Sans',sans-serif"

# Light in every case: a projector and a printer have no dark mode.
PAGE = """<!doctype html>
<html lang="en" data-md-color-scheme="default">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>:root{{{variables}color-scheme:light}}{css}</style>
<body>
{body}
</body>
</html>
"""

SLIDES_CSS = f"""
html{{scroll-snap-type:y mandatory;font:24px/1.45 {SYSTEM};
  color:var(--mp-ink);background:var(--mp-paper)}}
body{{margin:0;counter-reset:slide}}
section{{box-sizing:border-box;min-height:100vh;padding:5vh 7vw;scroll-snap-align:start;
  counter-increment:slide;
  display:flex;flex-direction:column;justify-content:center;position:relative;break-after:page}}
section::after{{content:counter(slide);position:absolute;right:3vw;bottom:3vh;font-size:14px;
  color:var(--mp-soft)}}
h1{{font-size:64px;margin:0}}
h2{{font-size:40px;line-height:1.15;margin:0 0 24px}}
p{{margin:16px 0 0}}
em,small{{color:var(--mp-soft);font-style:normal;font-size:20px}}
li{{margin:10px 0}}
code{{font-size:.9em}}
svg{{width:100%;height:auto;max-height:62vh}}
figure{{margin:0}}
figure + figure svg, section:has(figure + figure) svg{{max-height:36vh}}
@page{{size:1280px 720px;margin:0}}
@media print{{section{{height:720px;min-height:0}}svg{{max-height:440px}}
  section:has(figure + figure) svg{{max-height:250px}}}}
@media (max-width:700px){{html{{font-size:18px;scroll-snap-type:none}}
  h1{{font-size:min(40px,9.5vw)}}h2{{font-size:28px}}}}
"""

# Space, arrows and page keys turn slides; without scripts they scroll.
SLIDES_SCRIPT = """<script>
addEventListener("keydown", (event) => {
  const steps = { ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1 };
  const step = steps[event.key];
  if (!step) return;
  event.preventDefault();
  const slides = [...document.querySelectorAll("section")];
  const now = slides.findIndex((slide) => slide.getBoundingClientRect().bottom > innerHeight / 2);
  slides[Math.max(0, Math.min(slides.length - 1, now + step))].scrollIntoView();
});
</script>"""

SHEET_CSS = f"""
@page{{size:A4;margin:9mm}}
html{{font:13.5px/1.42 {SYSTEM};color:var(--mp-ink);background:var(--mp-paper)}}
body{{margin:0 auto;max-width:192mm;padding:8px}}
h1{{font-size:22px;margin:0 0 8px;column-span:all}}
main{{columns:2;column-gap:7mm}}
h2{{font-size:15.5px;margin:0 0 4px;color:var(--mp-hue0);border-bottom:1px solid var(--mp-line)}}
section{{break-inside:avoid;margin:0 0 10px}}
p,ul,ol{{margin:4px 0;padding-left:0}}
li{{margin-left:16px}}
table{{border-collapse:collapse;width:100%}}
th,td{{text-align:left;padding:2px 6px 2px 0;vertical-align:top;border-bottom:1px solid var(--mp-shade)}}
th:empty{{display:none}}
code{{font-size:11.5px}}
svg{{width:100%;height:auto}}
@media print{{body{{padding:0}}}}
@media (max-width:700px){{html{{font-size:15px}}code{{font-size:13px}}main{{columns:1}}}}
"""


def slides() -> str:
    """The deck: a section a slide, split at `---`."""
    text = (HERE / "slides.md").read_text()
    parts = [
        f"<section>\n{as_html(part)}\n</section>" for part in re.split(r"^---$", text, flags=re.MULTILINE)
    ]
    body = "\n".join(["<main>", *parts, "</main>", SLIDES_SCRIPT])
    return page("PagedAttention: slides", SLIDES_CSS, body)


def cheat_sheet() -> str:
    """One sheet of A4 in two columns."""
    title, *parts = re.split(r"^#+ ", (HERE / "cheat_sheet.md").read_text(), flags=re.MULTILINE)[1:]
    sections = "\n".join(f"<section>\n{as_html('## ' + part)}\n</section>" for part in parts)
    figure = f"<section>{svg('block-table')}</section>"
    return page(
        "PagedAttention: cheat sheet", SHEET_CSS, f"<main><h1>{title.strip()}</h1>\n{figure}{sections}</main>"
    )


def page(title: str, css: str, body: str) -> str:
    """A whole HTML file."""
    return PAGE.format(title=title, variables=palette.variables(palette.LIGHT), css=css, body=body)


def as_html(text: str) -> str:
    """Markdown as HTML; `![](name)` is a picture of docs/assets."""
    html = markdown.markdown(text.strip(), extensions=["tables"])
    return re.sub(
        r'<p><img alt="" src="([\w-]+)" /></p>', lambda found: f"<figure>{svg(found[1])}</figure>", html
    )


def svg(name: str) -> str:
    """A picture of docs/assets."""
    return (ROOT / "docs/assets" / f"{name}.svg").read_text().strip()


PICTURE = re.compile(r"!\[([^\]]*)\]\(\.\./\.\./docs/([\w/-]+)\.svg\)")


def notebook(folder: Path) -> str:
    """A lesson of `tutorials/` as a notebook: its text, its pictures, its code to run, its exercise."""
    text = (folder / "lesson.md").read_text()
    start = start_of(folder)
    cells = []
    for part in re.split(r"(^```(?:python|bash)\n.*?^```\n)", text, flags=re.MULTILINE | re.DOTALL):
        code = re.fullmatch(r"```(python|bash)\n(.*)```\n", part, re.DOTALL)
        if code is None:
            cells += [words(part.strip())] if part.strip() else []
        elif code[1] == "python":
            cells.append(code_cell(code[2]))
        else:
            lines = code[2].replace("\\\n", " ").splitlines()
            cells.append(code_cell("\n".join(f"!{' '.join(line.split())}" for line in lines)))
    if start.exists():
        said = f"Your exercise is `tutorials/{folder.name}/exercise.py` in a clone."
        cells += [words(said), code_cell(start.read_text())]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1) + "\n"


def words(text: str) -> dict[str, object]:
    """A cell of text; its pictures are attached to it."""
    attached = {
        f"{Path(name).name}.svg": {
            "image/svg+xml": base64.b64encode((ROOT / f"docs/{name}.svg").read_bytes()).decode()
        }
        for _, name in PICTURE.findall(text)
    }
    cell: dict[str, object] = {
        "cell_type": "markdown",
        "metadata": {},
        "source": PICTURE.sub(lambda p: f"![{p[1]}](attachment:{Path(p[2]).name}.svg)", text).splitlines(
            keepends=True
        ),
    }
    return cell | ({"attachments": attached} if attached else {})


def code_cell(code: str) -> dict[str, object]:
    """A cell of code that has not been run."""
    source = code.rstrip().splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source}
