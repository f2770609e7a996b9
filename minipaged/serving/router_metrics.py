"""Metrics of several replicas as one page for Prometheus: each sample has the label `replica`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from minipaged.serving.answers import Answers
from minipaged.serving.exchange import Replica


def merged(
    texts: Mapping[int, str], replicas: Sequence[Replica], num_retries: int, answers: Answers
) -> bytes:
    """The replicas' own metrics, by number, and the router's metrics, in Prometheus' text format.

    Answers are those to clients, not what the replicas answered to the router.
    """
    families: dict[str, Metric] = {}
    for number, text in texts.items():
        for given in text_string_to_metric_families(text):
            family = families.setdefault(given.name, Metric(given.name, given.documentation, given.type))
            for sample in given.samples:
                family.add_sample(sample.name, {**sample.labels, "replica": str(number)}, sample.value)
    families |= {family.name: family for family in answers.collect()}
    up = GaugeMetricFamily("minipaged:replica_up", "Whether it gets requests.", labels=["replica"])
    has = GaugeMetricFamily("minipaged:replica_requests", "Prompts that it has.", labels=["replica"])
    starts = CounterMetricFamily("minipaged:replica_starts", "Starts of its process.", labels=["replica"])
    for replica in replicas:
        label = [str(replica.number)]
        up.add_metric(label, replica.is_up)
        has.add_metric(label, replica.num_requests)
        starts.add_metric(label, replica.num_starts)
    retries = CounterMetricFamily("minipaged:router_retries", "Requests sent to one more replica.")
    retries.add_metric([], num_retries)
    registry: Any = SimpleNamespace(collect=lambda: (*families.values(), up, has, starts, retries))
    return generate_latest(registry)
