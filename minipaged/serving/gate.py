"""What every request passes first: the check for shutdown, the key, and the limits on its body.

A plain ASGI middleware: it neither buffers a stream nor hides a disconnected client.
"""

from __future__ import annotations

import asyncio
import re

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minipaged.serving.errors import CLIENT_GONE, ApiError, shutting_down
from minipaged.serving.service import Service
from minipaged.serving.settings import ServerSettings
from minipaged.text_io import cut

OPEN = ("/", "/health", "/version")
"""Paths that need no key: they reveal nothing about requests."""


class Gate:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._admit(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        settings = self._service.settings
        deadline = scope["state"]["deadline"] = asyncio.get_running_loop().time() + settings.request_timeout
        await self._app(scope, limited(receive, deadline, settings.max_body_bytes), send)

    def _admit(self, scope: Scope) -> None:
        path, method = scope["path"], scope["method"]
        scope["state"]["tenant"] = ""
        if path in OPEN or method == "OPTIONS":
            return
        if self._service.is_draining and path != "/metrics":
            raise shutting_down()
        headers = Headers(scope=scope)
        given = headers.get("authorization")
        bearer = re.fullmatch(r"(?i:bearer) +(\S+)", given or "")
        scope["state"]["tenant"] = self._service.tenant(bearer[1] if bearer else given)
        if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
            raise ApiError(415, f"Content-Encoding is {cut(encoding)}; send the body uncompressed")
        check_announced(headers, self._service.settings.max_body_bytes)


def allow_origins(app: FastAPI, settings: ServerSettings) -> None:
    """Let web pages of the settings' origins read the answers, errors included."""
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", "X-Should-Retry", "X-Replica"],
        )


def check_announced(headers: Headers, max_bytes: int) -> None:
    """Raise ApiError 413 for a body that will be too long, before it is read."""
    if int(headers.get("content-length", 0)) > max_bytes:
        raise ApiError(413, _too_large(max_bytes))


def limited(receive: Receive, deadline: float, max_bytes: int) -> Receive:
    """`receive`, for a whole body neither too long nor too slow; else HTTPException 499, 413, 408."""
    num_bytes, is_whole = 0, False

    async def receive_some() -> Message:
        nonlocal num_bytes, is_whole
        if is_whole:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise HTTPException(408, "the body did not arrive in time; send it faster") from None
        if message["type"] == "http.disconnect":
            raise HTTPException(CLIENT_GONE, "the client has gone")
        num_bytes += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if num_bytes > max_bytes:
            raise HTTPException(413, _too_large(max_bytes))
        return message

    return receive_some


def _too_large(max_bytes: int) -> str:
    return f"the body is larger than {max_bytes:,} bytes; send less, or raise --max-body-bytes"
