"""What happened, counted: metrics and the log line are derived from plans, on a clock that the test holds."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import pytest

from minipaged import SamplingParams
from minipaged.config import config_from
from minipaged.engine import Engine
from minipaged.execution.model_runner import ModelRunner
from minipaged.memory.block_table import BlockCopy
from minipaged.metrics import Metrics, StatsLogger, draft_summary, quantile
from minipaged.scheduling import StepPlan
from minipaged.simulation.calibration import FittedCosts
from minipaged.simulation.executor import SimulatedExecutor

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class Clock:
    """One second a look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def engine(model) -> Engine:
    config = config_from({"num_blocks": 64, "block_size": 4, "max_num_seqs": 2})
    return Engine(ModelRunner(model, config), config, clock=Clock())


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> None:
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished:
        engine.step()
        engine.check_invariants()


def test_tokens_latencies_and_finish_reasons_are_counted_exactly(engine):
    """A token counted twice, a latency that includes the queue of another."""
    run(engine, [[5, 6, 7], [8, 9, 10, 11, 12]])
    metrics = engine.metrics
    assert (metrics.prompt_tokens, metrics.generation_tokens, metrics.steps) == (8, 12, 6)
    assert metrics.request_success == {"length": 2}
    # Both arrive at seconds 1 and 2, and each step ends a second after the one before.
    assert list(metrics.time_to_first_token) == [2.0, 1.0]
    assert list(metrics.inter_token_latency) == [1.0] * 10
    assert list(metrics.e2e_request_latency) == [7.0, 6.0]
    # The prompts take 1 and 2 blocks; with all but the last output token, 8 and 10 tokens take 2 and 3.
    assert metrics.peak_kv_blocks == 5


def test_an_aborted_request_ends_when_it_is_aborted(engine):
    """Catches an end at the last step: a request that waited a minute and was given up took no time."""
    request = engine.add_request("waits", [5, 6, 7], GREEDY)  # at second 2; the engine began at 1
    engine.clock.now = 60.0
    engine.abort("waits")
    assert request.times["finished"] == 61.0
    assert list(engine.metrics.e2e_request_latency) == [59.0]


def test_latencies_are_read_from_a_clock_that_is_fine_on_every_system():
    """Catches latencies in ticks of 16 ms: those of `time.monotonic` on Windows, before Python 3.13."""
    costs = FittedCosts(0.0, 0.0, 0.0, 0.0)
    machine = SimulatedExecutor(costs, num_blocks=8, max_model_len=64, block_size=4, vocab_size=100)
    assert Engine(machine, config_from({"block_size": 4})).clock is time.perf_counter


def test_a_step_in_which_a_request_fails_has_given_it_no_token(engine):
    """The time to a first token that never came; a gap before a token that never came."""
    for request_id, allowed in ("none", [5]), ("one", [5, 6]):
        params = GREEDY.clone(allowed_token_ids=allowed, no_repeat_ngram_size=1)
        request = engine.add_request(request_id, [5], params)
        while engine.has_unfinished:
            engine.step()
        output = engine.output(request)
        assert "forbid every token" in output.error
        assert (output.metrics.first_token_time is not None) == (output.metrics.num_generation_tokens > 0)
    assert engine.metrics.request_success == {"error": 2}
    assert engine.metrics.generation_tokens == len(engine.metrics.time_to_first_token) == 1
    assert not engine.metrics.inter_token_latency


@pytest.mark.parametrize(("error", "reason"), [(None, "abort"), ("a fault", "error")])
def test_a_request_ended_from_outside_after_one_of_its_samples_is_not_a_success(engine, error, reason):
    """The reason of a sample that had ended by itself, counted for the whole request."""
    params = SamplingParams(n=2, seed=0, max_tokens=6, ignore_eos=True)
    request = engine.add_request("0", [5], params)
    engine.step()
    one, other = (sequence.output_token_ids[0] for sequence in request.sequences)
    assert one != other
    engine.abort("0")
    engine.reset_metrics()
    request = engine.add_request("1", [5], params.clone(stop_token_ids=[one]))
    engine.step()
    assert len(request.completions) == len(request.sequences) == 1
    engine.abort("1", error)
    assert engine.metrics.request_success == {reason: 1}


