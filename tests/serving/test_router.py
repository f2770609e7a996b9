"""A router over servers in threads: where requests go, what passes, what happens when one is lost."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minipaged import AsyncLLM, SamplingParams
from minipaged.serving import router as routers
from minipaged.serving import streaming
from minipaged.serving import watch as watching
from minipaged.serving.exchange import Exchange, Outgoing, Replica
from minipaged.serving.prompt_keys import look_at
from minipaged.serving.router import Router
from minipaged.serving.server import server_of
from minipaged.serving.settings import ServerSettings
from tests.serving.conftest import OPTIONS, C, connect, in_thread, request_of, running, wait_for
from tests.serving.toys import IDS, toy


class Routed:
    """Servers, the router before them, and a client."""

    def __init__(self, servers, router, front, url) -> None:
        self.servers, self.router, self.front, self.url = servers, router, front, url
        self.http = httpx.Client(base_url=url, timeout=60)

    def ask(self, **fields) -> httpx.Response:
        return self.http.post(C, json={**IDS, **fields})

    def die(self, number: int) -> None:
        """Close a server's sockets as the end of its process does."""
        server = self.servers[number].server

        def cut() -> None:
            for listener in server.servers:
                listener.close()
            for connection in list(server.server_state.connections):
                connection.transport.abort()

        server.servers[0].get_loop().call_soon_threadsafe(cut)

    def slow_down(self, seconds: float) -> None:
        for server in self.servers:
            server.llm.engine.executor.seconds = seconds

    def end(self) -> None:
        """Tell all at once that they end: each looks ten times a second."""
        for one in (self.front, *(server.server for server in self.servers)):
            one.should_exit = True

    def running_on(self) -> list[int]:
        return [server.llm.engine.metrics.steps for server in self.servers]


@contextmanager
def routed(count: int = 2, make=toy, options=None, **settings):
    """`count` servers over toy models behind a router on a free port."""
    with ExitStack() as stack:
        servers = [stack.enter_context(running(make(**(options or {})), **settings)) for _ in range(count)]
        router = Router(
            [Replica(i, server.url) for i, server in enumerate(servers)], ServerSettings(port=0, **settings)
        )
        front = server_of(router.app, router, router.settings)
        port = stack.enter_context(in_thread(front))
        one = Routed(servers, router, front, f"http://127.0.0.1:{port}")
        stack.callback(one.end)
        stack.enter_context(one.http)
        yield one


@contextmanager
def routed_to(answer, count: int = 2, **settings):
    """A router over replicas that are only a function from a request to its answer, and a client."""
    replicas = [Replica(i, f"http://replica-{i}") for i in range(count)]
    router = Router(replicas, ServerSettings(port=0, **settings))
    router._http._transport = httpx.MockTransport(answer)
    with in_thread(server_of(router.app, router, router.settings)) as port:
        one = Routed((), router, None, f"http://127.0.0.1:{port}")
        with one.http:
            yield one


async def never() -> None:
    """What a replica does whose process is stopped."""
    await asyncio.Event().wait()


def events(text: str) -> list:
    """A stream's events, without what differs from one answer to the next."""
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert found.pop() == "[DONE]"
    return [{k: v for k, v in json.loads(line).items() if k not in ("id", "created")} for line in found]


def test_what_the_router_refuses_has_a_line_in_the_log_and_an_id(caplog):
    """Catches a refusal that leaves no trace, and one of a replica that is logged there and here."""
    with caplog.at_level(logging.INFO), routed(max_body_bytes=1000) as fleet:
        logging.getLogger("minipaged").setLevel(logging.INFO)
        large = fleet.http.post(C, json={**IDS, "prompt": [1] * 1000})
        bad = fleet.http.post(C, json={**IDS, "temperature": -1})
        good = fleet.http.post(C, json=IDS)
        assert [answer.status_code for answer in (large, bad, good)] == [413, 400, 200]
    lines = [record.getMessage() for record in caplog.records]
    ids = [answer.headers["X-Request-Id"] for answer in (large, bad, good)]
    assert [sum(name in line for line in lines) for name in ids] == [1, 1, 1]


