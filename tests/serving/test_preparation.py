"""Between the body and the engine: texts become tokens, and neither a timeout, nor the end of the server, nor
other clients wait for it."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from minipaged import AsyncLLM, SamplingParams
from minipaged.decoding.structured import StructuredOutputsParams
from minipaged.serving import logprobs, service, streaming
from minipaged.serving.errors import api_error
from minipaged.serving.generation import _guarded
from minipaged.serving.streaming import DONE, EventStream, failed
from minipaged.serving.threads import DaemonThreads
from tests.processes import started
from tests.serving.conftest import CHAT, JSON, OPTIONS, C, connect, request_of, running, wait_for
from tests.serving.toys import IDS, toy

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
BODIES = {
    C: {"prompt": ["once", "twice"], "max_tokens": 3},
    CHAT: HELLO,
    "/v1/responses": {"input": "Hello", "max_output_tokens": 3},
    "/tokenize": {"messages": HELLO["messages"]},
    "/detokenize": {"tokens": [300]},
}


class Held:
    """The functions of a tokenizer, which do not return before they are let go."""

    def __init__(self, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self._free = threading.Event()
        self.num_calls = 0
        tokenizer = llm.get_tokenizer()
        for name in ("encode", "decode", "apply_chat_template"):
            monkeypatch.setattr(tokenizer, name, self._held(getattr(tokenizer, name)))

    def let_go(self) -> None:
        self._free.set()

    def _held(self, function):
        def wait_and_call(*args, **options):
            self.num_calls += 1
            assert self._free.wait(60)
            return function(*args, **options)

        return wait_and_call


# -- time ----------------------------------------------------------------------------------------


def test_the_time_of_a_request_includes_its_preparation(monkeypatch):
    """Catches a long text that is tokenized for as long as it takes, and then gets a whole timeout again."""
    llm = AsyncLLM(**OPTIONS)
    held = Held(llm, monkeypatch)
    with running(llm, request_timeout=0.3) as server:
        for path, body in BODIES.items():
            answer = server.http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout"), path
        server.assert_released()
        held.let_go()
        assert server.http.post("/tokenize", json=BODIES["/tokenize"]).status_code == 200


def test_a_stream_whose_time_is_over_while_it_is_sent_says_so():
    """Catches a client that reads slowly, and finds its stream cut off in the place of an error."""

    async def outputs():
        for number in range(1000):
            yield number, None

    generation = SimpleNamespace(outputs=outputs, end="", params=SamplingParams())
    writer = SimpleNamespace(begin=lambda: "", events=lambda *output: "a", end=lambda: "", failed=failed)

    async def read():
        pieces = []
        async for piece in _guarded(generation, writer, asyncio.get_running_loop().time() + 0.05):
            pieces.append(piece)
            await asyncio.sleep(0.03)
        return pieces

    error = asyncio.run(read())[-1].removesuffix(DONE)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"
    assert "longer than --request-timeout allows" in generation.end


@pytest.mark.parametrize("end", ["timeout", "shutting_down"])
def test_a_client_that_does_not_read_is_left(monkeypatch, end):
    """Catches a connection that lasts as long as the client likes, and a traceback at its end: that of its
    time, or the server's, which cancels what still runs."""
    monkeypatch.setattr(streaming, "TO_READ", 0.05)
    log = []

    async def events():
        try:
            yield "event"
        except Exception as error:
            log.append(api_error(error).code)
            yield "too late"

    async def close():
        log.append("closed")

    async def never(*message):
        if not message or message[0]["type"] == "http.response.body":
            await asyncio.sleep(60)

    async def answer():
        now = asyncio.get_running_loop().time()
        response = EventStream(events(), close, now if end == "timeout" else None)
        task = asyncio.create_task(response({"type": "http"}, never, never))
        await asyncio.sleep(0.02)
        if end == "shutting_down":
            task.cancel()
        await asyncio.wait_for(task, 10)

    asyncio.run(answer())
    assert log == [end, "closed"]


