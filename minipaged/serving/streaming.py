"""Server-sent events, and work that ends when its client disconnects.

A disconnect is detected at once, even in the queue: the client's task is cancelled, the iterators of its
outputs are closed, and the engine frees its blocks before the next step.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minipaged.outputs import CompletionOutput
from minipaged.serving.errors import ApiError, shutting_down

if TYPE_CHECKING:
    from minipaged.serving.schemas import StreamOptions

T = TypeVar("T")
DONE = "data: [DONE]\n\n"

TO_READ = 5.0
"""Seconds after a stream's deadline that a slow client has to read why it ends."""


def event_of(value: Any, name: str | None = None) -> str:
    """A server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(value)}\n\n"


def is_plain(completion: CompletionOutput) -> bool:
    """Whether it continues, and carries only text."""
    return completion.finish_reason is None and completion.logprobs is None


class Chunks:
    """Events that differ only in their one choice; the rest of their JSON is written once.

    Args:
        head: the fields before `choices`.
        plain: a choice that continues and carries only text: first its "index", 0, then the text, "".
        usage: returns the field "usage" so far, and others beside it.
        options: whether a last event reports the usage (then each has the field, null until then), and
            whether each event does.
    """

    def __init__(
        self,
        head: dict[str, Any],
        plain: dict[str, Any],
        usage: Callable[[], dict[str, Any]],
        options: StreamOptions | None,
    ) -> None:
        self._head = head
        self._usage = usage
        self._options = options if options and options.include_usage else None
        self._before = event_of(head).removesuffix("}\n\n") + ', "choices": ['
        self._end = ', "usage": null}\n\n' if self._options else "}\n\n"
        before_index, _, rest = json.dumps(plain).partition("0")
        between, _, after_text = rest.partition('""')
        self._piece = self._before + before_index, between, after_text + "]"

    def event(self, choice: dict[str, Any], **others: Any) -> str:
        """The event with this choice, and with other fields next to `choices`."""
        fields = "".join(f", {json.dumps(name)}: {json.dumps(value)}" for name, value in others.items())
        return f"{self._before}{json.dumps(choice)}]{fields}{self._after}"

    @property
    def _after(self) -> str:
        if self._options and self._options.continuous_usage_stats:
            return self._end.replace("null", json.dumps(self._usage()["usage"]))
        return self._end

    def piece(self, index: int, text: str) -> str:
        """The event with the plain choice of this index and text."""
        before, between, after = self._piece
        return f"{before}{index}{between}{json.dumps(text)}{after}{self._after}"

    def last(self) -> str:
        """The event with the usage, if requested, and the end."""
        return (event_of({**self._head, "choices": [], **self._usage()}) if self._options else "") + DONE


def failed(error: ApiError) -> str:
    """The events that report an error and end a stream of such events."""
    return event_of(error.body()) + DONE


def response_failed(error: ApiError, number: int) -> str:
    """The same for `/v1/responses`, whose events are numbered."""
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return event_of({"type": "error", "sequence_number": number, **fields}, "error")


class EventStream(Response):
    """Server-sent events, one or several at a time, until they end or the client disconnects.

    Args:
        events: end by themselves at the deadline.
        close: called at the end, whatever it is.
        deadline: on the event loop's clock; a client still reading a little later is dropped.
        headers: in place of those of a new stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str] | AsyncGenerator[bytes],
        close: Callable[[], Awaitable[None]] | None = None,
        deadline: float | None = None,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.raw_headers = headers or self.raw_headers
        self._events = events
        self._close = close
        self._end = None if deadline is None else deadline + TO_READ

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(receive, self._send(send))
        except (TimeoutError, asyncio.CancelledError) as error:
            # Time is up, or the server ends and stops waiting for a client that does not read.
            reason = error if isinstance(error, TimeoutError) else shutting_down()
            with suppress(type(reason), StopAsyncIteration):
                await self._events.athrow(reason)  # for the log; nobody reads what it says
        finally:
            with suppress(asyncio.CancelledError):  # (the event loop ends: nothing is left to do)
                await self._events.aclose()
                if self._close is not None:
                    await self._close()

    async def _send(self, send: Send) -> None:
        async for events in self._events:
            if events:
                body = events.encode() if isinstance(events, str) else events
                async with asyncio.timeout_at(self._end):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if the client disconnects first: then it is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