def test_a_client_that_leaves_in_the_middle_of_its_body_is_not_a_failure(caplog):
    """Catches a traceback, or a line about a bad body, for each client that gives up while it sends."""
    with caplog.at_level(logging.INFO), routed() as fleet:
        logging.getLogger("minipaged").setLevel(logging.INFO)
        for http, front in ((fleet.http, fleet.front), (fleet.servers[0].http, fleet.servers[0].server)):
            tasks = front.server_state.tasks
            wait_for(lambda: not tasks)  # noqa: B023
            with connect(http) as client:
                client.sendall(request_of(b"{", length=99))
                wait_for(lambda: tasks)  # noqa: B023
            wait_for(lambda: not tasks)  # noqa: B023
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("minipaged.serving")]
    assert lines == []


def test_a_web_page_can_read_what_the_router_says_itself():
    """Catches a page that sees "network error" in the place of an answer; a header that is there twice."""
    with routed(allowed_origins=("http://page.example",), max_body_bytes=1000) as fleet:
        origin = {"Origin": "http://page.example"}
        for answer in (
            fleet.http.get("/health", headers=origin),
            fleet.http.post(C, json={**IDS, "prompt": [1] * 1000}, headers=origin),
            fleet.http.post(C, json=IDS, headers=origin),
        ):
            assert answer.headers.get_list("access-control-allow-origin") == ["http://page.example"]


# -- what passes ---------------------------------------------------------------------------------


def test_answers_are_those_of_a_server(offline):
    """Catches a body, a status, a header or an event that the router changes or loses."""
    with routed(make=AsyncLLM, options=OPTIONS) as fleet:
        direct = fleet.servers[0].http
        for prompt in ("The little robot", "Once upon a time"):  # (one for each)
            body = {"prompt": prompt, "temperature": 0, "max_tokens": 9}
            (expected,) = offline.generate(prompt, SamplingParams(temperature=0, max_tokens=9))
            assert fleet.http.post(C, json=body).json()["choices"][0]["text"] == expected.outputs[0].text
            stream = {**body, "stream": True, "logprobs": 1}
            through, straight = (http.post(C, json=stream) for http in (fleet.http, direct))
            assert through.headers["content-type"] == straight.headers["content-type"]
            assert len(through.headers.get_list("date")) == 1
            assert events(through.text) == events(straight.text)
            assert len(events(through.text)) >= 9
        for method, path, given in (
            ("POST", C, {"content": b"{"}),
            ("POST", C, {"json": {**IDS, "temperature": -1}}),
            ("GET", "/v1/models", {}),
            ("GET", "/v1/models/nothing?a=%2F&b", {}),
            ("DELETE", C, {}),
            ("GET", "/openapi.json", {}),
        ):
            through, straight = (http.request(method, path, **given) for http in (fleet.http, direct))
            assert (through.status_code, through.content) == (straight.status_code, straight.content), path
            assert through.headers["X-Request-Id"]
        client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["pocket"]


@pytest.mark.parametrize("path", ["/", "/health", "/nothing"])
def test_a_head_is_a_get_without_its_body(path):
    """Catches the length of the body that HEAD does not have, and one replica's health for that of all."""
    with routed() as fleet:
        head, get = fleet.http.head(path), fleet.http.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-length"] == get.headers["content-length"] == str(len(get.content))


def test_keys_are_the_servers_business():
    """Catches a router that lets in whom the servers refuse, or keeps the key to itself."""
    with routed(api_keys=("a",)) as fleet:
        for path in ("/metrics", "/v1/models"):
            assert fleet.http.get(path).status_code == 401
            assert fleet.http.get(path, headers={"Authorization": "Bearer a"}).status_code == 200
        assert fleet.ask().status_code == 401
        assert fleet.http.get("/health").status_code == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_kept():
    """Catches a router that holds whatever it is sent."""
    with routed(max_body_bytes=1000) as fleet:
        answer = fleet.ask(prompt=[1] * 1000)
        assert answer.status_code == 413
        assert "X-Replica" not in answer.headers, "a replica was sent it"
        assert "--max-body-bytes" in answer.json()["error"]["message"]
        with connect(fleet.http) as client:
            client.settimeout(30)
            client.sendall(request_of(b"{", length=10**11))  # (and no more)
            assert client.recv(4096).startswith(b"HTTP/1.1 413")


# -- where it goes -------------------------------------------------------------------------------


