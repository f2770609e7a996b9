"""A server's `/metrics` (Prometheus text, vLLM's names after `minipaged:`) as a dashboard in the terminal."""

from __future__ import annotations

import http.client
import math
import re
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PREFIX = "minipaged:"
TIMEOUT = 5.0  # seconds
LARGEST = 1 << 24  # bytes of an answer
SAMPLE = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*")
BOUND = re.compile(r'(?:^|,)\s*le="([^"]+)"')


class ServerError(ValueError):
    """A server that does not answer, or is not a minipaged server; the message names the address."""


class Scrape(NamedTuple):
    """One scrape of a server: samples are summed over all labels but a bucket's bound, shares averaged."""

    at: float  # seconds
    values: Mapping[str, float]  # name without the prefix -> value
    buckets: Mapping[str, Mapping[float, float]]  # histogram -> upper bound -> count up to it


def fetch(url: str, path: str, missing_is_empty: bool = False, api_key: str | None = None) -> tuple[str, str]:
    """(content type, text) of a page of a server; empty for 401 and 404 if asked. Raises `ServerError`."""
    if not url.startswith(("http://", "https://")):
        raise ServerError(f"{url} is not an HTTP address; give one such as http://127.0.0.1:8000")
    address = f"{root_of(url)}/{path}"
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ServerError("the API key has a character that headers do not allow; give the server's own")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            body = answer.read(LARGEST)
            if answer.length:  # (only a read without a limit, or in chunks, raises this)
                raise http.client.IncompleteRead(body, answer.length)
            return answer.headers.get("Content-Type", ""), body.decode(errors="replace")
    except urllib.error.HTTPError as error:
        if missing_is_empty and error.code in (401, 404):
            return "", ""
        answered = f"{address} answered {error.code}"
        if error.code == 401:
            raise ServerError(f"{answered}: give its key with --api-key or in MINIPAGED_API_KEY") from error
        raise ServerError(f"{answered}; is it the address of minipaged serve?") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ServerError(f"cannot reach {address}: {reason}; start a server with minipaged serve") from error


def root_of(url: str) -> str:
    """A server's address without the end that OpenAI's clients expect."""
    return url.rstrip("/").removesuffix("/v1")


def read_metrics(text: str, url: str, at: float) -> Scrape:
    """The samples of this project in Prometheus' text format. Raises `ServerError` if there is none."""
    values: defaultdict[str, float] = defaultdict(float)
    shares: defaultdict[str, list[float]] = defaultdict(list)  # of each replica
    buckets: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
    for line in text.splitlines():
        sample = SAMPLE.fullmatch(line)
        if sample is None or not sample["name"].startswith(PREFIX):
            continue
        name = sample["name"].removeprefix(PREFIX)
        try:
            value = float(sample["value"])
            bound = BOUND.search(sample["labels"] or "")
            if name.endswith("_bucket") and bound is not None:
                buckets[name.removesuffix("_bucket")][float(bound[1])] += value
            elif name.endswith("_perc"):
                shares[name].append(value)
            else:
                values[name] += value
        except ValueError:
            continue
    values |= {name: sum(found) / len(found) for name, found in shares.items()}
    if not values:
        raise ServerError(f"{url} serves no minipaged metrics; is it the address of minipaged serve?")
    return Scrape(at, values, buckets)


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """The value below which this share lies, by linear interpolation in its bucket; nan without samples."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0
    if not total:
        return math.nan
    low = before = 0.0
    for bound in bounds:
        if buckets[bound] >= share * total:
            inside = buckets[bound] - before
            if math.isinf(bound):
                return low
            return low + (bound - low) * ((share * total - before) / inside if inside else 1.0)
        low, before = bound, buckets[bound]
    return low


LATENCIES = {
    "time_to_first_token_seconds": "first token",
    "inter_token_latency_seconds": "between tokens",
    "e2e_request_latency_seconds": "whole request",
}
QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99}
WIDEST = 1000  # columns: more than any figure needs


def _latency(buckets: Mapping[float, float], share: float) -> str:
    """A quantile in milliseconds or seconds; in the lowest bucket, only its bound is known."""
    first = min(buckets)
    if share * buckets[max(buckets)] <= buckets[first]:
        return f"< {_seconds(first)}"
    return _seconds(quantile(buckets, share))


def dashboard(url: str, now: Scrape, last: Scrape | None = None, trouble: str = "") -> RenderableType:
    """What a scrape shows; with the previous one, also rates. `trouble`: why there is no newer one."""

    def value(name: str) -> float:
        return now.values.get(name, 0.0)

    def total(name: str) -> tuple[str, ...]:
        """A counter, and how fast it grows."""
        if last is None or now.at <= last.at:
            return (f"{value(name):,.0f}",)
        grown = max(0.0, value(name) - last.values.get(name, 0.0))
        return f"{value(name):,.0f}", f"{grown / (now.at - last.at):,.1f}/s"

    hits, queries = value("prefix_cache_hits_total"), value("prefix_cache_queries_total")
    figures = _Figures(
        min(1.0, max(0.0, value("kv_cache_usage_perc"))),
        [(name, f"{value(f'num_requests_{name}'):,.0f}") for name in ("running", "waiting", "swapped")],
        [
            ("prompt tokens", *total("prompt_tokens_total")),
            ("generated tokens", *total("generation_tokens_total")),
            ("prefix hits", f"{hits / queries:.1%}" if queries else "none"),
            ("preemptions", *total("num_preemptions_total")),
        ],
        [
            (shown, *(_latency(found, share) for share in QUANTILES.values()))
            for name, shown in LATENCIES.items()
            if (found := now.buckets.get(name)) and found[max(found)]
        ],
    )
    # First: a low terminal shows the beginning.
    warning = (Text(f"not up to date: {trouble}"), Text()) if trouble else ()
    subtitle = "counts since the server started; Ctrl-C ends"
    return Panel(Group(*warning, figures), title=Text(url), subtitle=subtitle)


@dataclass
class _Figures:
    """Tables side by side where they fit; else a line of text for each row, which wraps."""

    usage: float
    counts: list[tuple[str, ...]]
    tokens: list[tuple[str, ...]]
    latencies: list[tuple[str, ...]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tables = self._tables()
        fits = Measurement.get(console, options.update(max_width=WIDEST), tables).maximum <= options.max_width
        yield tables if fits else self._lines()

    def _tables(self) -> RenderableType:
        bar = Table.grid(padding=(0, 1))
        bar.add_row("KV cache", ProgressBar(total=1.0, completed=self.usage, width=40), f"{self.usage:.1%}")
        sides = Table.grid(padding=(0, 6))
        counts, tokens = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
        for table, rows in ((counts, self.counts), (tokens, self.tokens)):
            for row in rows:
                table.add_row(*row)
        sides.add_row(counts, tokens)
        parts: list[RenderableType] = [bar, Text(), sides]
        if self.latencies:
            latencies = Table(box=None, padding=(0, 2), header_style="dim")
            for heading in ("latency", *QUANTILES):
                latencies.add_column(heading, justify="left" if heading == "latency" else "right")
            for row in self.latencies:
                latencies.add_row(*row)
            parts += [Text(), latencies]
        return Group(*parts)

    def _lines(self) -> Text:
        rows = [("KV cache", f"{self.usage:.1%}"), *self.counts, *self.tokens]
        lines = [" ".join(row) for row in rows]
        for name, *values in self.latencies:
            pairs = (f"{quantile} {value}" for quantile, value in zip(QUANTILES, values))
            lines.append(f"{name}: {', '.join(pairs)}")
        return Text("\n".join(lines), overflow="fold")


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"
