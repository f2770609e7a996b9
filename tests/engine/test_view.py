"""`minipaged view` and `minipaged top`: what they write and show, and what they say when they cannot."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

from minipaged.decoding.params import SamplingParams
from minipaged.viewer.page import live_page, trace_page
from minipaged.viewer.perfetto import perfetto
from minipaged.viewer.pictures.runs import modelless
from minipaged.viewer.replay import TraceError, read_trace
from minipaged.viewer.scrape import ServerError, dashboard, fetch, quantile, read_metrics
from minipaged.viewer.trace import TraceWriter
from tests.engine.test_cli import call
from tests.engine.test_fuzz import Scenario
from tests.engine.test_trace import TracedToyEngine
from tests.toy import toy_scheduler

METRICS = """# HELP minipaged:num_requests_running Running.
# TYPE minipaged:num_requests_running gauge
minipaged:num_requests_running{model_name="pocket",engine="0"} 3.0
minipaged:num_requests_running{model_name="pocket",engine="1"} 2.0
minipaged:num_requests_waiting{model_name="a,b=\\"c\\" }"} 7
minipaged:kv_cache_usage_perc{engine="0"} 0.3
minipaged:kv_cache_usage_perc{engine="1"} 0.2
minipaged:num_preemptions_total 4
minipaged:prompt_tokens_total 1200
minipaged:generation_tokens_total 5000 1700000000000
minipaged:prefix_cache_queries_total 200
minipaged:prefix_cache_hits_total 50
minipaged:time_to_first_token_seconds_bucket{le="0.1"} 50
minipaged:time_to_first_token_seconds_bucket{le="0.2"} 100
minipaged:time_to_first_token_seconds_bucket{le="+Inf"} 100
minipaged:time_to_first_token_seconds_sum 10
minipaged:time_to_first_token_seconds_count 100
python_gc_objects_collected_total 5
"""


class Server(BaseHTTPRequestHandler):
    pages: ClassVar[dict[str, tuple[str, str]]] = {}
    key: ClassVar[str | None] = None  # what all but its page asks for, if anything

    def do_GET(self):
        kind, text = self.pages.get(self.path, ("", ""))
        is_known = self.key is None or self.headers.get("Authorization") == f"Bearer {self.key}"
        if not is_known and self.path != "/":
            kind, text = "", ""
        self.send_response(200 if kind else 404 if is_known else 401)
        self.send_header("Content-Type", kind or "text/plain")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    """An HTTP server with pages that the test sets: path -> (type, text)."""
    yield from serve(None)


@pytest.fixture
def locked_server():
    """The same, with the API key "sekret"."""
    yield from serve("sekret")


def serve(key):
    handler = type("Handler", (Server,), {"pages": {}, "key": key})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}", handler.pages
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def trace(tmp_path) -> Path:
    engine = modelless(12, 6, preemption_mode="swap")
    path = tmp_path / "run.jsonl"
    with TraceWriter(path, engine):
        for number, name in enumerate("ABC"):
            engine.add_request(name, range(50 * number, 50 * number + 9), SamplingParams(max_tokens=12))
        while engine.has_unfinished:
            engine.step()
    return path


def test_view_writes_one_page(capsys, monkeypatch, trace, tmp_path):
    """Catches a page that is not written, that is large, or that asks another file or host."""
    page = tmp_path / "page.html"
    code, out, err = call(capsys, monkeypatch, "view", str(trace), "-o", str(page))
    assert (code, err) == (0, "")
    text = page.read_text()
    assert f"{len(text.encode()):,} bytes" in out
    assert len(text.encode()) < 300_000
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    assert "{{" not in text.split("<script")[0]


def test_a_page_depends_on_its_trace_alone(trace):
    """Catches a time or a path in the page: two writings of a trace that differ."""
    assert trace_page(trace) == trace_page(trace)
    assert str(trace.parent) not in trace_page(trace)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "view needs a trace"),
        (("{folder}/no/none",), "cannot read trace"),
        (("{foreign}",), "not a trace of version 2"),
        (("{trace}", "-o", "{trace}"), "is the input itself"),
        (("{trace}", "-o", "{folder}/p", "--perfetto", "{folder}/p"), "give each its own file"),
        (("{folder}/none", "-o", "{folder}/p.html"), "cannot read trace"),
        (("{trace}", "-o", "{folder}/no/p.html"), "cannot write page"),
        (("{foreign}", "-o", "{folder}/p.html"), "not a trace of version 2"),
        (("{empty}", "-o", "{folder}/p.html"), "is empty; make a trace with --trace FILE"),
        (("{trace}", "--live", "http://127.0.0.1:1"), "opens the server's own page, not a trace"),
        (("--live", "http://127.0.0.1:1"), "cannot reach http://127.0.0.1:1/:"),
        (("--live", "file:///etc/passwd"), "minipaged: file:///etc/passwd is not an HTTP address"),
    ],
)
def test_view_says_in_one_line_what_is_missing(capsys, monkeypatch, trace, tmp_path, arguments, message):
    """Catches a traceback, a page of something that is not a trace, a trace that is overwritten."""
    (tmp_path / "foreign").write_text('{"traceEvents": []}\n')
    (tmp_path / "empty").touch()
    before = trace.read_text()
    places = {
        "trace": trace,
        "folder": tmp_path,
        "foreign": tmp_path / "foreign",
        "empty": tmp_path / "empty",
    }
    code, out, err = call(capsys, monkeypatch, "view", *(text.format(**places) for text in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert trace.read_text() == before
    assert not (tmp_path / "p.html").exists()


def test_without_a_place_the_page_is_beside_its_trace(capsys, monkeypatch, trace):
    """Catches a question whose answer is clear."""
    code, out, err = call(capsys, monkeypatch, "view", str(trace))
    page = trace.with_suffix(".html")
    assert (code, err) == (0, "")
    assert out.startswith(f"{page}: ")
    assert page.read_text() == trace_page(trace)


def test_a_cut_trace_is_written_with_a_word_of_warning(capsys, monkeypatch, trace, tmp_path):
    """Catches a crash whose trace cannot be looked at, or a page that hides that it is not whole."""
    trace.write_text(trace.read_text()[:-30])
    lines = len(trace.read_text().splitlines())
    page = tmp_path / "page.html"
    code, _, err = call(capsys, monkeypatch, "view", str(trace), "-o", str(page))
    assert code == 0
    assert f"line {lines} is not JSON (was it truncated?)" in err
    assert err.count("\n") == 1
    assert page.exists()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (["[]"], "line 4 is not a JSON object"),
        (['{"x": 1}'], "line 4 does not continue the trace (KeyError('step')); is a line missing?"),
        ([], "line 4 does not continue the trace"),
    ],
    ids=["list", "foreign", "missing"],
)
def test_a_page_of_a_broken_trace_says_what_perfetto_says(
    capsys, monkeypatch, trace, tmp_path, broken, message
):
    """Catches a page of a few steps, with no word, of a trace with a foreign or a missing line."""
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join([*lines[:3], *broken, *lines[7:]]))
    page = tmp_path / "page.html"
    code, _, err = call(capsys, monkeypatch, "view", str(trace), "-o", str(page))
    assert (code, err.count("\n")) == (0, 1)
    assert message in err
    assert page.exists()
    with pytest.raises(TraceError) as raised:
        perfetto(trace)
    assert err == f"minipaged: {raised.value} (the page shows the steps before it)\n"


def test_empty_lines_of_a_trace_are_ignored(capsys, monkeypatch, trace, tmp_path):
    """Catches a command that refuses, or says that the page breaks off at, a line that the page skips."""
    before = list(read_trace(trace))
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join([*lines[:3], "", " \t", *lines[3:], "", ""]))
    assert list(read_trace(trace)) == before
    arguments = ("-o", str(tmp_path / "page.html"), "--perfetto", str(tmp_path / "run.json"))
    code, _, err = call(capsys, monkeypatch, "view", str(trace), *arguments)
    assert (code, err) == (0, "")


def test_perfetto_has_a_slice_for_every_step_of_a_request(trace, capsys, monkeypatch, tmp_path):
    """Catches a timeline with gaps, rows without names, or events that Perfetto does not read."""
    file = tmp_path / "run.json"
    assert call(capsys, monkeypatch, "view", str(trace), "--perfetto", str(file))[0] == 0
    events = json.loads(file.read_text())["traceEvents"]
    assert all({"ph", "name", "pid"} <= event.keys() for event in events)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == ["request A", "request B", "request C"]
    slices = {(names[e["tid"]], e["ts"] // 1000) for e in events if e["ph"] == "X"}
    records = list(read_trace(trace))
    assert slices == {(f"request {t.request}", r.step) for r in records for t in r.scheduled}
    used = [e["args"]["in use"] for e in events if e["name"] == "blocks"]
    assert used == [record.planned.num_used for record in records]
    tokens = [e["args"] for e in events if e["name"] == "tokens"]
    assert tokens[0] == {"decode": 0, "prefill": sum(t.num_tokens for t in records[0].scheduled)}
    sampled = sum(t.num_candidates > 0 for t in records[1].scheduled)
    assert tokens[1] == {"decode": sampled, "prefill": 0}
    marks = [(names[e["tid"]], e["name"]) for e in events if e["ph"] == "i"]
    assert ("request C", "preempted") in marks
    assert ("request C", "resumed") in marks


@pytest.mark.parametrize("seed", [5, 6, 13, 24])
def test_perfetto_counts_as_decodes_what_follows_a_chosen_token(seed, tmp_path, caplog):
    """Catches the last token of a prompt or of a recomputation counted as a decode: the rest was cached, was
    swapped out, or was computed by earlier chunks."""
    caplog.set_level(logging.ERROR, "minipaged")
    scenario = Scenario(seed)
    scenario.engine = engine = TracedToyEngine(toy_scheduler(**scenario.settings), tmp_path / "trace")
    scenario.run()
    engine.file.close()
    counted = [
        e["args"] for e in json.loads(perfetto(tmp_path / "trace"))["traceEvents"] if e["name"] == "tokens"
    ]
    unsampled: set[str] = set()  # requests of which no token was chosen since their last admission
    expected = []
    for record in read_trace(tmp_path / "trace"):
        unsampled |= {event["request"] for event in record.events if "cached_tokens" in event}
        tokens = {"decode": 0, "prefill": 0}
        for each in record.scheduled:
            tokens["prefill" if each.request in unsampled else "decode"] += each.num_tokens
        unsampled -= {each.request for each in record.scheduled if each.num_candidates}
        expected.append(tokens)
    assert counted == expected


def test_perfetto_refuses_what_is_not_a_trace(tmp_path):
    """Catches an empty timeline for a wrong file."""
    (tmp_path / "x").write_text("{}\n")
    with pytest.raises(TraceError):
        perfetto(tmp_path / "x")


def test_live_opens_the_page_that_the_server_has(server, capsys, monkeypatch):
    """Catches an address that is a server's, but not of ours, and one that ends with a slash."""
    url, pages = server
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    code, _, err = call(capsys, monkeypatch, "view", "--live", url)
    assert code == 2
    assert "has no live page" in err
    pages["/"] = ("text/html; charset=utf-8", "<h1>another server</h1>")
    assert call(capsys, monkeypatch, "view", "--live", url)[0] == 2
    pages["/"] = ("text/html; charset=utf-8", live_page())
    code, out, _ = call(capsys, monkeypatch, "view", "--live", url + "/")
    assert (code, opened) == (0, [f"{url}/"])
    assert f"{url}/" in out