def test_a_prompt_goes_where_its_beginning_is_cached():
    """Catches requests spread at random: each prefix would be computed on every replica."""
    with routed() as fleet:
        where: dict[int, set] = {}
        for turn in range(3):
            for prefix in range(3):  # (an odd number: in turn they would change places)
                prompt = [prefix + 1] * 32 + [10 + turn] * 8
                answer = fleet.ask(prompt=prompt, max_tokens=2)
                cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == (32 if turn else 0)
                where.setdefault(prefix, set()).add(answer.headers["X-Replica"])
        assert all(len(found) == 1 for found in where.values())
        assert sorted(found.pop() for found in where.values()) == ["0", "0", "1"]


def test_the_prefix_caches_of_all_replicas_are_emptied():
    """Catches a reset that only the first replica hears of, and a key that is not checked."""
    with routed(api_keys=("key",)) as fleet:
        fleet.http.headers["Authorization"] = "Bearer key"

        def cached() -> list[int]:
            bodies = [{**IDS, "prompt": [i] * 40, "max_tokens": 2} for i in range(4)]
            answers = [fleet.http.post(C, json=body).json() for body in bodies]
            return [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]

        assert [cached(), cached()] == [[0] * 4, [39] * 4]
        assert all(fleet.running_on())
        refused = fleet.http.post("/reset_prefix_cache", headers={"Authorization": "Bearer other"})
        assert refused.status_code == 401
        assert cached() == [39] * 4
        assert fleet.http.post("/reset_prefix_cache").status_code == 200
        assert cached() == [0] * 4
        fleet.die(1)
        assert fleet.http.post("/reset_prefix_cache").status_code == 200
        fleet.die(0)
        wait_for(lambda: fleet.http.post("/reset_prefix_cache").status_code == 503)


def test_a_home_that_is_busy_is_left():
    """Catches a load that is never counted, or never given back."""
    with routed(options={"max_num_seqs": 64}) as fleet, ThreadPoolExecutor(24) as pool:
        fleet.slow_down(0.01)
        answers = list(pool.map(lambda _: fleet.ask(prompt=[1] * 32, max_tokens=20), range(24)))
        assert {answer.headers["X-Replica"] for answer in answers} == {"0", "1"}
        assert [replica.num_requests for replica in fleet.router.replicas] == [0, 0]


def test_keys_of_a_body_are_those_of_its_first_prompt_and_of_its_cache():
    """Catches conversations, salts and tenants that look alike, and bodies that no router can read."""

    def keys(authorization=None, **fields):
        return look_at(json.dumps(fields).encode(), authorization)

    text = "a" * 200
    assert len(keys(prompt=text)[0]) == 3
    assert keys(prompt=text) == keys(prompt=[text])
    assert keys(prompt=[text, "b"]) == (keys(prompt=text)[0], 2)
    assert len(keys(prompt=list(range(40)))[0]) == 2
    assert keys(prompt=[[1] * 16, [2]]) == (keys(prompt=[1] * 16)[0], 2)
    for other in (keys("key", prompt=text), keys(prompt=text, cache_salt="s"), keys(prompt=text, model="m")):
        assert not set(other[0]) & set(keys(prompt=text)[0])
    first = [{"role": "user", "content": text}]
    more = [*first, {"role": "assistant", "content": text}]
    assert keys(messages=more)[0][:3] == keys(messages=first)[0][:3] != []
    found = keys(input=text, instructions="b" * 64)
    assert len(found[0]) >= 3
    assert keys(input=text, instructions="b" * 64) == found
    assert not set(keys(input=text, instructions="c" * 64)[0]) & set(found[0])
    assert keys(input=more)[0][:3] == keys(input=first)[0][:3] != []
    for body in (
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff",
        b'{"prompt": 3}',
        b'{"prompt": [[[]]]}',
        b"[" * 10**5,
        b'{"prompt": [{}]}',
        b'{"prompt": []}',
        json.dumps({"prompt": dict.fromkeys("abcdefghijklmnop")}).encode(),  # (3.12: slices can be keys)
    ):
        assert look_at(body, None)[0] == []


