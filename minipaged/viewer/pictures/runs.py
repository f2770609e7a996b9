"""Runs of the real engine without a model: preemption, chunked prefill, prefix hits.

Every step returns made-up tokens at once; the engine makes all other decisions as usual.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from minipaged.components import Components
from minipaged.config import EngineConfig
from minipaged.decoding.params import DecodingParams, SamplingParams
from minipaged.engine import Engine
from minipaged.scheduling import PreemptionCosts, Sample, StepPlan, StepResult
from minipaged.viewer.recorder import StepRecord, recording
from minipaged.viewer.snapshot import PoolView

VOCABULARY = 1000

POLICIES = {
    "reserve": "Reserve: prompt and longest answer at admission; the rest wait",
    "chunked": "Chunked: a grant of blocks, later single ones",
    "on_demand": "On demand: a block when the last is full",
}
"""Page growth -> caption."""


class NoModel:
    """An `Executor` that computes nothing."""

    block_bytes = 1
    max_model_len = VOCABULARY
    vocab_size = VOCABULARY
    eos_token_ids: tuple[int, ...] = ()
    kept_states: Container[int] | None = None
    preemption_costs = PreemptionCosts(1e-6, 1e-5, 1e-5)

    def __init__(self, block_size: int, num_blocks: int, num_host_blocks: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks

    def execute(self, plan: StepPlan) -> StepResult:
        """The next numbers, as many as requested."""
        samples = []
        for _, start, num_tokens, count in plan.scheduled:
            if count:
                tokens = [(start + num_tokens + i) % VOCABULARY for i in range(count)]
                samples.append(Sample(tokens, [-1.0 - 0.1 * i for i in range(count)]))
        return StepResult(samples)


def modelless(
    num_blocks: int, num_host_blocks: int = 0, components: Components | None = None, **options: Any
) -> Engine:
    """An engine with blocks of 4 tokens and no model; `options` are fields of `EngineConfig`."""
    config = EngineConfig(block_size=4, disable_log_stats=True, **options)
    return Engine(NoModel(4, num_blocks, num_host_blocks), config, components=components)


def run(
    engine: Engine,
    requests: Mapping[str, tuple[Sequence[int], DecodingParams]],
    arrivals: Mapping[str, int] = {},
) -> list[StepRecord]:
    """Run requests (id -> prompt, parameters) to their end; `arrivals`: id -> step, if not the first."""
    late = dict(arrivals)
    with recording(engine) as records:
        while engine.has_unfinished or late or not records:
            for name, (prompt, params) in requests.items():
                if late.get(name, 0) == len(records):
                    engine.add_request(name, prompt, params)
                    late.pop(name, None)
            engine.step()
    return records


def preempted() -> StepRecord:
    """Three requests outgrow a pool of 12 blocks: the latest, C, is swapped out to the host."""
    prompts = {"A": range(9), "B": range(50, 59), "C": range(100, 109)}
    records = run(
        modelless(12, 6, preemption_mode="swap"),
        {name: (prompt, SamplingParams(max_tokens=12)) for name, prompt in prompts.items()},
    )
    return next(r for r in records if any(e["kind"] == "preempted" for e in r.events))


def chunked() -> list[StepRecord]:
    """Two requests decode; half of C's prompt is cached, D's is cut to what the budget of 32 leaves."""
    shared = list(range(100, 120))
    requests = {
        "A": ([*shared, 7, 8], SamplingParams(max_tokens=9)),
        "B": (range(30), SamplingParams(n=2, temperature=1.0, max_tokens=9)),
        "C": ([*shared, *range(200, 220)], SamplingParams(max_tokens=4)),
        "D": (range(300, 324), SamplingParams(max_tokens=4)),
    }
    records = run(modelless(60, max_num_batched_tokens=32), requests, arrivals={"C": 3, "D": 3})
    return records[3:5]


def prompts_first() -> list[StepRecord]:
    """Without chunked prefill: a step of prompts alone, then a step of decodes."""
    requests = {name: (range(i, i + 9), SamplingParams(max_tokens=4)) for i, name in enumerate("ABC")}
    return run(modelless(60, max_num_batched_tokens=32, enable_chunked_prefill=False), requests)[:2]


def grown(policy: str, max_tokens: int) -> PoolView:
    """The seventh decode of eight requests, in a pool of 33 blocks, under a page growth policy."""
    requests = {
        name: (range(i, i + 9), SamplingParams(max_tokens=max_tokens)) for i, name in enumerate("ABCDEFGH")
    }
    return run(modelless(33, page_growth=policy, max_num_batched_tokens=96), requests)[7].planned
