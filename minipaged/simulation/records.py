"""What happened to every request of a simulated run, and averages over time.

Plain data and arithmetic: no scheduler, no clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from minipaged.simulation.workloads import Arrival

GAP_RESOLUTION = 1e-4
"""Inter-token latencies are counted in bins of so many seconds."""


class Record:
    """What happened to one request; times in seconds on the simulated clock.

    Attributes:
        admitted: when it first got blocks.
        first_token: end of the step that gave its first token.
        last_token: end of the step that gave its newest token.
        finished: when it was handed back; None while it is not.
    """

    __slots__ = ("admitted", "arrival", "finished", "first_token", "last_token", "lengths", "preemptions")

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival.time
        self.lengths = arrival.lengths
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.last_token = 0.0
        self.finished: float | None = None
        self.preemptions = 0

    @property
    def normalized_latency(self) -> float:
        """End-to-end seconds per output token."""
        assert self.finished is not None
        return (self.finished - self.arrival) / self.lengths.output


class Usage(NamedTuple):
    """Averages over time while requests run.

    Attributes:
        requests: running requests.
        tokens: share of the KV memory that holds token states.
        held: share of the KV memory that is handed out.
        shared: share of block-table entries that need no block of their own.
    """

    requests: float
    tokens: float
    held: float
    shared: float


@dataclass
class Run:
    """Result of a run.

    Attributes:
        records: of the finished requests, in the order in which they finished.
        seconds: simulated time at the end.
        num_steps: steps executed.
        num_preemptions: how often a request gave way.
        num_dropped: arrivals turned away at `max_users`.
        num_refused: requests that could never run.
        num_cached_tokens: prompt tokens found in the prefix cache.
        gaps: inter-token latencies in units of `GAP_RESOLUTION`: how many of each.
    """

    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    num_dropped: int = 0
    num_refused: int = 0
    num_cached_tokens: int = 0
    gaps: Counter[int] = field(default_factory=Counter)
    usage: Usage = Usage(0.0, 0.0, 0.0, 0.0)

    @property
    def normalized_latency(self) -> float:
        """Mean over requests of end-to-end latency / output length, s/token (the paper's metric)."""
        return sum(record.normalized_latency for record in self.records) / len(self.records)

    @property
    def throughput(self) -> float:
        """Finished requests a second."""
        return len(self.records) / self.seconds

    def gap_quantile(self, share: float) -> float:
        """Inter-token latency that this share of the gaps does not exceed, s; 0 if there were none."""
        left = share * self.gaps.total()
        for gap in sorted(self.gaps):
            left -= self.gaps[gap]
            if left <= 0:
                return gap * GAP_RESOLUTION
        return 0.0

    @property
    def gap_mean(self) -> float:
        """Mean inter-token latency, s."""
        return GAP_RESOLUTION * sum(g * n for g, n in self.gaps.items()) / max(1, self.gaps.total())

    def quantile(self, what: Callable[[Record], float], share: float) -> float:
        """The value of `what` that this share of the finished requests does not exceed."""
        return quantile([what(record) for record in self.records], share)

    @property
    def output_tokens(self) -> int:
        """Generated tokens of the finished requests (one sample of each)."""
        return sum(record.lengths.output for record in self.records)


def quantile(values: list[float], share: float) -> float:
    """The smallest value that this share of `values` does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def time_to_first_token(record: Record) -> float:
    """From arrival to the first token, s."""
    assert record.first_token is not None
    return record.first_token - record.arrival


def queue_time(record: Record) -> float:
    """From arrival to the first blocks, s."""
    assert record.admitted is not None
    return record.admitted - record.arrival


def inference_time(record: Record) -> float:
    """From the first blocks to the end, s."""
    assert record.admitted is not None
    assert record.finished is not None
    return record.finished - record.admitted
