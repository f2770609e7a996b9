"""The server's page against a server that only replays: a header, a snapshot, steps, and streamed text."""

from __future__ import annotations

import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from minipaged.viewer.page import live_page
from tests.docs.browser import Browser, Page, find_chromium

pytestmark = pytest.mark.slow

HEADER = {"format": "minipaged-trace", "version": 2, "block_size": 4, "num_blocks": 8, "num_host_blocks": 0}
PREFIX = "/behind/a/proxy"
OFFLINE = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}


class Replay(BaseHTTPRequestHandler):
    lines: queue.Queue
    asked: list

    def do_GET(self):
        if self.path == f"{PREFIX}/live":
            self.answer(200, "text/html; charset=utf-8", live_page().encode())
        elif self.path == f"{PREFIX}/trace/live":
            self.answer(200, "text/event-stream")
            while (line := self.lines.get()) is not None:
                self.wfile.write(f"data: {json.dumps(line)}\n\n".encode())
                self.wfile.flush()
        else:
            self.answer(404, "text/plain")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body))
        if "refuse" in body["prompt"]:
            error = {"error": {"message": "prompt is <b>refused</b>"}}
            self.answer(400, "application/json", json.dumps(error).encode())
            return
        self.answer(200, "text/event-stream")
        for text in (" there", " was <img src=x onerror=globalThis.ran=1>", " \u00e9nd"):
            for index in range(body["n"]):
                data = json.dumps({"choices": [{"index": index, "text": text}]}, ensure_ascii=False)
                piece = f"data: {data}\n\n".encode()
                for part in (piece[:-4], piece[-4:]):  # a piece may arrive in parts
                    self.wfile.write(part)
                    self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, code: int, kind: str, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def live():
    """(page, queue of trace lines to send, list of what was asked)."""
    find_chromium()  # before the server starts
    lines, asked = queue.Queue(), []
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Handler", (Replay,), {"lines": lines, "asked": asked})
    )
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with Browser() as browser:
        page = browser.open(f"http://127.0.0.1:{server.server_address[1]}{PREFIX}/live", 1280, dark=False)
        page.wait_for("globalThis.viewer")
        yield page, lines, asked
    lines.put(None)
    server.shutdown()
    thread.join()
    server.server_close()


def entry(step: int, *blocks: int) -> dict:
    table = {"blocks": [0, list(blocks)], "num_tokens": 4 * len(blocks)}
    return {"step": step, "num_waiting": 0, "planned": {"tables": {"A/0": table}}}


def test_the_pool_follows_the_server_from_the_middle_of_a_run(live):
    """Catches a page that waits for step 0, or that stays where it was when the server went on."""
    page, lines, _ = live
    lines.put(HEADER)
    lines.put(entry(41, 3))
    lines.put(entry(42, 3, 5))
    page.wait_for("viewer.state().step === 42")
    assert [block["id"] for block in page.value("viewer.state().blocks") if block["refs"]] == [3, 5]
    lines.put(HEADER)
    lines.put(entry(77, 1))
    page.wait_for("viewer.state().step === 77")
    assert page.value("viewer.state().steps") == 1
    assert page.problems == []


def test_an_answer_is_read_out_when_it_is_whole(live):
    """Catches a screen reader that speaks every token, and begins anew at each."""
    page, _, _ = live
    busy = "document.getElementById('answers').getAttribute('aria-busy')"
    assert page.value(f"document.getElementById('ask').requestSubmit(), {busy}") == "true"
    page.wait_for("document.getElementById('stop').disabled")
    assert page.value(busy) == "false"


def hide(page: Page, hidden: bool) -> None:
    """Tell the page that its tab is hidden, or shown again."""
    page.value(
        f"Object.defineProperty(document, 'hidden', {{value: {json.dumps(hidden)}, configurable: true}}),"
        "void document.dispatchEvent(new Event('visibilitychange'))"
    )


