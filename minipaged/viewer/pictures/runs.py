"""Runs of the real engine without a model, for pictures of scheduling: preemption, chunks, prefix hits.

The executor below answers every step at once with made-up tokens; which blocks are taken, who is preempted
and how a budget is spent is decided by the engine as always. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minipaged.config import EngineConfig
from minipaged.decoding.params import DecodingParams, SamplingParams
from minipaged.engine import Engine
from minipaged.scheduling import PreemptionCosts, Sample, StepPlan, StepResult
from minipaged.viewer.recorder import StepRecord, Tap

VOCABULARY = 1000


class NoModel:
    """An executor that computes nothing; see `execution.executor.Executor` for its attributes."""

    def __init__(self, block_size: int, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_bytes = 1
        self.max_model_len = VOCABULARY
        self.vocab_size = VOCABULARY
        self.eos_token_ids: tuple[int, ...] = ()
        self.preemption_costs = PreemptionCosts(1e-6, 1e-5, 1e-5)

    def execute(self, plan: StepPlan) -> StepResult:
        """The next numbers, as many as are asked for."""
        return StepResult(
            [
                Sample(
                    [(chunk.start + chunk.num_tokens + i) % VOCABULARY for i in range(chunk.num_candidates)],
                    [-1.0 - 0.1 * i for i in range(chunk.num_candidates)],
                )
                for chunk in plan.scheduled
                if chunk.num_candidates
            ]
        )


def run(
    requests: Mapping[str, tuple[Sequence[int], DecodingParams]],
    block_size: int,
    num_blocks: int,
    num_host_blocks: int = 0,
    arrivals: Mapping[str, int] | None = None,
    **options: Any,
) -> list[StepRecord]:
    """Run requests to their end.

    Args:
        requests: id -> prompt and parameters, in the order of arrival.
        arrivals: id -> step at which it arrives, if not the first.
        options: fields of `EngineConfig`.
    """
    config = EngineConfig(block_size=block_size, disable_log_stats=True, **options)
    engine = Engine(NoModel(block_size, num_blocks, num_host_blocks), config)
    records: list[StepRecord] = []
    Tap(engine, records.append)
    late = dict(arrivals or {})
    while engine.has_unfinished or late or not records:
        for name, (prompt, params) in requests.items():
            if late.get(name, 0) == len(records):
                engine.add_request(name, prompt, params)
                late.pop(name, None)
        engine.step()
    return records


def preempted() -> StepRecord:
    """Three requests outgrow a pool of 12 blocks: the latest, C, is swapped out to the host."""
    records = run(
        {name: (range(50 * i, 50 * i + 9), SamplingParams(max_tokens=12)) for i, name in enumerate("ABC")},
        block_size=4,
        num_blocks=12,
        num_host_blocks=6,
        preemption_mode="swap",
    )
    return next(r for r in records if any(e["kind"] == "preempted" for e in r.events))


def chunked() -> list[StepRecord]:
    """Two requests decode; half of C's prompt is cached, D's is cut to what the budget of 32 leaves."""
    shared = list(range(100, 120))
    records = run(
        {
            "A": ([*shared, 7, 8], SamplingParams(max_tokens=9)),
            "B": (range(30), SamplingParams(n=2, temperature=1.0, max_tokens=9)),
            "C": ([*shared, *range(200, 220)], SamplingParams(max_tokens=4)),
            "D": (range(300, 324), SamplingParams(max_tokens=4)),
        },
        block_size=4,
        num_blocks=60,
        arrivals={"C": 3, "D": 3},
        max_num_batched_tokens=32,
    )
    return [r for r in records if r.step in (3, 4)]
