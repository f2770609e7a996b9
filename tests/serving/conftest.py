"""A server in a thread of the test's process, so that a test can look into its engine."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import torch

from minipaged import LLM, AsyncLLM
from minipaged.serving.server import Server, make_server
from minipaged.serving.settings import ServerSettings
from tests.checked import checked

C, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
OPTIONS = {"num_blocks": 512, "disable_log_stats": True}


def wait_for(condition: Callable[[], Any]) -> None:
    """Look until it holds; a minute is for the slowest of machines."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def connect(http: httpx.Client) -> socket.socket:
    """A connection to this client's server, for what no client sends."""
    return socket.create_connection(("127.0.0.1", http.base_url.port))


def request_of(body: bytes, length: int | None = None, path: str = C) -> bytes:
    """A request, by default for a completion; `length`: of a body of which more would come."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


class Running:
    """A server that runs, and ways to reach it."""

    def __init__(self, server: Server, llm: AsyncLLM, port: int) -> None:
        self.server, self.llm = server, llm
        self.service = server._service
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def openai(self, key: str = "none") -> openai.OpenAI:
        """The official client; it retries nothing, so that each error is seen."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def assert_released(self, seconds: float = 60) -> None:
        """Nobody is served and no block is held, or soon is."""
        engine, deadline = self.llm.engine, time.monotonic() + seconds
        while time.monotonic() < deadline:
            served = {*self.service._active, *self.service._preparing}
            if not engine.has_unfinished and not engine.scheduler.kv.num_used and not served:
                return
            time.sleep(0.005)
        pytest.fail(f"{engine.scheduler.kv.num_used} blocks are held, {served} are served")


@contextmanager
def in_thread(server: Server) -> Iterator[int]:
    """Run a server until the end of the block; its port."""
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), name="test-server")
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive())
        assert server.started, "the server did not start"
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive(), "the server did not end"


@contextmanager
def running(llm: AsyncLLM, **settings: Any) -> Iterator[Running]:
    """Serve `llm` on a free port until the end of the block."""
    server = make_server(llm, "pocket", ServerSettings(**{"port": 0, **settings}))
    with llm, in_thread(server) as port:
        one = Running(server, llm, port)
        yield one
        one.http.close()


@pytest.fixture(scope="session")
def offline() -> LLM:
    """What the answers must equal."""
    return LLM(**OPTIONS)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """The embedded model."""
    with running(checked(AsyncLLM(**OPTIONS, max_waiting=64)), max_waiting=64) as one:
        yield one


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    """The official client of `server`."""
    return server.openai()


@pytest.fixture
def writes(server, monkeypatch):
    """Makes the model write a text."""
    tokenizer, generate = server.llm.get_tokenizer(), server.llm.generate

    def write(text: str) -> list[int]:
        script = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

        def force(generated, logits):
            forced = torch.full_like(logits, -torch.inf)
            forced[script[len(generated)]] = 0
            return forced

        def scripted(prompt, params, request_id):
            return generate(prompt, replace(params, logits_processors=(force,)), request_id)

        monkeypatch.setattr(server.llm, "generate", scripted)
        return script

    return write


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Thousands of preemptions, and failures on purpose."""
    logging.getLogger("minipaged").setLevel(logging.CRITICAL)
