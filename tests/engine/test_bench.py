"""`minipaged bench`: when a request counts as arrived, and what its figures count."""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from minipaged.bench import check_contracts, repeat_workload, run_workload, tokenized
from minipaged.components import Components
from minipaged.execution.accel import limits
from minipaged.learn.contracts import ContractError
from minipaged.learn.contracts.allocator import AllocatorContract
from minipaged.llm import LLM
from minipaged.metrics import StatsLogger
from minipaged.scheduling import Sample, StepPlan, StepResult
from minipaged.simulation.calibration import FittedCosts
from minipaged.simulation.executor import SimulatedExecutor
from minipaged.workload import WorkloadError, random_workload, read_workload
from tests.models import zoo

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


def test_the_time_before_the_first_arrival_does_not_count(timed_llm):
    """Catches throughput that is divided by a wait: at 1 request in 100 s, the first came after 158 s."""
    result = run_workload(timed_llm(), [{"prompt_token_ids": [5, 6, 7], "max_tokens": 2}], rate=0.01)
    assert result["wall_s"] == pytest.approx(2 * STEP)


def test_latencies_of_requests_that_are_all_there_count_from_the_start(timed_llm):
    """One sequence at a time, two steps each: the second request waits for the first."""
    items = [{"prompt_token_ids": [5, 6, 7], "max_tokens": 2}] * 2
    result = run_workload(timed_llm(max_num_seqs=1), items)
    assert result["ttft_ms_p95"] == pytest.approx(1e3 * 3 * STEP)
    assert result["wall_s"] == pytest.approx(4 * STEP)


def test_a_run_shorter_than_a_tick_of_the_processors_clock_has_figures(timed_llm, monkeypatch):
    """Catches a ZeroDivisionError on Windows, where CPU time goes on by 16 ms."""
    monkeypatch.setattr("minipaged.bench.time.process_time", lambda: 16.0)
    result = run_workload(timed_llm(), [{"prompt_token_ids": [5, 6, 7], "max_tokens": 2}])
    assert (result["cpu_s"], result["out_tok_per_cpu_s"]) == (0.0, None)
    assert result["out_tok_per_s"] == pytest.approx(1 / STEP)


def test_progress_counts_all_requests_that_have_finished(timed_llm):
    """Catches a bar that shows how many the last step finished."""
    shown = []
    items = [{"prompt_token_ids": [5, 6, 7], "max_tokens": count} for count in (1, 3, 3, 5)]
    run_workload(timed_llm(), items, progress=shown.append)
    assert shown[-5:] == [1, 1, 3, 3, 4]


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


def test_prefill_and_decode_have_rates_of_their_own(timed_llm):
    """One step for a prompt of 60 tokens, four for the others: 60 tokens in one step, 4 in four. Catches a
    decode rate that the prompt's time slows down."""
    result = run_workload(timed_llm(), [{"prompt_token_ids": [5] * 60, "max_tokens": 5}])
    assert result["prefill_tok_per_s"] == pytest.approx(60 / STEP)
    assert result["decode_tok_per_s"] == pytest.approx(1 / STEP)
    assert result["decode_steps_per_s"] == pytest.approx(1 / STEP)


def test_rejected_tokens_count_for_no_rate(timed_llm):
    """Catches rows that are taken for tokens: of each draft, the first token is accepted."""

    class OneRight:
        def draft(self, sequences, counts):
            return [[0, 1, 0][:count] for count in counts]

    llm = timed_llm(num_speculative_tokens=3, components=Components(drafter=OneRight))
    result = run_workload(llm, random_workload(1, 10, 9, llm.engine.executor.vocab_size))
    assert result["decode_tok_per_s"] == pytest.approx(2 / STEP)
    assert result["decode_steps_per_s"] == pytest.approx(1 / STEP)
    assert (result["draft_tokens"], result["accepted_tokens"]) == (3 + 3 + 3 + 1, 4)


def test_prompts_without_decodes_have_no_decode_rate(timed_llm):
    """Catches a division by no time."""
    result = run_workload(timed_llm(), [{"prompt_token_ids": [5] * 60, "max_tokens": 1}])
    assert result["decode_tok_per_s"] is result["decode_steps_per_s"] is result["decode_kv_tokens"] is None
    assert result["itl_ms_p50"] is result["itl_ms_p99"] is None