# -- who leaves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_blocks_of_its_replica(stream):
    """Catches a router that goes on listening to an answer that nobody wants."""
    with routed() as fleet:
        fleet.slow_down(0.02)
        body = json.dumps({**IDS, "max_tokens": 150, "stream": stream}).encode()
        with connect(fleet.http) as client:
            client.sendall(request_of(body))
            wait_for(lambda: fleet.servers[0].llm.engine.metrics.steps > 3)
        fleet.servers[0].assert_released(5)
        assert fleet.servers[0].llm.engine.metrics.request_success == {"abort": 1}
        wait_for(lambda: fleet.router.replicas[0].num_requests == 0)


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_a_client_that_leaves_at_any_moment_leaves_no_connection_open(kind):
    """Catches a connection lost to the pool as its answer ends: after many, no file can be opened."""

    async def serve(reader, writer) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: 9\r\n\r\n"
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(head.encode() + b"data: 1\n\n")
        writer.close()

    async def ask(http, replica) -> None:
        exchange = Exchange(http, replica, Outgoing("GET", "/", [], b"", 1))
        await exchange.begin()
        if exchange.events is not None:
            try:
                assert [piece async for piece in exchange.events] == []
            finally:
                await exchange.close()

    async def leave_at(step: int, http, replica) -> bool:
        task = asyncio.create_task(ask(http, replica))
        for _ in range(step):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.wait_for(ask(http, replica), 10)
        assert replica.num_requests == 0
        return task.cancelled()

    async def leave() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1")
        replica = Replica(0, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        one = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(limits=one, timeout=5, trust_env=False) as http:
            step = 1
            while await leave_at(step, http, replica):
                step += 1
        server.close()
        assert step > 5

    asyncio.run(leave())


# -- who is late ---------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1])
def test_a_request_ends_at_its_deadline_whatever_its_replica_does(after, monkeypatch, caplog):
    """Catches a client that waits for a stopped process, from the beginning on or after one event."""
    monkeypatch.setattr(routers, "TO_ANSWER", 0.1)

    class Events(httpx.AsyncByteStream):
        async def __aiter__(self):
            for _ in range(after):
                yield b'data: {"choices": []}\n\n'
            await never()

    async def answer(request):
        if request.url.path != "/health":
            return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=Events())
        return httpx.Response(200)

    with caplog.at_level(logging.WARNING, "minipaged"), routed_to(answer, request_timeout=0.2) as fleet:
        got = fleet.ask(stream=True)
        error = events(got.text)[-1]["error"] if after else got.json()["error"]
        assert (got.status_code, error["code"]) == (200 if after else 504, "timeout")
        wait_for(lambda: [replica.num_requests for replica in fleet.router.replicas] == [0, 0])
        assert fleet.router.num_retries == 0
    assert caplog.messages == ["The time of a request at replica 0 is up"]


def test_the_reason_of_a_late_request_is_its_replicas(monkeypatch):
    """Catches a router that is first, so that the replica's log says that the client has gone."""
    monkeypatch.setattr(routers, "TO_ANSWER", 30.0)  # (whatever else the machine does)
    with routed(request_timeout=0.3) as fleet:
        fleet.slow_down(0.05)
        for stream in (False, True):
            got = fleet.ask(max_tokens=150, stream=stream)
            error = events(got.text)[-1]["error"] if stream else got.json()["error"]
            assert (error["code"], "X-Replica" in got.headers) == ("timeout", True)


def test_a_client_that_does_not_read_is_dropped_after_its_deadline(monkeypatch):
    """Catches a request that counts for its replica, and is computed, for as long as its client likes."""
    monkeypatch.setattr(streaming, "TO_READ", 0.2)
    closed = []

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self):
            while True:
                yield b"data: %s\n\n" % (b"a" * 2**20)
                await asyncio.sleep(0)

        async def aclose(self):
            closed.append(self)

    async def answer(request):
        if request.url.path != "/health":
            return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=Endless())
        return httpx.Response(200)

    with routed_to(answer, request_timeout=0.5) as fleet, connect(fleet.http) as client:
        client.sendall(request_of(b"{}"))
        wait_for(lambda: fleet.router.replicas[0].num_requests)
        assert closed == []
        wait_for(lambda: not fleet.router.replicas[0].num_requests)
        wait_for(lambda: closed)
        assert len(closed) == 1