def test_the_time_of_a_request_includes_its_body():
    """Catches a timeout that begins anew when the body is there."""
    llm = toy()
    llm.engine.executor.seconds = 0.05
    body = json.dumps({**IDS, "max_tokens": 100}).encode()
    with running(llm, request_timeout=1) as server:
        with connect(server.http) as client:
            client.sendall(request_of(body[:1], length=len(body)))
            time.sleep(0.8)
            client.sendall(body[1:])
            assert client.recv(4096).startswith(b"HTTP/1.1 504")
        server.assert_released()
        assert llm.engine.metrics.steps < 12, "more than the rest of its time has room for"


# -- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_patient", [True, False])
def test_a_request_in_preparation_is_one_that_runs_when_the_server_ends(is_patient, monkeypatch, caplog):
    """Catches a server that thinks it is idle, and cuts off with a traceback what it had taken."""
    llm = AsyncLLM(**OPTIONS)
    held = Held(llm, monkeypatch)
    with (
        caplog.at_level(logging.INFO, "minipaged"),
        running(llm, shutdown_timeout=30 if is_patient else 0.3) as server,
        ThreadPoolExecutor(5) as pool,
    ):
        answers = {path: pool.submit(server.http.post, path, json=body) for path, body in BODIES.items()}
        wait_for(lambda: len(server.service._preparing) == 5)
        server.server.handle_exit(signal.SIGTERM, None)
        if is_patient:
            assert server.http.post(CHAT, json=HELLO).status_code == 503
            held.let_go()
            assert {answer.result().status_code for answer in answers.values()} == {200}
        else:
            for path, answer in answers.items():
                found = answer.result()
                assert (found.status_code, found.json()["error"]["code"]) == (503, "shutting_down"), path
                assert found.headers["Retry-After"]
        wait_for(lambda: server.server.should_exit)
        server.assert_released()
        held.let_go()
    assert [record for record in caplog.records if record.exc_info] == []


SLOW = """
import sys, time
from minipaged import AsyncLLM, SamplingParams
from minipaged.serving.server import bind, make_server
from minipaged.serving.settings import ServerSettings

settings = ServerSettings(port=0, shutdown_timeout=float(sys.argv[1]))
with bind(settings) as listener, AsyncLLM(num_blocks=64, disable_log_stats=True) as llm:
    llm.get_tokenizer().apply_chat_template = lambda *args, **options: time.sleep(60)
    server = make_server(llm, "pocket", settings)
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    server.run(sockets=[listener])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("num_signals", "shutdown_timeout"), [(1, "0.5"), (2, "60")])
def test_a_process_does_not_wait_for_the_thread_that_tokenizes(num_signals, shutdown_timeout):
    """Catches a thread that Python joins before it exits, so that even a second signal ends nothing."""
    with started("-c", SLOW, shutdown_timeout) as process, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        answer = pool.submit(httpx.post, url + CHAT, json=HELLO, timeout=90)
        time.sleep(0.5)
        httpx.get(url + "/health", timeout=60)  # (which is answered after the other has begun)
        for _ in range(num_signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        assert process.wait(20) in (0, -signal.SIGTERM)
        found = answer.result()
        assert (found.status_code, found.json()["error"]["code"]) == (503, "shutting_down")
        assert "Traceback" not in process.stderr.read()


def test_threads_are_few_and_end_when_there_is_nothing_to_do():
    """Catches a thread for each of a thousand requests, lost work, and an error that kills a thread."""
    threads, seen, counts = DaemonThreads(3), set(), []

    def work(number: int) -> int:
        seen.add(threading.current_thread())
        counts.append(sum(thread.is_alive() for thread in list(seen)))
        time.sleep(0.001)
        if number == 5:
            raise KeyError(number)
        return number

    futures = [threads.submit(work, number) for number in range(40)]
    assert isinstance(futures.pop(5).exception(), KeyError)
    assert [future.result() for future in futures] == [*range(5), *range(6, 40)]
    assert max(counts) <= 3
    assert all(thread.daemon for thread in seen)
    wait_for(lambda: not any(thread.is_alive() for thread in seen))
    assert threads.submit(work, 7).result() == 7


# -- others --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_what_is_prepared_for_a_client_that_leaves_is_given_up(path, monkeypatch, caplog):
    """Catches texts of clients that have gone, for which everybody after them waits; and their requests that
    the log does not have."""
    caplog.set_level(logging.INFO, "minipaged")
    llm = AsyncLLM(**OPTIONS)
    held = Held(llm, monkeypatch)
    body = json.dumps(BODIES[path]).encode()
    with running(llm) as server:
        clients = [connect(server.http) for _ in range(50)]  # more than there are threads
        for client in clients:
            client.sendall(request_of(body, path=path))
        wait_for(lambda: len(server.service._preparing) == 50)
        for client in clients:
            client.close()
        wait_for(lambda: not server.service._preparing)
        held.let_go()
        server.assert_released()
        assert server.http.post(CHAT, json=HELLO).status_code == 200
    assert held.num_calls < 50
    assert caplog.text.count(f": POST '{path}', status 499") == 50


@pytest.mark.parametrize("path", [C, CHAT, "/tokenize"])
def test_long_texts_do_not_hold_up_short_ones(path, monkeypatch):
    """Catches one queue for all: a few prompts of megabytes, and nobody's chat begins for minutes."""
    llm = AsyncLLM(**OPTIONS)
    tokenizer, free = llm.get_tokenizer(), threading.Event()
    encode = tokenizer.encode

    def slow_if_long(text, **options):
        assert len(text) < 1000 or free.wait(60)
        return encode(text[:1000], **options)

    monkeypatch.setattr(tokenizer, "encode", slow_if_long)
    text = "a " * 50_000
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    with running(llm) as server, ThreadPoolExecutor(50) as pool:
        answers = [pool.submit(server.http.post, path, json=body) for _ in range(50)]
        wait_for(lambda: len(server.service._preparing) == 50)
        assert server.http.post(CHAT, json=HELLO).status_code == 200
        free.set()
        assert {answer.result().status_code for answer in answers} == {200}


