"""Counts the answers to clients, refusals included, by path and status: `http_requests_total`, as in vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

from prometheus_client.core import CounterMetricFamily, Metric

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize")

OTHER = "other"
"""Stands for every other path: clients may try any number of them."""

STATUSES = ("200", "400", "401", "404", "429", "500", "503")

POLLED = ("/", "/health", "/version", "/metrics")
"""Not counted: monitors ask for them all the time."""


class Answers:
    """The counts of one server."""

    def __init__(self) -> None:
        # (The usual ones from 0 on: `rate` does not see a count that begins at 1.)
        self._counts = Counter(dict.fromkeys(product((*PATHS, OTHER), STATUSES), 0))

    def add(self, path: str, status: int) -> None:
        """Count an answer that begins."""
        if path not in POLLED:
            self._counts[path if path in PATHS else OTHER, str(status)] += 1

    def collect(self) -> Iterator[Metric]:
        """The counter, as prometheus_client asks for it."""
        family = CounterMetricFamily("http_requests", "Answers to clients.", labels=["handler", "status"])
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family
