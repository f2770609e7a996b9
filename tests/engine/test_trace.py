"""The trace: from the file alone, the memory at every step is what it was in the engine."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from minipaged import LLM, SamplingParams
from minipaged.config import EngineConfig
from minipaged.decoding.params import BeamSearchParams
from minipaged.engine import Engine
from minipaged.memory import BlockAllocator, PrefixCache
from minipaged.scheduling import Auto, PreemptionCosts, ScheduledSequence, StepPlan
from minipaged.viewer import replay
from minipaged.viewer.highlights import Highlights
from minipaged.viewer.pictures.runs import modelless
from minipaged.viewer.recorder import MOST_WAITING, Recorder, StepRecord, recording, scheduled_tokens
from minipaged.viewer.replay import TraceError, read_trace
from minipaged.viewer.snapshot import PoolView, look
from minipaged.viewer.trace import FORMAT, TraceWriter
from tests.engine.conftest import make_llm
from tests.engine.test_cli import call
from tests.engine.test_fuzz import VOCABULARY, Scenario
from tests.engine.toy_model import SlowModel
from tests.slow import slow_but
from tests.toy import ToyEngine, beams, samples, toy_scheduler


class Truth(NamedTuple):
    """What the live engine says, asked of allocator and tables themselves."""

    device_counts: list[int]
    host_counts: list[int]
    num_free: int
    tables: dict[tuple[str, int], tuple[list[int], int, int, list[int], bool]]
    waiting: list[str]


def counts(allocator: BlockAllocator) -> list[int]:
    return [allocator.ref_count(block) for block in range(allocator.num_blocks)]


def truth(scheduler) -> Truth:
    """The memory of a scheduler, not by way of `look`."""
    kv = scheduler.kv
    host = kv.swap_space.allocator if kv.swap_space else None
    tables = {}
    for queue in (scheduler.running, scheduler.swapped):
        for request in queue:
            for i, s in enumerate(request.sequences):
                t = s.table
                entry = (list(t.blocks), t.num_tokens, s.num_computed_tokens, list(s.token_ids))
                tables[request.request_id, i] = (*entry, queue is scheduler.swapped)
    waiting = [request.request_id for request in scheduler.waiting]
    return Truth(counts(kv.allocator), counts(host) if host else [], kv.allocator.num_free, tables, waiting)


def check_view(view: PoolView, live: Truth) -> None:
    device, host = view.blocks(), view.blocks(on_host=True)
    assert [block.ref_count for block in device] == live.device_counts
    assert [block.ref_count for block in host] == live.host_counts
    assert [block.state for block in device].count("free") == view.num_free == live.num_free
    assert [block.state for block in device].count("used") == view.num_used
    assert {
        (t.request, t.position): (list(t.blocks), t.num_tokens, t.num_computed, list(t.token_ids), t.on_host)
        for t in view.tables.values()
    } == live.tables
    for name, table in view.tables.items():
        assert name == table.name
        for logical, block in enumerate(table.blocks):
            found = (host if table.on_host else device)[block]
            assert table in found.owners
            assert found.filled >= table.filled(logical, view.block_size)


class TracedToyEngine(ToyEngine):
    """Has the hooks of an engine, writes a trace and remembers the truth at the same moments."""

    detokenizer = None

    def __init__(self, scheduler, path: Path) -> None:
        super().__init__(scheduler, VOCABULARY)
        self.on_planned, self.on_committed = [], []
        self.file = TraceWriter(path, self)
        self.moments: list[tuple[Truth, Truth]] = []
        self.records: list[StepRecord] = []
        Recorder(self, self.records.append)
        commit = scheduler.commit

        def committed(plan, result):
            touched = commit(plan, result)
            for hook in self.on_committed:
                hook(plan, result, touched)
            return touched

        self.scheduler.commit = committed

    def _schedule(self):
        plan = super()._schedule()
        for hook in self.on_planned:
            hook(plan)
        self._at_plan = truth(self.scheduler)
        return plan

    def step(self, meanwhile=lambda: None):
        plan = super().step(meanwhile)
        self.moments.append((self._at_plan, truth(self.scheduler)))
        return plan


def check_replay(path: Path, engine: TracedToyEngine) -> None:
    replayed = list(read_trace(path))
    assert len(replayed) >= len(engine.moments)
    for record, seen, (planned, committed) in zip(replayed, engine.records, engine.moments):
        assert record == seen
        check_view(record.planned, planned)
        check_view(record.committed, committed)
        assert record.num_waiting == len(committed.waiting)
        assert list(record.waiting) == committed.waiting[:MOST_WAITING]


@pytest.mark.parametrize("seed", slow_but(range(20), range(60)))
def test_the_replayed_memory_is_the_live_memory_at_every_step(seed, tmp_path, caplog):
    """A block whose owner, count, fill or state cannot be found in the file: after a fork, a swap, a
    preemption, an eviction, an abort, or a step that failed and left no line."""
    caplog.set_level(logging.ERROR, "minipaged")
    scenario = Scenario(seed)
    engine = TracedToyEngine(toy_scheduler(**scenario.settings), tmp_path / "trace")
    scenario.engine = engine
    scenario.run()
    engine.file.close()
    check_replay(tmp_path / "trace", engine)


def test_scheduled_tokens_stand_at_the_place_of_their_sequence():
    """Catches the tokens of one sample in the row of another: samples that are alike do not show it."""
    request = SimpleNamespace(request_id="r")
    first, second, ended = (SimpleNamespace(request=request, index=index) for index in (4, 2, 3))
    request.sequences = [first, second]
    plan = StepPlan(0, [ScheduledSequence(sequence, 5, 1, 1) for sequence in (second, first, ended)])
    assert [tokens.name for tokens in scheduled_tokens(plan)] == ["r/1", "r/0", "r/3"]


def test_the_scenarios_meet_everything_that_moves_blocks():
    """Sixty calm runs that would prove nothing."""
    met = set()
    for seed in range(60):
        scenario = Scenario(seed)
        scenario.run()
        met.update(kind for kind, count in (scenario.counts + scenario.count_events()).items() if count)
    assert met >= {
        "preempted (swap)", "preempted (recompute)", "resumed (swap)", "copies", "cached tokens", "aborts",
        "failed steps", "outgrown",
    }  # fmt: skip


def test_evictable_blocks_are_distinguished_from_free_ones(tmp_path):
    """Blocks that the prefix cache keeps shown as free: a viewer would not know why a prompt hits."""
    engine = TracedToyEngine(toy_scheduler(8, 4, caching=True), tmp_path / "trace")
    engine.add(range(8), 1)
    engine.run()
    engine.file.close()
    *_, last = read_trace(tmp_path / "trace")
    assert last.committed.evictable == {0, 1}
    assert last.committed.num_free == 6


def test_a_decode_costs_few_bytes_however_long_the_sequence(tmp_path):
    """Whole tables in every line: a trace that grows with the square of the length."""
    engine = TracedToyEngine(toy_scheduler(512, 4, budget=2000), tmp_path / "trace")
    for _ in range(4):
        engine.add([1] * 400, 40)
    engine.run()
    engine.file.close()
    lines = (tmp_path / "trace").read_text().splitlines()
    # Three decodes of four take no block: a chunk and a token id a sequence.
    assert sorted(map(len, lines[2:-1]))[len(lines) // 2] < 4 * 70


def test_a_pool_of_twice_as_many_blocks_is_asked_no_oftener_what_is_evictable(monkeypatch):
    """Catches a question for each block, twice a step: 27 ms for a pool of 100,000."""
    num_asked, own = 0, PrefixCache.count_evictable

    def counted(cache, blocks):
        nonlocal num_asked
        num_asked += 1
        return own(cache, blocks)

    monkeypatch.setattr(PrefixCache, "count_evictable", counted)
    asked = []
    for num_blocks in (8, 16):
        engine = ToyEngine(toy_scheduler(num_blocks, 4, caching=True))
        engine.add(range(4 * num_blocks - 4), 1)
        engine.run()
        num_asked = 0
        assert len(look(engine.scheduler).evictable) == num_blocks - 1
        asked.append(num_asked)
    assert asked[0] == asked[1]


def test_twice_as_long_a_trace_takes_twice_as_many_looks_at_its_numbers(tmp_path, monkeypatch):
    """Catches all tokens and blocks checked again at each step: 12 s for a sequence of 20,000 tokens."""
    looks = 0

    def counted(value):
        nonlocal looks
        looks += 1
        return type(value)

    monkeypatch.setattr(replay, "type", counted, raising=False)
    found = []
    for count in (50, 100):
        engine = TracedToyEngine(toy_scheduler(64, 4), tmp_path / "trace")
        engine.add([1, 2], count)
        engine.run()
        engine.file.close()
        looks = 0
        assert len(list(read_trace(tmp_path / "trace"))) == count
        found.append(looks)
    assert found[1] <= 2 * found[0]


def test_the_queue_is_written_when_it_changes_and_only_its_front(tmp_path):
    """Catches a thousand ids in every line, an aborted request that waits forever, an order turned around."""
    engine = TracedToyEngine(toy_scheduler(8, 4, max_num_seqs=1), tmp_path / "trace")
    requests = [engine.add([1, 2], 3) for _ in range(1000)]
    _, second, *others = [request.request_id for request in requests]
    for _ in range(2):
        engine.step()
    engine.scheduler.abort(requests[1])
    engine.step()
    engine.scheduler.abort(requests[2])
    engine.file.close()
    written = [json.loads(line).get("waiting") for line in (tmp_path / "trace").read_text().splitlines()[1:]]
    front = [[second, *others][:MOST_WAITING], others[:MOST_WAITING], others[1 : 1 + MOST_WAITING]]
    assert written == [front[0], None, front[1], front[2]]
    replayed = list(read_trace(tmp_path / "trace"))
    assert [list(record.waiting) for record in replayed] == [front[0], front[0], front[1], front[2]]
    assert [record.num_waiting for record in replayed] == [999, 999, 998, 997]


def test_a_trace_without_the_queue_still_opens(tmp_path):
    """Catches a trace of an earlier version that is refused for a field that it could not have."""
    (tmp_path / "trace").write_text(
        "".join(
            json.dumps(line) + "\n"
            for line in (
                FORMAT | {"block_size": 4, "num_blocks": 4, "num_host_blocks": 0},
                {"step": 0, "num_waiting": 3},
            )
        )
    )
    [record] = read_trace(tmp_path / "trace")
    assert (record.num_waiting, record.waiting) == (3, ())


def test_memory_that_changes_after_the_last_step_is_in_the_closing_line(tmp_path):
    """An aborted request that holds its blocks forever in the viewer."""
    engine = TracedToyEngine(toy_scheduler(8, 4), tmp_path / "trace")
    request = engine.add(range(8), 5)
    engine.step()
    engine.scheduler.abort(request)
    engine.file.close()
    *_, last = read_trace(tmp_path / "trace")
    assert last.events == ({"kind": "closed"},)
    assert last.committed.num_free == 8
    assert not last.committed.tables


def kinds(record: StepRecord) -> list[str]:
    return [event["kind"] for event in record.events]


def test_a_prefix_cache_that_is_cleared_between_two_steps_is_recorded(tmp_path):
    """Catches cached blocks that go free without a reason, or that count as evicted when others take them."""
    engine = modelless(8)
    with TraceWriter(tmp_path / "trace", engine) as trace, recording(engine) as records:
        for number, synchronizes in enumerate((False, True, False)):
            engine.add_request(
                f"{number}", range(20 * number, 20 * number + 13), SamplingParams(max_tokens=2)
            )
            while engine.has_unfinished:
                engine.step()
            engine.reset_prefix_cache()
            if synchronizes:
                trace.synchronize("idle")
    replayed = list(read_trace(tmp_path / "trace"))
    assert [kinds(record) for record in replayed] == [
        ["admitted"], [], ["cleared", "admitted"], [], ["idle", "cleared"], ["admitted"], [],
        ["closed", "cleared"],
    ]  # fmt: skip
    assert not any(record.evicted for record in replayed + records)


def test_the_reason_for_a_preemption_counts_one_in_the_singular():
    """Catches "moving 1 blocks out and in" and "computing 1 tokens again"."""
    engine = ToyEngine(toy_scheduler(16, 4, num_host_blocks=16))
    request = engine.add(range(1))
    engine.step()
    _, reason = Auto(PreemptionCosts(0.0, 0.001, 0.01)).choose_mode(request, engine.scheduler.kv)
    assert reason == "moving 1 block out and in takes about 2 ms, computing 1 token again 10 ms"


def test_a_prefix_cache_that_is_cleared_after_a_failed_step_is_recorded(tmp_path):
    """Catches a failed step, long told, that hides what happens to an idle engine after it."""
    model = SlowModel(8)
    engine = Engine(model, EngineConfig(block_size=4, disable_log_stats=True))
    with TraceWriter(tmp_path / "trace", engine) as trace:
        engine.add_request("A", [1] * 9, SamplingParams(max_tokens=2))
        while engine.has_unfinished:
            engine.step()
        engine.add_request("B", [3] * 9, SamplingParams(max_tokens=2))
        model.num_broken = 1
        with pytest.raises(RuntimeError):
            engine.step()
        engine.abort("B")
        trace.synchronize("idle")
        engine.reset_prefix_cache()
        trace.synchronize("idle")
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert [event["kind"] for event in lines[-1]["events"]] == ["idle", "cleared"]


def test_what_others_evict_or_a_failed_step_loses_is_not_recorded_as_cleared():
    """Catches a reason that is inferred from free blocks alone."""
    model = SlowModel(8)
    engine = Engine(model, EngineConfig(block_size=4, disable_log_stats=True))
    with recording(engine) as records:
        for number in range(4):
            engine.add_request(f"{number}", [number] * 9, SamplingParams(max_tokens=2))
            while engine.has_unfinished:
                engine.step()
        engine.add_request("A", range(1), SamplingParams(max_tokens=3))
        engine.add_request("B", range(20, 48), SamplingParams(max_tokens=3))
        model.num_broken = 1
        with pytest.raises(RuntimeError):
            engine.step()
        engine.abort("B")
        while engine.has_unfinished:
            engine.step()
    assert any(record.evicted for record in records)
    assert not any("cleared" in kinds(record) for record in records)


def test_a_trace_may_begin_in_the_middle_of_a_run(tmp_path):
    """Tables that were there before the file was opened are missing from it."""
    engine = ToyEngine(toy_scheduler(32, 4))
    engine.add(range(9), 6, beams(2))
    engine.add(range(5), 6, samples(2))
    engine.step()
    traced = TracedToyEngine(engine.scheduler, tmp_path / "trace")
    traced.executor = engine.executor
    for _ in range(3):
        traced.step()
    traced.file.close()
    check_replay(tmp_path / "trace", traced)


@pytest.fixture
def traced(model, prompts, tmp_path):
    """A small model under a tight pool, traced while it generates by every method."""
    llm = make_llm(
        model,
        block_size=4,
        num_blocks=40,
        preemption_mode="swap",
        max_num_batched_tokens=48,
    )
    moments: list[Truth] = []
    hooks = len(llm.engine.on_planned), len(llm.engine.on_committed) + 1
    with TraceWriter(tmp_path / "trace", llm.engine), recording(llm.engine) as records:
        llm.engine.on_committed.append(lambda *step: moments.append(truth(llm.engine.scheduler)))
        params = [
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
            BeamSearchParams(beam_width=3, max_tokens=12),
            SamplingParams(n=3, temperature=1.0, max_tokens=12, seed=1),
        ]
        chosen = [p for p in prompts if len(p) < 60][:6]
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p in chosen], [params[i % 3] for i in range(len(chosen))]
        )
    assert (len(llm.engine.on_planned), len(llm.engine.on_committed)) == hooks  # with that of `moments`
    return tmp_path / "trace", moments, records, outputs, llm


def test_a_traced_engine_replays(traced):
    """The hooks of a real engine: a plan seen too late, or an engine not left as it was found."""
    path, moments, records, outputs, _ = traced
    replayed = list(read_trace(path))
    assert replayed == records
    assert len(replayed) == len(moments)
    for record, live in zip(replayed, moments):
        check_view(record.committed, live)
    assert any(event["kind"] == "preempted" and event["reason"] for r in replayed for event in r.events)
    assert any(record.copies for record in replayed)
    ended = {request: tokens for record in replayed for request, tokens in record.completions.items()}
    assert ended["0"] == (tuple(outputs[0].outputs[0].token_ids),)


def test_a_trace_changes_no_token(traced, prompts):
    """A hook that touches what it looks at."""
    *_, outputs, llm = traced
    chosen = [p for p in prompts if len(p) < 60][:6]
    again = llm.generate(
        [{"prompt_token_ids": chosen[0]}], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    )
    assert again[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_highlights_keep_the_fullest_moment(traced, model):
    """A picture of the pool after the run, when everything is free again."""
    _, _, records, _, _ = traced
    llm = make_llm(model)
    with Highlights(llm.engine) as seen:
        for record in records:
            seen.observe(record)
    assert seen.fullest.num_used == max(record.planned.num_used for record in records)
    assert records[seen.fullest_step].planned == seen.fullest


def test_the_fullest_moment_of_one_request_is_its_last(model):
    """A picture whose last block holds one token above a table where it is full."""
    llm = make_llm(model)
    with Highlights(llm.engine) as seen:
        [output] = llm.generate(
            {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        )
    assert list(seen.fullest.tables.values()) == list(seen.place(output).tables)


def test_every_completion_is_placed_in_the_blocks_it_ended_in(model, prompts):
    """A sample that ended early, a beam of another step, a preempted request: tokens in foreign blocks."""
    llm = make_llm(model, block_size=4, num_blocks=40, preemption_mode="swap", max_num_batched_tokens=48)
    chosen = [p for p in prompts if len(p) < 60][:6]
    with recording(llm.engine) as records, Highlights(llm.engine) as seen:
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p in chosen],
            [
                SamplingParams(n=3, temperature=1.0, max_tokens=12, seed=1, stop_token_ids=(5, 6, 7, 8, 9)),
                BeamSearchParams(beam_width=3, num_return_sequences=3, max_tokens=12),
            ]
            * 3,
        )
    lengths = set()
    for output in outputs:
        for completion, table in zip(output.outputs, seen.place(output).tables):
            assert list(table.token_ids) == output.prompt_token_ids + completion.token_ids[:-1]
            assert table.num_tokens == len(table.token_ids)
            assert any(table in record.planned.tables.values() for record in records)
            lengths.add(len(completion.token_ids))
    assert len(lengths) > 1, "all ended in the same step"


def test_generate_shows_the_pool_and_where_the_tokens_lay(capsys, monkeypatch):
    """--show-blocks after the run, when nothing is held any more."""
    arguments = (
        "generate",
        "--prompt",
        "The sun",
        "--max-tokens",
        "20",
        "--block-size",
        "8",
        "--show-blocks",
    )
    code, out, _ = call(capsys, monkeypatch, *arguments)
    assert code == 0
    assert "The pool at its fullest (step 1" in out
    assert "3 of " in out
    assert "Request 0: " in out
    assert "<|begin|>The sun" in out
    code, out, err = call(capsys, monkeypatch, *arguments, "--json")
    assert json.loads(out)["outputs"]
    assert "The pool at its fullest" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read trace"),
        (b"\xff\xfe\x00\x80", "not text"),
        (b"", "is empty; make a trace with --trace FILE"),
        (b"\n", "line 1 is not JSON"),
        (b"[1]\n", "line 1 is not a JSON object"),
        (b'{"format": "other"}\n', "not a trace of version 2"),
        (
            b'{"format": "minipaged-trace", "version": 3}\n',
            "is a trace of version 3.*; read it with a newer minipaged",
        ),
    ],
)
def test_a_file_that_is_not_a_trace_is_reported_in_one_line(content, message, tmp_path):
    """A traceback for a wrong argument."""
    path = tmp_path / "trace"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as error:
        list(read_trace(path))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_trace_with_a_lost_or_cut_line_is_refused(tmp_path):
    """A viewer that draws a memory that never was."""
    engine = TracedToyEngine(toy_scheduler(32, 4), tmp_path / "trace")
    rng = random.Random(1)
    engine.add([rng.randrange(VOCABULARY) for _ in range(9)], 6, samples(2))
    engine.run()
    engine.file.close()
    lines = (tmp_path / "trace").read_text().splitlines(keepends=True)
    cut = tmp_path / "cut"
    cut.write_text("".join(lines[:-1]) + lines[-1][:20])
    with pytest.raises(TraceError, match=f"line {len(lines)} is not JSON"):
        list(read_trace(cut))
    lost = tmp_path / "lost"
    lost.write_text("".join(lines[:1] + lines[2:]))
    with pytest.raises(TraceError, match="line 2 does not continue the trace"):
        list(read_trace(lost))


@pytest.mark.parametrize(
    ("committed", "message"),
    [
        ({"evictable": [32]}, "evictable block 32 is not in the pool"),
        ({"tables": {"r/0": {"blocks": [0, [31, 32]]}}}, "r/0 has block 32, which is not in the pool"),
        (
            {"tables": {"r/0": {"blocks": [0, [0]], "on_host": True}}},
            "r/0 has block 0, which is not in the p",
        ),
        ({"tables": {"r/0": {"num_tokens": -1}}}, "r/0 has a field that is not an integer of at least 0"),
        ({"tables": {"r/0": {"num_computed": "1"}}}, "r/0 has a field that is not an integer of at least 0"),
        ({"tables": {"r/0": {"token_ids": [0, [1.5]]}}}, "r/0 has a field that is not an integer of at"),
    ],
)
def test_a_trace_of_what_no_pool_can_hold_is_refused(committed, message, tmp_path):
    """A viewer that fails while it draws, or shows a block that is not there."""
    path = tmp_path / "trace"
    header = FORMAT | {"block_size": 4, "num_blocks": 32, "num_host_blocks": 0}
    line = {"step": 0, "num_waiting": 0, "committed": committed}
    path.write_text(f"{json.dumps(header)}\n{json.dumps(line)}\n")
    with pytest.raises(TraceError, match=f"line 2 does not continue the trace .*{message}"):
        list(read_trace(path))


def test_the_text_of_a_token_is_written_once(capsys, tmp_path, monkeypatch):
    """A trace that only the tokenizer can read, or that repeats every word in every step."""
    path = tmp_path / "trace"
    prompt = ("--prompt", "The sun The sun")
    call(capsys, monkeypatch, "generate", *prompt, "--max-tokens", "12", "--trace", str(path))
    trace = read_trace(path)
    records = list(trace)
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    written = [token for line in lines for token in line.get("texts", {})]
    assert len(written) == len(set(written))
    table = records[0].planned.tables["0/0"]
    assert "".join(trace.texts[token] for token in table.token_ids) == "<|begin|>The sun The sun"


def test_parts_of_a_character_are_written_as_bytes(tmp_path):
    """Catches tokens that all look alike: by itself, each decodes to U+FFFD."""
    llm = LLM(num_blocks=8, disable_log_stats=True)
    with TraceWriter(tmp_path / "trace", llm.engine):
        llm.generate("5 €é", SamplingParams(max_tokens=1))
    trace = read_trace(tmp_path / "trace")
    token_ids = next(iter(trace)).planned.tables["0/0"].token_ids
    texts = [trace.texts[token] for token in token_ids]
    assert texts == ["<|begin|>", "5", "<0x20><0xE2>", "<0x82>", "<0xAC>", "<0xC3>", "<0xA9>"]


def test_a_trace_has_the_texts_of_draft_tokens(tmp_path):
    """Catches a rejected token that can be shown only as a number: it is in no table and no text."""
    llm = LLM(num_blocks=64, disable_log_stats=True, num_speculative_tokens=4)
    with TraceWriter(tmp_path / "trace", llm.engine):
        llm.generate("A cat and a dog. A cat", SamplingParams(temperature=0, max_tokens=40))
    trace = read_trace(tmp_path / "trace")
    drafts = [event for record in trace for event in record.events if event["kind"] == "drafted"]
    assert drafts
    tokens = {token for event in drafts for token in event["draft"] + event["output"]}
    decode = llm.tokenizer.decode
    assert {token: trace.texts[token] for token in tokens} == {token: decode([token]) for token in tokens}
