"""Lessons written in their pages, in Chromium: red before, green after, and the engine runs with them."""

import json

import pytest

from minipaged.learn.lessons import read_lessons
from minipaged.playground.lessons import DEMOS
from tests.docs.browser import Browser, find_chromium
from tests.docs.site import ROOT, build_once, served
from tests.docs.solutions import solve

pytestmark = pytest.mark.slow

LESSONS = {lesson.number: lesson for lesson in read_lessons(ROOT) if lesson.number in DEMOS}
ENDED = "Python itself has ended in this page, by an exit or an endless recursion; it is loaded anew."
EDITOR = "document.querySelector('.lesson-panel')"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, in a folder below that from which it is served."""
    find_chromium()  # before what takes long
    site = build_once(tmp_path_factory)
    manifest = json.loads((site / "play/engine/manifest.json").read_text())
    if missing := manifest["lessons"]["missing"]:
        pytest.skip(f"the site is built without the lessons' editor: {missing}")
    return site


@pytest.fixture(scope="module")
def address(site, tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    (root / "below").mkdir()
    (root / "below/here").symlink_to(site)
    with served(root) as address:
        yield f"{address}below/here/"


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


def opened(browser, address, number):
    page = browser.open(f"{address}learn/{LESSONS[number].folder.name}/", 1280, dark=False)
    page.value("lesson.show()")
    page.value("lesson.load().then(() => true)")
    return page


@pytest.fixture(scope="module")
def first(browser, address):
    """Lesson 01, opened; its engine is loaded once."""
    page = opened(browser, address, "01")
    yield page
    page.close()


def checked(page, source=None):
    if source is not None:
        page.value(f"lesson.set({json.dumps(source)})")
    return page.value("lesson.check()")


def status(page):
    return page.value("document.querySelector('.lesson-status').textContent")


def test_an_editor_that_cannot_be_loaded_says_so_until_it_can(browser, address):
    """Catches "Failed to fetch", and a failure that is still reported above the open editor."""
    page = browser.open(f"{address}learn/02_allocator/", 1280, dark=False)
    told = "document.querySelector('.lesson > p[role=status]').textContent"
    page.value("document.querySelector('.lesson > button').focus()")
    for url in ("*engine/manifest.json*", "*lessons/editor.js*"):
        browser.call("Network.setBlockedURLs", {"urls": [url]}, page.session)
        page.value("lesson.show().then(() => true)")
        assert page.value(told) == "The editor cannot be loaded; check the connection and try again."
        assert page.value("document.activeElement === document.querySelector('.lesson > button')")
    browser.call("Network.setBlockedURLs", {"urls": []}, page.session)
    page.value("lesson.show().then(() => true)")
    assert page.value(told) == ""
    assert page.value(f"{EDITOR}.hidden") is False
    page.close()


def test_nothing_is_loaded_before_the_click(browser, address, site):
    """Catches an editor and 13 MB for everyone who only reads."""
    for name in ("learn/01_block_table/", "learn/03_paged_attention/"):
        page = browser.open(address + name, 1280, dark=False)
        assert not [url for url in page.requests if "pyodide" in url or "/lessons/" in url or ".zip" in url]
        assert page.value("!!document.querySelector('.lesson')") == ("01" in name)
        page.close()
    manifest = json.loads((site / "play/engine/manifest.json").read_text())
    assert sum((manifest["files"] | manifest["lessons"]["files"]).values()) < 15.5e6


@pytest.mark.parametrize("number", ["01", "04"])
def test_a_lesson_is_red_before_and_green_after(browser, address, first, tmp_path, number):
    """Catches a check that runs nothing, one whose tests are others than `learn check`'s, and errors."""
    page = first if number == "01" else opened(browser, address, number)
    lesson = LESSONS[number]
    page.value("lesson.reset()")
    before = checked(page)
    assert not before["green"]
    assert before["tasks"][0]["tests"] == [["Nothing is written in exercise.py yet."]]
    after = checked(page, solve(lesson, tmp_path).read_text())
    assert after["green"]
    assert [task["head"] for task in after["tasks"]] == [
        f"task {i}: {task.name}  ({len(task.tests)} of {len(task.tests)} tests)"
        for i, task in enumerate(lesson.tasks, start=1)
    ]
    assert f"Lesson {number} is green." in status(page)
    state = page.value("lesson.run()")
    assert state["steps"] > 5
    assert "The engine runs with your classes." in status(page)
    assert page.problems == []
    assert [url for url in page.requests if not url.startswith((address, "data:", "blob:"))] == []
    if number != "01":
        page.close()