def test_a_grammar_that_is_never_compiled_holds_up_nobody(monkeypatch):
    """Catches six such grammars, whose clients may have gone, for which each chat and all other grammars wait
    for ever; and a client that is not told why his grammar is not taken."""
    compile_grammar, free = StructuredOutputsParams.compile, threading.Event()

    def endless_if_it_says_so(params, *args):
        assert params.regex != "endless" or free.wait(60)
        return compile_grammar(params, *args)

    monkeypatch.setattr(StructuredOutputsParams, "compile", endless_if_it_says_so)
    monkeypatch.setattr(service, "LONGEST_COMPILATION", 0.3)
    bodies = [{"prompt": "a", "structured_outputs": {"regex": regex}} for regex in ("endless", "ab")]
    endless, quick = (json.dumps(body).encode() for body in bodies)
    with running(AsyncLLM(**OPTIONS)) as server, ThreadPoolExecutor(6) as pool:
        clients = [connect(server.http) for _ in range(6)]
        for client in clients:
            client.sendall(request_of(endless))
        wait_for(lambda: len(server.service._preparing) == 6)
        assert server.http.post(CHAT, json=HELLO).status_code == 200
        for client in clients:
            client.close()
        assert server.http.post(C, content=quick, headers=JSON).json()["choices"][0]["text"] == "ab"
        answers = [pool.submit(server.http.post, C, content=endless, headers=JSON) for _ in range(6)]
        for answer in answers:
            assert answer.result().status_code == 400
            assert "takes more than 0.3 s to compile; give a simpler one" in answer.result().text
        free.set()
        assert server.http.post(C, content=quick, headers=JSON).status_code == 200