def test_metrics_are_summed_over_labels():
    """Catches one engine of two, a label with a comma or a brace in it, a time stamp taken for a value."""
    scrape = read_metrics(METRICS, "here", 1.0)
    assert scrape.values["num_requests_running"] == 5
    assert scrape.values["num_requests_waiting"] == 7
    assert scrape.values["generation_tokens_total"] == 5000
    assert "python_gc_objects_collected_total" not in scrape.values
    assert scrape.buckets["time_to_first_token_seconds"] == {0.1: 50, 0.2: 100, math.inf: 100}


def test_quantiles_lie_on_the_line_through_their_bucket():
    """Catches the bucket's bound in place of what lies inside it; a division by an empty histogram."""
    buckets = {0.1: 50.0, 0.2: 100.0, math.inf: 100.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.1)
    assert quantile(buckets, 0.75) == pytest.approx(0.15)
    assert quantile({0.1: 0.0, math.inf: 4.0}, 0.5) == 0.1
    assert math.isnan(quantile({0.1: 0.0, math.inf: 0.0}, 0.5))
    assert math.isnan(quantile({}, 0.5))


def shown(*looks: str) -> str:
    scrapes = [read_metrics(text, "here", 2.0 * number) for number, text in enumerate(looks)]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(dashboard("http://here", scrapes[-1], scrapes[-2] if len(scrapes) > 1 else None))
    return console.export_text()