def test_a_replica_that_hangs_takes_only_itself_out_of_what_the_router_reports(caplog, monkeypatch):
    """Catches a fleet without metrics or models for the minute until one stopped process is killed, and a gap
    in the metrics of which the log says nothing."""
    monkeypatch.setattr(routers, "TO_ASK", 0.6)

    async def answer(request):
        if request.url.host == "replica-0":
            await never()
        if request.url.path == "/slow":  # (the last one that there is gets the time that it needs)
            await asyncio.sleep(0.9)
        return httpx.Response(200, text="steps 1\n")

    with caplog.at_level(logging.WARNING, "minipaged"), routed_to(answer) as fleet:
        page = fleet.http.get("/metrics").text
        assert 'steps{replica="1"} 1.0' in page
        assert 'steps{replica="0"}' not in page
        assert caplog.messages == ["Replica 0 is left out of /metrics: it has not answered in time"]
        for path in ("/v1/models", "/slow"):
            found = fleet.http.get(path)
            assert (found.status_code, found.headers.get("X-Replica")) == (200, "1"), path


def test_all_replicas_are_asked_at_once():
    """Catches a scrape that takes as long as all its replicas together."""
    asked: list[str] = []

    async def answer(request):
        if request.url.path == "/metrics":
            asked.append(request.url.host)
            while len(asked) < 3:
                await asyncio.sleep(0.01)
        return httpx.Response(200, text="steps 1\n")

    with routed_to(answer, 3) as fleet:
        page = fleet.http.get("/metrics").text
        assert [f'steps{{replica="{i}"}} 1.0' in page for i in range(3)] == [True] * 3


def test_a_reset_of_the_caches_that_a_replica_does_not_hear_is_not_reported_as_done():
    """Catches a measurement that is not cold, and a client that waits for a stopped process."""

    async def answer(request):
        if request.url.path == "/reset_prefix_cache" and request.url.host == "replica-1":
            await never()
        return httpx.Response(200)

    with routed_to(answer, request_timeout=0.2) as fleet:
        got = fleet.http.post("/reset_prefix_cache")
        assert (got.status_code, got.json()["error"]["code"]) == (504, "timeout")


# -- who dies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_replica_dies_before_the_first_token_is_computed_elsewhere(stream):
    """Catches an error for a request of which the client has received nothing."""
    with routed() as fleet, ThreadPoolExecutor(1) as pool:
        expected = fleet.ask(max_tokens=5, stream=stream).text
        victim = fleet.servers[1]  # (the second request goes there: the first replica was sent one more)
        victim.llm.engine.executor.seconds = 1.0
        answer = pool.submit(fleet.ask, max_tokens=5, stream=stream)
        wait_for(lambda: victim.service._active)
        fleet.die(1)
        got = answer.result()
        assert got.status_code == 200
        assert got.headers["X-Replica"] == "0"
        if stream:
            assert events(got.text) == events(expected)
        else:
            assert got.json()["choices"] == json.loads(expected)["choices"]
        assert fleet.router.num_retries == 1
        assert [replica.is_up for replica in fleet.router.replicas] == [True, False]
        for _ in range(4):
            assert fleet.ask(max_tokens=2).headers["X-Replica"] == "0"
        assert fleet.router.num_retries == 1, "the dead one was asked again"
        assert fleet.http.get("/health").json() == {"status": "ok", "replicas": 2, "up": 1}


def test_a_lost_replica_is_reported_once(caplog):
    """Catches a line for each of the requests that it had, and the name of a Python class as the cause."""
    with routed() as fleet, ThreadPoolExecutor(6) as clients, caplog.at_level(logging.WARNING, "minipaged"):
        fleet.slow_down(0.2)
        answers = [clients.submit(fleet.ask, max_tokens=20) for _ in range(6)]
        wait_for(lambda: [replica.num_requests for replica in fleet.router.replicas] == [3, 3])
        wait_for(lambda: len(fleet.servers[1].service._active) == 3)
        fleet.die(1)
        wait_for(lambda: fleet.router.replicas[0].num_requests == 6)
        fleet.slow_down(0)
        assert [answer.result().status_code for answer in answers] == [200] * 6
        lines = [line for line in caplog.messages if "Replica 1" in line and "is taken out" in line]
        assert lines == ["Replica 1 is taken out of service: the connection broke"]