def test_new_metrics_count_from_zero(engine):
    """Catches a second benchmark that counts the tokens of the first."""
    run(engine, [[5, 6, 7]])
    engine.reset_metrics()
    run(engine, [[5, 6, 7], [8, 9]])
    assert (engine.metrics.prompt_tokens, engine.metrics.generation_tokens) == (5, 12)


def test_prefix_hits_are_counted_in_tokens(engine):
    """A hit rate in blocks or in requests."""
    prompt = list(range(5, 22))  # four full blocks and a token
    run(engine, [prompt])
    run(engine, [prompt])
    assert engine.metrics.prefix_cache_queries == 34
    assert engine.metrics.prefix_cache_hits == 16
    assert engine.metrics.prefix_cache_hit_rate == pytest.approx(16 / 34)


def test_waste_is_the_share_of_empty_slots(engine):
    """Waste that counts full blocks, or counts a block of two owners twice."""
    run(engine, [[5, 6, 7, 8, 9]], GREEDY.clone(max_tokens=4))
    # 5 to 8 tokens in 2 blocks of 4, one step each.
    assert engine.metrics.kv_waste == pytest.approx((3 + 2 + 1 + 0) / (4 * 8))


def test_what_samples_share_is_saved_and_their_own_tails_are_empty_each(engine):
    """Catches a saving that is not counted, and two tails taken for one because the first block is shared."""
    run(engine, [[5, 6, 7, 8, 9]], SamplingParams(n=2, seed=0, max_tokens=3, ignore_eos=True))
    # Blocks of 4: the prompt's 2, then a shared one and two tails, with 6 and with 7 tokens.
    assert engine.metrics.kv_waste == pytest.approx((3 + 2 * 2 + 2 * 1) / (4 * (2 + 3 + 3)))
    assert engine.metrics.sharing_saving == pytest.approx(1 - (2 + 3 + 3) / (2 + 4 + 4))


def test_shares_of_nothing_are_zero():
    """Catches a division by zero in a log line before the first prompt."""
    metrics = Metrics()
    assert (metrics.kv_waste, metrics.sharing_saving, metrics.prefix_cache_hit_rate) == (0, 0, 0)


def test_moved_and_copied_blocks_are_counted(engine):
    """Catches a direction that is not counted, or counted as the other."""
    copy, metrics = BlockCopy(0, 1), Metrics()
    plan = StepPlan(0, swap_out=[copy] * 3, swap_in=[copy] * 2, copies=[copy])
    for _ in range(2):
        metrics.observe(plan, engine.scheduler, 1.0)
    assert (metrics.blocks_swapped_out, metrics.blocks_swapped_in, metrics.blocks_copied) == (6, 4, 2)


def test_a_quantile_is_the_nearest_rank():
    """Catches interpolation, a rank one too high where the share is met exactly, and a p99 of no request that
    ends a report."""
    assert [quantile([30, 10, 20], share) for share in (0, 1 / 3, 0.5, 1)] == [10, 10, 20, 30]
    for count, ranks in ((0, [0, 0, 0]), (1, [1, 1, 1]), (20, [10, 19, 20]), (200, [100, 190, 198])):
        assert [quantile(range(count, 0, -1), share) for share in (0.5, 0.95, 0.99)] == ranks


def test_the_waste_of_a_long_run_gives_every_step_the_same_weight(engine):
    """A mean in which the first steps, all of which are looked at, count for more than the later ones."""
    run(engine, [[5, 6, 7, 8]], GREEDY.clone(max_tokens=120))
    shares = [(-tokens % 4, tokens + -tokens % 4) for tokens in range(4, 124)]
    exact = sum(empty for empty, _ in shares) / sum(held for _, held in shares)
    assert engine.metrics.kv_waste == pytest.approx(exact, rel=0.15)