def test_the_dashboard_has_counts_and_rates_since_the_last_look():
    """Catches rates since the server started, a share of hits of nothing, a crash without histograms."""
    text = shown(METRICS)
    assert "25.0%" in text
    assert "/s" not in text
    assert re.search(r"first token +< 100 ms +190 ms +198 ms", text)
    later = METRICS.replace("generation_tokens_total 5000", "generation_tokens_total 5300")
    assert "150.0/s" in shown(METRICS, later)
    restarted = METRICS.replace("generation_tokens_total 5000", "generation_tokens_total 10")
    assert "-" not in shown(METRICS, restarted).split("generated tokens")[1].splitlines()[0]
    assert "none" in shown("minipaged:num_requests_running 0\n")


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_top_shows_a_server_once(server, capsys, monkeypatch, path):
    """Catches a command that only works on a terminal, or not with clients' base URL, or shows nothing."""
    url, pages = server
    pages["/metrics"] = ("text/plain; version=0.0.4", METRICS)
    code, out, err = call(capsys, monkeypatch, "top", url + path, "--once")
    assert (code, err) == (0, "")
    for part in (url, "running", "5", "5,000", "25.0%", "first token"):
        assert part in out


@pytest.mark.parametrize("text", ["", "up 1\n", "<html>"])
def test_top_says_that_a_server_is_not_ours(text):
    """Catches a dashboard of zeros for the wrong port."""
    with pytest.raises(ServerError, match="serves no minipaged metrics"):
        read_metrics(text, "http://there", 0.0)


