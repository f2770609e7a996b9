"""The generated pages, each a function that returns Markdown."""

from __future__ import annotations

import functools
import json
import os
import re
import textwrap
import tomllib
import typing
from collections.abc import Callable
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

from reading import ROOT, Fact, Outcome, read_facts, read_messages

from minipaged.config import EngineConfig
from minipaged.learn.lessons import Lesson, read_lessons
from minipaged.playground.lessons import DEMOS
from minipaged.simulation.claims import measured_text, published_text
from minipaged.viewer.pictures import build as drawing
from minipaged.viewer.pictures import ideas, palette
from minipaged.viewer.pictures.svg import Svg

Replacement = Callable[[re.Match[str]], str]
Report = dict[tuple[str, str], Outcome] | None

# Where a reader of the site finds a file of the repository: the page that includes it.
PAGE_OF = {
    "minipaged/memory/allocator.py": "concepts/allocator.md",
    "minipaged/memory/block_table.py": "concepts/block-table.md",
    "minipaged/memory/page_growth.py": "concepts/page-growth.md",
    "minipaged/memory/prefix_cache.py": "concepts/prefix-cache.md",
    "minipaged/memory/swap_space.py": "concepts/swapping.md",
    "minipaged/scheduling/plan.py": "concepts/scheduler.md",
    "minipaged/scheduling/scheduler.py": "concepts/scheduler.md",
    "minipaged/scheduling/preemption.py": "concepts/preemption.md",
    "minipaged/scheduling/policies.py": "concepts/batch-policies.md",
    "minipaged/decoding/methods.py": "concepts/parallel-sampling.md",
    "minipaged/decoding/beam_search.py": "concepts/beam-search.md",
    "minipaged/decoding/speculation.py": "concepts/speculation.md",
    "kernels/reference/attention.py": "concepts/paged-attention.md",
    "kernels/reference/oracle.py": "concepts/paged-attention.md",
    "kernels/triton/decode.py": "kernels.md",
    "kernels/triton/prefill.py": "kernels.md",
    "docs/architecture.md": "architecture.md",
    "docs/benchmarks/cpu_kernels.md": "cpu-kernels.md",
    "CONTRIBUTING.md": "guides/contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def front_matter(**entries: str) -> str:
    """A page's front matter."""
    return "---\n" + "".join(f"{key}: {value}\n" for key, value in entries.items()) + "---\n\n"


def commands() -> str:
    """The two commands of the README, each part on a line of its own, so that they fit on a phone."""
    readme = (ROOT / "README.md").read_text()

    def piece(pattern: str) -> str:
        found = re.search(pattern, readme, re.DOTALL)
        assert found is not None, f"README.md has no {pattern}"
        return found[1]

    run, test = (
        piece(rf"<!-- {name} -->\n(```bash\n.*?```\n)").replace(" && ", " &&\n") for name in ("run", "test")
    )
    prints = piece(r"Among other lines, it prints:\n\n(```text\n.*?```\n)")
    wheels = piece(r"(On Linux, pip installs torch.*?\n\n)")
    return (
        "In a clone of the repository, install minipaged and generate text with the embedded model (3 "
        "million parameters, no download, no GPU).\n\n"
        f"{run}\nAmong other lines, it prints:\n\n{prints}\n{wheels}"
        f"Install it and run the tests:\n\n{test}"
    )


def palette_css() -> str:
    """The colours of the pictures, as variables for the style sheets; on paper, always the light ones."""
    return (
        f":root,[data-md-color-scheme=default]{{{palette.variables(palette.LIGHT)}}}\n"
        f"@media screen{{[data-md-color-scheme=slate]{{{palette.variables(palette.DARK)}}}}}\n"
        f"@media print{{[data-md-color-scheme] .mp.mp{{{palette.variables(palette.LIGHT)}}}}}\n"
    )


# -- configuration --------------------------------------------------------------------------------------


def configuration() -> str:
    """Every field of `EngineConfig`."""
    lines = [
        front_matter(source="minipaged/config.py"),
        "# Configuration\n",
        "Every setting of the engine, read from `EngineConfig` when this page was built. `LLM(...)` takes",
        "the names as keyword arguments, `minipaged generate` and `minipaged bench` take the flags. A value",
        "that cannot work is refused when the engine is built, with a message that names the field, the",
        "value and the fix.",
        "",
    ]
    hints = typing.get_type_hints(EngineConfig)
    for option in fields(EngineConfig):
        flag = option.name.replace("_", "-")
        flags = f"`--{flag}`"
        if isinstance(option.default, bool):
            flags += f", `--no-{flag}`" if option.name.startswith("enable_") else ""
        lines += [
            f"## `{option.name}` {{ #{option.name} }}\n",
            f"{_with_links(option.metadata['help'], option.name)}\n",
            f"{_type_text(hints[option.name])} · default {_default_text(option.default)} · {flags}\n",
        ]
    return "\n".join(lines)


def _with_links(text: str, own: str) -> str:
    """Names of other settings become links."""
    others = "|".join(option.name for option in fields(EngineConfig) if "_" in option.name)
    return re.sub(
        rf"\b({others})\b", lambda name: name[0] if name[0] == own else f"[`{name[0]}`](#{name[0]})", text
    )


def _default_text(value: Any) -> str:
    if value is None:
        return "not set"
    gib = f" ({value >> 30} GiB)" if type(value) is int and value and value % (1 << 30) == 0 else ""
    return f"`{value}`{gib}"


def _type_text(hint: Any) -> str:
    choices = typing.get_args(hint)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "one of " + ", ".join(f"`{choice}`" for choice in choices)
    kinds = [kind.__name__ for kind in choices or (hint,) if kind is not type(None)]
    return {"int": "integer", "float": "number", "bool": "switch", "str": "text"}[kinds[0]]


# -- specification --------------------------------------------------------------------------------------


def specification(report: Report) -> str:
    """All tests of `tests/concepts`, by concept."""
    files = sorted((ROOT / "tests/concepts").glob("test_*.py"))
    count = sum(len(read_facts(file)) for file in files)
    lines = [
        front_matter(source="tests/concepts"),
        "# Specification\n",
        f"What each class must do: {count} facts, each of them a test. A test's name states the fact; what",
        "follows is the bug that the test would catch. Students' own classes are run against the same tests.",
        "",
    ]
    if report is None:
        lines.append("This page was built without a test report, so it carries no marks.\n")
    else:
        cases = [sum(outcome[i] for outcome in report.values()) for i in range(3)]
        lines.append(
            f"Marks of the run that this build was made from: {cases[0]} cases passed, {cases[1]} failed, "
            f"{cases[2]} skipped. A test with several cases says how many.\n"
        )
    for file in files:
        lines.append(f"## {_title(file.stem)} {{ #{file.stem} }}\n")
        lines.append(f"`tests/concepts/{file.name}`\n")
        lines.append(facts(file.stem, report))
    return "\n".join(lines)


def facts(stem: str, report: Report) -> str:
    """The facts of one test file as a list.

    Raises:
        FileNotFoundError: there is no such file.
    """
    lines, section = [], ""
    for fact in read_facts(ROOT / "tests/concepts" / f"{stem}.py"):
        if fact.section != section:
            section = fact.section
            lines.append(f"\n**{section[0].upper()}{section[1:]}**\n")
        catches = fact.catches.replace("\n", " ").replace("<", "&lt;").replace("*", r"\*")
        lines.append(f"- {_mark(fact, stem, report)}**{fact.statement}.**\n  {catches}".rstrip())
    return '<div class="facts" markdown="1">\n\n' + "\n".join(lines) + "\n\n</div>\n"


def _mark(fact: Fact, stem: str, report: Report) -> str:
    outcome = None if report is None else report.get((stem, fact.name))
    if outcome is None:
        return ""
    if outcome.failed:
        return '<span class="mark failed">✗ failed</span> '
    if not outcome.passed:
        return '<span class="mark skipped">○ skipped</span> '
    cases = "" if outcome.passed == 1 else f" {outcome.passed} cases"
    return f'<span class="mark passed">✓ passed{cases}</span> '


def _title(stem: str) -> str:
    words = stem.removeprefix("test_").replace("_", " ")
    return {"fcfs": "FCFS scheduling", "kv manager": "KV manager"}.get(words, words[0].upper() + words[1:])


# -- lessons --------------------------------------------------------------------------------------------


def lessons() -> dict[str, str]:
    """A page per lesson of `tutorials/`, and their index."""
    written = {}
    rows = []
    needs = []
    for lesson in read_lessons(ROOT):
        folder, name = lesson.folder, f"{lesson.folder.name}.md"
        source = folder / "lesson.md"
        text = PICTURE.sub(lambda found: picture(found[1]), source.read_text())
        text = ANSWER.sub(answer, text)
        text = with_editor(lesson, rewrite_links(text, folder, Path("learn")))
        written[f"learn/{name}"] = (
            front_matter(source=str(source.relative_to(ROOT))) + text + files_of(lesson)
        )
        needed = tomllib.loads((folder / "tasks.toml").read_text())["needs"]
        needs.append((lesson.number, lesson.title, needed))
        rows.append(
            f"| {lesson.number} | [{lesson.title}]({name}) | {', '.join(needed)} | {lesson.minutes} |"
        )
    written["learn/index.md"] = "\n".join(
        [
            front_matter(source="tutorials"),
            "# Learn\n",
            "In most lessons you write a part of the engine: a class, a function or a kernel. The project's",
            "own tests check it, and then the whole engine runs with your part in place of its own. (Lessons",
            "00, 11 and 12 have nothing to write.) Lessons 01, 02, 04 to 09 and 13 have an editor on their",
            "pages: there is nothing to install, and your code stays in your browser. All lessons work in a",
            "clone of the repository, where you can continue with a downloaded `exercise.py`.",
            "",
            "To look before you write, take [the tour](tour.md): fifteen minutes, nothing to install.",
            "",
            "**One afternoon?** Take [the tour](tour.md) and lessons [00](00_kv_cache.md),",
            "[01](01_block_table.md) and [02](02_allocator.md), read [Worked",
            "numbers](04_scheduler.md#worked-numbers) in lesson 04, and end with",
            "[lesson 06](06_preemption.md): about three hours, from a block table to preemption.",
            "",
            "In a clone, [install minipaged](../index.md#run-it) with its tests. Then:",
            "",
            "```bash",
            "minipaged learn            # which lesson is red, which is green",
            "minipaged learn next       # what to read, what to write",
            "minipaged learn check 01   # run the tests of a lesson on your code",
            "```\n",
            f'<div class="on-wide">{framed(ideas.lessons_svg(needs))}</div>',
            "",
            "| number | lesson | needs | minutes |",
            "|---:|---|---|---:|",
            *rows,
            "",
            "You may skip lessons: where a command names an exercise that you have not started, the",
            "project's own class takes its place.",
            "",
        ]
    )
    return written


def tour() -> str:
    """The notebook of the tour with the pictures that lie in it."""
    lines = [front_matter(source="tutorials/tour.ipynb"), run_elsewhere("tutorials/tour.ipynb")]
    for cell in json.loads((ROOT / "tutorials/tour.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [rewrite_links(source, ROOT / "tutorials", Path("learn")), ""]
            continue
        lines.append(folded("The code", source))
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/svg+xml" in data:
                shown = Svg("".join(data["image/svg+xml"]))
                shown.narrow = output["metadata"].get("narrow")
                lines.append(framed(shown))
            elif "text/html" in data:
                lines.append("".join(data["text/html"]) + "\n")
            else:
                text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
                lines.append(f"```text\n{text}\n```\n")
    return "\n".join(lines)


def run_elsewhere(notebook: str) -> str:
    """Links that open a notebook of the repository in Colab and Binder, if it is known to be on GitHub."""
    address = os.environ.get("MINIPAGED_REPO_URL", "").rstrip("/")
    found = re.fullmatch(r"https://github\.com/([^/]+/[^/]+)", address)
    if found is None:
        return ""
    return (
        f"[Open in Colab](https://colab.research.google.com/github/{found[1]}/blob/main/{notebook}) (install "
        f"first: `%pip install git+{address}`) · "
        f"[Open in Binder](https://mybinder.org/v2/gh/{found[1]}/main?labpath={notebook})\n"
    )


ABBREVIATIONS = {
    "KV cache": "KV cache",
    "Prefill": "Prefill",
    "prefill": "Prefill",
    "Copy-on-write": "Copy-on-write",
    "copy-on-write": "Copy-on-write",
    "watermark": "Watermark",
    "evictable": "Evictable block",
    "TTFT": "TTFT",
    "ITL": "ITL",
    "CUDA graph": "CUDA graph",
    "GQA": "GQA",
    "MLA": "MLA",
}
"""What is explained on hover, and the entry of the glossary that says it."""


def abbreviations() -> str:
    """The definitions that every page is given: the first sentence of an entry of the glossary."""
    text = (ROOT / "docs/glossary.md").read_text()
    lines = []
    for word, entry in ABBREVIATIONS.items():
        found = re.search(rf"^{re.escape(entry)}\n:   (.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
        assert found is not None, f"{entry} is not in the glossary"
        said = " ".join(re.sub(r"`[^`]*`", "", found[1]).split())
        lines.append(f"*[{word}]: {said.split('. ')[0].rstrip('.')}.")
    return "\n".join(lines) + "\n"


PICTURE = re.compile(r"^!\[[^\]]*\]\(\.\./\.\./docs/assets/([\w-]+)\.svg\)$", re.MULTILINE)
"""A picture of a lesson: on its page it stands in the page itself."""

ANSWER = re.compile(r"^ +<details><summary>(.*)</summary>\n\n((?: +.*\n|\n)*?) +</details>\n", re.MULTILINE)
"""An answer below a question of a lesson: in a list, the site renders no Markdown between HTML tags."""


def answer(found: re.Match[str]) -> str:
    """An answer to unfold, indented as the site's Markdown wants the content of a list."""
    text = textwrap.indent(textwrap.dedent(found[2]), " " * 8)
    return f'\n    ??? note "{found[1]}"\n\n{text}\n'


def with_editor(lesson: Lesson, text: str) -> str:
    """The text of a lesson; if it needs no torch, with an editor after its tasks (docs/play/lesson.js)."""
    if lesson.number not in DEMOS:
        return text
    looks = escape(json.dumps([demo.look for demo in DEMOS[lesson.number]]))
    before, tasks, rest = text.partition("\n## Tasks\n")
    body, heading, after = rest.partition("\n## ")
    return (
        f"{before}{tasks}{body}\n## Write it here\n\n"
        "The editor, the tests and the engine run in this page; nothing is installed.\n\n"
        f'<link rel="stylesheet" href="../../play/lesson.css">\n'
        f'<div class="lesson" data-number="{lesson.number}" data-name="{lesson.folder.name}" '
        f'data-demos="{looks}">\n'
        '<button type="button" class="md-button md-button--primary">Open the editor</button>\n'
        '<p role="status"></p>\n<noscript><p>The editor needs JavaScript. In a clone, write in '
        f"<code>tutorials/{lesson.folder.name}/exercise.py</code>; "
        f"<code>minipaged learn check {lesson.number}</code> runs its tests.</p></noscript>\n</div>\n"
        f'<script type="module" src="../../play/lesson.js"></script>\n{heading}{after}'
    )


def files_of(lesson: Lesson) -> str:
    """The exercise as it ships, folded up, and where the tests of the lesson are."""
    name = lesson.folder.name
    notebook = f"[This lesson as a notebook]({name}.ipynb)."
    if not lesson.start.exists():
        return f"\n{notebook}\n"
    files = sorted({test.partition("::")[0] for test in lesson.tests})
    return (
        f"\n## The files\n\nYou write in `tutorials/{name}/exercise.py`; its tests are in "
        f"{', '.join(f'`{file}`' for file in files)}. {notebook}\n\n"
    ) + folded("exercise.py", lesson.start.read_text())


def folded(title: str, code: str) -> str:
    """Python code under a title, to be unfolded."""
    shown = "\n".join(f"    {line}".rstrip() for line in code.splitlines())
    return f'??? example "{title}"\n\n    ```{{ .python }}\n{shown}\n    ```\n'


def rewrite_links(text: str, source: Path, page: Path) -> str:
    """Make the relative links of a repository file work on the page that shows it.

    A link to a file of the repository goes to the page that includes it; without one to the file in the
    repository, if its address is known (MINIPAGED_REPO_URL), else it is no link any more.

    Args:
        source: folder in which the file lies.
        page: folder of the page, relative to docs/.
    """

    def rewritten(match: re.Match[str]) -> str:
        image, label, target, anchor = match.groups()
        if re.match(r"[a-z]+:", target) or not target:
            return match[0]
        path = os.path.relpath((source / target).resolve(), ROOT)
        where = PAGE_OF.get(path)
        if (lesson := re.fullmatch(r"tutorials/(\w+)(?:/lesson\.md)?/?", path)) is not None:
            where = f"learn/{lesson[1]}.md"
        elif re.fullmatch(r"docs/benchmarks/\w+\.md", path) and where is None:
            where, anchor = "benchmarks.md", anchor or f"#{section_of(path)}"
        elif path.startswith("docs/") and where is None:
            where = path.removeprefix("docs/") + ("/index.md" if (ROOT / path).is_dir() else "")
        if where is not None:
            return f"{image}[{label}]({os.path.relpath(where, page)}{anchor or ''})"
        address = os.environ.get("MINIPAGED_REPO_URL")
        return f"{image}[{label}]({address}/blob/main/{path})" if address else label

    return outside_code(text, re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)"), rewritten)


def section_of(path: str) -> str:
    """The anchor of a file that is a section of a page: its heading."""
    return anchor_of((ROOT / path).read_text().partition("\n")[0])


def anchor_of(heading: str) -> str:
    """The anchor that a page gives to a heading."""
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def outside_code(text: str, pattern: re.Pattern[str], replacement: str | Replacement) -> str:
    """Replace a pattern in Markdown, leaving fenced code alone."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else pattern.sub(replacement, part) for part in parts)


def one_level_down(text: str) -> str:
    """Headings one rank lower, for a file that becomes a section of a page."""
    return outside_code(text, re.compile(r"^(#+ )", re.MULTILINE), r"#\1")


# -- messages, figures, benchmarks ----------------------------------------------------------------------


def messages() -> str:
    """Every error and warning, by the module that says it."""
    lines = [
        front_matter(source="minipaged"),
        "# All messages\n",
        "Every error and warning of the project, collected from its source when this page was built. `…`",
        "stands for a value. The common ones are explained in [Troubleshooting](troubleshooting.md).\n",
    ]
    path = ""
    for message in read_messages():
        if message.path != path:
            path = message.path
            lines.append(f"\n## `{path}`\n")
        text = message.text.replace("`", "'").replace("\n", " ").strip()
        lines.append(f"- {message.kind}: `{text}`")
    return "\n".join(lines) + "\n"


HEADLINES = [
    ("fig02", "KV memory holding token states, Orca (Max)"),
    ("fig02", "KV memory holding token states, paged"),
    ("fig12", "sustained rate of paged over Orca (Oracle), OPT-13B, 1 GPU, ShareGPT"),
    ("fig13", "batched requests, paged, ShareGPT, 2 req/s"),
    ("fig15", "blocks saved, Alpaca, beam search, width 4"),
    ("fig16", "sustained rate over Orca (Oracle), prefix of 341 tokens, paged, prefix shared"),
    ("growth", "requests finished, growing over reserving"),
]
"""The claims that README and home page show, by experiment."""


def headlines() -> str:
    """A few of the claims, as a table."""
    lines = ["| claim | source | published | measured here |", "|---|---|---|---|"]
    for experiment, text in HEADLINES:
        result = experiment_result(experiment)
        lines += [claim_row(claim) for claim in result["claims"] if claim["claim"] == text]
    return "\n".join(lines) + "\n"


def experiment_result(name: str) -> dict[str, Any]:
    """What `minipaged reproduce` recorded of an experiment in `docs/reproduce/results.json`."""
    results = json.loads((ROOT / "docs/reproduce/results.json").read_text())
    return next(result for result in results if result["experiment"] == name)


def claim_row(claim: dict[str, Any]) -> str:
    """A row of a table: claim, source, published, measured."""
    return f"| {claim['claim']} | {claim['source']} | {published_text(claim)} | {measured_text(claim)} |"


def claims(experiment: str) -> str:
    """One experiment: picture, claims, measured numbers; for pages one folder below docs/."""
    result = experiment_result(experiment)
    anchor = anchor_of(result["title"])
    lines = [
        '<figure class="chart" markdown="1">',
        f'<div class="sheet" markdown="span">![{result["title"]}](../reproduce/{experiment}.svg)</div>',
        f"<figcaption>{result['title']}: measured here, after {result['source']}.</figcaption>",
        "</figure>\n",
        "| claim | source | published | measured here |",
        "|---|---|---|---|",
        *map(claim_row, result["claims"]),
        f"\n`minipaged reproduce {experiment}`, on a simulated clock. What that means, and what differs: "
        f"[{result['title']}](../reproduce/index.md#{anchor}).\n",
    ]
    return "\n".join(lines)


def picture(name: str) -> str:
    """A picture of `docs/assets` in the page itself, so that it follows the page's colours."""
    return framed(pictures()[f"{name}.svg"])


pictures = functools.cache(drawing.pictures)


def framed(svg: Svg) -> str:
    """An SVG in the page; on a phone, a large one without a narrow form scrolls rather than shrinks."""
    width = int(re.search(r'viewBox="0 0 (\d+)', svg)[1])
    if svg.narrow or width <= 560:
        return f'<figure class="frame"><div class="sheet small">{responsive(svg)}</div></figure>\n'
    shape = "sheet wide" if width > 800 else "sheet"
    sheet = f'<div class="{shape}" tabindex="0" role="group">{svg.strip()}</div>'
    return f'<figure class="frame">{sheet}</figure>\n'


def responsive(svg: Svg) -> str:
    """A picture, and its narrow form if it has one; the page shows one of them."""
    if svg.narrow is None:
        return svg.strip()
    return f'<div class="on-wide">{svg.strip()}</div><div class="on-phone">{svg.narrow.strip()}</div>'


BENCHMARKS = ("summary", "peers", "single_stream", "serving", "gpu", "how_to_compare")
"""The sections of the page on benchmarks: results first, the method last."""


def benchmarks() -> str:
    """Measured figures: files of `docs/benchmarks/`, as they are."""
    folder = ROOT / "docs/benchmarks"
    lines = [
        front_matter(source="docs/benchmarks"),
        "# Benchmarks\n",
        "This page lists only what was measured, with the machine, the versions, the date and the command.",
        "What is not here has not been measured.\n",
    ]
    for name in BENCHMARKS:
        section = (folder / f"{name}.md").read_text()
        lines.append(rewrite_links(one_level_down(section), folder, Path()))
    return "\n".join(lines)


def cpu_kernels() -> str:
    """What each change to the CPU kernels gained."""
    file = ROOT / "docs/benchmarks/cpu_kernels.md"
    return front_matter(source="docs/benchmarks/cpu_kernels.md") + rewrite_links(
        file.read_text(), file.parent, Path()
    )
