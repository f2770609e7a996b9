"""`minipaged bench`: when a request counts as arrived, and which value a percentile is."""

from __future__ import annotations

import logging
import re
from collections import deque

import pytest

from minipaged.bench import run_workload
from minipaged.llm import LLM
from minipaged.metrics import StatsLogger, quantile
from minipaged.scheduling import Sample, StepPlan, StepResult
from minipaged.simulation.calibration import FittedCosts
from minipaged.simulation.executor import SimulatedExecutor

STEP = 0.05


class TimedExecutor(SimulatedExecutor):
    """`STEP` of its own clock a step; sleeping lets the same clock go on."""

    def execute(self, plan: StepPlan) -> StepResult:
        super().execute(plan)
        return StepResult([Sample([0], [0.0])] * sum(bool(s.num_candidates) for s in plan.scheduled))

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def timed_llm(monkeypatch):
    def build(**options) -> LLM:
        costs = FittedCosts(STEP, 0.0, 0.0, 0.0)
        machine = TimedExecutor(costs, num_blocks=200, max_model_len=256, block_size=16, vocab_size=100)
        llm = LLM(executor=machine, tokenizer=None, disable_log_stats=True, **options)
        llm.engine.clock = lambda: machine.now
        monkeypatch.setattr("minipaged.bench.time.sleep", machine.sleep)
        return llm

    return build


def test_a_request_has_arrived_when_it_was_due_not_when_the_engine_looked(timed_llm):
    """Ten requests within some 10 ms, steps of 50 ms: all but the first fall into a step, and wait for its
    end and for their own. Catches the time until the step's end left out (coordinated omission)."""
    result = run_workload(timed_llm(), [{"prompt_token_ids": [5, 6, 7], "max_tokens": 2}] * 10, rate=1000)
    assert 1e3 * 1.7 * STEP < result["ttft_ms_p50"] < 1e3 * 2 * STEP


def test_latencies_of_requests_that_are_all_there_count_from_the_start(timed_llm):
    """One sequence at a time, two steps each: the second request waits for the first."""
    items = [{"prompt_token_ids": [5, 6, 7], "max_tokens": 2}] * 2
    result = run_workload(timed_llm(max_num_seqs=1), items)
    assert result["ttft_ms_p95"] == pytest.approx(1e3 * 3 * STEP)
    assert result["wall_s"] == pytest.approx(4 * STEP)


@pytest.mark.parametrize(
    ("count", "p50", "p95", "p99"), [(1, 1, 1, 1), (20, 10, 19, 20), (200, 100, 190, 198)]
)
def test_a_percentile_is_the_nearest_rank(count, p50, p95, p99):
    """Catches interpolation, and a rank one too high where the share is met exactly."""
    values = deque(range(count, 0, -1))
    assert [quantile(values, share) for share in (0.5, 0.95, 0.99)] == [p50, p95, p99]


def test_the_log_line_after_a_reset_counts_from_the_reset(caplog, timed_llm):
    """The warm-up counts more tokens than the run before the next line. Catches rates that are taken to the
    counts before `reset_metrics`: negative throughput."""
    llm = timed_llm()
    engine, clock = llm.engine, iter(range(10, 1000, 10))
    stats = StatsLogger(interval=5.0)
    engine.on_committed.append(lambda *_: stats.observe(engine.metrics, engine.scheduler, next(clock)))
    with caplog.at_level(logging.INFO, logger="minipaged.metrics"):
        run_workload(llm, [{"prompt_token_ids": [5, 6, 7], "max_tokens": 1}] * 8)
    rates = [tuple(map(float, re.findall(r"throughput: (\S+) tokens/s", line))) for line in caplog.messages]
    assert rates[-1] == (2.4, 0.8)
    assert min(map(min, rates)) >= 0
