"""What a teacher is given: slides, cheat sheet, notebooks, the plan, the grading workflow, hovers."""

import base64
import csv
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from minipaged.cli.main import app
from minipaged.learn.lessons import read_lessons
from minipaged.learn.words import sentence
from tests.docs.browser import Browser, find_chromium
from tests.docs.site import ROOT, build_once

pytest.importorskip("markdown", reason='mkdocs is not installed; pip install -c constraints.txt -e ".[docs]"')

import handouts
import pages

LESSONS = sorted(file.parent for file in ROOT.glob("tutorials/*/lesson.md"))
TEACHING = (ROOT / "docs/guides/teaching.md").read_text()


def test_a_slide_has_a_heading_and_the_pictures_it_names():
    """Catches a slide that shows the words `![](name)`, and two slides run into one."""
    deck = handouts.slides()
    parts = re.split(r"^---$", (ROOT / "docs/_generate/slides.md").read_text(), flags=re.MULTILINE)
    made = re.findall(r"<section>(.*?)</section>", deck, re.DOTALL)
    assert len(made) == len(parts)
    for part, slide in zip(parts, made):
        assert len(re.findall(r"<h[12]>", slide)) == 1
        assert slide.count("<svg") == part.count("![](")
    assert f"[{len(parts)} slides](" in TEACHING


@pytest.mark.parametrize("make", [handouts.slides, handouts.cheat_sheet])
def test_a_handout_is_one_file(make):
    """Catches a picture, a font or a script that is not there without a network."""
    html = make()
    assert re.findall(r'(?:src|href)=(?!"data:)', html) == []
    assert re.findall(r"url\((?!#)|@import", html) == []
    assert "![" not in html
    assert "`" not in re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)


def test_commands_of_the_cheat_sheet_work(tmp_path, monkeypatch):
    """Catches a command that asks for more than the sheet gives it. What takes long is asked for help."""
    monkeypatch.chdir(tmp_path)
    _, _, section = (ROOT / "docs/_generate/cheat_sheet.md").read_text().partition("## Commands")
    commands = [text.removeprefix("minipaged ") for text in re.findall("`(.+?)`", section)]
    assert len(commands) > 5
    for command in commands:
        words = shlex.split(command.replace("...", "--prompt Once"))
        words += [] if words[0] in ("generate", "view") else ["--help"]
        ran = CliRunner().invoke(app, words)
        assert ran.exit_code == 0, (command, ran.exception)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "count"), [(handouts.cheat_sheet, 1), (handouts.slides, None)])
def test_handouts_fit_their_sheets(make, count, tmp_path):
    """Catches a cheat sheet whose last lines are on a second sheet, and a slide that takes two."""
    (tmp_path / "page.html").write_text(make())
    command = [find_chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
    address = (tmp_path / "page.html").as_uri()
    subprocess.run(
        [*command, f"--print-to-pdf={tmp_path / 'page.pdf'}", address],
        check=True,
        capture_output=True,
        timeout=60,
    )
    sheets = len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "page.pdf").read_bytes()))
    assert sheets == (count or make().count("<section>"))


@pytest.mark.slow
@pytest.mark.parametrize("make", [handouts.slides, handouts.cheat_sheet])
def test_a_handout_fits_a_phone_and_all_of_it_is_its_main_part(make, tmp_path):
    """Catches a title that is wider than the screen, and text outside of main."""
    (tmp_path / "page.html").write_text(make())
    with Browser() as browser:
        page = browser.open((tmp_path / "page.html").as_uri(), 360, dark=False)
        for width in (1280, 360, 320):
            page.resize(width)
            assert page.value("document.documentElement.scrollWidth") <= width
        outside = page.value("[...document.body.children].map(each => each.tagName)")
        assert [name for name in outside if name != "SCRIPT"] == ["MAIN"]


@pytest.mark.parametrize("folder", LESSONS, ids=lambda folder: folder.name[:2])
def test_a_notebook_has_the_text_the_code_and_the_pictures_of_its_lesson(folder):
    """Catches a code block that is text in the notebook, and a picture that is a broken link there."""
    text = (folder / "lesson.md").read_text()
    notebook = json.loads(handouts.notebook(folder))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        assert block.rstrip() in code
    said = "".join("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown")
    assert "/docs/" not in "".join(re.findall(r"^!\[.*", said, re.MULTILINE))
    attached = [a for cell in notebook["cells"] for a in cell.get("attachments", {}).values()]
    assert len(attached) == len(re.findall(r"^!\[", text, re.MULTILINE))
    assert all(
        base64.b64decode(a["image/svg+xml"]).lstrip().startswith((b"<svg", b"<?xml")) for a in attached
    )
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_a_command_of_a_lesson_is_one_line_of_a_notebook():
    """Catches a command that goes on in the next line: a notebook would run it in two pieces."""
    notebook = json.loads(handouts.notebook(ROOT / "tutorials/08_prefix_cache"))
    lines = [line for cell in notebook["cells"] if cell["cell_type"] == "code" for line in cell["source"]]
    commands = [line for line in lines if line.startswith("!")]
    assert any("--max-num-seqs 1" in line and "--use prefix_cache" in line for line in commands)
    assert not any(line.rstrip().endswith("\\") for line in commands)