def test_the_last_token_of_a_prompt_is_no_decode(timed_llm):
    """Catches chunks taken for decodes by their size: 60 tokens in chunks of 59 and 1, or a prompt of one."""
    for length in (60, 1):
        items = [{"prompt_token_ids": [5] * length, "max_tokens": 1}]
        result = run_workload(timed_llm(max_num_batched_tokens=59), items)
        assert result["prefill_tok_per_s"] == pytest.approx(length / (2 * STEP if length > 59 else STEP))
        assert result["decode_steps_per_s"] is None


def test_a_request_that_the_pool_cannot_hold_is_refused():
    """Catches figures of 48 tokens under the name of 100."""
    llm = LLM(num_blocks=7, block_size=16, disable_log_stats=True)
    items = [{"prompt_token_ids": [5] * 20, "max_tokens": 100}]
    with pytest.raises(WorkloadError, match=r"entry 0 has 120 tokens, .* but the pool has room for 112"):
        run_workload(llm, items)
    assert (
        run_workload(llm, [{**items[0], "max_tokens": 93}])["output_tokens"] == 93
    )  # (the last is not stored)


def test_a_request_that_fails_leaves_no_figures(timed_llm, monkeypatch):
    """Catches a broken model with the best times: 0 ms to the first token, few steps, no failure named."""
    llm = timed_llm()
    answer = llm.engine.executor.execute

    def broken(plan: StepPlan) -> StepResult:
        errors = {item.sequence.request.request_id: "not finite" for item in plan.scheduled}
        return answer(plan)._replace(errors=errors)

    monkeypatch.setattr(llm.engine.executor, "execute", broken)
    with pytest.raises(WorkloadError, match=r"entry 0.*not finite"):
        run_workload(llm, [{"prompt_token_ids": [5, 6, 7], "max_tokens": 2}] * 3)


def test_percentiles_are_of_all_requests(timed_llm, monkeypatch):
    """Catches those of the last 65,536 tokens under the name of all: a slow start is left out."""
    monkeypatch.setattr("minipaged.metrics.KEEP", 3)
    items = [{"prompt_token_ids": [5, 6, 7], "max_tokens": 2}] * 8
    result = run_workload(timed_llm(max_num_seqs=1), items)
    assert result["ttft_ms_p50"] == pytest.approx(1e3 * 7 * STEP)


def test_the_warm_up_asks_for_no_token_for_which_the_pool_has_no_room(caplog):
    """Catches a warning to raise num_blocks for a workload that fits."""
    llm = LLM(num_blocks=7, block_size=16, disable_log_stats=True)
    caplog.clear()
    assert run_workload(llm, [{"prompt_token_ids": [5] * 112, "max_tokens": 1}])["output_tokens"] == 1
    assert not caplog.messages


def test_the_processor_time_of_other_ranks_is_not_guessed(timed_llm):
    """Catches the CPU seconds of one process reported as those of two."""
    llm = timed_llm()
    llm.config = replace(llm.config, tensor_parallel_size=2)
    result, spread = repeat_workload(llm, [ITEM], 2)
    assert result["cpu_s"] is result["out_tok_per_cpu_s"] is None
    assert "cpu_s" not in spread


ITEM = {"prompt_token_ids": [5] * 18, "max_tokens": 3}  # computes 20 tokens; the warm-up ends before


def with_last_steps(llm: LLM, *seconds: float) -> LLM:
    """The last step of each run takes so long."""
    left = iter(seconds)
    machine = llm.engine.executor
    whole = machine.execute

    def execute(plan):
        result = whole(plan)
        if any(item.start + item.num_tokens == 20 for item in plan.scheduled):
            machine.now += next(left) - STEP
        return result

    machine.execute = execute
    return llm


def test_of_repeated_runs_the_first_does_not_count_and_the_median_is_reported(timed_llm):
    """Catches a cold run in the median, and a spread that leaves a run out."""
    result, spread = repeat_workload(with_last_steps(timed_llm(), 9.0, 0.05, 0.4, 0.1), [ITEM], 3)
    assert result["wall_s"] == pytest.approx(2 * STEP + 0.1)
    assert spread["wall_s"] == pytest.approx((2 * STEP + 0.05, 2 * STEP + 0.4))
    assert result["tokens"] == [[0, 0, 0]]