def test_a_stream_whose_replica_dies_ends_with_an_error(caplog):
    """Catches a stream that looks complete, hangs, or goes on with the tokens of another run, and one that no
    log has: its replica could not write its line."""
    caplog.set_level(logging.INFO, "minipaged")
    with routed() as fleet:
        fleet.slow_down(0.05)
        with fleet.http.stream("POST", C, json={**IDS, "max_tokens": 100, "stream": True}) as answer:
            pieces = answer.iter_text()
            text = next(pieces)
            fleet.die(0)
            text += "".join(pieces)
        last = events(text)[-1]["error"]
        assert last["code"] == "replica_lost"
        assert last["message"] == "replica 0 was lost in the middle of the answer; send the request again"
        lines = [one.getMessage() for one in caplog.records if one.name == routers.__name__]
        assert f"{answer.headers['X-Request-Id']}: {last['message']}" in lines
        assert fleet.ask(max_tokens=2).headers["X-Replica"] == "1"


@pytest.mark.parametrize("target", ["/v1/responses", "/v1/responses?a=b"])
def test_a_response_whose_replica_dies_ends_with_an_event_that_its_client_knows(target):
    """Catches the end of a chat's stream, and a number that an earlier event had."""

    class Cut(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield b'data: {"sequence_number": 0}\n\ndata: {"sequence_number": 1}\n\n'
            yield b'data: {"sequence_number": 2}\n\ndata: {"seq'
            raise httpx.ReadError("gone")

    async def answer(request):
        if request.url.path != "/v1/responses":
            return httpx.Response(200)
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=Cut())

    with routed_to(answer) as fleet:
        text = fleet.http.post(target, json={"input": "a", "stream": True}).text
    *_, kind, data, _, _ = text.split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (kind, error["type"], error["code"]) == ("event: error", "error", "replica_lost")
    numbers = [int(number) for number in re.findall('"sequence_number": ([0-9]+)', text)]
    assert numbers == [0, 1, 2, 3]


