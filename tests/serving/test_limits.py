"""Who may use the server and how much of it; who leaves; what fails; how it ends."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

import minipaged
from minipaged import BeamSearchParams, SamplingParams
from minipaged.outputs import RequestMetrics, RequestOutput
from minipaged.serving import chat, completions, connections
from minipaged.serving import log_thread as log_threads
from minipaged.serving.generation import Usage
from minipaged.serving.log_thread import log_thread
from minipaged.serving.schemas import StreamOptions
from minipaged.serving.server import bind
from minipaged.serving.settings import ServerSettings, ServerSettingsError
from minipaged.serving.streaming import DONE, Chunks, event_of
from tests.processes import started
from tests.serving.conftest import C, connect, request_of, running, wait_for
from tests.serving.toys import IDS, toy
from tests.slow import slow_but

needs_pipes = pytest.mark.skipif(sys.platform == "win32", reason="a pipe that does not wait")

# -- keys ----------------------------------------------------------------------------------------


def test_every_path_that_reveals_requests_demands_the_key():
    """Catches an endpoint that was forgotten, a key compared by its beginning, BEARER refused."""
    with running(toy(), api_keys=("key-1", "key-2")) as server:
        paths = set(server.server.config.app.openapi()["paths"]) - {"/", "/health", "/version"}
        assert len(paths) >= 8
        for path in paths:
            for headers in ({}, {"Authorization": "Bearer key-"}, {"Authorization": "Bearer key-12"}):
                for method in ("GET", "POST"):
                    answer = server.http.request(method, path, headers=headers)
                    assert answer.status_code == 401, f"{method} {path}"
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert [server.http.get(path).status_code for path in ("/", "/health", "/version")] == [200] * 3
        assert server.http.get("/version").json() == {"version": minipaged.__version__}
        for given in ("Bearer key-2", "bearer key-1", "BEARER  key-1"):
            assert server.http.get("/v1/models", headers={"Authorization": given}).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.openai("wrong").models.list()


def test_keys_and_salts_never_share_a_cache():
    """Catches a tenant who learns from a hit, or its time, what another has asked."""
    with running(toy(), api_keys=("a", "b")) as server:

        def cached(key: str, **extra) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            body = {**IDS, "prompt": list(range(40)), "max_tokens": 2, **extra}
            answer = server.http.post(C, json=body, headers=headers).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached("a"), cached("a"), cached("b"), cached("b")] == [0, 39, 0, 39]
        assert [cached("a", cache_salt="x"), cached("a", cache_salt="x")] == [0, 39]
        assert [cached("b", cache_salt="x"), cached("b", cache_salt="x")] == [0, 39]


def test_a_measurement_can_begin_with_an_empty_prefix_cache():
    """Catches a first measurement that warms the cache for the second."""
    body = {**IDS, "prompt": list(range(40)), "max_tokens": 2}
    with running(toy()) as server:

        def cached() -> int:
            answer = server.http.post(C, json=body).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached(), cached()] == [0, 39]
        assert server.http.post("/reset_prefix_cache").status_code == 200
        assert [cached(), cached()] == [0, 39]
        server.llm.shutdown()
        answer = server.http.post("/reset_prefix_cache")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")


def test_an_address_that_others_reach_needs_a_key():
    """Catches a server that is open to the network by default."""
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.com"):
        with pytest.raises(ServerSettingsError, match=re.escape(f"host is {host!r}")):
            ServerSettings(host=host)
        ServerSettings(host=host, api_keys=("a",))
    for host in ("127.0.0.1", "::1", "localhost"):
        ServerSettings(host=host)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000),
        ("port", -1),
        ("max_waiting", 0),
        ("request_timeout", 0),
        ("request_timeout", float("nan")),
        ("shutdown_timeout", -1.0),
        ("max_body_bytes", 0),
        ("api_keys", ("a b",)),
        ("api_keys", ("from-a-file\n",)),
        ("api_keys", ("",)),
        ("allowed_origins", ("*", "page.example")),
        ("allowed_origins", ("http://page.example/",)),
        ("allowed_origins", ("http://Page.example",)),
        ("allowed_origins", ("http://page.example\n",)),
    ],
)
def test_a_setting_that_cannot_work_is_refused(name, value):
    """Catches a server that starts and then refuses everybody."""
    with pytest.raises(ServerSettingsError, match="; give"):
        ServerSettings(**{name: value})


def test_origins_of_apps_and_extensions_can_be_allowed():
    """Catches a refusal of what a browser really sends."""
    apps = ("file://", "null", "*", "tauri://localhost", "safari-web-extension://140BB581-8F3A")
    origins = (*apps, "http://[::1]:3000", "https://xn--bcher-kva.example")
    assert ServerSettings(allowed_origins=origins).allowed_origins == origins


def test_other_origins_are_refused_unless_they_are_allowed():
    """Catches CORS headers by default: any page could use a server on the visitor's machine."""
    page = {"Origin": "http://page.example"}
    with running(toy()) as server:
        answer = server.http.get("/v1/models", headers=page)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    with running(toy(), allowed_origins=("http://page.example",), api_keys=("a",)) as server:
        asks = {
            **page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        answer = server.http.options(C, headers=asks)
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        exposed = server.http.get("/health", headers=page).headers["access-control-expose-headers"]
        assert "X-Request-Id" in exposed
        assert (
            "access-control-allow-origin"
            not in server.http.get("/", headers={"Origin": "http://b.example"}).headers
        )


# -- how much ------------------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_back():
    """Catches a queue without end, a 500, a request that is lost behind the refused one."""
    llm = toy(max_waiting=2, max_num_seqs=1)
    llm.engine.executor.seconds = 0.02
    with running(llm) as server, ThreadPoolExecutor(8) as pool:
        body = {**IDS, "max_tokens": 20}
        answers = list(pool.map(lambda _: server.http.post(C, json=body), range(8)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert all(answer.headers["Retry-After"] for answer in refused)
        assert refused[0].json()["error"]["type"] == "rate_limit_error"
        done = [
            answer.json()["usage"]["completion_tokens"] for answer in answers if answer.status_code == 200
        ]
        assert done == [20] * (8 - len(refused))
        others = [pool.submit(server.http.post, C, json={**body, "max_tokens": 60}) for _ in range(2)]
        wait_for(lambda: llm.engine.scheduler.waiting)
        many = server.http.post(C, json={**body, "prompt": [[1]] * 2})
        assert many.status_code == 429, "some prompts of one body were taken"
        assert [other.result().status_code for other in others] == [200, 200]
        server.assert_released()


def test_a_body_of_more_prompts_than_may_ever_wait_is_told_the_limit():
    """Catches a 429 for ever, which says that others wait although the server is idle."""
    with running(toy(max_waiting=2)) as server:
        answer = server.http.post(C, json={**IDS, "prompt": [[1]] * 3})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "prompt")
        assert "has 3 prompts" in error["message"]
        assert "give at most 2, or raise --max-waiting" in error["message"]
        assert server.http.post(C, json={**IDS, "prompt": [[1]] * 2}).status_code == 200


def test_a_request_that_takes_too_long_gets_an_error_and_is_freed():
    """Catches a request that holds its blocks forever."""
    llm = toy()
    llm.engine.executor.seconds = 0.05
    with running(llm, request_timeout=0.3) as server:
        answer = server.http.post(C, json={**IDS, "max_tokens": 100})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert answer.headers["X-Should-Retry"] == "false", "OpenAI's clients send it again, in vain"
        text = server.http.post(C, json={**IDS, "max_tokens": 100, "stream": True}).text
        assert '"code": "timeout"' in text
        assert text.endswith("data: [DONE]\n\n")
        server.assert_released()
        with connect(server.http) as slow:
            slow.sendall(request_of(b"{", length=100))
            assert b" 408 " in slow.recv(4096).splitlines()[0]


def test_a_connection_that_never_finishes_a_header_is_closed():
    """Catches one that stays for ever, be it the first request or a later one, and idle ones that are closed,
    too."""
    whole, part = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /version HTTP/1.1\r\nHo"

    def ask(client: socket.socket) -> None:
        client.sendall(whole)
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(1000)

    with running(toy(), request_timeout=0.2) as server:
        first, silent, second, idle = clients = [connect(server.http) for _ in range(4)]
        for client in clients:
            client.settimeout(60)
        ask(second)
        ask(idle)
        for client in (first, second):
            client.sendall(part)
        assert [client.recv(1000) for client in (first, silent, second)] == [b""] * 3
        ask(idle)
        for client in clients:
            client.close()


def test_a_lack_of_file_descriptors_is_logged_once(caplog, monkeypatch):
    """Catches connections that are reset without a cause in the log, and a line for each second."""
    caplog.set_level(logging.INFO, logger=connections.logger.name)
    are_free = iter([True, False, False, True, False])
    monkeypatch.setattr(connections, "has_free_descriptor", lambda: next(are_free))
    watched = connections.Connections(1.0)
    counts = []
    for _ in range(5):
        watched.check_descriptors(7)
        counts.append(caplog.text.count("Too many open files: 7 connections"))
    assert counts == [0, 1, 1, 1, 2]


def test_ids_cannot_collide():
    """Catches ids that a client chooses, and that end another's request; ids that say nothing of its own."""
    with running(toy()) as server:
        request_id = server.http.get("/health", headers={"X-Request-Id": "a" * 81}).headers["X-Request-Id"]
        assert "a" * 81 not in request_id
        answers = [server.http.post(C, json=IDS, headers={"X-Request-Id": "same"}) for _ in range(5)]
        ids = {answer.json()["id"] for answer in answers}
        assert len(ids) == 5
        assert ids == {f"cmpl-{answer.headers['X-Request-Id']}" for answer in answers}
        assert all(one.startswith("cmpl-same-") for one in ids)


# -- leaving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks_within_a_step(stream):
    """Catches a text that is generated for nobody, also while it waits behind others."""
    llm = toy(max_num_seqs=1)
    llm.engine.executor.seconds = 0.02
    with running(llm) as server:
        body = json.dumps({**IDS, "max_tokens": 150, "stream": stream}).encode()
        clients = []
        for count in (1, 2):  # one runs, one waits
            clients.append(connect(server.http))
            clients[-1].sendall(request_of(body))
            wait_for(lambda count=count: len(server.service._active) == count)
        wait_for(lambda: llm.engine.metrics.steps > 3)
        clients[1].close()
        wait_for(lambda: not llm.engine.scheduler.waiting)
        steps = llm.engine.metrics.steps
        clients[0].close()
        server.assert_released()
        assert llm.engine.metrics.steps <= steps + 4
        assert llm.engine.metrics.request_success == {"abort": 2}


# -- failing -------------------------------------------------------------------------------------


def test_a_step_that_fails_once_fails_nobody():
    """Catches a request lost to a fault that computing again would have repaired."""
    llm = toy()
    with running(llm) as server:
        right = server.http.post(C, json={**IDS, "max_tokens": 10, "logprobs": 0}).json()["choices"]
        llm.engine.executor.num_broken = 2
        assert server.http.post(C, json={**IDS, "max_tokens": 10, "logprobs": 0}).json()["choices"] == right


@pytest.mark.parametrize("where", slow_but(["step"], ["step", "swap", "sampling"]))
def test_a_fault_fails_the_requests_of_its_step_alone(where, monkeypatch):
    """Catches a fault that kills the server, neighbours that fail along, and a reason that nobody hears."""
    from minipaged import AsyncLLM

    options = {"num_blocks": 8, "preemption_mode": "swap"} if where == "swap" else {"num_blocks": 64}
    llm = AsyncLLM(**options, max_num_seqs=2, disable_log_stats=True, seed=1)
    runner = llm.engine.executor
    owner, name = {
        "step": (runner, "forward"),
        "swap": (runner.cache, "swap_out"),
        "sampling": (runner, "sampler"),
    }[where]
    original, count = getattr(owner, name), [0]
    first = 1 if where == "swap" else 3  # (how many swaps there are depends on when requests arrive)

    def faulty(*args):
        if where != "swap" or args[0]:
            count[0] += 1
            if first <= count[0] < first + 3:
                raise RuntimeError("injected fault")
        return original(*args)

    def slow(*args, forward=runner.forward):
        time.sleep(0.01)  # so that requests run side by side, which takes a swap
        return forward(*args)

    if where == "swap":
        monkeypatch.setattr(runner, "forward", slow)
    monkeypatch.setattr(owner, name, faulty)
    with running(llm) as server, ThreadPoolExecutor(6) as pool:
        body = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
        prompts = [f"Once upon a time there were {i} foxes" for i in range(6)]

        def ask(i: int):
            return server.http.post(C, json={**body, "prompt": prompts[i], "stream": i % 2 == 1})

        answers = list(pool.map(ask, range(6)))
        assert count[0] >= first, "the fault never came"
        failed = [i for i, answer in enumerate(answers) if "injected fault" in answer.text]
        # (After a failed swap its requests are computed anew, without one: none is lost.)
        assert len(failed) in ((0,) if where == "swap" else (1, 2)), "another number than one step has"
        for i, answer in enumerate(answers):
            if i in failed:
                assert answer.status_code == (200 if i % 2 else 500)
                assert '"type": "server_error"' in answer.text
            else:
                assert answer.status_code == 200
                assert "error" not in answer.text
        server.assert_released()
        assert server.http.get("/health").status_code == 200
        right = server.http.post(C, json={**body, "prompt": prompts[0]}).json()["choices"][0]["text"]
    with running(AsyncLLM(num_blocks=64, disable_log_stats=True)) as server:
        assert server.http.post(C, json={**body, "prompt": prompts[0]}).json()["choices"][0]["text"] == right


def test_a_failing_engine_turns_health_red():
    """Catches a server that takes requests no step will ever answer, and one that stays red when repaired."""
    llm = toy()
    with running(llm) as server:
        assert server.http.get("/health").json() == {"status": "ok"}
        llm.engine.executor.num_broken = 10**6
        for _ in range(4):
            answer = server.http.post(C, json=IDS)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_failed")
            assert "on fire" in answer.json()["error"]["message"]
        red = server.http.get("/health")
        assert (red.status_code, red.json()["error"]["code"]) == (503, "unhealthy")
        llm.engine.executor.num_broken = 0
        assert server.http.post(C, json=IDS).status_code == 200
        assert server.http.get("/health").status_code == 200


def test_a_dead_engine_turns_health_red_and_refuses():
    """Catches clients that wait forever for a thread that has died."""
    llm = toy()
    with running(llm) as server:

        def die() -> None:
            raise SystemError("worn out")

        llm.between_steps(die)
        wait_for(lambda: not llm.is_running)
        assert "worn out" in server.http.get("/health").json()["error"]["message"]
        answer = server.http.post(C, json=IDS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")
        assert answer.headers["Retry-After"]


def test_a_rank_that_dies_while_nothing_runs_turns_health_red_at_once():
    """Catches a server that looks healthy until enough requests have failed."""
    llm = toy()
    with running(llm) as server:
        assert server.http.get("/health").status_code == 200
        llm.engine.executor.loss = "rank 1 was killed by SIGKILL"
        red = server.http.get("/health")
        assert (red.status_code, red.json()["error"]["code"]) == (503, "unhealthy")
        assert "rank 1 was killed" in red.json()["error"]["message"]
        answer = server.http.post(C, json=IDS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")


def test_log_lines_have_no_prompt(caplog):
    """Catches a prompt in a log, of a good request, a bad one or one that fails."""
    llm = toy()
    logging.getLogger("minipaged").setLevel(logging.DEBUG)
    with caplog.at_level(logging.DEBUG), running(llm) as server:
        secret = [41, 42, 43]
        for body in ({}, {"temperature": -1}, {"stream": True}, {"max_tokens": 5000}):
            server.http.post(C, json={**IDS, "prompt": secret, **body})
        server.http.post(C, json={**IDS, "prompt": "a secret"})
        llm.engine.executor.num_broken = 3
        server.http.post(C, json={**IDS, "prompt": secret})
    ours = [record for record in caplog.records if record.name.startswith(("minipaged", "uvicorn"))]
    log = "\n".join(record.getMessage() + str(record.exc_text or "") for record in ours)
    assert "cmpl-" in log
    assert "on fire" in log
    assert "41, 42" not in log
    assert "secret" not in log


def test_a_request_has_one_line_in_the_log_and_an_id(caplog, monkeypatch):
    """Catches a refused generation that is logged twice, a refusal of the outer layers without a line or an
    id, a line as long as a client likes, and one that a client forged."""
    llm = toy()
    hostile = "/%0aINFO%20forged" + "x" * 3000
    with caplog.at_level(logging.INFO), running(llm, allowed_origins=("http://page.example",)) as server:
        logging.getLogger("minipaged").setLevel(logging.INFO)
        preflight = {"Origin": "http://other.example", "Access-Control-Request-Method": "POST"}
        llm.engine.executor.num_broken = 3
        answers = [
            (500, server.http.post(C, json=IDS)),
            (200, server.http.post(C, json=IDS)),
            (400, server.http.post(C, json={**IDS, "prompt": [10**9]})),
            (400, server.http.post(C, json={**IDS, "temperature": -1})),
            (400, server.http.options(C, headers=preflight)),
            (404, server.http.get(hostile)),
            (200, server.http.get("/health")),
        ]
        monkeypatch.setattr(server.service, "check_model", lambda name: [][0])
        answers.insert(0, (500, server.http.post(C, json=IDS)))
        assert [answer.status_code for _, answer in answers] == [status for status, _ in answers]
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("minipaged.serving")]
    counts = [sum(answer.headers["X-Request-Id"] in line for line in lines) for _, answer in answers]
    assert counts == [1] * 7 + [0]
    for status, answer in answers:
        [line] = [line for line in lines if answer.headers["X-Request-Id"] in line] or [""]
        assert line.endswith(f", status {status}") == (status != 200), line
    assert "IndexError" in caplog.text
    assert max(map(len, lines)) < 400
    assert not [line for line in lines if "\n" in line]


@pytest.fixture
def pipe():
    """Both ends of a pipe."""
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as reader, open(writer, "w", encoding="utf-8") as writer:
        yield reader, writer


def fill(writer) -> None:
    """Write to a pipe until it takes no more."""
    os.set_blocking(writer.fileno(), False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer.fileno(), b"x" * 512)
    os.set_blocking(writer.fileno(), True)


def lines_of(reader) -> list[str]:
    """What was written after the pipe was full, once its writers have gone."""
    return reader.read().decode().lstrip("x").splitlines()


@needs_pipes
def test_a_log_that_nobody_reads_delays_nobody_and_counts_what_it_drops(pipe, caplog, monkeypatch):
    """Catches a server that hangs in writing its log, lines lost in silence, and a queue without end."""
    reader, writer = pipe
    fill(writer)
    monkeypatch.setattr(sys, "stderr", writer)
    monkeypatch.setattr(log_threads, "MOST_LINES", 10)
    caplog.set_level(logging.INFO, logger=log_threads.logger.name)
    handler = logging.StreamHandler()
    monkeypatch.setattr(log_threads.logger, "handlers", [handler])
    with log_thread():
        handler.setStream(sys.stderr)
        sys.stderr.write("taken by the thread\n")  # (not print, which writes twice)
        wait_for(lambda: not sys.stderr._waiting)
        for number in range(25):
            sys.stderr.write(f"line {number}\n")
        assert sys.stderr._num_dropped == 15
        sys.stderr.flush()
        text = reader.read(1 << 20)
        while b"dropped" not in text:
            text += reader.read(1 << 20)
        sys.stderr.write("the last\n")
    writer.close()
    expected = ["taken by the thread", *(f"line {number}" for number in range(10))]
    dropped = "15 lines of the log were dropped: its reader was too slow"
    assert [*text.decode().lstrip("x").splitlines(), *lines_of(reader)] == [*expected, dropped, "the last"]


def test_all_lines_that_are_dropped_are_counted(caplog, monkeypatch):
    """Catches counts that are dropped themselves, because the queue is still full."""
    monkeypatch.setattr(log_threads, "MOST_LINES", 10)
    caplog.set_level(logging.INFO, logger=log_threads.logger.name)
    writes, taken = threading.Semaphore(0), []

    class Slow(io.RawIOBase):
        def write(self, data) -> int:
            taken.append(bytes(data).decode())
            assert writes.acquire(timeout=60)
            return len(data)

    log = log_threads.LogThread(sys.__stderr__, Slow())
    monkeypatch.setattr(log_threads.logger, "handlers", [logging.StreamHandler(log)])
    log.write("first\n")
    for number in range(1, 4):
        wait_for(lambda: len(taken) == number)  # noqa: B023 (called at once)
        for _ in range(25):
            log.write("line\n")
        writes.release()
    for _ in range(100):
        writes.release()
    log.close()
    text = "".join(taken)
    counts = [int(found) for found in re.findall(r"(\d+) lines of the log were dropped", text)]
    assert text.count("line\n") + sum(counts) == 75


@needs_pipes
def test_the_end_does_not_wait_for_a_log_that_nobody_reads(pipe, monkeypatch):
    """Catches a server that two SIGTERMs do not end."""
    fill(pipe[1])
    monkeypatch.setattr(sys, "stderr", pipe[1])
    monkeypatch.setattr(log_threads, "PATIENCE", 0.1)
    with log_thread():
        print("nobody reads this", file=sys.stderr)
    assert sys.stderr is pipe[1]


# -- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_patient", [True, False])
def test_a_server_that_ends_refuses_what_is_new_and_finishes_what_runs(is_patient):
    """Catches a text that is silently cut, and a server that never ends."""
    llm = toy()
    llm.engine.executor.seconds = 0.03
    with running(llm, shutdown_timeout=30 if is_patient else 0.3) as server, ThreadPoolExecutor(2) as pool:
        body = {**IDS, "max_tokens": 40}
        whole = pool.submit(server.http.post, C, json=body)
        stream = pool.submit(server.http.post, C, json={**body, "stream": True})
        wait_for(lambda: len(server.service._active) == 2 and llm.engine.metrics.steps > 2)
        server.server.handle_exit(signal.SIGTERM, None)
        refused = server.http.post(C, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["Retry-After"]
        assert server.http.get("/health").status_code == 503
        assert server.http.get("/metrics").status_code == 200, "nobody sees how the end goes"
        if is_patient:
            assert whole.result().json()["usage"]["completion_tokens"] == 40
            assert '"finish_reason": "length"' in stream.result().text
        else:
            assert whole.result().status_code == 503
            assert '"code": "shutting_down"' in stream.result().text
        assert stream.result().text.endswith("data: [DONE]\n\n")
        wait_for(lambda: server.server.should_exit)


def test_the_end_does_not_wait_twice_for_clients_that_do_not_read(monkeypatch):
    """Catches a wait for requests that have been ended already, before uvicorn's own."""
    waits = []

    async def never_idle(seconds):
        waits.append(seconds)
        return False

    with running(toy(), shutdown_timeout=0.1) as server:
        monkeypatch.setattr(server.service, "_is_idle_within", never_idle)
        server.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: server.server.should_exit)
        assert waits == [0.1]


def test_a_second_signal_does_not_wait_for_what_runs():
    """Catches a server that cannot be ended before its last request."""
    with running(toy(), shutdown_timeout=1000) as server:
        server.service.enter(["never done"])
        server.server.handle_exit(signal.SIGINT, None)
        wait_for(lambda: server.service.live.is_closed)  # the first drains
        assert not server.server.should_exit
        server.server.handle_exit(signal.SIGINT, None)
        wait_for(lambda: not server.server.servers[0].is_serving())


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--replicas", "2")])
def test_a_signal_right_after_the_first_line_drains(arguments):
    """Catches a command that says that it serves before it handles signals, and dies with its requests."""
    command = ("-m", "minipaged", "serve", "--port", "0", "--num-blocks", "64", *arguments)
    with started(*command) as process:
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())[1])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(request_of(b'{"prompt": "Once", "max_tokens": 5}'))
            process.send_signal(signal.SIGTERM)
            assert re.match(rb"HTTP/1.1 (200|503) ", client.recv(1000))
        assert process.wait(60) == 0


def test_who_never_sends_his_body_does_not_spoil_the_end(caplog):
    """Catches a traceback in the log for a connection that merely hangs when the server ends."""
    with caplog.at_level(logging.INFO, "minipaged"), running(toy()) as server:
        server.server.config.timeout_graceful_shutdown = 0.2
        with connect(server.http) as client:
            client.sendall(request_of(b"{", length=99))
            wait_for(lambda: server.server.server_state.tasks)
            server.server.handle_exit(signal.SIGTERM, None)
            assert client.recv(1000).startswith(b"HTTP/1.1 503")
    assert [record for record in caplog.records if record.exc_info] == []


def test_the_command_serves_and_ends_on_sigterm():
    """Catches a command that does not start, ignores SIGTERM, or ends with a traceback; a request without a
    line in the log, and one with several."""
    command = ("-m", "minipaged", "serve", "--port", "0", "--num-blocks", "64")
    environment = {**os.environ, "MINIPAGED_API_KEY": "from-the-environment"}
    with started(*command, env=environment) as process:
        line = process.stdout.readline()
        found = re.fullmatch(r"Serving pocket at (http://127\.0\.0\.1:\d+)\n", line)
        assert found, line + process.stderr.read()
        url, headers = found[1], {"Authorization": "Bearer from-the-environment"}
        answer = httpx.post(url + C, json={"prompt": "Once", "max_tokens": 5}, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        assert httpx.post(url + C, json={"prompt": "secret"}, headers={"X-API-Key": "a"}).status_code == 401
        body = {"prompt": "Once", "stream": True, "max_tokens": 200, "ignore_eos": True}
        with httpx.stream("POST", url + C, headers=headers, json=body, timeout=60) as stream:
            pieces = stream.iter_text()
            text = next(pieces)
            process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        assert '"finish_reason": "length"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert process.wait(30) in (0, -signal.SIGTERM)
        # (The command keeps what it writes to standard output, which a server must not do for ever.)
        assert process.stdout.read() == ""
        log = process.stderr.read()
        assert "Traceback" not in log
        at = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
        assert len(re.findall(f"{at}INFO cmpl-.*: 1 prompt of ", log, re.MULTILINE)) == 2
        assert "Shutting down: 1 open request, with 30 s to finish\n" in log
        refusal = f"{at}INFO [0-9a-f]{{32}}: POST '{C}', status 401\n"
        assert len(re.findall(refusal, log, re.MULTILINE)) == 1
        assert "secret" not in log


@needs_pipes
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--replicas", "2")])
def test_a_log_that_nobody_reads_does_not_stop_the_command(arguments, pipe):
    """Catches a server that answers nobody, does not end, or aborts at the very end."""
    command = ("-m", "minipaged", "serve", "--port", "0", "--num-blocks", "64", *arguments)
    with started(*command, stderr=pipe[1]) as process:
        url = process.stdout.readline().split()[3]
        fill(pipe[1])
        for _ in range(3):
            answer = httpx.post(url + C, json={"prompt": "Once", "max_tokens": 5}, timeout=60)
            assert answer.status_code == 200, answer.text
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_log_that_cannot_be_written_does_not_change_the_exit_code():
    """Catches exit code 120 after a clean end."""
    with (
        open("/dev/full", "w", encoding="utf-8") as full,
        started("-m", "minipaged", "serve", "--port", "0", "--num-blocks", "64", stderr=full) as process,
    ):
        url = process.stdout.readline().split()[-1]
        assert httpx.post(url + C, json={"prompt": "Once", "max_tokens": 5}, timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_a_second_signal_ends_the_command_at_once():
    """Catches a traceback, and a server that waits for what runs."""
    with started("-m", "minipaged", "serve", "--port", "0", "--num-blocks", "2048") as process:
        url = process.stdout.readline().split()[-1]
        body = {"prompt": "Once", "stream": True, "max_tokens": 8000, "ignore_eos": True, "n": 4}
        with httpx.stream("POST", url + C, json=body, timeout=60) as stream:
            pieces = stream.iter_raw()  # (kept: dropping it hangs up, and there is nothing to wait for)
            next(pieces)
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) in (0, 130, -signal.SIGINT)
        assert "Traceback" not in process.stderr.read()


def test_a_taken_port_and_an_open_address_are_reported_in_one_line():
    """Catches a traceback, and a model loaded for nothing."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, expected in ((["--port", port], f"port {port}"), (["--host", "0.0.0.0"], "--api-key")):
            command = [sys.executable, "-m", "minipaged", "serve", *arguments]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert ran.returncode == 2
            assert expected in ran.stderr
            assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize(("platform", "may_share"), [("linux", True), ("win32", False)])
def test_two_servers_never_share_a_port_on_windows(platform, may_share, monkeypatch):
    """Catches SO_REUSEADDR where it lets a second server take every other client of the first."""
    monkeypatch.setattr(sys, "platform", platform)
    with bind(ServerSettings(port=0)) as listener:
        assert bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)) == may_share


def test_params_of_the_engine_reach_it():
    """Catches a table of fields that lacks one of `SamplingParams` or `BeamSearchParams`."""
    from dataclasses import fields

    from minipaged.serving.body_params import COMMON, OF_SAMPLES
    from minipaged.serving.schemas import OF_BEAMS

    elsewhere = {"n", "logit_bias", "logprobs", "output_kind", "structured_outputs"}
    elsewhere |= {"logits_processors", "detokenize"}  # of Python, not of HTTP
    assert {*COMMON, *OF_SAMPLES, *elsewhere} == {field.name for field in fields(SamplingParams)}
    elsewhere = {"num_return_sequences", "logprobs", "structured_outputs"}
    assert {*COMMON, *OF_BEAMS, *elsewhere} == {field.name for field in fields(BeamSearchParams)}


def test_the_part_of_an_event_that_is_written_once_is_that_of_each():
    """Catches a model's name that is taken for the place of the choices, a text or an index for another's."""
    head = {"model": 'a "choices": [] b ""\n', "created": 10}
    choice = {"index": 0, "text": "\u2028é\n\n"}
    usage, options = partial(dict, usage=3), StreamOptions(include_usage=True)
    chunks = Chunks(head, completions.PLAIN, usage, options)
    assert chunks.event(choice) == event_of({**head, "choices": [choice], "usage": None})
    right = event_of({**head, "choices": [choice], "more": [1], "usage": None})
    assert chunks.event(choice, more=[1]) == right
    assert chunks.last() == event_of({**head, "choices": [], "usage": 3}) + DONE
    without = Chunks(head, completions.PLAIN, usage, None)
    assert without.event(choice) + without.last() == event_of({**head, "choices": [choice]}) + DONE
    for index, text in ((0, ""), (10, '"" \u2028\\\n'), (2, "0")):
        for plain in ({**completions.PLAIN, "text": text}, {**chat.PLAIN, "delta": {"content": text}}):
            right = event_of({**head, "choices": [{**plain, "index": index}], "usage": None})
            chunks = Chunks(head, completions.PLAIN if "text" in plain else chat.PLAIN, usage, options)
            assert chunks.piece(index, text) == right


def test_a_request_is_in_the_queue_or_computed():
    """Catches a wait that is counted as computing, too."""
    usage, times = Usage(), RequestMetrics(1.0, 4.0, 5.0, 10.0, 11.0, num_generation_tokens=6)
    usage.count(0, RequestOutput("id", None, [1, 2, 3], finished=True, metrics=times))
    assert usage.fields()["timing"] == {"queue_seconds": 3.0, "inference_seconds": 7.0}


def test_the_usage_of_twice_as_many_prompts_takes_no_more_steps_to_report():
    """Catches all prompts of a body added up for each event that reports the usage so far."""
    steps = []
    for count in (10, 20):
        usage, calls = Usage(), []
        for position in range(count):
            usage.count(position, RequestOutput("id", None, [1, 2, 3], num_cached_tokens=2))
        sys.setprofile(lambda *call: calls.append(call))  # noqa: B023
        fields = usage.fields()["usage"]
        sys.setprofile(None)
        assert fields["prompt_tokens"] == 3 * count
        assert fields["prompt_tokens_details"] == {"cached_tokens": 2 * count}
        steps.append(len(calls))
    assert steps[0] == steps[1]
