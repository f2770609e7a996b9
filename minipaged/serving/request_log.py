"""Around an application: an id for each request, and a line in the log for each refusal.

Generations log themselves (`generation.py`), and replicas behind a router log theirs. A line has no text of
the request, and its path only quoted and cut.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from starlette.datastructures import MutableHeaders

logger = logging.getLogger(__name__)


class RequestLog:
    """A plain ASGI middleware, the outermost; `state` has `request_id` and `is_logged` below it."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As ASGI wants it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"], state["is_logged"] = uuid.uuid4().hex, False

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers, status = MutableHeaders(scope=message), message["status"]
                if "X-Request-Id" not in headers:  # else it is a replica's answer
                    headers["X-Request-Id"] = state["request_id"]
                    if status >= 400 and not state["is_logged"]:
                        where = scope["method"], scope["path"], status
                        logger.info("%s: %s %.200r, status %d", state["request_id"], *where)
            await send(message)

        await self._app(scope, receive, send_with_id)
