"""What happened to every request of a simulated run, and averages over time."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from minipaged.metrics import quantile
from minipaged.simulation.workloads import Lengths

GAP_RESOLUTION = 1e-5
"""Inter-token latencies are counted in bins of this many seconds."""


@dataclass(slots=True)
class Record:
    """What happened to one request, and when: seconds on the simulated clock."""

    arrival: float
    lengths: Lengths
    admitted: float = math.nan  # when it first got blocks
    first_token: float = math.nan  # end of the step that gave it
    last_token: float | None = None  # end of the step that gave the newest
    finished: float = math.nan  # when it was handed back
    num_tokens: int = 0  # generated, of one sample
    is_cut_short: bool = False  # the trace says more than the longest sequence, or the pool, holds

    @property
    def normalized_latency(self) -> float:
        """End-to-end seconds per output token."""
        return (self.finished - self.arrival) / self.num_tokens


class Usage(NamedTuple):
    """Averages over time while requests run."""

    requests: float  # running
    tokens: float  # share of the KV memory that holds token states
    held: float  # share of the KV memory that is handed out
    shared: float  # share of block-table entries that need no block of their own


@dataclass
class Run:
    """Result of a run."""

    records: list[Record] = field(default_factory=list)  # of the finished requests, in that order
    seconds: float = 0.0  # simulated, at the end
    watched_seconds: float = 0.0  # of the steps that `usage` is the average of
    num_steps: int = 0
    num_samples: int = 0  # tokens generated, one sample of each request counted
    num_preemptions: int = 0
    num_dropped: int = 0  # arrivals turned away at `max_users`
    num_refused: int = 0  # requests that could never run
    num_cached_tokens: int = 0  # of prompts, found in the prefix cache
    gaps: Counter[int] = field(default_factory=Counter)  # between tokens, / `GAP_RESOLUTION`, rounded up
    gap_seconds: float = 0.0  # their exact sum
    usage: Usage = Usage(0.0, 0.0, 0.0, 0.0)

    @property
    def normalized_latency(self) -> float:
        """Mean over requests of end-to-end latency / output length, s/token (the paper's metric)."""
        return sum(record.normalized_latency for record in self.records) / len(self.records)

    @property
    def num_cut_short(self) -> int:
        """Finished requests whose output ended early."""
        return sum(record.is_cut_short for record in self.records)

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
        """Mean inter-token latency, s; 0 if there were none."""
        return self.gap_seconds / max(1, self.gaps.total())

    def quantile(self, what: Callable[[Record], float], share: float) -> float:
        """The value of `what` that this share of the finished requests does not exceed."""
        return quantile(map(what, self.records), share)

    @property
    def output_tokens(self) -> int:
        """Generated tokens of the finished requests (one sample of each)."""
        return sum(record.num_tokens for record in self.records)


def time_to_first_token(record: Record) -> float:
    """From arrival to the first token, s."""
    return record.first_token - record.arrival


def queue_time(record: Record) -> float:
    """From arrival to the first blocks, s."""
    return record.admitted - record.arrival


def inference_time(record: Record) -> float:
    """From the first blocks to the end, s."""
    return record.finished - record.admitted