def test_the_run_that_does_not_count_is_not_profiled(timed_llm):
    """Catches seconds of four runs beside the figures of three."""
    runs = []
    profile = SimpleNamespace(watch=lambda engine: nullcontext(runs.append(engine)), start=lambda: None)
    repeat_workload(timed_llm(), [ITEM], 3, profile=profile)
    assert len(runs) == 3


def test_the_median_of_two_runs_is_between_them(timed_llm):
    """Catches the better throughput reported beside the worse latency."""
    result, _ = repeat_workload(with_last_steps(timed_llm(), 1.0, 0.1, 0.3), [ITEM], 2)
    assert result["wall_s"] == pytest.approx(2 * STEP + 0.2)
    assert repr((result["requests"], result["steps"])) == "(1, 3)"  # (and not 1.0)


def test_a_random_workload_has_the_sizes_asked_for():
    """Catches ids outside the vocabulary, and equal prompts, which the prefix cache would not compute."""
    items = random_workload(3, prompt_tokens=40, output_tokens=7, vocab_size=50)
    assert [(len(item["prompt_token_ids"]), item["max_tokens"]) for item in items] == [(40, 7)] * 3
    assert all(0 <= i < 50 for item in items for i in item["prompt_token_ids"])
    assert items[0]["prompt_token_ids"] != items[1]["prompt_token_ids"]
    with pytest.raises(WorkloadError, match="requests is 0; give at least 1"):
        random_workload(0, prompt_tokens=40, output_tokens=7, vocab_size=50)


def test_the_prompts_of_a_random_workload_begin_with_the_shared_prefix():
    """Catches prefixes that differ, and prompts that are longer by them."""
    first, second = (item["prompt_token_ids"] for item in random_workload(2, 40, 7, shared_prefix=16))
    assert first[:16] == second[:16]
    assert first[16:] != second[16:]
    assert len(first) == len(second) == 40
    with pytest.raises(
        WorkloadError, match=r"shared_prefix is 41; give a number from 0 to 40, the length of a prompt"
    ):
        random_workload(2, 40, 7, shared_prefix=41)


@pytest.mark.parametrize(
    ("settings", "prompts", "tokens"),
    [
        ({}, [range(10), range(20)], (10 + 20) + 2 * 2),  # with the two new tokens: on average the second
        ({"page_growth": "reserve"}, [range(10), range(20)], (10 + 20) + 2 * 2),
        ({"enable_prefix_caching": True, "block_size": 4}, [range(20)] * 3, 16 + 3 * (4 + 4)),
    ],
    ids=["alone", "blocks held for later", "a shared prefix"],
)
def test_a_decode_step_reads_the_tokens_of_its_sequences_each_once(settings, prompts, tokens):
    """Catches blocks counted once for each table that holds them, and blocks that hold nothing yet."""
    items = [{"prompt_token_ids": list(prompt), "max_tokens": 4} for prompt in prompts]
    llm = LLM(num_blocks=64, disable_log_stats=True, **settings)
    assert run_workload(llm, items)["decode_kv_tokens"] == tokens


def test_shares_of_the_limits_are_shares_of_what_was_measured(monkeypatch):
    """Catches bits taken for bytes, and an output layer that every row of a prompt passes."""
    model = LLM(quantization="none", disable_log_stats=True, num_blocks=10).engine.executor.model
    monkeypatch.setattr(limits, "read_bandwidth", lambda: 1e9)
    monkeypatch.setattr(limits, "matrix_rate", lambda dtype: 1e12)
    config = model.config
    head = config.vocab_size * config.hidden_size
    heads = config.num_attention_heads + config.num_key_value_heads
    layer = (
        2 * heads * config.head_dim * config.hidden_size + 3 * config.hidden_size * config.intermediate_size
    )
    numbers = config.num_hidden_layers * layer
    shares = limits.shares_of_limits(model, 1e6, decode_steps_per_s=2.0, prefill_tok_per_s=5.0)
    width = model.dtype.itemsize
    assert shares["decode_share_of_limit"] == pytest.approx(2 * (width * (numbers + head) + 1e6) / 1e9)
    assert shares["prefill_share_of_limit"] == pytest.approx(5 * 2 * numbers / 1e12)


