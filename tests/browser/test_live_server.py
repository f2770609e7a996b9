"""The page at `/` of a running server: prompts typed in Chromium, blocks of the engine that answers them."""

from __future__ import annotations

import json
import logging
import time
from contextlib import contextmanager

import pytest

from minipaged import AsyncLLM
from tests.checked import checked
from tests.docs.browser import Browser, Page
from tests.serving.conftest import Running, running

pytestmark = pytest.mark.slow

ROBOT = "Once upon a time, there was a little robot named Rusty. One day a fox came to the river."
HOSTILE = "<img src=x onerror=globalThis.ran=1></p><script>globalThis.ran=1</script> \u202e &lt; {{style}}"
ANSWERS = "[...document.querySelectorAll('#answers p')].map(p => p.lastChild.data)"
USED = "viewer.state().used"


@pytest.fixture(scope="module")
def browser():
    logging.getLogger("minipaged").setLevel(logging.CRITICAL)
    with Browser() as browser:
        yield browser


@contextmanager
def slowed(seconds: float, **settings):
    """A server of the embedded model in 96 blocks, a step of which takes at least some seconds."""
    llm = AsyncLLM(num_blocks=96, disable_log_stats=True)
    llm.engine.executor.eos_token_ids = ()  # (so that no text ends before it is looked at)
    compute = llm.engine.executor.execute
    llm.engine.executor.execute = lambda plan: (time.sleep(seconds), compute(plan))[1]
    with running(checked(llm), **settings) as server:
        yield server


@pytest.fixture(scope="module")
def server(browser):
    with slowed(0.02) as server:
        yield server


@pytest.fixture
def page(browser, server):
    page = watched(browser, server)
    yield page
    page.close()
    server.assert_released()


def watched(browser: Browser, server: Running, width: int = 1280, dark: bool = False) -> Page:
    page = browser.open(server.url, width, dark)
    page.wait_for("globalThis.viewer && document.getElementById('status').textContent === 'connected'")
    page.wait_for("viewer.state().steps > 0")
    return page


def ask(page: Page, prompt: str, max_tokens: int, completions: int = 1) -> None:
    """Type a prompt as a user would, and press the button."""
    for name, value in (("max_tokens", max_tokens), ("n", completions)):
        page.value(f"void (document.getElementById({name!r}).value = {value})")
    page.value("(() => { const box = document.getElementById('prompt'); box.focus(); box.select(); })()")
    page.browser.call("Input.insertText", {"text": prompt}, page.session)
    assert page.value("document.getElementById('prompt').value") == prompt
    page.value("document.querySelector('#ask button').focus()")
    page.press("Enter")


def owners(page: Page) -> dict[int, set[str]]:
    """Block -> numbers of the requests that hold it."""
    blocks = page.value("viewer.state().blocks")
    return {
        block["id"]: {name.split("/")[0] for name in block["owners"]} for block in blocks if block["refs"]
    }


def test_text_streams_while_its_blocks_fill_and_come_back(page, server):
    """Catches text that comes at once at its end, no blocks, another request's, or blocks held forever."""
    ask(page, ROBOT, max_tokens=120)
    page.wait_for(f"{ANSWERS}[0]?.length > 10 && {USED} > 2")
    early, before = page.value(ANSWERS)[0], page.value(USED)
    assert server.llm.engine.has_unfinished
    page.wait_for(f"{USED} > {before}")
    later = page.value(ANSWERS)[0]
    assert later.startswith(early)
    assert len(later) > len(early)
    number = page.value("document.querySelector('#answers .mpv-chip').textContent")
    assert set.union(*owners(page).values()) == {number}
    rows = page.value("[...document.querySelectorAll('.mpv-words')].map(row => row.textContent)")
    assert "Once upon a time" in "".join(rows)
    page.wait_for(f"{USED} === 0")
    state = page.value("viewer.state()")
    assert state["free"] + state["evictable"] == 96
    assert state["evictable"] > 2
    page.wait_for(
        "document.querySelector('.mpv-usage').textContent.startsWith('0 of 96 blocks')"
    )  # drawn later
    assert page.problems == []


def test_two_requests_with_one_beginning_share_its_blocks(page):
    """Catches sharing that the pool hides, and answers that cannot be told apart in it."""
    for _ in range(2):
        ask(page, ROBOT, max_tokens=150)
        page.wait_for(f"{ANSWERS}[0].length > 5")
    page.wait_for("viewer.state().blocks.some(block => block.refs > 1)")
    numbers = page.value("[...document.querySelectorAll('#answers .mpv-chip')].map(chip => chip.textContent)")
    shared = [who for who in owners(page).values() if len(who) > 1]
    assert shared
    assert all(who == set(numbers) for who in shared)
    assert page.value("viewer.state().counts.hits") > 0
    page.wait_for(f"{USED} === 0")
    assert page.problems == []


def test_completions_of_one_prompt_are_named_as_their_tables(page):
    """Catches three texts and three tables, and no way to say whose is which."""
    ask(page, "The little robot", max_tokens=150, completions=3)
    texts = "[...document.querySelectorAll('{}')].map(each => each.textContent)"
    # (Both at the same moment: tables are drawn a little later, and go when the texts end.)
    page.wait_for(
        f"globalThis.seen = [{texts.format('#answers .mpv-chip')}, {texts.format('.mpv-name b')}],"
        "seen.every(names => names.length === 3)"
    )
    chips, names = page.value("seen")
    assert chips == names
    page.wait_for(f"{USED} === 0")


