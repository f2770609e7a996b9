"""Counts of what happened, derived only from each step's (plan, result), under vLLM's names.

KV usage    blocks held by tables / blocks of the pool
waste       slots of held blocks without a token / slots of held blocks
sharing     1 - physical blocks / logical blocks (paper, Fig. 15)
hit rate    prompt tokens found in the prefix cache / prompt tokens looked up
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from minipaged.scheduling import FCFSScheduler, Request, StepPlan

logger = logging.getLogger(__name__)

ALL_OF = 64  # the first steps, all of which sample the tables (costly with many sequences)
SAMPLE_EVERY = 7  # after those, every 7th; odd, so that blocks are not always equally full
KEEP = 65_536  # latencies kept for quantiles


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that this share of `values` does not exceed (nearest rank); 0 for none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def draft_summary(accepted: int, drafted: int) -> str:
    """How many draft tokens were accepted; logs and commands all use this wording."""
    return f"{accepted} of {drafted} draft tokens accepted" if drafted else "no draft tokens"


def _latencies() -> Any:
    return field(default_factory=lambda: deque(maxlen=KEEP), repr=False)  # (thousands of numbers)


@dataclass(slots=True)
class Metrics:
    """Counters and latencies since the engine started. Latencies are in seconds."""

    steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    blocks_copied: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    peak_kv_blocks: int = 0
    request_success: Counter[str] = field(default_factory=Counter)
    time_to_first_token: deque[float] = _latencies()
    inter_token_latency: deque[float] = _latencies()
    e2e_request_latency: deque[float] = _latencies()
    generated_before: int = field(default=0, repr=False)
    _held_slots: int = field(default=0, repr=False)
    _empty_slots: int = field(default=0, repr=False)
    _physical_blocks: int = field(default=0, repr=False)
    _logical_blocks: int = field(default=0, repr=False)

    def observe_plan(self, plan: StepPlan, scheduler: FCFSScheduler, now: float) -> None:
        """Sample the memory that a planned step holds, before the commit frees any of it.

        A step is planned when the one before it is committed, `now`, or when a request wakes an idle engine.
        """
        kv = scheduler.kv
        self.peak_kv_blocks = max(self.peak_kv_blocks, kv.num_used)
        if any(event.kind == "admitted" for event in plan.events):
            for sequence, *_ in plan.scheduled:
                request = sequence.request
                request.times.setdefault("scheduled", max(now, request.arrival_time))
        weight = 1 if self.steps < ALL_OF else SAMPLE_EVERY
        if self.steps % weight:
            return
        tables = [sequence.table for request in scheduler.running for sequence in request.sequences]
        # Only the tail of a table is not full, and a shared tail counts once.
        tails = {t.blocks[-1]: t.capacity - t.num_tokens for t in reversed(tables) if t.blocks}
        self._empty_slots += weight * sum(tails.values())
        self._logical_blocks += weight * sum(len(table.blocks) for table in tables)
        self._physical_blocks += weight * kv.num_used
        self._held_slots += weight * kv.num_used * kv.block_size

    def observe(self, plan: StepPlan, scheduler: FCFSScheduler, now: float) -> None:
        """Count a committed step."""
        self.steps += 1
        self.num_preemptions += plan.num_preempted
        self.blocks_swapped_out += len(plan.swap_out)
        self.blocks_swapped_in += len(plan.swap_in)
        self.blocks_copied += len(plan.copies)
        self.generation_tokens = scheduler.num_generated_tokens - self.generated_before
        for event in plan.events:
            if event.kind == "admitted":
                self.prefix_cache_queries += event.detail["prompt_tokens"]
                self.prefix_cache_hits += event.detail["cached_tokens"]
                self.prompt_tokens += event.detail["prompt_tokens"]
            elif event.kind == "drafted":
                self.draft_tokens += event.detail["tokens"]
                self.accepted_tokens += event.detail["accepted"]
        for request in plan.sampling:
            if request.error is not None:
                continue  # no token of it was valid
            last = request.times.get("last_token")
            if last is None:
                request.times["first_token"] = now
                self.time_to_first_token.append(now - request.arrival_time)
            else:
                self.inter_token_latency.append(now - last)
            request.times["last_token"] = now

    def observe_end(self, request: Request, now: float) -> None:
        """A request has ended, in whatever way."""
        request.times["finished"] = now
        # (Of the last: samples that had ended by themselves come before those that were aborted.)
        reason = request.completions[-1].finish_reason if request.completions else None
        self.request_success[reason or "error"] += 1
        self.e2e_request_latency.append(now - request.arrival_time)

    @property
    def kv_waste(self) -> float:
        """Share of held slots without a token, averaged over the run."""
        return _share(self._empty_slots, self._held_slots)

    @property
    def sharing_saving(self) -> float:
        """Share of blocks saved by sharing, averaged over the run."""
        return _share(self._logical_blocks - self._physical_blocks, self._logical_blocks)

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of looked-up prompt tokens that were cached."""
        return _share(self.prefix_cache_hits, self.prefix_cache_queries)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


class StatsLogger:
    """A log line every `interval` seconds, as in vLLM."""

    def __init__(self, interval: float = 5.0) -> None:
        self.interval = interval
        self._last: tuple[float, int, int] | None = None
        self._metrics: Metrics | None = None

    def observe(self, metrics: Metrics, scheduler: FCFSScheduler, now: float) -> None:
        """Log if the interval has passed."""
        if self._last is None:
            self._last = (now, 0, 0)
        since, prompt, generated = self._last
        if metrics is not self._metrics:  # new ones count from zero
            prompt = generated = 0
        if now - since < self.interval:
            return
        self._metrics = metrics
        kv, drafted = scheduler.kv, metrics.draft_tokens
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, Swapped: %d reqs, KV cache usage: %.1f%%, "
            "Prefix cache hit rate: %.1f%%, Preemptions: %d%s",
            (metrics.prompt_tokens - prompt) / (now - since),
            (metrics.generation_tokens - generated) / (now - since),
            len(scheduler.running),
            len(scheduler.waiting),
            len(scheduler.swapped),
            100 * kv.num_used / kv.allocator.num_blocks,
            100 * metrics.prefix_cache_hit_rate,
            metrics.num_preemptions,
            f", {draft_summary(metrics.accepted_tokens, drafted)}" if drafted else "",
        )
        self._last = (now, metrics.prompt_tokens, metrics.generation_tokens)