def test_what_has_no_such_limit_has_no_share_of_it(monkeypatch):
    """Catches five times the bandwidth: a window is not read whole, nor are experts that no token chose."""
    monkeypatch.setattr(limits, "read_bandwidth", lambda: 1e9)
    monkeypatch.setattr(limits, "matrix_rate", lambda dtype: 1e12)

    def missing(model, quantization=None):
        shares = limits.shares_of_limits(model, 1e6, 2.0, 5.0, quantization)
        return [name for name in ("decode_share_of_limit", "prefill_share_of_limit") if shares[name] is None]

    decodes, prefills = "decode_share_of_limit", "prefill_share_of_limit"
    assert missing(zoo.build("llama")) == []
    assert missing(zoo.build("mistral_sliding")) == [decodes]
    assert missing(zoo.build("gemma3")) == [decodes]
    assert missing(zoo.build("gpt_neo")) == [decodes]
    assert missing(zoo.build("mixtral")) == [decodes, prefills]
    assert missing(zoo.build("llama"), "w8a8") == [prefills]
    nothing = limits.shares_of_limits(zoo.build("llama"), None, None, None)
    assert {name for name, value in nothing.items() if value is not None} == {
        "limit_read_gb_per_s",
        "limit_gflop_per_s",
    }


OVERRIDES = """
from minipaged.memory import BlockAllocator
from minipaged.scheduling import Recompute

class Mine(BlockAllocator):
    pass

class Twice(BlockAllocator):
    def allocate(self, count=1):
        return [0] * count

class Victim(Recompute):
    pass
"""


def test_contracts_are_checked_in_a_first_run_and_not_measured(timed_llm, tmp_path):
    """Catches the time of the checks in the figures of a class: 3 to 67 % of a run."""
    file = tmp_path / "mine.py"
    file.write_text(OVERRIDES)
    use = {"allocator": f"{file}:Mine", "preemption": f"{file}:Victim"}
    items = random_workload(4, 20, 5, vocab_size=100)
    llm = timed_llm(use=use)
    assert isinstance(llm.engine.scheduler.kv.allocator, AllocatorContract)
    check_contracts(llm, items, use)
    scheduler = llm.engine.scheduler
    assert type(scheduler.kv.allocator).__name__ == "Mine"
    assert type(scheduler.preemption).__name__ == "Victim"
    assert run_workload(llm, items)["output_tokens"] == 20

    broken = {"allocator": f"{file}:Twice"}
    with pytest.raises(ContractError, match=r"allocator: .* handed out once"):
        check_contracts(timed_llm(use=broken), items, broken)


def test_a_workload_may_have_texts(tmp_path):
    """Catches texts of one's own that only a script can measure."""
    file = tmp_path / "w.json"
    file.write_text('[{"prompt": "Once", "max_tokens": 3}, {"prompt_token_ids": [5, 6], "max_tokens": 2}]')
    llm = LLM(disable_log_stats=True)
    items = tokenized(llm, read_workload(file))
    assert items == [
        {"prompt_token_ids": llm.get_tokenizer().encode("Once"), "max_tokens": 3},
        {"prompt_token_ids": [5, 6], "max_tokens": 2},
    ]
    assert run_workload(llm, items)["output_tokens"] == 5


@pytest.mark.parametrize("prompt", ['""', "7", "null"])
def test_a_prompt_of_a_workload_that_is_not_text_is_reported(tmp_path, prompt):
    """Catches an error from the middle of a tokenizer."""
    file = tmp_path / "w.json"
    file.write_text(f'[{{"prompt": {prompt}, "max_tokens": 3}}]')
    with pytest.raises(WorkloadError, match=r"entry 0 of .*w.json: prompt is .*; give a text"):
        read_workload(file)


def test_a_text_for_a_model_without_a_tokenizer_is_reported(timed_llm):
    """Catches a message that does not say which entry."""
    with pytest.raises(WorkloadError, match=r"^entry 0: the model has no tokenizer"):
        tokenized(timed_llm(), [{"prompt": "Once", "max_tokens": 3}])
