"""Wraps an application: an id for each request, a log line for each refusal, a count of each answer, and an
answer to those on which the application fails.

Generations log themselves (`generation.py`), and replicas behind a router log theirs. A line has no text of
the request, and its path only quoted and cut.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minipaged.serving.answers import Answers
from minipaged.serving.errors import CLIENT_GONE, api_error

logger = logging.getLogger(__name__)


def _new_id(given: str | None) -> str:
    """A unique id; it begins with the client's, if that is short and plain."""
    begin = f"{given}-" if given and re.fullmatch(r"[\w.:-]{1,80}", given, re.ASCII) else ""
    return begin + uuid.uuid4().hex


def log_refusal(scope: Scope, status: int) -> None:
    """Log one line, unless a generation has begun and logs itself."""
    state = scope["state"]
    if not state["is_logged"]:
        where = scope["method"], scope["path"], status
        logger.info("%s: %.20s %.200r, status %d", state["request_id"], *where)


class RequestLog:
    """A plain ASGI middleware, the outermost; `state` has `request_id` and `is_logged` below it."""

    def __init__(self, app: ASGIApp, answers: Answers) -> None:
        self._app = app
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"], state["is_logged"] = _new_id(Headers(scope=scope).get("x-request-id")), False
        is_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                headers, status = MutableHeaders(scope=message), message["status"]
                self._answers.add(scope["path"], status)
                if "X-Request-Id" not in headers:  # else it is a replica's answer
                    headers["X-Request-Id"] = state["request_id"]
                    if status >= 400 and status != CLIENT_GONE:
                        log_refusal(scope, status)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except (Exception, asyncio.CancelledError) as error:  # the latter: uvicorn's, at the very end
            if is_begun:
                raise
            await api_error(error).response()(scope, receive, send_with_id)
