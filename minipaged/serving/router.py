"""Several replicas behind one address: each request goes to the replica that has the prompt's beginning
cached.

    client --> router --> replica 0 | replica 1 | ...     the policy is the simulator's: minipaged/routing.py

The router loads no model and reads a prompt only to find its beginnings. It sends a request again if its
replica is lost before the client has received anything; after that, the stream ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.responses import Response

from minipaged.routing import PrefixAware
from minipaged.serving.answers import Answers
from minipaged.serving.error_handlers import install_handlers
from minipaged.serving.errors import (
    CLIENT_GONE,
    ApiError,
    api_error,
    json_response,
    nobody_left,
    shutting_down,
)
from minipaged.serving.exchange import Exchange, Outgoing, Replica, passed_on
from minipaged.serving.gate import allow_origins, check_announced, limited
from minipaged.serving.prompt_keys import look_at
from minipaged.serving.request_log import RequestLog
from minipaged.serving.router_metrics import MergedMetrics
from minipaged.serving.settings import ServerSettings
from minipaged.serving.streaming import EventStream, failed, response_failed, unless_gone
from minipaged.serving.watch import PATIENCE, take_out, watch

logger = logging.getLogger(__name__)

GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses")

TO_ASK = 3.0
"""Seconds that a replica has for its metrics, or for a page that another replica has, too."""

TO_ANSWER = 1.0
"""Seconds after a request's deadline that its replica has to say so itself; its log then has the reason."""

MOST_LOST = 2
"""Replicas that may be lost with one request: it may be what kills them."""


