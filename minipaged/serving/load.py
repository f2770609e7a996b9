"""A load on a server over HTTP, measured by its clients: `minipaged bench --url`.

    closed loop   `users` clients, each sends its next request when the last one is answered
    open loop     arrivals at a mean rate, Poisson; one that finds `users` in the system is turned away

Any server with OpenAI's `/v1/completions` will do. The clients measure the times (to the first token, between
two tokens, of a whole request). Only a minipaged server reports queue and inference time, in the last event
("timing"). Percentiles are the nearest rank.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import httpx

from minipaged.metrics import quantile
from minipaged.viewer.scrape import root_of
from minipaged.workload import WorkloadItem


class LoadError(ValueError):
    """The server cannot be reached, or a setting of the load is invalid."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent, and how.

    Attributes:
        url: of the server, without `/v1`.
        items: requests, taken in turn; over and over until `seconds` are over. They may have no end.
        users: clients of a closed loop; in an open loop, the most that may be in the system.
        rate: arrivals a second; None: closed loop.
        seconds: arrivals end then; None: after each item was sent once.
        ignore_eos: always generate `max_tokens`; else a text may end by itself.
        stream: ask for an event per token; else for whole answers, which do not show when their tokens came.
        model: None: the first that the server names.
        api_key: None: none.
        ttft_target, itl_target: seconds; a request is good if its first token and its mean time between
            tokens are within them.
        timeout: seconds that a client waits for the next event.
        seed: of the arrivals.
    """

    url: str
    items: Iterable[WorkloadItem]
    users: int = 32
    rate: float | None = None
    seconds: float | None = None
    ignore_eos: bool = True
    stream: bool = True
    model: str | None = None
    api_key: str | None = None
    ttft_target: float | None = None
    itl_target: float | None = None
    timeout: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise LoadError(f"url is {self.url}; give an HTTP address such as http://127.0.0.1:8000")
        if self.users < 1:
            raise LoadError(f"users is {self.users}; give at least 1")
        for name in ("rate", "seconds", "ttft_target", "itl_target", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise LoadError(f"{name} is {value}; give a number above 0")
            if value is not None and name.endswith("_target") and not self.stream:
                raise LoadError(f"{name} is {value}, but whole answers do not show it; stream the answers")


@dataclass(slots=True)
class Record:
    """One request as measured by its client; seconds."""

    sent: float  # on a clock of its own
    late: float | None = None  # in an open loop: after it was due
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)  # between two events
    total: float = 0.0
    num_tokens: int = 0
    is_short: bool = False  # with fewer tokens than were asked for
    num_cached: int = 0
    queue: float | None = None
    inference: float | None = None
    error: str | None = None


def run_load(load: Load, progress: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """Send a load and measure; `progress` gets the number of requests that have ended.

    Ctrl-C ends it; the figures are those of the requests until then, and have a field "interrupted".

    Raises:
        LoadError: the server cannot be reached, or answers no request.
    """
    return asyncio.run(_Clients(load, progress).run())


class _Clients:
    def __init__(self, load: Load, progress: Callable[[int], None]) -> None:
        self._load = load
        self._progress = progress
        self._records: list[Record] = []
        self._num_dropped = 0
        self._num_inside = 0

    async def run(self) -> dict[str, Any]:
        load = self._load
        headers = {} if load.api_key is None else {"Authorization": f"Bearer {load.api_key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.users)
        async with httpx.AsyncClient(
            base_url=root_of(load.url), headers=headers, limits=limits, timeout=load.timeout
        ) as self._http:
            self._model = load.model or await self._first_model()
            start = time.perf_counter()
            is_whole = True
            try:
                await (self._closed() if load.rate is None else self._open(load.rate))
            except asyncio.CancelledError:  # by Ctrl-C
                if not self._records:
                    raise
                is_whole = False
            wall = time.perf_counter() - start
        figures = _summary(load, self._records, self._num_dropped, wall)
        return figures if is_whole else {**figures, "interrupted": True}

    async def _first_model(self) -> str:
        try:
            answer = await self._http.get("/v1/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            reason = str(error).split("\n")[0] or type(error).__name__
            raise LoadError(
                f"url is {self._load.url}, but no model answers there: {reason}; start the server"
            ) from error

    async def _closed(self) -> None:
        items, start = self._items(), time.perf_counter()

        async def user() -> None:
            for item in items:
                await self._send(item)
                if self._load.seconds is not None and time.perf_counter() - start >= self._load.seconds:
                    return

        await asyncio.gather(*(user() for _ in range(self._load.users)))

    async def _open(self, rate: float) -> None:
        draw, due, start = random.Random(self._load.seed), 0.0, time.perf_counter()
        tasks: list[asyncio.Task[None]] = []
        try:
            for item in self._items():
                if self._load.seconds is not None and due >= self._load.seconds:
                    break
                await asyncio.sleep(start + due - time.perf_counter())
                if self._num_inside >= self._load.users:
                    self._num_dropped += 1
                else:
                    tasks.append(asyncio.create_task(self._send(item, start + due)))
                due += draw.expovariate(rate)
            if self._load.seconds is None:
                await asyncio.gather(*tasks)
            else:  # (as in TGI's pull request #2024, what is open at the end does not count)
                await asyncio.sleep(max(0.0, start + self._load.seconds - time.perf_counter()))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _items(self) -> Iterator[WorkloadItem]:
        rounds = repeat(self._load.items, 1) if self._load.seconds is None else repeat(self._load.items)
        return chain.from_iterable(rounds)

    async def _send(self, item: WorkloadItem, due: float | None = None) -> None:
        record = Record(time.perf_counter())
        record.late = None if due is None else record.sent - due
        self._num_inside += 1
        try:
            await self._receive(item, record)
        except Exception as error:  # (any server may answer with anything)
            record.error = f"{type(error).__name__}: {error}"
        self._num_inside -= 1
        self._records.append(record)
        self._progress(len(self._records))

    async def _receive(self, item: WorkloadItem, record: Record) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": item["prompt"] if "prompt" in item else item["prompt_token_ids"],
            "max_tokens": item["max_tokens"],
            "temperature": 0,
        }
        if self._load.ignore_eos:  # (which OpenAI does not have, and some servers refuse)
            body["ignore_eos"] = True
        if self._load.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        last = record.sent
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                reason = (await answer.aread()).decode(errors="replace")
                record.error = f"{answer.status_code}: {reason[:200]}"
                return
            async for event in _events(answer, self._load.stream):
                now = time.perf_counter()
                if event.get("error"):
                    record.error = str(event["error"])
                    return
                if event["choices"]:
                    if record.ttft is None:
                        record.ttft = now - record.sent
                    else:
                        record.gaps.append(now - last)
                    last = now
                if usage := event.get("usage"):
                    record.num_tokens = int(usage["completion_tokens"])
                    record.is_short = record.num_tokens < item["max_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    record.num_cached = int(details.get("cached_tokens") or 0)
                if timing := event.get("timing"):
                    record.queue = float(timing["queue_seconds"])
                    record.inference = float(timing["inference_seconds"])
        record.total = last - record.sent
        if not record.num_tokens or record.ttft is None:
            record.error = "the answer ended without its choices or its usage"


async def _events(answer: httpx.Response, is_stream: bool) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, or the whole answer as one."""
    if not is_stream:
        yield json.loads(await answer.aread())
        return
    rest = b""
    async for part in answer.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")  # (httpx's own lines end at U+2028, too, as JSON's do not)
        for line in lines:
            if line.startswith((b"data: {", b"data:{")):
                yield json.loads(line[5:])