def test_many_prompts_are_tokenized_apart_from_the_event_loop(monkeypatch):
    """Catches 256 texts, each just short enough, that hold up everybody's stream for seconds."""
    llm = AsyncLLM(**OPTIONS)
    tokenizer, used = llm.get_tokenizer(), set()
    encode = tokenizer.encode

    def noting(*args, **options):
        used.add(threading.current_thread().name)
        return encode(*args, **options)

    monkeypatch.setattr(tokenizer, "encode", noting)
    with running(llm) as server:
        answer = server.http.post(C, json={"prompt": ["once upon a time " * 60] * 8, "max_tokens": 1})
        assert len(answer.json()["choices"]) == 8
        assert used
        assert "test-server" not in used


def test_the_spelling_of_tokens_is_looked_up_apart_from_the_event_loop(monkeypatch):
    """Catches a long text whose tokens, one by one, take everybody's second."""
    llm = AsyncLLM(**OPTIONS)
    tokenizer, used = llm.get_tokenizer(), []
    spell = tokenizer.convert_ids_to_tokens

    def noting(ids):
        used.append(threading.current_thread().name)
        return spell(ids)

    monkeypatch.setattr(tokenizer, "convert_ids_to_tokens", noting)
    with running(llm) as server:
        answer = server.http.post("/tokenize", json={"prompt": "once " * 9, "return_token_strs": True})
        assert answer.json()["token_strs"] == spell(answer.json()["tokens"])
        assert len(used) == 1
        assert used != ["test-server"]


@pytest.mark.parametrize(
    ("path", "wants"),
    [
        (C, {"logprobs": 3}),
        (C, {"prompt_logprobs": 3}),
        (C, {"prompt_logprobs": 3, "stream": True}),
        (CHAT, {"logprobs": True, "top_logprobs": 3}),
        (CHAT, {"prompt_logprobs": 3, "stream": True}),
    ],
)
def test_log_probabilities_are_written_apart_from_the_event_loop(path, wants, monkeypatch):
    """Catches five answers of 1,500 tokens, each with 20 alternatives, that stop everybody for a second."""
    used = set()

    def noting(value):
        used.add(threading.current_thread().name)
        return value

    monkeypatch.setattr(logprobs, "finite", noting)
    body = {C: {"prompt": "Once upon a time", "max_tokens": 3}, CHAT: HELLO}[path]
    with running(AsyncLLM(**OPTIONS)) as server:
        assert server.http.post(path, json=body | wants).status_code == 200
        assert used
        assert "test-server" not in used


def test_others_have_a_turn_between_two_prompts_of_a_body(monkeypatch):
    """Catches requests that are all checked and built before anybody else's next token goes out."""
    llm = toy()
    generate, turns, seen = llm.generate, [], []

    def noting(*args):
        seen.append(len(turns))
        asyncio.get_running_loop().call_soon(turns.append, None)
        return generate(*args)

    monkeypatch.setattr(llm, "generate", noting)
    with running(llm) as server:
        assert server.http.post(C, json={**IDS, "prompt": [[1, 2]] * 20}).status_code == 200
    assert seen == list(range(20))


@pytest.mark.parametrize("reason", ["client", "shutdown", "too long"])
def test_what_ends_between_two_prompts_of_a_body_leaves_nothing(reason, monkeypatch):
    """Catches prompts that were handed over before their client or the server was gone, and run on."""
    llm = toy()
    generate, ids = llm.generate, []

    def slow(*args):
        time.sleep(0.02)
        ids.append(args[2])
        return generate(*args)

    monkeypatch.setattr(llm, "generate", slow)
    with running(llm, shutdown_timeout=0.1) as server:
        prompts = [[1, 2]] * 40 + [[1] * 10**4] * (reason == "too long")
        body = json.dumps({**IDS, "max_tokens": 1000, "prompt": prompts}).encode()
        with connect(server.http) as client:
            client.sendall(request_of(body))
            if reason == "too long":
                assert client.recv(4096).startswith(b"HTTP/1.1 400")
                assert ids == [], "some were handed over before the last was looked at"
            wait_for(lambda: len(ids) > 2 or reason == "too long")
            if reason == "shutdown":
                server.server.handle_exit(signal.SIGTERM, None)
                assert client.recv(4096).startswith(b"HTTP/1.1 503")
                assert len(ids) < 40
        server.assert_released()