class Router:
    """An ASGI application in front of replicas.

    Args:
        replicas: all of them, in the order of their numbers.
        settings: of the server; the replicas check keys and origins.
    """

    def __init__(self, replicas: Sequence[Replica], settings: ServerSettings) -> None:
        self.replicas = replicas
        self.settings = settings
        self.is_draining = False
        self.num_retries = 0
        answers = Answers()
        self._merged = MergedMetrics(replicas, answers)
        self._policy = PrefixAware()
        self._tasks: list[asyncio.Task[None]] = []
        timeout = httpx.Timeout(None, connect=PATIENCE)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
        self._http = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, cookies=no_cookies)
        app = FastAPI(
            openapi_url=None,
            redirect_slashes=False,
            telemetry={"tracing": False, "metrics": False, "logs": False},
            lifespan=self._alive,
        )
        install_handlers(app)
        allow_origins(app, settings)  # (for what it answers itself)
        app.add_middleware(RequestLog, answers=answers)
        app.api_route("/health", methods=["GET", "HEAD"])(self._health)
        app.api_route("/metrics", methods=["GET", "HEAD"])(self._metrics)
        app.post("/reset_prefix_cache")(self._reset_prefix_cache)
        methods = ["GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"]
        app.api_route("/{path:path}", methods=methods)(self._pass_on)
        self.app = app

    @asynccontextmanager
    async def _alive(self, app: FastAPI) -> AsyncIterator[None]:
        self._tasks = [asyncio.create_task(watch(replica, self._http)) for replica in self.replicas]
        try:
            yield
        finally:
            await self._unwatch()
            await self._http.aclose()

    async def _unwatch(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def drain(self) -> None:
        """End all replicas; each finishes what runs, within the settings' timeout."""
        await self._unwatch()
        await asyncio.gather(*(replica.end(self.settings.shutdown_timeout) for replica in self.replicas))

    # -- what it answers itself -------------------------------------------------------------------

    async def _health(self) -> Response:
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="unhealthy")
        num_up = sum(replica.is_up for replica in self.replicas)
        if not num_up:
            raise nobody_left()
        return json_response({"status": "ok", "replicas": len(self.replicas), "up": num_up})

    async def _metrics(self, request: Request) -> Response:
        answers = await self._ask_all(request, "GET", "/metrics", TO_ASK)
        for exchange in answers:
            if 400 <= exchange.status < 500:
                return exchange.response()  # (a key is missing)
        return Response(self._merged.page(answers, self.num_retries), media_type=CONTENT_TYPE_LATEST)

    async def _reset_prefix_cache(self, request: Request) -> Response:
        if self.is_draining:
            raise shutting_down()
        try:
            async with asyncio.timeout(self.settings.request_timeout + TO_ANSWER):
                answers = await self._ask_all(request, "POST", "/reset_prefix_cache")
        except TimeoutError as error:
            raise api_error(error) from error
        if not answers:
            raise nobody_left()
        return max(answers, key=lambda exchange: exchange.status).response()

    async def _ask_all(
        self, request: Request, method: str, path: str, seconds: float | None = None
    ) -> list[Exchange]:
        """The answers of the replicas that are up; those lost meanwhile or later than this are left out."""
        outgoing = Outgoing(method, path, passed_on(request.headers.raw), b"", 0)

        async def ask(replica: Replica) -> Exchange | None:
            exchange = Exchange(self._http, replica, outgoing)
            with suppress(httpx.TransportError, TimeoutError):
                async with asyncio.timeout(seconds):
                    await exchange.begin()
                return exchange
            return None

        answers = await asyncio.gather(*(ask(replica) for replica in self.replicas if replica.is_up))
        return [exchange for exchange in answers if exchange is not None]

    # -- what replicas answer ---------------------------------------------------------------------

    async def _pass_on(self, request: Request) -> Response:
        if self.is_draining:
            raise shutting_down()
        deadline = asyncio.get_running_loop().time() + self.settings.request_timeout
        check_announced(request.headers, self.settings.max_body_bytes)
        receive = limited(request.receive, deadline, self.settings.max_body_bytes)
        body = await Request(request.scope, receive).body()
        path, query = request.scope["raw_path"].decode(), request.scope["query_string"].decode()
        target = f"{path}?{query}" if query else path
        generates = request.method == "POST" and request.url.path in GENERATES
        keys, size = look_at(body, request.headers.get("authorization")) if generates else ([], 0)
        outgoing = Outgoing(request.method, target, passed_on(request.headers.raw), body, size)
        end = deadline + TO_ANSWER
        exchange = await unless_gone(receive, self._exchange(outgoing, keys, end))
        if exchange is None:
            return Response(status_code=CLIENT_GONE)
        if exchange.events is None:
            return exchange.response()
        last, dropped = (end, deadline) if generates else (None, None)  # (a live trace has no end)
        events = self._events(exchange, exchange.events, last)
        return EventStream(events, exchange.close, dropped, exchange.headers)

    async def _exchange(self, outgoing: Outgoing, keys: Sequence[int], end: float) -> Exchange:
        """The first answer of a replica worth passing on; a stream is left open.

        Raises:
            ApiError: no replica is left, the request was lost with two, its time is up (at `end`, on the
                event loop's clock), or the server shuts down.
        """
        tried: list[Replica] = []
        lost = 0
        refusal: Exchange | None = None
        while (replica := self._choose(outgoing, keys, tried)) is not None:
            self.num_retries += bool(tried)
            tried.append(replica)
            exchange = Exchange(self._http, replica, outgoing)
            limit = end
            if outgoing.method in ("GET", "HEAD") and self._able(tried):
                limit = min(end, asyncio.get_running_loop().time() + TO_ASK)
            try:
                async with asyncio.timeout_at(limit):
                    await exchange.begin()
            except TimeoutError as error:
                if limit < end:
                    continue
                raise _late(exchange, error) from error
            except httpx.TransportError as error:
                is_unreachable = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
                lost += not is_unreachable
                take_out(replica, "it cannot be reached" if is_unreachable else "the connection broke")
                if lost == MOST_LOST:
                    message = f"{lost} replicas were lost with this request; it is not tried again"
                    raise ApiError(503, message, code="replica_lost") from error
                continue
            if exchange.status not in (429, 503) or not outgoing.size:
                return exchange
            refusal = exchange
        if refusal is not None:
            return refusal
        raise nobody_left()

    async def _events(
        self, exchange: Exchange, events: AsyncGenerator[bytes], end: float | None
    ) -> AsyncGenerator[bytes]:
        """The events of a replica; if it is lost or its time is up, the last reports it."""
        yield exchange.body
        num_events = exchange.body.count(b"\n\n")
        while True:
            try:
                async with asyncio.timeout_at(end):
                    piece = await anext(events, None)
            except TimeoutError as reason:
                error = _late(exchange, reason)
                break
            except httpx.TransportError:
                number = exchange.replica.number
                take_out(exchange.replica, "the connection broke during an answer")
                message = f"replica {number} was lost in the middle of the answer; send the request again"
                lost = ApiError(503, message, code="replica_lost")
                error = shutting_down() if self.is_draining else lost
                break
            if piece is None:
                return
            num_events += piece.count(b"\n\n")
            yield piece
        logger.info("%s: %s", Headers(raw=exchange.headers).get("x-request-id"), error.message)
        if exchange.outgoing.size:
            is_response = exchange.outgoing.target.startswith("/v1/responses")
            yield (response_failed(error, num_events) if is_response else failed(error)).encode()

    def _choose(self, outgoing: Outgoing, keys: Sequence[int], tried: Sequence[Replica]) -> Replica | None:
        """The next to try; None if all were tried. What generates nothing goes to the first."""
        if self.is_draining:  # (after a second signal, there is no connection to send it on)
            raise shutting_down()
        able = self._able(tried)
        if not able:
            return None
        if not outgoing.size:
            return able[0]
        loads = [replica.num_requests if replica in able else math.inf for replica in self.replicas]
        return self.replicas[self._policy(keys, loads)]

    def _able(self, tried: Sequence[Replica]) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_up and replica not in tried]


def _late(exchange: Exchange, error: TimeoutError) -> ApiError:
    logger.warning("The time of a request at replica %d is up", exchange.replica.number)
    return api_error(error)