def test_a_mistake_is_reported_in_words(first):
    """Catches a red mark that does not say what is wrong."""
    source = (ROOT / "tests/docs/wrong/lesson_01.py").read_text() + "\n\nBlockTable = CountsLogicalBlocks\n"
    report = checked(first, source)
    assert report["tasks"][0]["tests"][0][0] == "The slot of a token is found through the table."
    shown = first.value("document.querySelector('.lesson-results').innerText")
    assert "The slot of a token is found through the table." in shown
    assert "slot, line " in shown
    assert status(first) == "2 of 3 tasks are red."


def test_a_class_that_breaks_a_rule_stops_the_run(first):
    """Catches a run that silently takes the project's own class."""
    source = "from minipaged.memory import BlockTable as Given\n\n\nclass BlockTable(Given):\n"
    source += "    def append(self, count=1):\n        self.num_tokens += count\n"
    first.value(f"lesson.set({json.dumps(source)})")
    assert first.value("lesson.run()") is None
    assert "append" in status(first)


def test_an_exception_in_a_run_is_reported_with_its_line(first):
    """Catches Pyodide's own trouble reported in place of the student's mistake."""
    source = "from minipaged.memory import BlockTable as Given\n\n\nclass BlockTable(Given):\n"
    source += "    def append(self, count=1):\n        {}[3]\n"
    first.value(f"lesson.set({json.dumps(source)})")
    assert first.value("lesson.run()") is None
    assert "raised KeyError: 3 (exercise.py, line 6)" in status(first)


def test_a_run_of_what_is_not_written_says_so(first):
    """Catches a task's name alone, as if it had been run."""
    first.value("lesson.reset()")
    first.value("lesson.set(lesson.text() + '\\n')")
    assert first.value("lesson.run()") is None
    assert status(first).startswith("Not written yet. Lesson 1, task ")


def test_a_class_that_ends_python_does_not_end_the_page(first):
    """Catches a lesson that answers nothing until it is loaded again."""
    assert checked(first, "import os\n\nos._exit(1)\n") is None
    assert status(first) == ENDED
    first.problems.clear()  # (Pyodide itself reports it there)
    assert checked(first, "BlockTable = 5\n") is not None
    assert status(first) == "3 of 3 tasks are red."


def test_a_recursion_that_ends_python_is_reported_at_once_and_not_at_the_next_check(first):
    """Catches the browser's own words, and a check of what is right that is lost to what was wrong."""
    source = "def f(x):\n    sorted([x], key=f)\n\n\nf(1)\n"
    first.value(f"lesson.set({json.dumps(source)})")
    assert first.value("lesson.run()") is None
    assert status(first) == ENDED
    first.problems.clear()  # (Pyodide itself reports it there)
    assert checked(first, "BlockTable = 5\n") is not None
    assert status(first) == "3 of 3 tasks are red."


def test_what_was_written_survives_a_reload_and_a_reset_asks_first(first):
    """Catches an hour of work that is gone."""
    first.value("lesson.set('# mine\\n')")
    first.value("new Promise(done => setTimeout(done, 500))")
    first.reload()
    assert (
        first.value("document.querySelector('.lesson > button').textContent")
        == "Go on with what you have written"
    )
    first.value("lesson.show()")
    assert first.value("lesson.text()") == "# mine\n"
    press = f"[...{EDITOR}.querySelectorAll('button')].find(b => b.textContent === '%s').click()"
    first.value(press % "Reset")
    assert first.value(
        f"[...{EDITOR}.querySelectorAll('[role=alert]')].map(each => !each.hidden && each.innerText)"
    )[1].startswith("Throw away what you have written?")
    first.value(press % "Keep it")
    assert first.value("lesson.text()") == "# mine\n"
    assert first.value("document.activeElement.textContent") == "Reset"
    first.value(press % "Reset")
    first.value(press % "Begin anew")
    assert first.value("lesson.text()") == LESSONS["01"].start.read_text()
    assert first.value("!!document.activeElement.closest('.lesson-editor')")
    assert first.value("Object.keys(localStorage).filter(key => key.includes('01_block_table'))") == []