def test_top_gives_the_servers_key(locked_server, capsys, monkeypatch):
    """Catches a server with a key, as every public one has, that cannot be watched, and a key unnamed."""
    url, pages = locked_server
    pages["/metrics"] = ("text/plain; version=0.0.4", METRICS)
    code, _, err = call(capsys, monkeypatch, "top", url, "--once")
    assert code == 2
    assert "answered 401: give its key with --api-key or in MINIPAGED_API_KEY" in err
    code, out, _ = call(capsys, monkeypatch, "top", url, "--once", "--api-key", "sekret")
    assert (code, "5,000" in out) == (0, True)
    monkeypatch.setenv("MINIPAGED_API_KEY", "sekret")
    assert call(capsys, monkeypatch, "top", url, "--once")[0] == 0


def test_live_needs_no_key(locked_server, capsys, monkeypatch):
    """Catches the refusal of a path that the server does not have: the page asks for the key itself."""
    url, pages = locked_server
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    pages["/"] = ("text/html; charset=utf-8", live_page())
    code, out, _ = call(capsys, monkeypatch, "view", "--live", url)
    assert (code, f"{url}/" in out) == (0, True)


def test_top_says_that_nothing_answers(capsys, monkeypatch):
    """Catches a traceback where no server is started, and an interval that makes it spin."""
    code, _, err = call(capsys, monkeypatch, "top", "http://127.0.0.1:1", "--once")
    assert code == 2
    assert "cannot reach http://127.0.0.1:1/metrics" in err
    assert err.count("\n") == 1
    code, _, err = call(capsys, monkeypatch, "top", "http://127.0.0.1:1", "--interval", "0")
    assert "interval is 0.0; give 0.1 to 3600 seconds" in err