@pytest.mark.parametrize("path", [C, "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("status", [429, 503])
def test_who_is_refused_by_a_replica_is_sent_to_another_whatever_he_asks_for(path, status):
    """Catches an endpoint whose requests count for no replica, and that are tried at one alone."""

    async def answer(request):
        is_refused = request.url.host == "replica-0" and request.method == "POST"
        return httpx.Response(status if is_refused else 200, json={})

    with routed_to(answer) as fleet:
        found = fleet.http.post(path, json={"prompt": "a", "input": "a", "messages": []})
        assert (found.status_code, found.headers["X-Replica"]) == (200, "1")


def test_an_address_reaches_the_replica_as_it_was_written():
    """Catches a slash of a model's name that becomes one of the path, and a query that is lost."""
    seen = []

    async def answer(request):
        seen.append(request.url.raw_path)
        return httpx.Response(200)

    with routed_to(answer) as fleet:
        fleet.http.get("/v1/models/a%2Fb?c=%2F&d")
    assert b"/v1/models/a%2Fb?c=%2F&d" in seen


def test_a_live_trace_has_no_deadline(monkeypatch):
    """Catches a page that stands still after --request-timeout, but only behind a router."""
    monkeypatch.setattr(routers, "TO_ANSWER", 0.0)
    monkeypatch.setattr(streaming, "TO_READ", 0.0)

    class Slow(httpx.AsyncByteStream):
        async def __aiter__(self):
            for number in range(3):
                yield b"data: %d\n\n" % number
                await asyncio.sleep(0.3)

    async def answer(request):
        if request.url.path != "/trace/live":
            return httpx.Response(200)
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=Slow())

    with routed_to(answer, request_timeout=0.2) as fleet:
        assert fleet.http.get("/trace/live").text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"


def test_a_request_that_two_replicas_were_lost_with_is_not_sent_to_a_third():
    """Catches one request that kills every replica in turn."""
    with routed(3) as fleet, ThreadPoolExecutor(1) as pool:
        fleet.slow_down(1.0)
        answer = pool.submit(fleet.ask, max_tokens=5)
        for number in (0, 1):
            wait_for(lambda number=number: fleet.servers[number].service._active)
            fleet.die(number)
        error = answer.result()
        assert (error.status_code, error.json()["error"]["code"]) == (503, "replica_lost")
        assert not fleet.servers[2].service._active
        fleet.slow_down(0.0)
        assert fleet.ask(max_tokens=2).status_code == 200


def test_replicas_that_cannot_be_reached_cost_a_request_no_try():
    """Catches a request given up, which was never sent to those that are gone."""
    with routed(3) as fleet:
        for number in (0, 1):
            fleet.die(number)
            wait_for(lambda number=number: not fleet.servers[number].server.servers[0].is_serving())
        answer = fleet.ask(max_tokens=2)
        assert (answer.status_code, answer.headers["X-Replica"]) == (200, "2")


def test_without_a_replica_clients_are_told_to_come_back():
    """Catches a router that hangs, or says that it is well."""
    with routed(1) as fleet:
        fleet.die(0)
        answer = fleet.ask()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert answer.headers["Retry-After"]
        assert fleet.http.get("/health").status_code == 503
        assert "minipaged:replica_up" in fleet.http.get("/metrics").text


def test_an_ill_replica_is_left_out_until_it_is_well(monkeypatch):
    """Catches a replica that answers every request with 503, and one that never comes back."""
    monkeypatch.setattr(watching, "BETWEEN_LOOKS", 0.02)
    with routed() as fleet:
        service, replica = fleet.servers[0].service, fleet.router.replicas[0]
        service._failed_steps = 10**6
        wait_for(lambda: not replica.is_up)
        assert {fleet.ask(max_tokens=1).headers["X-Replica"] for _ in range(4)} == {"1"}
        service._failed_steps = 0
        wait_for(lambda: replica.is_up)


@pytest.mark.parametrize("where", ["cookie", "tend"])
def test_replicas_are_watched_whatever_goes_wrong(where, monkeypatch, caplog):
    """Catches a replica that is never restarted again, in silence; a failure that is logged every second."""
    monkeypatch.setattr(watching, "BETWEEN_LOOKS", 0.02)
    looks = 0

    async def tend(replica) -> None:
        if where == "tend" and looks < 5:
            await count()
            raise RuntimeError("no more files")

    async def count() -> None:
        nonlocal looks
        looks += 1

    async def answer(request):
        await count()
        return httpx.Response(200, headers={b"Set-Cookie": b"\xff\xfe="} if where == "cookie" else {})

    monkeypatch.setattr(Replica, "tend", tend)
    with caplog.at_level(logging.WARNING, "minipaged"), routed_to(answer, 1):
        wait_for(lambda: looks > 10)
    unwell = ["The watch of replica 0 failed", "Replica 0 is taken out of service: it is unhealthy"]
    assert caplog.messages == ([] if where == "cookie" else [*unwell, "Replica 0 is back"])


def test_who_is_refused_by_a_full_replica_is_sent_to_another():
    """Catches a 429 while another replica is idle; and one that is lost when all are full."""
    with routed(options={"max_waiting": 1, "max_num_seqs": 1}) as fleet, ThreadPoolExecutor(12) as pool:
        fleet.slow_down(0.03)
        answers = list(pool.map(lambda _: fleet.ask(prompt=[1] * 32, max_tokens=20), range(12)))
        done = [answer.headers["X-Replica"] for answer in answers if answer.status_code == 200]
        assert set(done) == {"0", "1"}
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) + len(done) == 12
        assert refused
        assert refused[0].headers["Retry-After"]


