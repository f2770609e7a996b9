"""The results of simulated runs in the terms that operators use: throughput, latencies, KV memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minipaged.simulation.records import Run, queue_time, time_to_first_token


def _shown(label: str) -> Any:
    return field(metadata={"label": label})


@dataclass(frozen=True)
class Report:
    """The results of a run; each field has its meaning and unit as `label` in its metadata."""

    requests: int = _shown("requests finished")
    cut_short: int = _shown("of those, outputs cut short")
    refused: int = _shown("requests refused")
    seconds: float = _shown("simulated time [s]")
    request_rate: float = _shown("throughput [req/s]")
    token_rate: float = _shown("throughput [tok/s]")
    ttft_p50: float = _shown("time to first token, median [s]")
    ttft_p95: float = _shown("time to first token, p95 [s]")
    itl_mean: float = _shown("inter-token latency, mean [s]")
    itl_p99: float = _shown("inter-token latency, p99 [s]")
    normalized_latency: float = _shown("normalized latency [s/token]")
    queue_p95: float = _shown("queue time, p95 [s]")
    preemptions: int = _shown("preemptions")
    cached_tokens: int = _shown("prompt tokens from the prefix cache")
    running: float = _shown("running requests, mean")
    kv_usage: float = _shown("KV memory handed out, mean")
    kv_waste: float = _shown("of that without a token, mean")


def report(runs: Sequence[Run]) -> Report:
    """One report over the runs of one or several replicas."""
    total = Run(seconds=max(run.seconds for run in runs))
    for run in runs:
        total.records += run.records
        total.gaps += run.gaps
        total.gap_seconds += run.gap_seconds
    # Averages over all of the time, where those of a run are over its steps.
    shares = [run.watched_seconds / total.seconds for run in runs]
    running, tokens, held, _ = (
        sum(share * value for share, value in zip(shares, values))
        for values in zip(*(run.usage for run in runs))
    )
    return Report(
        requests=len(total.records),
        cut_short=total.num_cut_short,
        refused=sum(run.num_refused for run in runs),
        seconds=total.seconds,
        request_rate=total.throughput,
        token_rate=total.output_tokens / total.seconds,
        ttft_p50=total.quantile(time_to_first_token, 0.5),
        ttft_p95=total.quantile(time_to_first_token, 0.95),
        itl_mean=total.gap_mean,
        itl_p99=total.gap_quantile(0.99),
        normalized_latency=total.normalized_latency,
        queue_p95=total.quantile(queue_time, 0.95),
        preemptions=sum(run.num_preemptions for run in runs),
        cached_tokens=sum(run.num_cached_tokens for run in runs),
        running=running,
        kv_usage=held / len(runs),
        kv_waste=1 - tokens / held if held else 0.0,
    )