def test_top_waits_for_a_server_that_comes_back(server, capsys, monkeypatch):
    """Catches a dashboard that a restart, or one slow answer, ends."""
    url, pages = server
    pages["/metrics"] = ("text/plain; version=0.0.4", METRICS)
    later = METRICS.replace("generation_tokens_total 5000", "generation_tokens_total 7777")
    after_each_look = iter([{}, {"/metrics": ("text/plain; version=0.0.4", later)}])

    def sleep(seconds: float) -> None:
        if (new := next(after_each_look, None)) is None:
            raise KeyboardInterrupt
        pages.clear()
        pages.update(new)

    monkeypatch.setattr("minipaged.cli.view.time.sleep", sleep)
    code, out, err = call(capsys, monkeypatch, "top", url)
    assert (code, err) == (0, "")
    assert "7,777" in out


@pytest.mark.parametrize(
    ("header", "body"),
    [("Content-Length: 99999", METRICS), ("Transfer-Encoding: chunked", f"{99999:x}\r\n{METRICS}")],
)
def test_an_answer_that_breaks_off_is_none(header, body):
    """Catches the first half of the figures for all of them: the server ended while it answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(10_000)
                client.sendall(f"HTTP/1.1 200 OK\r\n{header}\r\n\r\n{body}".encode())

        pool.submit(answer)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        with pytest.raises(ServerError, match=f"cannot reach {address}: IncompleteRead"):
            fetch(address.removesuffix("/metrics"), "metrics")


def test_top_writes_each_look_to_a_pipe_as_it_comes(server):
    """Catches a log that is empty until the command ends, a traceback when its reader has seen enough."""
    url, pages = server
    pages["/metrics"] = ("text/plain; version=0.0.4", METRICS)
    command = [sys.executable, "-m", "minipaged", "top", url, "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        too_late = threading.Timer(30, process.kill)
        too_late.start()
        looks = 0
        while looks < 2:
            line = process.stdout.readline()
            assert line, "nothing was written in 30 seconds"
            looks += "generated tokens" in line
        too_late.cancel()
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == ""


@pytest.mark.parametrize("width", [*range(8, 40, 5), 59, 60, 80, 140])
@pytest.mark.parametrize("with_rates", [False, True])
def test_no_number_of_the_dashboard_is_cut(width, with_rates):
    """Catches "9…" for 961 in a narrow terminal, and a label in two lines where there is room for it."""
    scrapes = [read_metrics(METRICS, "here", at) for at in (1.0, 2.0)]
    scrapes[1].values["generation_tokens_total"] = 961_234_567
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(dashboard("http://here", scrapes[1], scrapes[0] if with_rates else None))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    body = text.replace("─", "").replace("│", "")
    assert "…" not in body
    words = "".join(body.split())
    for value in ("running5", "swapped0", "1,200", "961,234,567", "25.0%", "<100ms", "198ms"):
        assert value in words
    assert ("961,229,567.0/s" in words) == with_rates
    assert width < 60 or "generated tokens" in body


def test_top_shows_why_there_is_no_news():
    """Catches old numbers that look new, also in a terminal so low that it shows only the beginning."""
    scrape = read_metrics(METRICS, "here", 0.0)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(dashboard("http://here", scrape, trouble="http://here/metrics answered 503"))
    text = console.export_text()
    assert "5,000" in text
    assert "not up to date: http://here/metrics answered 503" in text.splitlines()[1]


def test_top_says_that_no_header_can_have_the_key(server, capsys, monkeypatch):
    """Catches the advice to start the server that is there, and a key that is printed."""
    for key in ("sekret\nsekret", "日本"):
        code, _, err = call(capsys, monkeypatch, "top", server[0], "--once", "--api-key", key)
        assert code == 2
        assert "the API key has a character that headers do not allow; give the server's own" in err
        assert key not in err