def test_half_an_event_is_never_passed_on():
    """Catches an error that is glued to the beginning of an event that was cut."""

    class Cut(httpx.AsyncByteStream):
        async def __aiter__(self):
            for piece in (b"data: 1\n\ndata", b": 2\n", b"\ndata: 3", b"\n\ndata: {"):
                yield piece
            raise httpx.ReadError("cut")

    async def passed() -> tuple[list[bytes], bool]:
        def answer(request):
            return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=Cut())

        replica = Replica(0, "http://replica")
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            exchange = Exchange(http, replica, Outgoing("POST", C, [], b"{}", 1))
            await exchange.begin()
            assert replica.num_requests == 1
            pieces, is_cut = [exchange.body], False
            try:
                async for piece in exchange.events:
                    pieces.append(piece)
            except httpx.ReadError:
                is_cut = True
            await exchange.close()
            assert replica.num_requests == 0
            return pieces, is_cut

    assert asyncio.run(passed()) == ([b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"], True)


# -- what it reports, and its end ----------------------------------------------------------------


def test_metrics_of_all_replicas_are_on_one_page():
    """Catches a family that is listed twice, samples of two replicas under one name, counts that are lost."""
    with routed() as fleet:
        for i in range(4):
            fleet.ask(prompt=[i] * 20, max_tokens=3)
        text = fleet.http.get("/metrics").text
        families = list(text_string_to_metric_families(text))
        names = [family.name for family in families]
        assert len(names) == len(set(names))
        samples = {
            (sample.name, sample.labels.get("replica")): sample.value
            for family in families
            for sample in family.samples
            if sample.name.endswith(("_total", "_up", "_count"))
        }
        for number in ("0", "1"):
            assert samples["minipaged:generation_tokens_total", number] == 6
            assert samples["minipaged:time_to_first_token_seconds_count", number] == 2
            assert samples["minipaged:replica_up", number] == 1
        assert samples["minipaged:router_retries_total", None] == 0
        answers = [
            s for family in families if family.name == "http_requests" for s in family.samples if s.value
        ]
        assert [(s.labels, s.value) for s in answers] == [({"handler": C, "status": "200"}, 4)]


@pytest.mark.parametrize(
    ("status", "page"), [(200, b"junk { "), (200, b"\xff\xfe 1"), (200, b'a{b="c 1'), (500, b"no")]
)
def test_a_page_of_metrics_that_cannot_be_read_is_left_out_and_logged_once(status, page, caplog):
    """Catches a scraper that is told of an error of its own, and loses the replicas that are well."""

    async def answer(request):
        if request.url.path == "/metrics" and request.url.host == "replica-0":
            return httpx.Response(status, content=page)
        return httpx.Response(200, text="steps 1\n")

    with caplog.at_level(logging.WARNING, "minipaged"), routed_to(answer) as fleet:
        for _ in range(3):
            got = fleet.http.get("/metrics")
            assert got.status_code == 200
            assert 'steps{replica="1"} 1.0' in got.text
            assert 'minipaged:replica_up{replica="0"} 1.0' in got.text
        (line,) = caplog.messages
        assert line.startswith("Replica 0 is left out of /metrics: ")
        status, page = 200, b"steps 2\n"
        assert 'steps{replica="0"} 2.0' in fleet.http.get("/metrics").text


def test_a_router_that_ends_refuses_what_is_new_and_finishes_what_runs():
    """Catches a stream that is cut by the end of the server."""
    with routed() as fleet, ThreadPoolExecutor(1) as pool:
        fleet.slow_down(0.03)
        stream = pool.submit(fleet.ask, max_tokens=20, stream=True)
        wait_for(lambda: fleet.servers[0].service._active)
        fleet.router.is_draining = True
        refused = fleet.ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert fleet.http.get("/health").status_code == 503
        assert events(stream.result().text)[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_a_replica_lost_while_the_router_ends_is_the_routers_end(stream, caplog):
    """Catches a second Ctrl-C that clients see as a failure, because the router asks another replica."""
    with routed() as fleet, ThreadPoolExecutor(1) as pool, caplog.at_level(logging.INFO, "minipaged"):
        fleet.slow_down(0.05)
        answer = pool.submit(fleet.ask, max_tokens=100, stream=stream)
        wait_for(lambda: fleet.servers[0].llm.engine.metrics.steps > 2)
        fleet.router.is_draining = True
        fleet.die(0)
        got = answer.result()
        error = events(got.text)[-1]["error"] if stream else got.json()["error"]
        assert error["code"] == "shutting_down"
        assert got.status_code == (200 if stream else 503)
        assert not fleet.servers[1].service._active, "the next replica was asked"
    assert not [record for record in caplog.records if record.exc_info]


def test_a_stream_that_is_cancelled_while_it_closes_ends_quietly():
    """Catches a traceback for each stream that is being closed when a second signal ends the router."""

    async def events():
        yield b"data: 1\n\n"

    async def run() -> list[bytes]:
        closing, sent = asyncio.Event(), []

        async def close() -> None:
            closing.set()
            await never()

        async def send(message) -> None:
            sent.append(message.get("body", b""))

        stream = asyncio.create_task(streaming.EventStream(events(), close)({}, never, send))
        await closing.wait()
        stream.cancel()
        await stream
        return sent

    assert asyncio.run(run()) == [b"", b"data: 1\n\n", b""]
