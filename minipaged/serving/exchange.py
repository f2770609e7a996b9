"""One request at one replica: bytes to it, bytes from it, and how its end is detected.

The bytes are not read, except to find where an event of a stream ends, so a client never gets half of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import NamedTuple

import httpx
from starlette.responses import Response

ONE_CONNECTION = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "host", "content-length", "date"),
}
"""Headers of one connection (RFC 9110, section 7.6.1), and what each hop writes itself."""

Headers = list[tuple[bytes, bytes]]


def passed_on(headers: Headers) -> Headers:
    """Those that go to the other side, too."""
    return [(name, value) for name, value in headers if name.decode().lower() not in ONE_CONNECTION]


@dataclass(eq=False)
class Replica:
    """A server that answers requests; the code that keeps it alive sets its address."""

    number: int
    url: str = ""
    is_up: bool = True
    num_requests: int = 0  # prompts in progress
    num_starts: int = 1

    async def tend(self) -> None:
        """Called repeatedly, between health checks."""

    async def end(self, seconds: float) -> None:
        """Let it finish what runs, within this time."""


class Outgoing(NamedTuple):
    """A request as it is sent to any replica."""

    method: str
    target: str  # path and query
    headers: Headers
    body: bytes
    size: int  # prompts in it, for the load; 0: it generates nothing


class Exchange:
    """A request sent to a replica. After `begin`, `status`, `headers` and `body` are there, and `events` if
    the answer is a stream; only then must `close` be called."""

    def __init__(self, http: httpx.AsyncClient, replica: Replica, outgoing: Outgoing) -> None:
        self.replica = replica
        self.outgoing = outgoing
        self._http = http
        self._answer: httpx.Response | None = None
        self.status = 0
        self.headers: Headers = []
        self.body = b""  # of a stream: its first events
        self.length = "0"  # of the body, also if HEAD left it out
        self.events: AsyncGenerator[bytes] | None = None  # the rest; raises as `begin`
        replica.num_requests += outgoing.size

    async def begin(self) -> None:
        """Send, and wait for the whole answer, or for the first event of a stream.

        Raises:
            httpx.ConnectError, httpx.ConnectTimeout: the replica cannot be reached: nothing was sent.
            httpx.TransportError: it was lost.
        """
        out, is_open = self.outgoing, False
        try:
            url = httpx.URL(self.replica.url, raw_path=out.target.encode())
            request = httpx.Request(out.method, url, headers=out.headers, content=out.body or None)
            self._answer = await self._http.send(request, stream=True)
            self.status = self._answer.status_code
            self.headers = passed_on(self._answer.headers.raw)
            self.headers.append((b"x-replica", str(self.replica.number).encode()))
            kind = self._answer.headers.get("content-type", "")
            chunks = self._answer.stream  # (`aiter_raw` would close it at its end, where a cancellation hits)
            assert isinstance(chunks, httpx.AsyncByteStream)
            if self.status == 200 and kind.startswith("text/event-stream"):
                self.events = _whole_events(chunks)
                self.body = await anext(self.events, b"")
                is_open = True
            else:
                self.body = b"".join([chunk async for chunk in chunks])
                self.length = self._answer.headers.get("content-length", str(len(self.body)))
        finally:
            if not is_open:
                await self.close()

    def response(self) -> Response:
        """A complete answer, for the client."""
        response = Response(self.body, self.status)
        response.raw_headers = [*self.headers, (b"content-length", self.length.encode())]
        return response

    async def close(self) -> None:
        """Close the connection: a replica that still computes notices and frees the blocks."""
        self.replica.num_requests -= self.outgoing.size
        if self._answer is not None:
            # Cancelled halfway, it would never return the connection to the pool.
            await asyncio.shield(self._answer.aclose())


async def _whole_events(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """The chunks of a stream, cut where an event ends; a client drops a last one that is cut, anyway."""
    held = b""
    async for chunk in chunks:
        whole, end, held = (held + chunk).rpartition(b"\n\n")
        if end:
            yield whole + end