def _summary(load: Load, records: list[Record], num_dropped: int, wall: float) -> dict[str, Any]:
    done = [record for record in records if record.error is None]
    if not done:
        reason = records[0].error if records else "none was sent"
        raise LoadError(f"no request was answered; the first error was: {reason}")
    tokens = sum(record.num_tokens for record in done)
    first = [record.ttft for record in done if record.ttft is not None]
    gaps = [gap for record in done for gap in record.gaps]
    queue = [record.queue for record in done if record.queue is not None]
    inference = [record.inference for record in done if record.inference is not None]
    late = [record.late for record in records if record.late is not None]
    figures: dict[str, Any] = {
        "wall_s": wall,
        "requests": len(done),
        "failed": len(records) - len(done),
        "turned_away": num_dropped,
        **({"late_ms_p95": 1e3 * quantile(late, 0.95)} if load.rate is not None else {}),
        "requests_per_s": len(done) / wall,
        "output_tokens": tokens,
        **({"cut_short": sum(record.is_short for record in done)} if load.ignore_eos else {}),
        "out_tok_per_s": tokens / wall,
        "cached_tokens": sum(record.num_cached for record in done),
        "queue_s_mean": sum(queue) / len(queue) if queue else None,
        "queue_s_p95": quantile(queue, 0.95) if queue else None,
        "inference_s_mean": sum(inference) / len(inference) if inference else None,
        "inference_s_p95": quantile(inference, 0.95) if inference else None,
        "s_per_token_mean": sum(r.total / r.num_tokens for r in done) / len(done),
    }
    latencies = {"ttft": first, "itl": gaps} if load.stream else {}
    for name, values in (latencies | {"e2e": [record.total for record in done]}).items():
        for percent in (50, 95, 99):
            figures[f"{name}_ms_p{percent}"] = 1e3 * quantile(values, percent / 100) if values else None
    if load.ttft_target is not None or load.itl_target is not None:
        figures["good_requests"] = good = sum(_is_good(record, load) for record in done)
        figures["goodput_per_s"] = good / wall
    if len(records) > len(done):
        figures["first_error"] = next(record.error for record in records if record.error is not None)
    return figures


def _is_good(record: Record, load: Load) -> bool:
    """Whether a request met its targets."""
    if record.ttft is None or (load.ttft_target is not None and record.ttft > load.ttft_target):
        return False
    mean = (record.total - record.ttft) / max(1, record.num_tokens - 1)
    return load.itl_target is None or mean <= load.itl_target
