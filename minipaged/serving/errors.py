"""What a client gets when a request cannot be served: a status, and OpenAI's error object."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from starlette.responses import Response

from minipaged.decoding.checks import ParamsError
from minipaged.engine_thread import EngineStoppedError, QueueFullError
from minipaged.scheduling import RequestTooLongError

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""A status that nobody receives."""

RETRY_AFTER = {"Retry-After": "1"}
"""Seconds; for clients that find the queue full or the server shutting down."""


class ApiError(Exception):
    """An error that ends a request.

    Args:
        status: the HTTP status.
        message: one line: the value, and the fix.
        param: the field of the body that is at fault, or None.
        code: OpenAI's error code, if there is one.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """As an HTTP response."""
        return json_response(self.body(), self.status, self.headers)


def shutting_down() -> ApiError:
    """The error for new requests, and for those that are ended."""
    message = "the server is shutting down; send the request again elsewhere"
    return ApiError(503, message, code="shutting_down", headers=RETRY_AFTER)


def nobody_left() -> ApiError:
    """The error when no replica is left."""
    message = "no replica can serve; those that died are restarting, try again in a few seconds"
    return ApiError(503, message, code="no_replica", headers=RETRY_AFTER)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value as JSON, in ASCII: any string can be sent."""
    return Response(json.dumps(value), status, headers, "application/json")


def api_error(error: BaseException, fields: Collection[str] = (), default: str | None = None) -> ApiError:
    """An error of the engine as an `ApiError`.

    Args:
        error: what was raised.
        fields: of the body; `param` is the one that the message is about.
        default: the `param` if it is about none.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return shutting_down()  # (nothing else cancels the task of a request)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers=RETRY_AFTER)
    if isinstance(error, EngineStoppedError):
        return ApiError(503, str(error), code="engine_stopped", headers=RETRY_AFTER)
    if isinstance(error, TimeoutError):
        message = "the request took longer than --request-timeout allows; ask for less, or raise it"
        return ApiError(504, message, code="timeout", headers={"X-Should-Retry": "false"})
    if isinstance(error, ValueError):
        code = "context_length_exceeded" if isinstance(error, RequestTooLongError) else None
        words = re.findall(r"[a-z_]+", str(error))
        named = [word for word in words[: None if isinstance(error, ParamsError) else 1] if word in fields]
        if named or default is None:
            return ApiError(400, str(error), named[0] if named else None, code)
        message = str(error) if default in words else f"{default}: {error}"
        return ApiError(400, message, default, code)
    logger.error("A request failed", exc_info=error)
    return ApiError(500, "the server failed; its log has the reason", code="internal_error")
