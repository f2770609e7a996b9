"""The built site in a browser: every page, wide and narrow, light and dark."""

import pytest

from minipaged.viewer.replay import read_trace
from tests.docs.browser import Browser, Page, find_chromium
from tests.docs.site import ROOT, build_once, served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where the site is served."""
    find_chromium()  # before what takes long
    site = build_once(tmp_path_factory)
    with served(site) as address:
        yield address, sorted(str(page.parent.relative_to(site)) for page in site.glob("**/index.html"))


@pytest.fixture(scope="module")
def browser(address):
    with Browser() as browser:
        yield browser


def test_the_browser_notices_what_goes_wrong(browser, tmp_path):
    """Catches a harness that finds every page perfect."""
    bad = '<script>console.error("bad")</script><img src="gone.png"><p style="width:900px">wide</p>'
    (tmp_path / "index.html").write_text(bad)
    with served(tmp_path) as address:
        page = browser.open(address, 400, dark=False)
        page.wait_for("document.images[0].complete")
        assert any("bad" in problem for problem in page.problems)
        assert any("404" in problem for problem in page.problems)
        assert page.value("document.documentElement.scrollWidth") > 400


WIDE, NARROW = 1280, 400
AXE_VISITS = [(WIDE, False), (WIDE, True), (NARROW, True)]
"""Widths, and whether colours are dark, in which axe looks at the pages."""


@pytest.mark.timeout(900)  # some seventy pages, each a few seconds of a browser on a busy machine
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_fits_asks_nobody_else_and_can_be_read(address, browser, dark):
    """Catches sideways scrolling on a phone, errors of scripts, and requests that leave the machine; where
    axe is installed, contrast too low to read, nameless controls, regions that keys cannot reach."""
    home, pages = address
    assert len(pages) > 30
    script = read_axe()
    complaints = {}
    for name in [*(f"{page}/" for page in pages), "404.html"]:
        page = browser.open(f"{home}{name}", WIDE, dark)
        scheme = page.value("document.body.getAttribute('data-md-color-scheme')")
        found = [*page.problems, *(u for u in page.requests if not u.startswith((home, "data:", "blob:")))]
        if page.value("document.querySelectorAll('h1').length") != 1:
            found.append("not one heading of the first rank")
        if scheme != ("slate" if dark else "default"):
            found.append(f"colours are {scheme}")
        for width in (WIDE, NARROW):
            page.resize(width)
            wide = page.value("document.documentElement.scrollWidth")
            if wide > width:
                found.append(f"{wide} pixels wide in a window of {width}")
            if script and (width, dark) in AXE_VISITS:
                found += violations(page, script)
        page.close()
        if found:
            complaints[name] = found
    assert complaints == {}


def test_a_column_of_short_numbers_is_narrow_on_a_phone(address, browser):
    """Catches a third of the screen for "1" to "9", because a header has the room of a column of text."""
    cells = "[...document.querySelectorAll('.md-typeset td')].filter(c => /^\\d{1,2}$/.test(c.innerText))"
    for name in ("guides/teaching", "learn", "learn/07_chunked_prefill", "architecture"):
        page = browser.open(f"{address[0]}{name}/", 390, dark=False)
        widths = page.value(f"{cells}.map(cell => Math.round(cell.getBoundingClientRect().width))")
        assert widths, name
        assert max(widths) <= 75, name  # as wide as its header, "minutes"
        page.close()


def test_no_command_is_cut(address, browser):
    """Catches a command whose end is found only by scrolling, on a phone or on a wide screen."""
    commands = "[...document.querySelectorAll('.language-bash code')]"
    for name, count in (("guides/serving", 4), ("guides/viewer", 1), ("benchmarks", 10)):
        page = browser.open(f"{address[0]}{name}/", 1280, dark=False)
        for width in (1280, 390):
            page.resize(width)
            assert page.value(f"{commands}.length") >= count, name
            assert page.value(f"{commands}.filter(c => c.scrollWidth > c.clientWidth).length") == 0, name
        page.close()


def read_axe() -> str | None:
    """The script that finds what readers with other eyes and hands would stumble over, if it is installed."""
    script = ROOT / "node_modules/axe-core/axe.min.js"
    return script.read_text() if script.exists() else None


@pytest.fixture(scope="module")
def axe():
    if (script := read_axe()) is None:
        pytest.skip("axe-core is not installed; in the repository: npm install --no-save axe-core")
    return script


SHOW_SCENES = """(async () => {
    for (const scene of document.querySelectorAll(".scene[data-scene]")) {
        if (!scene.offsetParent) continue;  // (in a tab that is not open)
        scene.scrollIntoView();
        while (!scene.viewer) await new Promise((done) => setTimeout(done, 20));
    }
})()"""


def violations(page: Page, axe: str) -> list[str]:
    """Everything that axe finds in a page as it stands now, its scenes in sight, whatever its weight."""
    page.value(SHOW_SCENES)
    page.value(f"{axe};undefined")
    return page.value(
        "axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.map("
        "rule => `${rule.impact} ${rule.id}: ${rule.nodes.slice(0, 3).map(node => node.html.slice(0, 99))}`))"
    )


def test_axe_notices_what_nobody_could_read(browser, axe, tmp_path):
    """Catches a check that finds every page perfect."""
    (tmp_path / "index.html").write_text('<p style="color:#bbb">pale</p><table><tr><th></th></tr></table>')
    with served(tmp_path) as address:
        found = violations(browser.open(address, 400, dark=False), axe)
    assert any("color-contrast" in line for line in found)
    assert any("empty-table-header" in line for line in found)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_in_the_search_and_in_the_drawer(address, browser, axe, dark):
    """Catches what only shows once something is opened."""
    page = browser.open(address[0], 400, dark)
    for toggle in ("__drawer", "__search"):
        page.value(f"document.getElementById('{toggle}').click()")
        assert violations(page, axe) == [], toggle
        page.value(f"document.getElementById('{toggle}').click()")
    page.value("[...document.querySelectorAll('details')].forEach(box => box.open = true)")
    assert violations(page, axe) == []


def test_a_keyboard_gets_through_the_page(address, browser):
    """Catches a page without a link past the navigation, focus not to be seen, a switch for mice only."""
    page = browser.open(address[0], 1280, dark=False)
    reached = []
    while len(reached) < 40 and "md-button" not in " ".join(reached):
        page.press("Tab")
        reached.append(page.value("document.activeElement.className"))
        shown = "document.activeElement.matches('.md-option') ? document.activeElement.nextElementSibling : "
        outline = page.value(f"getComputedStyle({shown} document.activeElement).outlineStyle")
        assert outline != "none" or "md-search" in reached[-1], f"no focus to be seen on {reached[-1]}"
        if "md-option" in reached[-1]:
            page.press("Enter")
            assert page.value("document.body.getAttribute('data-md-color-scheme')") == "slate"
    assert "md-skip" in reached[0]
    for wanted in ("md-option", "md-search__input", "md-tabs__link", "md-button"):
        assert any(wanted in name for name in reached), (wanted, reached)
    while page.value("document.activeElement.textContent") != "Next":
        page.press("Tab")
    page.press("ArrowRight")
    caption = "document.querySelector('.frame:not([hidden]) figcaption strong').textContent"
    assert page.value(caption) == "3 of 5: The first generated token"


def test_the_moving_picture_is_stepped_through_with_buttons_and_keys(address, browser):
    """Catches a picture that moves where stillness is preferred, or that only a mouse can move."""
    page = browser.open(address[0], 1280, dark=False)
    caption = "document.querySelector('.frame:not([hidden]) figcaption strong').textContent"
    assert page.value("document.querySelectorAll('.frame:not([hidden])').length") == 1
    assert page.value(caption) == "2 of 5: The prompt"
    assert page.value("[...document.querySelectorAll('.frames-bar button')].map(b => b.textContent)") == [
        "Back",
        "Play",
        "Next",
    ]
    page.value("document.querySelectorAll('.frames-bar button')[2].click()")
    assert page.value(caption) == "3 of 5: The first generated token"
    page.value(
        "document.querySelectorAll('.frames-bar button')[2].dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))"
    )
    assert page.value(caption) == "4 of 5: The second generated token"
    page.value("document.querySelectorAll('.frames-bar button')[0].click()")
    assert page.value(caption) == "3 of 5: The first generated token"


SCENES = {
    "block-table": {"fig6": 2, "fig7": 2, "fig8": 1},
    "parallel-sampling": {"fig8": 1},
    "beam-search": {"fig9": 12},
    "prefix-cache": {"prefix-hit": 7},
    "batch-policies": {"chunked-prefill": 4},
    "preemption": {"recompute": 8},
    "swapping": {"swap": 8},
    "page-growth": {"on-demand": 3, "chunked": 3, "reserve": 3},
    "allocator": {"orca": 4, "paging": 4},
}
"""Concept page -> its scenes -> a step at which some sequence holds blocks."""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", SCENES)
def test_the_scenes_of_a_concept_are_clicked_through(address, browser, axe, name, dark, tmp_path):
    """Catches a scene that does not load, a step that shows another memory than the trace, a button that
    does nothing, and a viewer wider than a phone or unreadable in one of the two colour schemes."""
    home, _ = address
    page = browser.open(f"{home}concepts/{name}/", 1280, dark)
    for scene, busy in SCENES[name].items():
        figure = f"document.querySelector('[data-scene={scene}]')"
        tab = f"{figure}.closest('.tabbed-block')"
        page.value(
            f"{tab} && {tab}.closest('.tabbed-set').querySelectorAll(':scope > input')"
            f"[[...{tab}.parentElement.children].indexOf({tab})].click()"
        )
        page.value(f"{figure}.scrollIntoView()")
        page.wait_for(f"{figure}.viewer?.state().steps && !{figure}.viewer.state().loading")
        text = page.value(f"fetch(new URL('../../scenes/{scene}.jsonl', location)).then(a => a.text())")
        (trace := tmp_path / scene).write_text(text)
        records = list(read_trace(trace))
        button = f"[...{figure}.querySelectorAll('button')].find(b => b.ariaLabel === '%s')"
        press = f"{button}.click()"
        page.value(press % "Last step")
        page.wait_for(f"!{button % 'First step'}.disabled")
        page.value(press % "First step")
        for place, record in enumerate(records):
            state = page.value(f"{figure}.viewer.state()")
            assert (state["step"], state["phase"]) == (record.step, "planned")
            owners = {b["id"]: b["owners"] for b in state["blocks"] if b["refs"]}
            assert owners == {
                b.block: [table.name for table in b.owners] for b in record.planned.blocks() if b.owners
            }
            if record.step == busy:
                assert owners
                assert state["events"]
            page.value(press % "Step on")
            state = page.value(f"{figure}.viewer.state()")
            if state["phase"] == "committed":
                assert state["used"] == record.committed.num_used
                if place < len(records) - 1:
                    page.value(press % "Step on")
        assert page.value(f"{figure}.viewer.state().used") == 0
    assert violations(page, axe) == []
    for width in (1280, 400):
        page.resize(width)
        assert page.value("document.documentElement.scrollWidth") <= width
    assert page.problems == []
    assert [url for url in page.requests if not url.startswith((home, "data:", "blob:"))] == []
    page.close()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("allocator", "concepts/allocator"),
        ("RadixAttention", "learn/15_after_paged_attention"),
        ("--quantization int4", "guides/tuning"),
        ("playground", "play/"),
    ],
)
def test_the_search_finds(address, browser, words, wanted):
    """Catches an index not built, a search that needs a network, words behind signs, another name."""
    page = browser.open(address[0], 1280, dark=False)
    page.value("document.querySelector('.md-search__input').focus()")
    page.value(
        f"(() => {{ const field = document.querySelector('.md-search__input'); field.value = '{words}';"
        "field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));"
        "field.dispatchEvent(new InputEvent('input', {bubbles: true})); })()"
    )
    page.wait_for("/document/.test(document.querySelector('.md-search-result__meta').textContent)")
    links = page.value("[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)")
    assert wanted in links[0]
    assert page.problems == []