@pytest.mark.parametrize(
    ("address", "links"),
    [("", 0), ("https://example.org/minipaged", 0), ("https://github.com/someone/minipaged", 2)],
)
def test_colab_and_binder_are_linked_where_they_can_find_the_notebook(address, links, monkeypatch):
    """Catches a button that leads nowhere: both open notebooks of GitHub."""
    monkeypatch.setenv("MINIPAGED_REPO_URL", address)
    text = pages.run_elsewhere("tutorials/tour.ipynb")
    assert text.count("](https://") == links
    assert text.count("someone/minipaged") >= links


def test_the_plan_has_every_lesson_and_its_minutes():
    """Catches a lesson that no day has, and times that were changed in the lesson alone."""
    minutes = {lesson.number: lesson.minutes for lesson in read_lessons(ROOT)}
    rows = re.findall(r"^\| \d+ \| [^|]+ \| ([^|]+) \| (\d+) \|$", TEACHING, re.MULTILINE)
    planned = []
    for lab, total in rows:
        numbers = re.findall(r"\b\d\d\b", lab)
        planned += numbers
        given = [minutes[number] for number in numbers]
        assert int(total) == (max(given) if " or " in lab else sum(given)), lab
    assert sorted(planned) == sorted(minutes)


def test_the_report_that_is_shown_counts_the_tests_there_are():
    """Catches numbers from before a test was added, and a red test that has another name by now."""
    [text] = re.findall(r"^```json\n(.*?)^```$", TEACHING, re.MULTILINE | re.DOTALL)
    report = json.loads(text)
    lessons = {lesson.number: lesson for lesson in read_lessons(ROOT)}
    assert report["tasks"] == sum(len(lesson.tasks) for lesson in lessons.values())
    for shown in report["lessons"]:
        tasks = {task.name: task.tests for task in lessons[shown["number"]].tasks}
        for task in shown["tasks"]:
            tests = tasks[task["name"]]
            assert (task["tests"], task["tests"] - task["passed"]) == (len(tests), len(task["red"]))
            assert set(task["red"]) <= {sentence(test) for test in tests}


def test_the_grading_workflow_is_one():
    """Catches a workflow with a wrong indentation: it would be found by the first class."""
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra `docs`")
    [text] = re.findall(r"^```yaml\n(.*?)^```$", TEACHING, re.MULTILINE | re.DOTALL)
    steps = yaml.safe_load(text)["jobs"]["grade"]["steps"]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    commands = "\n".join(step["run"] for step in steps if "run" in step)
    assert "minipaged learn report --json > report.json" in commands
    for script in (step["run"] for step in steps if "run" in step):
        subprocess.run(["bash", "-n", "-c", script], check=True)


def test_the_loop_grades_each_student_alone(tmp_path, monkeypatch):
    """Catches an exercise of the student before, and a table that a name with umlauts or a comma breaks."""
    for student in ("Jörg Müller, 2", "b"):
        (tmp_path / "handed_in" / student / "tutorials/01_x").mkdir(parents=True)
    (tmp_path / "handed_in/Jörg Müller, 2/tutorials/01_x/exercise.py").write_text("1")
    for folder in ("clone/tutorials/.start", "clone/tutorials/01_x", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "clone/tutorials/.start/01_x.py").write_text("0")
    command = tmp_path / "bin/minipaged"
    task = """{\\"name\\": \\"a, b\\", \\"green\\": $n}"""
    lesson = f"""{{\\"number\\": \\"01\\", \\"tasks\\": [{task}]}}"""
    text = f"""{{\\"green\\": $n, \\"lessons\\": [{lesson}]}}"""
    command.write_text(f'#!/bin/sh\nn=$(cat tutorials/01_x/exercise.py)\necho "{text}"\n')
    command.chmod(0o755)
    monkeypatch.chdir(tmp_path / "clone")
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    [loop] = re.findall(r'^```bash title="grade.sh"\n(.*?)^```$', TEACHING, re.MULTILINE | re.DOTALL)
    [script] = re.findall(r'^```python title="grades.py"\n(.*?)^```$', TEACHING, re.MULTILINE | re.DOTALL)
    subprocess.run(["bash", "-c", loop], check=True)
    (tmp_path / "handed_in/a").mkdir()  # whose report was interrupted
    (tmp_path / "handed_in/a/report.json").touch()
    made = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert made.stdout == "a: the report is empty; grade it again\n"
    with open("grades.csv", newline="", encoding="utf-8-sig") as file:
        rows = list(csv.reader(file))
    assert rows == [["student", "green", "01 a, b"], ["Jörg Müller, 2", "1", "1"], ["b", "0", "0"]]


def test_every_hover_is_an_entry_of_the_glossary():
    """Catches an entry that was renamed, and a hover of half a sentence."""
    lines = pages.abbreviations().splitlines()
    assert len(lines) == len(pages.ABBREVIATIONS)
    for line in lines:
        assert re.fullmatch(r"\*\[[\w -]+\]: \S.{15,200}\.", line), line


@pytest.mark.slow
def test_terms_are_explained_where_they_stand(tmp_path_factory):
    """Catches definitions that no page includes, or that a page shows as text."""
    site = build_once(tmp_path_factory)
    page = (site / "guides/teaching/index.html").read_text() + (
        site / "concepts/prefix-cache/index.html"
    ).read_text()
    assert '<abbr title="' in page
    assert "*[KV cache]" not in page