def test_two_tabs_of_a_lesson_hold_one_text_and_neither_overwrites_the_other(browser, address):
    """Catches an hour of work that a tab forgotten in the background writes over."""
    link = f"{address}learn/{LESSONS['05'].folder.name}/"
    one = browser.open(link, 1280, dark=False)
    other = browser.open(link, 1280, dark=False, beside=one)
    for page in (one, other):
        page.value("lesson.show()")
    for writer, reader, text in ((one, other, "# a\n"), (other, one, "# b\n")):
        writer.value(f"lesson.set({json.dumps(text)})")
        reader.wait_for(f"lesson.text() === {json.dumps(text)}")
    kept = "Object.keys(localStorage).find(key => key.includes('05_'))"
    asked = f"!{EDITOR}.querySelector('[role=alert]').hidden"
    press = f"[...{EDITOR}.querySelectorAll('button')].find(b => b.textContent === '%s').click()"
    for number, (choice, chosen) in enumerate((("Keep this one", "here"), ("Take the other one", "there"))):
        # As if the other tab wrote while this one was frozen: no event comes.
        other.value(f"localStorage[{kept}] = '# there {number}'; lesson.set('# here {number}')")
        other.wait_for(asked)
        assert other.value(f"localStorage[{kept}]") == f"# there {number}"
        other.value(press % choice)
        assert not other.value(asked)
        for page in (one, other):
            page.wait_for(f"lesson.text() === '# {chosen} {number}'")
    assert one.problems == other.problems == []
    one.close()


def test_an_endless_loop_is_stopped_and_reported(first):
    """Catches a page that has to be closed; and an engine that is lost with the loop."""
    start = LESSONS["01"].start.read_text()
    stub = 'raise NotImplementedError("Lesson 1, task 1: filled slots of one logical block")'
    assert stub in start
    assert checked(first, start.replace(stub, "while True: pass")) is None
    assert status(first).endswith("Not done after 10 s; is there an endless loop?")
    assert status(first).startswith("Seven tokens fill a block")
    assert checked(first, start)["tasks"][0]["green"] is False
    assert first.problems == []


def test_an_engine_that_answers_nothing_is_ended_and_reported(first):
    """Catches a page that loads the tests for ever after the student's file closed the thread."""
    checked(first, "import js\n\njs.close()\n")
    first.value(
        "globalThis.plain = setInterval, globalThis.setInterval = (call, wait) => plain(call, wait / 10)"
    )
    assert checked(first) is None
    assert status(first) == "Not done after 30 s; is there an endless loop?"
    first.value("globalThis.setInterval = plain")
    assert checked(first, "BlockTable = 5\n") is not None
    assert first.problems == []


def test_the_way_back_to_the_top_is_beside_the_editor(first):
    """Catches a button that is half behind the panel."""
    first.resize(1440)
    panel = first.value(f"{EDITOR}.getBoundingClientRect().left")
    assert first.value("document.querySelector('.md-top').getBoundingClientRect().right") < panel
    first.resize(1280)


def test_the_editor_can_be_read_and_fits(first):
    """Catches pale letters, nameless controls, and sideways scrolling, in both colour schemes."""
    script = ROOT / "node_modules/axe-core/axe.min.js"
    if not script.exists():
        pytest.skip("axe-core is not installed; in the repository: npm install --no-save axe-core")
    checked(first, (ROOT / "tests/docs/wrong/lesson_01.py").read_text() + "\n\nBlockTable = RoundsDown\n")
    first.value("lesson.run()")
    first.value(f"{script.read_text()};undefined")
    for width in (1280, 400):
        first.resize(width)
        for scheme in ("default", "slate"):
            first.value(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
            found = first.value(
                "axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.map("
                "rule => `${rule.impact} ${rule.id}: ${rule.nodes.slice(0, 3).map(node => node.html)}`))"
            )
            assert found == [], (width, scheme)
        assert first.value("document.documentElement.scrollWidth") <= width
    assert first.problems == []
