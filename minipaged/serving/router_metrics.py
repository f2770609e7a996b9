"""Metrics of several replicas as one page for Prometheus: each sample has the label `replica`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from minipaged.serving.answers import Answers
from minipaged.serving.exchange import Exchange, Replica

logger = logging.getLogger(__name__)


class MergedMetrics:
    """The page of a router.

    Args:
        replicas: all of them.
        answers: to clients, not what the replicas answered to the router.
    """

    def __init__(self, replicas: Sequence[Replica], answers: Answers) -> None:
        self._replicas = replicas
        self._answers = answers
        self._left_out: set[int] = set()  # numbers of the replicas whose pages could not be read

    def page(self, pages: Sequence[Exchange], num_retries: int) -> bytes:
        """The replicas' own metrics and the router's, in Prometheus' text format.

        A page that is missing, or cannot be read, is left out; the log says so once.
        """
        families: dict[str, Metric] = {}
        answered = {exchange.replica.number for exchange in pages}
        for replica in self._replicas:
            if replica.is_up and replica.number not in answered:
                self._leave_out(replica.number, "it has not answered in time")
        for exchange in pages:
            number = exchange.replica.number
            for given in self._read(number, exchange.status, exchange.body):
                family = families.setdefault(given.name, Metric(given.name, given.documentation, given.type))
                for sample in given.samples:
                    family.add_sample(sample.name, {**sample.labels, "replica": str(number)}, sample.value)
        families |= {family.name: family for family in self._answers.collect()}
        registry: Any = SimpleNamespace(collect=lambda: (*families.values(), *self._own(num_retries)))
        return generate_latest(registry)

    def _read(self, number: int, status: int, body: bytes) -> list[Metric]:
        try:
            if status != 200:
                raise ValueError(f"it answered {status}")
            found = list(text_string_to_metric_families(body.decode()))
        except Exception as error:  # (the parser raises more than ValueError)
            self._leave_out(number, error)
            return []
        self._left_out.discard(number)
        return found

    def _leave_out(self, number: int, reason: object) -> None:
        if number not in self._left_out:
            logger.warning("Replica %d is left out of /metrics: %s", number, reason)
        self._left_out.add(number)

    def _own(self, num_retries: int) -> tuple[Metric, ...]:
        up = GaugeMetricFamily("minipaged:replica_up", "Whether it gets requests.", labels=["replica"])
        has = GaugeMetricFamily("minipaged:replica_requests", "Prompts that it has.", labels=["replica"])
        starts = CounterMetricFamily("minipaged:replica_starts", "Starts of its process.", labels=["replica"])
        for replica in self._replicas:
            label = [str(replica.number)]
            up.add_metric(label, replica.is_up)
            has.add_metric(label, replica.num_requests)
            starts.add_metric(label, replica.num_starts)
        retries = CounterMetricFamily("minipaged:router_retries", "Requests sent to one more replica.")
        retries.add_metric([], num_retries)
        return up, has, starts, retries