def test_a_hidden_page_releases_its_stream_and_takes_it_up_when_it_is_shown(live):
    """Catches six tabs that hold all connections a browser opens to one host: no tab generates any more."""
    page, lines, _ = live
    lines.put(HEADER)
    lines.put(entry(41, 3))
    page.wait_for("viewer.state().step === 41")
    status = "document.getElementById('status').textContent"
    hide(page, True)
    page.wait_for(f"{status} === 'paused while the page is hidden'")
    lines.put(None)  # (for the handler of the released stream, which waits for a line)
    while not lines.empty():
        time.sleep(0.01)
    hide(page, False)
    page.wait_for(f"{status} === 'connected'")
    lines.put(HEADER)
    lines.put(entry(77, 1))
    page.wait_for("viewer.state().step === 77")
    assert [url.endswith("/trace/live") for url in page.requests].count(True) == 2
    assert page.problems == []


def test_a_page_that_is_hidden_for_a_moment_keeps_its_stream_and_its_steps(live):
    """Catches a look at another tab that costs the reader the run so far."""
    page, lines, _ = live
    lines.put(HEADER)
    lines.put(entry(41, 3))
    page.wait_for("viewer.state().step === 41")
    hide(page, True)
    hide(page, False)
    page.value("new Promise(done => setTimeout(done, 6000))")
    lines.put(entry(42, 3))
    page.wait_for("viewer.state().step === 42")
    assert page.value("viewer.state().steps") == 2
    assert [url.endswith("/trace/live") for url in page.requests].count(True) == 1


def test_an_answer_and_its_table_have_one_name_to_the_end(live):
    """Catches a table that loses its number when its siblings have ended, while its text still has one."""
    page, lines, _ = live
    name = f"cmpl-{'0' * 32}-0"
    tables = {f"{name}/{i}": {"blocks": [0, [i]], "num_tokens": 2} for i in range(3)}
    ended = {f"{name}/{i}": None for i in (0, 2)}
    lines.put(HEADER)
    lines.put({"step": 0, "num_waiting": 0, "planned": {"tables": tables}})
    lines.put({"step": 1, "num_waiting": 0, "committed": {"tables": ended}})
    page.wait_for("viewer.state().step === 1")
    page.wait_for("document.querySelectorAll('.mpv-name').length === 1")
    assert page.value("document.querySelector('.mpv-name b').textContent") == "1.2"


def test_text_streams_in_as_text(live):
    """Catches an answer that becomes elements, completions that mix, a character cut in two."""
    page, _, asked = live
    page.value(
        "(() => { document.getElementById('prompt').value = 'Once'; document.getElementById('n').value = 2;"
        "document.getElementById('ask').requestSubmit(); })()"
    )
    answers = "[...document.querySelectorAll('#answers p')].map(p => p.textContent)"
    page.wait_for(f"{answers}.length === 2 && {answers}.every(text => text.endsWith('\u00e9nd'))")
    wanted = "Once there was <img src=x onerror=globalThis.ran=1> \u00e9nd"
    assert page.value(answers) == [wanted, wanted]
    assert page.value("document.querySelectorAll('img').length") == 0
    assert page.value("globalThis.ran") is None
    path, body = asked[0]
    assert path == f"{PREFIX}/v1/completions"
    assert body == {"prompt": "Once", "max_tokens": 64, "n": 2, "stream": True}
    assert page.problems == []


def test_a_refusal_is_shown_where_the_answer_would_be(live):
    """Catches a prompt that is refused and nothing to be seen of it."""
    page, _, _ = live
    page.value(
        "(() => { document.getElementById('prompt').value = 'refuse';"
        "document.getElementById('ask').requestSubmit(); })()"
    )
    page.wait_for("document.querySelector('#answers p')?.dataset.state === 'failed'")
    text = page.value("document.querySelector('#answers p').textContent")
    assert text == "refuse [prompt is <b>refused</b>]"