def test_the_log_line_comes_every_few_seconds_and_says_what_users_look_for(engine, caplog):
    """A silent engine, or a line per step."""
    caplog.set_level(logging.INFO, "minipaged")
    run(engine, [[5, 6, 7], [8, 9]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    lines = [record.message for record in caplog.records if "throughput" in record.message]
    assert len(lines) == 1
    for part in ("prompt throughput", "generation throughput", "Running: 2", "Waiting: 0", "Swapped: 0",
                 "KV cache usage: ", "Prefix cache hit rate: 0.0%", "Preemptions: 0"):  # fmt: skip
        assert part in lines[0]


def test_throughput_in_the_log_is_that_since_the_last_line(caplog):
    """Catches an average since the start, and a negative one after the metrics were reset."""
    caplog.set_level(logging.INFO, "minipaged")
    kv = SimpleNamespace(num_used=1, allocator=SimpleNamespace(num_blocks=4))
    scheduler = SimpleNamespace(kv=kv, running=[1], waiting=[], swapped=[])
    stats, metrics = StatsLogger(5.0), Metrics(prompt_tokens=100, generation_tokens=10)
    for now in (100.0, 104.9, 105.0):
        stats.observe(metrics, scheduler, now)
    metrics.prompt_tokens, metrics.generation_tokens = 150, 40
    metrics.prefix_cache_hits, metrics.prefix_cache_queries = 1, 2
    stats.observe(metrics, scheduler, 110.0)
    stats.observe(Metrics(prompt_tokens=60, generation_tokens=20), scheduler, 120.0)
    stats.observe(Metrics(prompt_tokens=60, generation_tokens=20), scheduler, 130.0)
    throughputs = [record.message.split(" tokens/s")[:2] for record in caplog.records]
    assert [[float(part.split()[-1]) for part in parts] for parts in throughputs] == [
        [20.0, 2.0],
        [10.0, 6.0],
        [6.0, 2.0],
        [6.0, 2.0],
    ]
    assert "KV cache usage: 25.0%, Prefix cache hit rate: 50.0%" in caplog.records[1].message


def test_printed_metrics_are_counts(engine):
    """Catches `print(llm.engine.metrics)` as pages of single latencies."""
    run(engine, [[5, 6, 7], [8, 9]])
    assert len(engine.metrics.inter_token_latency) == 10
    printed = repr(engine.metrics)
    assert "generation_tokens=12" in printed
    assert "latency" not in printed
    assert "_held_slots" not in printed


@pytest.mark.parametrize(
    ("accepted", "drafted", "summary"),
    [
        (0, 0, "no draft tokens"),
        (0, 5, "0 of 5 draft tokens accepted"),
        (1, 5, "1 of 5 draft tokens accepted"),
    ],
)
def test_draft_summary(accepted, drafted, summary):
    """Catches "0 of 0", and terms that a reader of vLLM's log does not know."""
    assert draft_summary(accepted, drafted) == summary


@pytest.mark.parametrize("tokens", [0, 3])
def test_the_log_line_has_draft_tokens_where_there_are_any(model, caplog, tokens):
    """Catches draft tokens in every log, and none in the log of a user who turned speculation on."""
    caplog.set_level(logging.INFO, "minipaged")
    config = config_from({"num_blocks": 64, "num_speculative_tokens": tokens})
    engine = Engine(ModelRunner(model, config), config, clock=Clock())
    run(engine, [[5, 6, 5, 6, 5, 6]], GREEDY.clone(max_tokens=16))
    metrics = engine.metrics
    (line, *_) = [record.message for record in caplog.records if "throughput" in record.message]
    if tokens:
        accepted, drafted = map(int, line.partition("Preemptions: 0, ")[2].split()[:3:2])
        assert line.endswith(f"Preemptions: 0, {draft_summary(accepted, drafted)}")
        assert 0 < drafted <= metrics.draft_tokens
        assert accepted <= metrics.accepted_tokens
    else:
        assert line.endswith("Preemptions: 0")


def test_disable_log_stats_silences_the_line(model, caplog):
    """A setting that is not looked at."""
    caplog.set_level(logging.INFO, "minipaged")
    config = config_from({"num_blocks": 64, "disable_log_stats": True})
    run(Engine(ModelRunner(model, config), config, clock=Clock()), [[5, 6, 7]])
    assert not [record for record in caplog.records if "throughput" in record.message]
