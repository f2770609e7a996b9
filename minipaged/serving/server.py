"""uvicorn around the application, and a shutdown that loses nothing.

On SIGTERM or Ctrl-C, the server still answers: new requests get 503, and running ones finish or, after
`shutdown_timeout`, are ended with a reason. A second signal ends the server at once.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from minipaged.async_llm import AsyncLLM
from minipaged.serving.app import create_app
from minipaged.serving.connections import Connections
from minipaged.serving.settings import ServerSettings, ServerSettingsError

KEEP_ALIVE = 65
"""Seconds that a connection may be idle: longer than clients keep one, else it is closed as it is reused."""


class Drained(Protocol):
    """What a server serves."""

    is_draining: bool

    async def drain(self) -> None:
        """Let what runs finish; called once `is_draining` is set."""


class Server(uvicorn.Server):
    """A uvicorn server that drains before it closes its sockets; headers get `header_timeout` seconds."""

    def __init__(self, config: uvicorn.Config, service: Drained, header_timeout: float) -> None:
        super().__init__(config)
        self._connections = Connections(header_timeout)
        self._service = service
        self._drained: asyncio.Task[None] | None = None
        self._num_signals = 0
        self.announce: Callable[[], object] = lambda: None
        """Called once it serves: clients may connect, and a signal drains."""

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, in a process that does nothing else: what exists now stays, so the garbage collector need
        not scan it repeatedly (0.24 s each time, while everyone waits)."""
        gc.collect()
        gc.freeze()
        super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        try:
            self.announce()
        except BaseException:
            await self.lifespan.shutdown()  # (else its task logs an error)
            raise

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends."""
        self._num_signals += 1
        if self._num_signals > 1 or not self.started:
            self.should_exit = self.force_exit = True
        self._service.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end. Looks at the connections, too, once a second."""
        if self._service.is_draining and self._drained is None:
            self._drained = asyncio.create_task(self._service.drain())
        if self._drained is not None and self._drained.done():
            self.should_exit = True
        if counter % 10 == 0:
            self._connections.look(self.server_state.connections)
            self._connections.check_descriptors(len(self.server_state.connections))
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Notify the application of its end after a second signal, too (else its task logs an error)."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()


def make_server(llm: AsyncLLM, model_name: str, settings: ServerSettings) -> Server:
    """A server, not yet started."""
    app = create_app(llm, model_name, settings)
    return server_of(app, app.state.service, settings)


def server_of(app: ASGIApp, service: Drained, settings: ServerSettings) -> Server:
    """Like `make_server`, for an existing application."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=5,  # to read why a request has ended, and for other requests
        server_header=False,
        ws="none",
        access_log=False,  # the application logs each request, with its id
        log_config=None,
    )
    return Server(config, service, header_timeout=min(KEEP_ALIVE, settings.request_timeout))


def bind(settings: ServerSettings) -> socket.socket:
    """A socket at the settings' address, so that a port in use is reported before the model is loaded.

    Raises:
        ServerSettingsError: the address is unavailable.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    if sys.platform != "win32":  # (where it would let two servers listen on one port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        where = f"{settings.host}, port {settings.port}"
        raise ServerSettingsError(
            f"cannot listen on {where}: {error.strerror or error}; give another address or port"
        ) from error
    return listener