def test_a_hostile_prompt_is_text_wherever_it_is_shown(page):
    """Catches markup of a prompt that becomes elements, in the answer, in a table or in an event."""
    ask(page, HOSTILE, max_tokens=30)
    page.wait_for(f"{ANSWERS}[0]?.length > 5 && {USED} > 0")
    assert page.value("document.querySelector('#answers b').textContent") == HOSTILE
    page.wait_for("document.querySelector('.mpv-words').textContent.includes('<img')")
    assert page.value("document.querySelectorAll('img').length") == 0
    assert page.value("document.querySelectorAll('script').length") == 1
    page.wait_for(f"{USED} === 0")
    assert page.value("globalThis.ran") is None
    assert page.problems == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_pool_stays_in_sight_of_long_answers(browser, server, width, dark):
    """Catches a page that scrolls sideways, and answers that push the pool off the screen."""
    page = watched(browser, server, width, dark)
    ask(page, "\n".join([ROBOT] * 20), max_tokens=60, completions=3)
    page.wait_for(f"{ANSWERS}.every(text => text) && {USED} > 20")
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value("document.querySelector('.mpv-pool').getBoundingClientRect().top") < 900
    page.wait_for(f"{USED} === 0")
    assert page.problems == []
    page.close()


def test_answers_can_be_stopped(page, server):
    """Catches a long answer, asked for by mistake, that one has to wait for."""
    stop = "document.getElementById('stop')"
    assert page.value(f"{stop}.disabled")
    ask(page, ROBOT, max_tokens=700, completions=2)
    page.wait_for(f"{ANSWERS}.every(text => text.length > 5) && !{stop}.disabled")
    page.value(f"{stop}.click()")
    page.wait_for(f"{USED} === 0 && {stop}.disabled")
    assert all(text.endswith(" [stopped]") for text in page.value(ANSWERS))
    server.assert_released()
    ask(page, ROBOT, max_tokens=5)
    page.wait_for(f"{ANSWERS}[0].length > 5 && {stop}.disabled")
    assert "[" not in page.value(ANSWERS)[0]
    assert page.problems == []


def test_every_text_that_is_cut_off_says_so(browser):
    """Catches the second of two completions, which looks as if it had ended by itself."""
    with slowed(0.02) as server:
        page = watched(browser, server)
        ask(page, ROBOT, max_tokens=700, completions=2)
        page.wait_for(f"{ANSWERS}.every(text => text.length > 5)")
    states = "[...document.querySelectorAll('#answers p')].map(p => p.dataset.state)"
    page.wait_for(f"{states}.includes('failed')")
    assert page.value(states) == ["failed", "failed"]
    page.close()


def test_a_request_with_a_name_of_its_own_has_a_number_too(page, server):
    """Catches names of a hundred letters where the others are "3"."""
    body = {"prompt": ROBOT, "max_tokens": 60, "stream": True}
    headers = {"X-Request-Id": "my-trace.12:34_5"}
    with server.http.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        page.wait_for("document.querySelector('.mpv-name b')?.textContent")
        assert page.value("document.querySelector('.mpv-name b').textContent").isdigit()
        stream.read()
    page.wait_for(f"{USED} === 0")


def test_a_server_with_keys_asks_for_one(browser):
    """Catches a page that works without keys only, and texts of other keys' requests in its pool."""
    with slowed(0.02, api_keys=("alpha", "beta")) as server:
        page = browser.open(server.url, 1280, dark=False)
        page.wait_for("document.getElementById('status').textContent.includes('API key')")
        page.value(
            "(() => { const box = document.getElementById('key'); box.value = 'alpha';"
            "box.dispatchEvent(new Event('change')); })()"
        )
        page.wait_for("document.getElementById('status').textContent === 'connected'")
        ask(page, ROBOT, max_tokens=40)
        page.wait_for(f"{ANSWERS}[0]?.length > 5 && {USED} > 0")
        other = {"prompt": "A secret of beta", "max_tokens": 30}
        server.http.post("/v1/completions", json=other, headers={"Authorization": "Bearer beta"})
        assert "secret" not in json.dumps(page.value("document.body.textContent"))
        page.wait_for(f"{USED} === 0")
        assert [problem for problem in page.problems if "401" not in problem] == []
        page.close()


def test_the_page_comes_back_when_the_server_does(browser):
    """Catches a page that must be loaded anew after a restart of the server."""
    with slowed(0.0) as server:
        page = watched(browser, server)
        port = int(server.url.rsplit(":", 1)[1])
    page.wait_for("document.getElementById('status').textContent !== 'connected'")
    with slowed(0.0, port=port) as server:
        page.wait_for("document.getElementById('status').textContent === 'connected'")
        ask(page, "The fox", max_tokens=10)
        page.wait_for(f"{ANSWERS}[0]?.length > 5 && {USED} === 0")
        assert len(page.value(ANSWERS)) == 1
        assert server.llm.engine.metrics.request_success == {"length": 1}
        page.close()