def ask(page: Page, prompt: str, **fields: object) -> None:
    """Fill the form in and press its button."""
    for name, value in {"prompt": prompt, **fields}.items():
        page.value(f"void (document.getElementById({name!r}).value = {json.dumps(value)})")
    page.value("document.querySelector('#ask button:not([type])').click()")


@pytest.mark.parametrize("field", ["n", "max_tokens"])
def test_an_empty_number_is_asked_for_and_not_sent(field, live):
    """Catches a request for "" completions, and a refusal of it that has no answer to stand in."""
    page, _, asked = live
    ask(page, "refuse", **{field: ""})
    assert page.value("document.querySelector('#ask :invalid')?.id") == field
    assert asked == []
    page.value("document.getElementById('ask').dispatchEvent(new Event('submit', { cancelable: true }))")
    page.wait_for("document.querySelector('#answers p')?.dataset.state === 'failed'")
    assert [problem for problem in page.problems if "400" not in problem] == []


def test_a_long_prompt_is_shown_by_its_end(live):
    """Catches 5,000 words above the one line that says why they were refused."""
    page, _, _ = live
    ask(page, "refuse " + "word " * 5000 + "end")
    page.wait_for("document.querySelector('#answers p')?.dataset.state === 'failed'")
    prompt = page.value("document.querySelector('#answers b').textContent")
    assert prompt == "…" + ("word " * 5000 + "end")[-300:]


def test_a_key_that_cannot_be_sent_is_reported(live):
    """Catches "Failed to execute 'fetch' on 'Window': String contains non ISO-8859-1 code point"."""
    page, lines, asked = live
    reason = "the key has characters that a key cannot have"
    page.value("void (document.getElementById('key').value = 'ключ')")
    ask(page, "Once")
    page.wait_for("document.querySelector('#answers p')?.dataset.state === 'failed'")
    assert page.value("document.querySelector('#answers p').textContent") == f"Once [{reason}]"
    lines.put(None)  # the stream ends; the page connects again, with this key
    page.wait_for(f"document.getElementById('status').textContent === 'not connected: {reason}'")
    page.value(
        "(() => { const key = document.getElementById('key'); key.value = 'key';"
        "key.dispatchEvent(new Event('change')); })()"
    )
    page.wait_for("document.getElementById('status').textContent === 'connected'")
    assert asked == []
    assert page.problems == []


def test_a_server_that_is_gone_is_reported(live):
    """Catches "Failed to fetch", which says nothing of the server."""
    page, lines, _ = live
    reason = "the server cannot be reached"
    page.browser.call("Network.emulateNetworkConditions", OFFLINE, page.session)
    ask(page, "Once")
    page.wait_for("document.querySelector('#answers p')?.dataset.state === 'failed'")
    assert page.value("document.querySelector('#answers p').textContent") == f"Once [{reason}]"
    lines.put(None)
    page.wait_for(f"document.getElementById('status').textContent === 'not connected: {reason}'")


def test_the_title_stays_whole_beside_a_long_message(live):
    """Catches "minipag... live" on a phone whose page says why it is not connected."""
    page, _, _ = live
    page.resize(360)
    title = "document.querySelector('h1')"
    for length in range(25):
        page.value(f"void (document.getElementById('status').textContent = 'not '.repeat({length}))")
        assert page.value(f"{title}.scrollWidth <= {title}.clientWidth")
        assert page.value(f"{title}.clientHeight < 2 * parseFloat(getComputedStyle({title}).fontSize)")
        assert page.value("document.documentElement.scrollWidth") <= 360


def test_the_live_page_fits_a_phone(live):
    """Catches a page that scrolls sideways with or without a run."""
    page, lines, _ = live
    lines.put(HEADER)
    lines.put(entry(1, 0, 1, 2))
    page.wait_for("viewer.state().steps === 1")
    for width in (1280, 400, 320):
        page.resize(width)
        assert page.value("document.documentElement.scrollWidth") <= width
