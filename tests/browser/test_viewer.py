"""The viewer in Chromium: what it shows is what the trace says, which is what was in the engine."""

from __future__ import annotations

import json
import logging
import re
from contextlib import closing, suppress
from pathlib import Path

import pytest

from minipaged.components import Components
from minipaged.config import EngineConfig
from minipaged.decoding.params import BeamSearchParams, SamplingParams
from minipaged.engine import Engine
from minipaged.memory import PrefixCache
from minipaged.serving.live import _without_tokens
from minipaged.viewer.displays import trace_frame
from minipaged.viewer.page import WEB, script, trace_page
from minipaged.viewer.pictures import palette
from minipaged.viewer.pictures.runs import modelless
from minipaged.viewer.replay import read_trace
from minipaged.viewer.snapshot import PoolView
from minipaged.viewer.trace import TraceLines, TraceWriter
from tests.docs.browser import Browser, Page
from tests.docs.site import served
from tests.engine.drafters import Foresight
from tests.engine.test_fuzz import Scenario
from tests.engine.test_trace import TracedToyEngine
from tests.engine.toy_model import SlowModel, toy_engine
from tests.toy import toy_scheduler

pytestmark = pytest.mark.slow

MOUNT = """<!doctype html><html lang="en"><meta charset="utf-8"><title>viewer</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="viewer.css">
<main><h1>A run</h1><div id="viewer"></div></main>
<script type="module">
import { mountViewer } from "./viewer.js";
globalThis.viewer = mountViewer(document.getElementById("viewer"), { baseUrl: "/docs" });
</script></html>"""


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where the modules are served as they are, with a page that mounts the viewer."""
    folder = tmp_path_factory.mktemp("web")
    for file in WEB.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "index.html").write_text(MOUNT)
    with served(folder) as address:
        yield address


@pytest.fixture
def page(browser, home):
    page = browser.open(home, 1280, dark=False)
    page.wait_for("globalThis.viewer")
    yield page
    page.close()


def load(page: Page, text: str) -> None:
    page.value(f"viewer.load({json.dumps(text)})")


def recorded(path: Path, engine, requests) -> str:
    """A run of an engine as the text of its trace; `requests`: id -> (prompt, parameters)."""
    with TraceWriter(path, engine):
        for name, (prompt, params) in requests.items():
            engine.add_request(name, prompt, params)
        while engine.has_unfinished:
            engine.step()
    return path.read_text()


@pytest.fixture(scope="module")
def swapping(tmp_path_factory) -> str:
    """Three requests outgrow 12 blocks; C is swapped out and comes back."""
    engine = modelless(12, 6, preemption_mode="swap")
    requests = {
        name: (prompt, SamplingParams(max_tokens=12))
        for name, prompt in {"A": range(9), "B": range(50, 59), "C": range(100, 109)}.items()
    }
    return recorded(tmp_path_factory.mktemp("run") / "swap.jsonl", engine, requests)


def block_of(view: PoolView, on_host: bool) -> list[dict]:
    return [
        {
            "id": block.block,
            "owners": [table.name for table in block.owners],
            "refs": block.ref_count,
            "cached": block.state == "evictable",
            "filled": block.filled,
        }
        for block in view.blocks(on_host)
    ]


def tables_of(view: PoolView) -> dict[str, dict]:
    return {
        name: {**table._asdict(), "blocks": list(table.blocks), "token_ids": list(table.token_ids)}
        for name, table in view.tables.items()
    }


def waste_of(view: PoolView) -> float:
    held = [block for block in view.blocks() if block.ref_count]
    slots = len(held) * view.block_size
    return 1 - sum(block.filled for block in held) / slots if slots else 0.0


SHOWN = ("blocks", "host", "tables", "used", "free", "evictable", "waste", "queues")


def states(page: Page, steps: list[int]) -> list[dict]:
    """What the viewer says at these steps, in this order: while each is computed, and after its commit."""
    return page.value(
        f"{json.dumps(steps)}.flatMap(step => ['planned', 'committed'].map(phase => {{"
        f"viewer.seek(step, phase); const state = viewer.state();"
        f"return Object.fromEntries({json.dumps([*SHOWN, 'step', 'phase', 'error'])}"
        ".map(key => [key, state[key]]));"
        "}))"
    )


def load_scenario(page: Page, seed: int, path: Path) -> None:
    """A random run of forks, swaps, preemptions, evictions, aborts and failed steps."""
    scenario = Scenario(seed)
    engine = TracedToyEngine(toy_scheduler(**scenario.settings), path)
    scenario.engine = engine
    scenario.run()
    engine.file.close()
    load(page, path.read_text())


@pytest.mark.parametrize("seed", range(20))
def test_the_memory_in_the_page_is_that_of_the_run_at_every_step(seed, page, tmp_path, caplog):
    """Catches an owner, count, fill, table or state that differs after a fork, a swap, a preemption, an
    eviction, an abort or a failed step; also when steps are visited in any order."""
    caplog.set_level(logging.ERROR, "minipaged")
    load_scenario(page, seed, tmp_path / "trace")
    records = {record.step: record for record in read_trace(tmp_path / "trace")}
    there, back = sorted(records), sorted(records, reverse=True)
    for order in (there, back[::7], there[::13] + back[::11]):
        shown = iter(states(page, order))
        for step in order:
            for phase in ("planned", "committed"):
                view = getattr(records[step], phase)
                state = next(shown)
                assert (state["step"], state["phase"], state["error"]) == (step, phase, "")
                assert state["blocks"] == block_of(view, False)
                assert state["host"] == block_of(view, True)
                assert state["tables"] == tables_of(view)
                assert (state["used"], state["free"]) == (view.num_used, view.num_free)
                assert state["waste"] == pytest.approx(waste_of(view))
                assert state["queues"]["waiting"] == list(records[step].waiting)
                assert state["queues"]["num_waiting"] == records[step].num_waiting
    assert page.problems == []


def events_of(page: Page, step: int, phase: str) -> list[dict]:
    """What the viewer says happens at a step."""
    return page.value(f"viewer.seek({step}, {phase!r}), viewer.state().events")


@pytest.mark.parametrize("seed", range(8))
def test_a_commit_changes_nothing_in_the_explanation_of_the_plan(seed, page, tmp_path, caplog):
    """Catches hits, copies, allocations or names that are made up from the memory after the commit."""
    caplog.set_level(logging.ERROR, "minipaged")
    load_scenario(page, seed, tmp_path / "trace")
    of_the_commit = {"fork", "free", "end"}
    kinds = set()
    for record in read_trace(tmp_path / "trace"):
        planned, committed = (
            [event for event in events_of(page, record.step, phase) if event["kind"] not in of_the_commit]
            for phase in ("planned", "committed")
        )
        assert committed == planned
        kinds |= {event["kind"] for event in planned}
    assert {"admission", "allocation", "prefill", "decode"} <= kinds


@pytest.mark.parametrize("phase", ["planned", "committed"])
def test_a_prefix_hit_names_the_blocks_that_were_there(phase, page, tmp_path):
    """Catches blocks that the step has filled itself, taken for hits once they are full."""
    params = SamplingParams(max_tokens=6)
    requests = {"0": (range(19), params), "1": ([*range(8), *range(50, 61)], params)}
    load(page, recorded(tmp_path / "trace", modelless(32), requests))
    hits = [event for event in events_of(page, 0, phase) if event["kind"] == "hit"]
    assert [event["blocks"] for event in hits] == [[0, 1]]
    assert "8 tokens of request 1 are found in blocks 0, 1 and not computed again: another" in hits[0]["text"]
    prefills = {e["text"]: e["concept"] for e in events_of(page, 0, phase) if e["kind"] == "prefill"}
    assert prefills == {
        "Request 0 computes its prompt: 19 tokens in one forward pass.": "scheduler",
        "Request 1 computes tokens 8 to 18 of 19: what is cached is left out.": "prefix-cache",
    }


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_every_eviction_is_counted(mode, page, tmp_path, monkeypatch):
    """Catches cached blocks that a preemption, or an abort, frees and the same plan gives away: in use before
    and after."""
    evicted: list[list[int]] = []  # of each step
    own = PrefixCache._evict

    def evict(cache, block):
        evicted[-1] += [block] if block in cache.evictable else []
        own(cache, block)

    monkeypatch.setattr(PrefixCache, "_evict", evict)
    engine = modelless(24, 24, preemption_mode=mode)
    with TraceWriter(tmp_path / "trace", engine):
        for i in range(4):
            engine.add_request(f"{i}", range(100 * i, 100 * i + 12), SamplingParams(max_tokens=60))
        while engine.has_unfinished:
            evicted.append([])
            engine.step()
            if len(evicted) == 30:
                engine.abort("0")
    load(page, (tmp_path / "trace").read_text())
    told = [
        [e for e in events_of(page, step, "planned") if e["kind"] == "eviction"]
        for step in range(len(evicted))
    ]
    assert [sorted(b for e in events for b in e["blocks"]) for events in told] == list(map(sorted, evicted))
    assert page.value("viewer.state().counts.evictions") == sum(map(len, evicted)) > 10


@pytest.mark.parametrize(
    ("prompt", "hit"),
    [
        (
            range(9),
            "8 tokens of B are found in blocks 0, 1 and not computed again: another request computes them",
        ),
        (range(5), "4 tokens of B are found in block 0 and not computed again: another request computes it"),
    ],
)
def test_a_prefix_that_another_request_computes_in_the_same_step_is_not_called_cached(
    prompt, hit, page, tmp_path
):
    """Catches "already cached" of blocks that were free until this step."""
    requests = dict.fromkeys("AB", (prompt, SamplingParams(max_tokens=2)))
    load(page, recorded(tmp_path / "trace", modelless(32), requests))
    texts = [event["text"] for event in events_of(page, 0, "planned") if event["kind"] == "hit"]
    assert texts == [f"Prefix hit: {hit} in this step."]


def test_a_prefix_of_which_another_request_computes_a_part_names_that_part(page, tmp_path):
    """Catches "already cached" of all blocks where only the first was."""
    engine = modelless(32)
    with TraceWriter(tmp_path / "trace", engine):
        for names, prompt in (("A", range(5)), ("BC", range(9))):
            for name in names:
                engine.add_request(name, prompt, SamplingParams(max_tokens=2))
            while engine.has_unfinished:
                engine.step()
    load(page, (tmp_path / "trace").read_text())
    assert [event["text"] for event in events_of(page, 2, "planned") if event["kind"] == "hit"] == [
        "Prefix hit: 4 tokens of B are already cached in block 0 and not computed again.",
        "Prefix hit: 8 tokens of C are found in blocks 0, 1 and not computed again: "
        "another request computes block 1 in this step.",
    ]


def test_a_prefix_hit_names_the_block_that_is_copied_for_its_last_token(page, tmp_path):
    """Catches 7 cached tokens "in block 0", which has room for 4 of them."""
    params = SamplingParams(max_tokens=6)
    engine = modelless(32)
    with TraceWriter(tmp_path / "trace", engine):
        for name in ("A", "B"):
            engine.add_request(name, range(8), params)
            while engine.has_unfinished:
                engine.step()
    load(page, (tmp_path / "trace").read_text())
    [record] = [r for r in read_trace(tmp_path / "trace") if r.copies]
    [hit] = [event for event in events_of(page, record.step, "planned") if event["kind"] == "hit"]
    assert "7 tokens of B are already cached in blocks 0, 1 and" in hit["text"]
    assert hit["blocks"] == [0, 1]


def test_what_a_preempted_request_computes_again_is_not_described_as_its_prompt(page, tmp_path):
    """Catches "computes its prompt: 14 tokens" of a request whose prompt has 9."""
    engine = modelless(12, preemption_mode="recompute", enable_prefix_caching=False)
    requests = {name: (range(9), SamplingParams(max_tokens=12)) for name in "ABC"}
    load(page, recorded(tmp_path / "trace", engine, requests))
    back = {
        record.step: (event["blocks"], record.scheduled[-1].num_tokens)
        for record in read_trace(tmp_path / "trace")
        for event in record.events
        if event["kind"] == "resumed"
    }
    assert back
    for step, (blocks, tokens) in back.items():
        texts = [event["text"] for event in events_of(page, step, "planned")]
        again = f"it asks for {blocks} new blocks, and the pool has them."
        assert f"C is back and computes its tokens again: {again}" in texts
        assert f"C computes its {tokens} tokens again, in one forward pass." in texts
    assert "C computes its prompt: 9 tokens in one forward pass." in [
        e["text"] for e in events_of(page, 0, "planned")
    ]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(
    ("num_blocks", "completions", "budget", "step", "sentence"),
    [
        (8, 1, 8, 17, "C computes token 16 of 17: what is done is left out."),
        (9, 2, 64, 16, "C.2 computes token 12 of 13: what is cached is left out."),
    ],
    ids=["last chunk", "the rest is cached"],
)
def test_a_single_token_that_a_preempted_request_lacks_is_no_decode(
    num_blocks, completions, budget, step, sentence, hidden, page, tmp_path
):
    """Catches "C decodes: one new token" of the end of a recomputation, in sentences and in counts."""
    engine = modelless(num_blocks, preemption_mode="recompute", max_num_batched_tokens=budget)
    requests = {
        "A": (range(6), SamplingParams(max_tokens=16)),
        "C": (range(100, 107), SamplingParams(n=completions, max_tokens=16)),
    }
    text = recorded(tmp_path / "trace", engine, requests)
    lines = (json.loads(line, object_hook=_without_tokens) for line in text.splitlines())
    load(page, trace_text(*lines) if hidden else text)
    texts = [event["text"] for event in events_of(page, step, "planned")]
    assert sentence in texts
    assert not any(text.startswith("C") and "decode" in text for text in texts)
    [record] = [record for record in read_trace(tmp_path / "trace") if record.step == step]
    a, c = (sum(t.num_tokens for t in record.scheduled if t.request == name) for name in "AC")
    assert drawn(page, ".mpv-budget .mpv-key > span")[:2] == [f"{a} decode", f"{c} prefill"]


def test_a_request_that_a_failed_step_sends_back_is_explained_when_it_is_admitted_again(page, tmp_path):
    """Catches "it asks for 1 new block" without a word on which one, and on why it is asked again."""
    model = SlowModel(32)
    engine = Engine(model, EngineConfig(block_size=4, disable_log_stats=True))
    with TraceWriter(tmp_path / "trace", engine):
        engine.add_request("A", range(9), SamplingParams(max_tokens=8))
        for model.num_broken in (0, 0, 0, 1):
            with suppress(RuntimeError):
                engine.step()
        engine.step()
    load(page, (tmp_path / "trace").read_text())
    assert [event["text"] for event in events_of(page, 4, "planned")] == [
        "A gave its blocks back before this step: a step failed.",
        "A is back and computes its tokens again: it asks for 1 new block, and the pool has it.",
        "Prefix hit: 8 tokens of A are already cached in blocks 0, 1 and not computed again.",
        "A gets block 2 for 12 tokens.",
        "A computes tokens 8 to 11 of 12: what is cached is left out.",
    ]


def test_hidden_tokens_are_said_to_be_hidden_and_change_no_other_sentence(page, tmp_path):
    """Catches "computes its prompt: 14 tokens" of tokens that are computed again, or are cut by the budget,
    because the ids that are hidden were counted; and rows that are empty without a word."""
    engine = modelless(12, preemption_mode="recompute", enable_prefix_caching=False, max_num_batched_tokens=8)
    requests = {name: (range(9), SamplingParams(max_tokens=12)) for name in "ABC"}
    text = recorded(tmp_path / "trace", engine, requests)
    records = list(read_trace(tmp_path / "trace"))
    note = "The trace does not say which tokens these are (a server with several API keys hides them)."

    def told(trace: str) -> list[list[str]]:
        load(page, trace)
        return [[event["text"] for event in events_of(page, record.step, "committed")] for record in records]

    known = told(text)
    assert note not in drawn(page, ".mpv-tables .mpv-more")
    lines = (json.loads(line, object_hook=_without_tokens) for line in text.splitlines())
    hidden = told(trace_text(*lines))
    assert hidden == [
        [re.sub(r" of \d+: (?=.*budget)", ": ", sentence) for sentence in step] for step in known
    ]
    sentences = " ".join(sentence for step in hidden for sentence in step)
    assert re.search(r"computes tokens \d+ to \d+: .*budget", sentences)
    assert re.search(
        r"computes its \d+ tokens again|computes tokens \d+ to \d+ of \d\d: what is done", sentences
    )
    page.value("viewer.seek(0)")
    assert drawn(page, ".mpv-tables .mpv-more")[-1] == note
    page.value("document.querySelector('.mpv-pool').focus()")
    page.press("ArrowRight")
    assert drawn(page, ".mpv-detail") == ["Block 0: held by A (reference count 1), 4 of 4 slots filled."]


def test_what_preempted_samples_share_again_is_no_prefix_hit(page, tmp_path):
    """Catches "already cached" of what the first sample computes in this step: there is no prefix cache."""
    engine = modelless(14, preemption_mode="recompute", enable_prefix_caching=False)
    requests = {
        "A": (range(8), SamplingParams(max_tokens=30)),
        "B": (range(50, 59), SamplingParams(n=3, max_tokens=12)),
    }
    load(page, recorded(tmp_path / "trace", engine, requests))
    [record] = [
        record
        for record in read_trace(tmp_path / "trace")
        if any(event["kind"] == "resumed" for event in record.events)
    ]
    first, *others = [table for table in record.planned.tables.values() if table.request == "B"]
    shared = ", ".join(str(block) for block in first.blocks if block in others[0].blocks)
    texts = [event["text"] for event in events_of(page, record.step, "planned")]
    assert f"Sequences of B share blocks {shared} again: what they have in common is computed once." in texts
    total = len(first.token_ids)
    assert [text for text in texts if text.startswith("B.2 computes")] == [
        f"B.2 computes tokens 8 to {total - 1} of {total}: what another sequence computes is left out."
    ]
    assert not any("cached" in text for text in texts)
    assert page.value("viewer.state().counts.hits") == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_request_that_is_gone_between_two_steps_is_explained(again, page, tmp_path):
    """Catches blocks that change their owner, and a request that leaves the pool, without an explanation;
    also where another one comes under its name."""
    engine = modelless(32)
    with TraceWriter(tmp_path / "trace", engine):
        for name in ("A", "B"):
            engine.add_request(name, range(9), SamplingParams(max_tokens=6))
        engine.step()
        engine.abort("A")
        if again:
            engine.add_request("A", range(50, 59), SamplingParams(max_tokens=6))
        while engine.has_unfinished:
            engine.step()
    load(page, (tmp_path / "trace").read_text())
    gone = [
        (record.step, event["text"])
        for record in read_trace(tmp_path / "trace")
        for event in events_of(page, record.step, "planned")
        if "before this step" in event["text"]
    ]
    assert gone == [
        (1, "A gave its blocks back before this step: it was aborted, or a step failed and it waits again.")
    ]


def live_texts(page: Page, lines: list[str]) -> list[list[str]]:
    """What the viewer says of each line of a live trace when it arrives."""
    header, *entries = lines
    return page.value(
        f"viewer.start({header}, 'committed'),"
        f"[{','.join(entries)}].map(entry => (viewer.append(entry), viewer.state().events.map(e => e.text)))"
    )


@pytest.mark.parametrize(
    ("num_prompt", "blocks"), [(9, "blocks 0, 1 are free again."), (5, "block 0 is free again.")]
)
def test_a_prefix_cache_that_is_cleared_is_explained(num_prompt, blocks, page):
    """Catches "a request was aborted" where nobody aborted one, cached blocks that go free without a word,
    and an eviction because "nothing else is free" in a pool that is free."""
    engine = modelless(32)
    lines: list[str] = []
    trace = TraceLines(engine, lines.append)

    def run(name: str, seen: bool) -> None:
        engine.add_request(name, range(num_prompt), SamplingParams(max_tokens=2))
        engine.step()
        engine.step()
        engine.reset_prefix_cache()
        if seen:
            trace.synchronize("idle")

    run("A", seen=True)
    run("B", seen=False)
    run("C", seen=False)
    trace.close()
    told = live_texts(page, lines)
    assert [text for texts in told for text in texts if "cache" in text and "stay" not in text] == [
        f"No step: the prefix cache was cleared, and {blocks}",
        f"The prefix cache was cleared before this step: {blocks}",
        f"The trace ends here: after its last step the prefix cache was cleared, and {blocks}",
    ]
    assert not any("aborted" in text for texts in told for text in texts)
    assert page.value("viewer.state().counts.evictions") == 0


@pytest.mark.parametrize(
    ("aborted", "told"),
    [("A", "A was aborted"), ("AB", "A, B were aborted"), ("C", "a request was aborted")],
)
def test_who_was_aborted_without_a_step_is_named(aborted, told, page):
    """Catches "a request" of two, and of one that everybody could see."""
    engine = modelless(32, max_num_seqs=2)
    lines: list[str] = []
    with closing(TraceLines(engine, lines.append)) as trace:
        for name in "ABC":
            engine.add_request(name, range(9), SamplingParams(max_tokens=6))
        engine.step()
        for name in aborted:
            engine.abort(name)
        trace.synchronize("idle")
    assert live_texts(page, lines)[1][0] == f"No step: {told}."


def test_a_request_that_a_failed_step_sends_back_is_not_described_as_aborted(page):
    """Catches "aborted" of what waits to be computed again, as the live page says when a step takes long."""
    model = SlowModel(32)
    engine = Engine(model, EngineConfig(block_size=4, disable_log_stats=True))
    lines: list[str] = []
    with closing(TraceLines(engine, lines.append)) as trace:
        engine.add_request("A", range(9), SamplingParams(max_tokens=8))
        engine.step()
        model.num_broken = 1
        with suppress(RuntimeError):
            engine.step()
        trace.synchronize("idle")
        engine.step()
    told = live_texts(page, lines)
    assert told[1][0] == "No step: a step failed, and A waits again."
    assert told[2][0].startswith("A is back and computes its tokens again")


def test_a_preempted_request_is_not_described_as_gone(page, tmp_path):
    """Catches a reason for what the plan itself explains."""
    engine = modelless(12, preemption_mode="recompute", enable_prefix_caching=False)
    requests = {name: (range(9), SamplingParams(max_tokens=12)) for name in "ABC"}
    load(page, recorded(tmp_path / "trace", engine, requests))
    texts = [
        event["text"]
        for record in read_trace(tmp_path / "trace")
        for event in events_of(page, record.step, "planned")
    ]
    assert any("is preempted" in text for text in texts)
    assert not any("before this step" in text for text in texts)


def test_what_a_beam_copies_and_takes_is_explained_before_it_continues_another(page, tmp_path):
    """Catches owners and reasons of copies and blocks read from tables that the commit has moved."""
    requests = {"0": (range(5), BeamSearchParams(beam_width=4, max_tokens=8))}
    load(page, recorded(tmp_path / "trace", modelless(32), requests))
    moved = 0
    for record in read_trace(tmp_path / "trace"):
        owner = {block: table.position for table in record.planned.tables.values() for block in table.blocks}
        events = events_of(page, record.step, "committed")
        texts = [event["text"] for event in events if event["kind"] == "copy"]
        assert len(texts) == len(record.copies)
        for (source, target), text in zip(record.copies, texts):
            readers = record.planned.blocks()[source].ref_count
            assert f"to block {target}, because sequence 0.{owner[target] + 1} writes" in text
            assert ("prefix cache keeps" in text) == (readers == 0)
        for event in events:
            if event["kind"] == "allocation" and record.step:
                assert event["text"].startswith(f"Sequence 0.{owner[event['blocks'][0]] + 1} takes")
        moved += sum(event["kind"] == "fork" for event in events)
    assert moved > 4


def test_a_copy_counts_those_that_read_the_block_when_it_is_made(page, tmp_path):
    """Catches "another" three times over, where the first of three writers leaves three that read."""
    load(
        page,
        recorded(tmp_path / "trace", modelless(32), {"0": (range(6), SamplingParams(n=4, max_tokens=4))}),
    )
    copies = [
        event["text"].split("because ")[1]
        for event in events_of(page, 1, "planned")
        if event["kind"] == "copy"
    ]
    assert copies == [
        "sequence 0.1 writes where 3 others read.",
        "sequence 0.2 writes where 2 others read.",
        "sequence 0.3 writes where another sequence reads.",
    ]


def test_a_beam_that_continues_another_names_it_and_who_else_does(page, tmp_path):
    """Catches a beam that only changed its rank, described as sharing blocks that it holds alone, and a beam
    that goes on at another place, described as dropped."""
    requests = {name: (range(5), BeamSearchParams(beam_width=4, max_tokens=12)) for name in "12"}
    load(page, recorded(tmp_path / "trace", modelless(64), requests))
    seen = set()
    for record in read_trace(tmp_path / "trace"):
        planned, committed = record.planned.tables, record.committed.tables
        places = {
            table.blocks: f"sequence {table.request}.{table.position + 1}" for table in planned.values()
        }
        expected = []
        for name, table in committed.items():
            if name not in planned or planned[name].blocks == table.blocks:
                continue
            place = f"sequence {table.request}.{table.position + 1}"
            text = f"{place.capitalize()} now continues the beam that was {places[table.blocks]}"
            others = [t for t in committed.values() if t.blocks == table.blocks and t is not table]
            if others:
                names = ", ".join(f"sequence {t.request}.{t.position + 1}" for t in others)
                blocks = ", ".join(map(str, table.blocks))
                text += f", and shares its block{'s' * (len(table.blocks) > 1)} {blocks} with {names}"
            if planned[name].blocks not in {t.blocks for t in committed.values()}:
                text += "; no beam continues what it held before"
            seen.add((bool(others), "no beam" in text))
            expected.append(f"{text}.")
        events = events_of(page, record.step, "committed")
        assert [e["text"] for e in events if e["concept"] == "beam-search"] == expected
    assert seen == {(True, True), (True, False), (False, True), (False, False)}


def test_what_a_commit_gives_back_names_what_the_step_has_taken(page, tmp_path):
    """Catches a block that is taken and given back within a step, where only the taking is explained."""
    load(page, recorded(tmp_path / "trace", modelless(8), {"0": (range(4), SamplingParams(max_tokens=2))}))
    free = [event["blocks"] for event in events_of(page, 1, "committed") if event["kind"] == "free"]
    assert free == [[0, 1]]


DONE, LIMITED = "what is done is left out", "the step's budget limits the rest."


@pytest.mark.parametrize(
    ("prompt", "chunks"),
    [
        (10, [f"tokens 0 to 3 of 10: {LIMITED}", f"tokens 4 to 7 of 10: {DONE}, and {LIMITED}",
              f"tokens 8 to 9 of 10: {DONE}."]),
        (5, [f"tokens 0 to 3 of 5: {LIMITED}", f"token 4 of 5: {DONE}."]),
    ],
)  # fmt: skip
def test_a_chunk_blames_the_budget_only_for_what_is_left(prompt, chunks, page, tmp_path):
    """Catches a last chunk that is described as if something had cut it short, and "tokens 4 to 4"."""
    engine = modelless(8, max_num_batched_tokens=4)
    load(page, recorded(tmp_path / "trace", engine, {"A": (range(prompt), SamplingParams(max_tokens=2))}))
    events = [events_of(page, step, "planned")[-1] for step in range(len(chunks))]
    assert [event["text"] for event in events] == [f"A computes {chunk}" for chunk in chunks]
    assert {event["concept"] for event in events} == {"batch-policies"}


def words(tokens: list[int]) -> str:
    """Tokens without texts, as the viewer shows them."""
    return "".join(f"{token} " for token in tokens)


@pytest.mark.parametrize("hidden", [False, True])
def test_draft_tokens_are_explained_as_such_and_nothing_else_is(hidden, page, tmp_path):
    """Catches prompts and decodes explained as drafts in a trace without tokens, a draft's block that is put
    down to a full one, and an outcome that comes before its draft."""
    foresight = Foresight(0.5, seed=1)
    components = Components(drafter=lambda: foresight)
    engine = toy_engine(components=components, num_speculative_tokens=4)
    text = recorded(
        tmp_path / "trace", engine, {"A": (range(6), SamplingParams(temperature=0, max_tokens=6))}
    )
    tokens = r',?"(token_ids":\[\d+,\[[\d,]*\]|(draft|output)":\[[\d,]*)\]'
    load(page, re.sub(tokens, "", text).replace("{,", "{") if hidden else text)
    assert [event["text"] for event in events_of(page, 0, "committed")][-1].startswith(
        "A computes its prompt"
    )
    planned = ["A takes block 2 for draft tokens.", "A decodes: one new token."]
    drafted, outcome = "4 draft tokens", "1 of 4 draft tokens for A was accepted"
    if not hidden:
        (event,) = list(read_trace(tmp_path / "trace"))[1].events
        draft, output = event["draft"], event["output"]
        drafted += f" (“{words(draft)}”)"
        outcome += f": “{words(output[:1])}” is kept, then the model chose “{words(output[1:])}”"
        outcome += f" instead of “{words(draft[1:2])}”"
    planned += [f"A also computes {drafted}: those that the model would have chosen are kept."]
    assert [event["text"] for event in events_of(page, 1, "planned")] == planned
    assert [event["text"] for event in events_of(page, 1, "committed")][:4] == [*planned, f"{outcome}."]


DRAFTED = {"kind": "drafted", "request": "A", "tokens": 2}


@pytest.mark.parametrize(
    ("event", "count", "outcome"),
    [
        ({"accepted": 0, "draft": [1, 2], "output": [3]},
         "0 of 2", "were accepted: the model chose “ big” instead of “ was”."),
        ({"accepted": 1, "draft": [1, 2], "output": [1, 3]},
         "1 of 2", "was accepted: “ was” is kept, then the model chose “ big” instead of “ a”."),
        ({"accepted": 2, "draft": [1, 2], "output": [1, 2, 3]},
         "2 of 2", "were accepted: “ was a” is kept, then the model chose “ big”."),
        ({"accepted": 0, "draft": [1, 2], "output": [1]},  # it ends the text: nothing is accepted
         "0 of 2", "were accepted: the model chose “ was”."),
        ({"accepted": 0, "draft": [1, 2], "output": []}, "0 of 2", "were accepted."),  # no token was valid
        ({"accepted": 1, "draft": 7, "output": {"x": "<img>"}}, "1 of 2", "was accepted."),
        ({"accepted": 0, "draft": [[1], "<b>"], "output": [None]}, "0 of 2", "were accepted."),
    ],
)  # fmt: skip
def test_the_outcome_of_a_draft_is_explained(event, count, outcome, page):
    """Catches "kept “”", a token that was chosen instead of itself, and a page that stops at an odd trace."""
    texts = {"1": " was", "2": " a", "3": " big"}
    load(page, trace_text(HEADER, {"step": 0, "num_waiting": 0, "events": [DRAFTED | event], "texts": texts}))
    assert events_of(page, 0, "committed")[0]["text"] == f"{count} draft tokens for A {outcome}"


@pytest.mark.parametrize(
    ("accepted", "output", "outcome"),
    [
        (0, [2], "rejected: the model chose “ a” instead of “ was”."),
        (1, [1, 2], "accepted: “ was” is kept, then the model chose “ a”."),
    ],
)
def test_a_single_draft_token_is_explained_in_the_singular(accepted, output, outcome, page):
    """Catches "1 token: those", and "0 of 1 were accepted"."""
    planned = {"tables": {"A/0": {"blocks": [0, [0]], "num_tokens": 3, "token_ids": [0, [1, 2, 1]]}}}
    scheduled = [["A", 0, 1, 1, 1], ["A", 0, 2, 1, 1]]
    event = {
        "kind": "drafted",
        "request": "A",
        "tokens": 1,
        "accepted": accepted,
        "draft": [1],
        "output": output,
    }
    step = {"step": 0, "num_waiting": 0, "scheduled": scheduled, "events": [event], "planned": planned}
    load(page, trace_text(HEADER, step | {"texts": {"1": " was", "2": " a"}}))
    assert [
        event["text"] for event in events_of(page, 0, "committed") if event["concept"] == "speculation"
    ] == [
        "A also computes 1 draft token (“ was”): it is kept if the model would have chosen it.",
        f"The draft token for A was {outcome}",
    ]


def test_a_snapshot_forks_nobody(page):
    """Catches a page that comes late and shows forks long past as if they had just happened, and one that
    connects again, to another server, and says that it has just been opened."""
    tables = {f"A/{i}": {"blocks": [0, [0, 1 + i]], "num_tokens": 6} for i in range(3)}
    event = {"kind": "snapshot"}
    load(
        page,
        trace_text(HEADER, {"step": 7, "num_waiting": 0, "events": [event], "committed": {"tables": tables}}),
    )
    [event] = events_of(page, 7, "committed")
    assert event["kind"] == "other"
    assert event["text"] == "This is the memory as it was when this page connected to the server."


@pytest.mark.parametrize("phase", ["planned", "committed"])
def test_a_sequence_keeps_its_name_when_its_siblings_end(phase, page, tmp_path):
    """Catches three samples that are all called 0 once they have ended, or one that is left alone."""
    load(
        page,
        recorded(tmp_path / "trace", modelless(32), {"0": (range(5), SamplingParams(n=3, max_tokens=3))}),
    )
    last = page.value("viewer.seek(99), viewer.state().step")
    (decodes,) = [event["text"] for event in events_of(page, last, phase) if event["kind"] == "decode"]
    assert decodes == "Sequences 0.1, 0.2, 0.3 decode: one new token each."


def test_a_number_is_shown_as_a_request_and_another_name_as_it_is(page, swapping):
    """Catches "2 is preempted" beside "4 blocks move", and the name of a user that is spelt anew."""
    for names, shown in (("012", ("Request 0", "Request 1", "Request 2")), ("abc", ("a", "b", "c"))):
        text = swapping
        for old, new in zip("ABC", names):
            text = text.replace(f'"{old}"', f'"{new}"').replace(f'"{old}/', f'"{new}/')
        load(page, text)
        texts = {
            s: [e["text"] for e in events_of(page, s, "planned")]
            for s in range(page.value("viewer.state().steps"))
        }
        assert [text.partition(" is admitted")[0] for text in texts[0][:3]] == list(shown)
        assert any(
            text.startswith(f"{shown[2]} is preempted because") for lines in texts.values() for text in lines
        )
        together = "Requests 0, 1, 2 decode" if names == "012" else "a, b, c decode"
        assert any(text.startswith(together) for lines in texts.values() for text in lines)


def test_a_commit_is_explained_from_cause_to_effect(page, tmp_path):
    """Catches blocks that come back before the request that held them has ended, or has computed anything."""
    load(page, recorded(tmp_path / "trace", modelless(8), {"0": (range(4), SamplingParams(max_tokens=2))}))
    events = events_of(page, 1, "committed")
    assert [event["kind"] for event in events][-3:] == ["decode", "end", "free"]
    assert events[-2]["text"].startswith("Request 0 has ended")


def test_appended_entries_show_what_a_loaded_trace_shows(page, swapping):
    """Catches a live view that drifts from the recorded one, or that leaves the reader's place."""
    header, *entries = swapping.splitlines()
    load(page, swapping)
    steps = [json.loads(entry)["step"] for entry in entries]
    whole = states(page, steps)
    page.value(f"viewer.start({header})")
    assert page.value("viewer.state().step") is None
    followed = []
    for entry in entries:
        page.value(f"viewer.append({entry})")
        followed.append(page.value("viewer.state().step"))
    assert followed == steps
    assert states(page, steps) == whole
    page.value("viewer.seek(2)")
    page.value(f"viewer.append({json.dumps({'step': 99, 'num_waiting': 0})})")
    assert page.value("viewer.state().step") == 2


def test_a_long_live_view_forgets_its_oldest_steps_and_nothing_else(page):
    """Catches a page that grows until the tab dies, or that shows a wrong pool after it has forgotten."""
    header = {
        "format": "minipaged-trace",
        "version": 2,
        "block_size": 4,
        "num_blocks": 8,
        "num_host_blocks": 0,
    }
    page.value(f"viewer.start({json.dumps(header)})")
    page.value(
        "for (let step = 0; step < 20200; step++) viewer.append({step, num_waiting: 0,"
        "scheduled: [['A', 0, step, 1, 1]], planned: {tables: {'A/0':"
        "{blocks: [0, [step % 8]], num_tokens: 1, token_ids: [0, [step]]}}}})"
    )
    state = page.value("viewer.state()")
    assert state["step"] == 20199
    assert state["steps"] <= 20_000
    page.value("viewer.seek(19990)")
    assert [b["id"] for b in page.value("viewer.state().blocks") if b["refs"]] == [19990 % 8]
    page.value("viewer.seek(0)")
    assert page.value("viewer.state().step") == 20200 - state["steps"]


def test_a_live_view_goes_on_when_the_step_that_it_shows_is_forgotten(page):
    """Catches a page that throws and stays still once its reader's place is gone."""
    header = json.dumps(HEADER)
    page.value(
        f"viewer.start({header});"
        "globalThis.more = (first, end) => { for (let step = first; step < end; step++) viewer.append({step,"
        "num_waiting: 0, planned: {tables: {'A/0': {blocks: [0, [step % 8]], num_tokens: 1}}}}); }"
    )
    page.value("more(0, 20_000), viewer.seek(10, 'committed'), viewer.state().step")
    page.value("more(20_000, 20_010)")
    state = page.value("viewer.state()")
    assert state["step"] == 20_010 - state["steps"]
    assert [block["id"] for block in state["blocks"] if block["refs"]] == [state["step"] % 8]
    assert page.problems == []


@pytest.mark.parametrize(
    ("prompts", "num_blocks", "budget", "expected"),
    [
        ({"A": range(8), "B": range(50, 58), "C": range(100, 108)}, 8, 64,
         ["B takes block 5, because 1 token of it has no slot yet.",
          "C takes block 0, because 1 token of it has no slot yet."]),
        ({"A": range(8), "C": range(100, 136)}, 13, 4,
         ["C takes blocks 2, 3, because 8 tokens of it have no slot yet."]),
    ],
    ids=["decodes", "a prompt"],
)  # fmt: skip
def test_what_a_request_takes_when_it_comes_back_from_the_host_is_explained(
    prompts, num_blocks, budget, expected, page, tmp_path
):
    """Catches a block beyond those that were moved, which appears in a table without a word."""
    engine = modelless(num_blocks, num_blocks, preemption_mode="swap", max_num_batched_tokens=budget)
    requests = {name: (prompt, SamplingParams(max_tokens=12)) for name, prompt in prompts.items()}
    load(page, recorded(tmp_path / "trace", engine, requests))
    [step] = [record.step for record in read_trace(tmp_path / "trace") if record.swap_in]
    events = events_of(page, step, "planned")
    assert [event["text"] for event in events if event["kind"] == "allocation"] == expected


def test_a_preemption_by_swap_is_explained_with_its_reason_and_its_blocks(page, swapping):
    """Catches a page that shows that something moved but not why, or a link that leads nowhere."""
    load(page, swapping)
    preempted = next(r["step"] for r in map(json.loads, swapping.splitlines()[1:]) if r.get("swap_out"))
    page.value("viewer.seek(0)")
    page.value("document.querySelector('.mpv-jump-preemptions').click()")
    state = page.value("viewer.state()")
    assert state["step"] == preempted
    assert state["queues"] == {"running": ["A", "B"], "swapped": ["C"], "waiting": [], "num_waiting": 0}
    text = " ".join(event["text"] for event in state["events"])
    assert "C is preempted because blocks ran out" in text
    assert "4 blocks move to host memory" in text
    page.wait_for("document.querySelector('.mpv-event-preemption a')")
    assert (
        page.value("document.querySelector('.mpv-event-preemption a').pathname")
        == "/docs/concepts/preemption/"
    )


def test_the_concept_pages_that_the_viewer_links_to_exist():
    """Catches a link to a page that was renamed."""
    concepts = re.search(r"CONCEPTS = \{(.*?)\n\};", (WEB / "explain.js").read_text(), re.DOTALL)[1]
    names = re.findall(r'^  "?([a-z-]+)"?: \[', concepts, re.MULTILINE)
    assert len(names) >= 10
    pages = {page.stem for page in (Path(__file__).parents[2] / "docs/concepts").glob("*.md")}
    assert set(names) <= pages


def test_the_keyboard_steps_jumps_and_chooses_blocks(page, swapping):
    """Catches a viewer for mice only."""
    load(page, swapping)
    press = (
        "((key, selector) => document.querySelector(selector).dispatchEvent("
        "new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true})))"
    )

    def pressed(key: str, selector: str = ".mpv-scrub") -> dict:
        page.value(f"{press}({json.dumps(key)}, {json.dumps(selector)})")
        return page.value("viewer.state()")

    assert pressed("ArrowRight")["step"] == 1
    assert pressed("ArrowLeft")["step"] == 0
    assert pressed("p")["queues"]["swapped"] == ["C"]
    assert pressed("End")["index"] == len(swapping.splitlines()) - 2
    assert pressed("ArrowRight")["phase"] == "committed"
    assert pressed("ArrowLeft")["phase"] == "planned"
    assert pressed("P")["queues"]["swapped"] == ["C"]
    assert pressed("Home")["step"] == 0
    assert pressed("ArrowRight", ".mpv-pool")["selected"] == {"block": 0, "onHost": False}
    assert pressed("ArrowRight", ".mpv-pool")["selected"] == {"block": 1, "onHost": False}
    assert pressed(" ")["playing"] is True
    assert pressed(" ")["playing"] is False


def drawn(page: Page, selector: str) -> list[str]:
    """The texts of elements, once what was asked for before is drawn."""
    return page.value(
        "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        f".then(() => [...document.querySelectorAll({selector!r})].map(each => each.textContent))"
    )


def press(page: Page, letter: str) -> None:
    """Press a key of the keyboard."""
    for kind in ("keyDown", "keyUp"):
        event = {"type": kind, "key": letter, "code": f"Key{letter.upper()}", "text": letter}
        page.browser.call("Input.dispatchKeyEvent", event, page.session)


# Every text that is written on a canvas from now on, with its contrast to what is below it.
WRITTEN = """(() => {
    const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const light = () => [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3)
        .map(value => value / 255)
        .map(share => share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0.05);
    const paint = (style, alpha = 1) => {
        Object.assign(pixel, { fillStyle: style, globalAlpha: alpha });
        pixel.fillRect(0, 0, 1, 1);
        return light();
    };
    const plain = CanvasRenderingContext2D.prototype.fillText;
    globalThis.written = [];
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        paint(getComputedStyle(document.querySelector(".mpv")).backgroundColor);
        pixel.globalAlpha = 1;
        pixel.drawImage(this.canvas, x, y, 1, 1, 0, 0, 1, 1);
        const [below, above] = [light(), paint(this.fillStyle, this.globalAlpha)];
        written.push([text, Math.max(below, above) / Math.min(below, above)]);
        plain.call(this, text, x, y);
    };
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_names_can_be_read_in_cells_that_are_paler_than_the_chosen_ones(dark, browser, home, swapping):
    """Catches names that fade with their cells once a table is chosen."""
    page = browser.open(home, 1280, dark)
    page.wait_for("globalThis.viewer")
    load(page, swapping)
    page.value("viewer.seek(4)")
    drawn(page, ".mpv-name")
    page.value(WRITTEN)
    page.value("document.querySelector('.mpv-name').click()")
    written = page.value("written")
    assert {"A", "B", "C"} <= {text for text, _ in written}
    assert [(text, contrast) for text, contrast in written if contrast < 4.5] == []
    page.close()


def test_the_chart_does_not_rely_on_hues(page, tmp_path):
    """Catches waste that few see over the bars, and cached blocks that only a hue tells from those in use."""
    page.value("""(drawing => {
        const ofTheChart = (canvas) => !canvas.isConnected && canvas.width > 500;
        const { stroke, fillRect } = drawing;
        globalThis.lines = [];
        globalThis.patterns = 0;
        drawing.stroke = function () {
            if (ofTheChart(this.canvas)) lines.push([this.strokeStyle, this.lineWidth]);
            stroke.call(this);
        };
        drawing.fillRect = function (...place) {
            if (ofTheChart(this.canvas)) patterns += this.fillStyle instanceof CanvasPattern;
            fillRect.apply(this, place);
        };
    })(CanvasRenderingContext2D.prototype)""")
    requests = {str(n): (range(n, n + 9), SamplingParams(max_tokens=n)) for n in (2, 8)}
    load(page, recorded(tmp_path / "trace", modelless(32), requests))
    casing, line = page.value("lines")[:2]
    assert (casing[0], line[0]) == (palette.LIGHT["paper"], palette.LIGHT["hue5"])
    assert casing[1] >= line[1] + 2
    assert page.value("patterns") > 0


def test_a_letter_that_is_pressed_in_the_viewer_stays_there(page, swapping):
    """Catches the documentation's own keys, by which p jumps to a preemption and leaves the page as well."""
    load(page, swapping)
    page.value("globalThis.heard = ''; addEventListener('keydown', event => heard += event.key)")
    for focused in (".mpv-pool", ".mpv-name", ".mpv-events a", ".mpv-scrub", ".mpv-controls select"):
        drawn(page, focused)
        page.value(f"document.querySelector({focused!r}).focus()")
        for letter in "pnsfp":
            press(page, letter)
            drawn(page, focused)
    assert page.value("viewer.state().queues.swapped") == ["C"]
    assert page.value("heard") == ""
    page.value("(() => { const title = document.querySelector('h1'); title.tabIndex = 0; title.focus(); })()")
    press(page, "n")
    assert page.value("heard") == "n"


@pytest.mark.parametrize(("button", "letter"), [(".mpv-name", "p"), ("[title*='(End)']", "P")])
def test_keys_go_on_when_the_button_that_was_pressed_is_gone(button, letter, page, swapping):
    """Catches a button that is drawn anew, or has nothing more to do, and takes the focus with it."""
    load(page, swapping)
    drawn(page, button)
    page.value(f"document.querySelector({button!r}).focus()")
    page.press("Enter")
    drawn(page, button)
    press(page, letter)
    assert page.value("viewer.state().queues.swapped") == ["C"]


def test_what_has_the_focus_keeps_it_when_it_is_drawn_anew(page, swapping):
    """Catches a view that nobody gets through with Tab, as every step throws them back to its beginning."""
    header, *entries = map(json.loads, swapping.splitlines())
    page.value(f"viewer.start({json.dumps(header)})")
    for entry in entries[:2]:
        page.value(f"viewer.append({json.dumps(entry)})")
    focused = "document.activeElement.textContent"
    for selector in (".mpv-name", ".mpv-events a"):
        drawn(page, selector)
        page.value(f"document.querySelector({selector!r}).focus()")
        name = page.value(focused).split()[0]
        if selector == ".mpv-name":
            page.press("Enter")
            drawn(page, selector)
            assert page.value("document.activeElement.ariaPressed") == "true"
        page.value(f"viewer.append({json.dumps(entries[2 if selector == '.mpv-name' else 3])})")
        drawn(page, selector)
        assert page.value(f"document.activeElement.matches({selector!r})"), selector
        assert page.value(focused).split()[0] == name


def test_the_arrow_keys_reach_the_host_blocks_and_come_back(page, swapping):
    """Catches blocks that only a mouse can choose."""
    load(page, swapping)
    drawn(page, ".mpv-pool")
    last = len(page.value("viewer.state().blocks")) - 1
    page.value("document.querySelector('.mpv-pool').focus()")
    chosen = []
    for key, times in (("ArrowRight", last + 3), ("ArrowLeft", 2)):
        for _ in range(times):
            page.value(
                "document.activeElement.dispatchEvent(new KeyboardEvent('keydown',"
                f"{{key: {key!r}, bubbles: true, cancelable: true}}))"
            )
            chosen.append(page.value("viewer.state().selected"))
    assert chosen[last:] == [
        {"block": last, "onHost": False},
        {"block": 0, "onHost": True},
        {"block": 1, "onHost": True},
        {"block": 0, "onHost": True},
        {"block": last, "onHost": False},
    ]


def test_the_chosen_block_is_read_out_once_and_escape_chooses_none(page, swapping):
    """Catches keys that a screen reader keeps, a block that it speaks of at every step, and one for ever."""
    load(page, swapping)
    drawn(page, ".mpv-pool")
    assert page.value("document.querySelector('.mpv-pool').role") == "application"
    page.value("document.querySelector('.mpv-pool').focus()")
    said = "document.querySelector('.mpv-stage [aria-live]').textContent"
    escape = (
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown',"
        "{key: 'Escape', bubbles: true, cancelable: true}))"
    )
    page.press("ArrowRight")
    assert page.value(said).startswith("Block 0: held by A")
    page.value("viewer.seek(9)")
    assert drawn(page, ".mpv-detail")[0].startswith("Block 0: ")
    assert page.value(said) == ""
    assert page.value(escape) is False  # taken by the viewer
    assert page.value("[viewer.state().selected, viewer.state().table]") == [None, None]
    assert page.value(said) == "No block is chosen."
    assert page.value(escape) is True  # left to the page


def test_steps_that_follow_one_another_are_not_all_read_out(page, swapping):
    """Catches a live view that talks without end, over the answers that somebody waits for."""
    header, *entries = map(json.loads, swapping.splitlines())
    page.value(
        "(line => { globalThis.said = []; new MutationObserver(() => said.push(line.textContent))"
        ".observe(line, {childList: true}); })(document.querySelector('.mpv > .mpv-hidden'))"
    )
    page.value(f"viewer.start({json.dumps(header)})")
    page.value(  # (in one call: on a busy machine, several are not quick enough)
        f"(async () => {{ for (const entry of {json.dumps(entries[:6])}) {{ viewer.append(entry);"
        "await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))); } })()"
    )
    page.wait_for("said.length")
    assert [text.split(".")[0] for text in page.value("said")] == ["Step 5 of 5"]


def test_waste_is_that_of_the_moment_that_is_shown(page, swapping):
    """Catches an empty pool with slots that are wasted in it."""
    load(page, swapping)
    page.value("viewer.seek(99, 'committed')")
    assert "waste, now 0.0 %" in drawn(page, ".mpv-strip .mpv-key span")
    assert page.value("document.querySelector('.mpv-chart').ariaLabel") == (
        "Over all steps: 0 blocks in use, 0.0 % of their slots empty (waste) now."
    )


def test_one_of_anything_is_reported_in_the_singular(page):
    """Catches "1 blocks", and a number of waiting requests that reads like the name of one."""
    table = {"blocks": [0, [0]], "num_tokens": 1}
    entry = {"step": 0, "num_waiting": 1, "planned": {"tables": {f"{i}/0": table for i in range(7)}}}
    load(page, trace_text(HEADER, entry))
    assert set(drawn(page, ".mpv-name")) == {f"{i} 1 token in 1 block, 3 of 4 slots empty" for i in range(6)}
    assert drawn(page, ".mpv-tables > .mpv-more")[0].startswith("and 1 more sequence;")
    assert drawn(page, ".mpv-queues dd")[1] == "1 request"
    assert "1 block in use," in page.value("document.querySelector('.mpv-chart').ariaLabel")
    long = {"blocks": [0, list(range(11))], "num_tokens": 44}
    entry = {"step": 0, "num_waiting": 3, "waiting": ["B"], "planned": {"tables": {"A/0": long}}}
    load(page, trace_text({**HEADER, "num_blocks": 11}, entry))
    assert drawn(page, ".mpv-table .mpv-more") == ["1 block before"]
    assert drawn(page, ".mpv-queues dd")[1] == "Band 2 more"


@pytest.mark.parametrize(
    ("held", "cached", "sentence"),
    [
        ([3], [3], "Block 3 comes back: no sequence holds it any more (it stays cached"),
        ([3, 5], [5], "Blocks 3, 5 come back: no sequence holds them any more (1 stays cached"),
        ([3, 5, 6], [5, 6], "Blocks 3, 5, 6 come back: no sequence holds them any more (2 stay cached"),
        ([3, 5], [3, 5], "Blocks 3, 5 come back: no sequence holds them any more (all stay cached"),
    ],
)
def test_the_blocks_that_stay_cached_are_counted(held, cached, sentence, page):
    """Catches "1 stay cached", and "all" of one."""
    table = {"blocks": [0, held], "num_tokens": 4 * len(held)}
    first = {"step": 0, "num_waiting": 0, "planned": {"tables": {"A/0": table}}}
    end = {"step": 1, "num_waiting": 0, "committed": {"tables": {"A/0": None}, "evictable": cached}}
    load(page, trace_text(HEADER, first, end))
    assert events_of(page, 1, "committed")[-1]["text"] == f"{sentence} until the room is needed)."


@pytest.mark.parametrize(
    ("moves", "sentence"),
    [
        ([[3, 0]], "1 block moves to host memory before its device block is given away."),
        ([[3, 0], [5, 1]], "2 blocks move to host memory before their device blocks are given away."),
    ],
)
def test_the_blocks_that_are_swapped_out_are_counted(moves, sentence, page):
    """Catches "1 block moves to host memory before their device blocks are given away"."""
    load(page, trace_text(HEADER, {"step": 0, "num_waiting": 0, "swap_out": moves}))
    assert [event["text"] for event in events_of(page, 0, "planned")] == [sentence]


@pytest.mark.parametrize(
    ("num_blocks", "hidden"),
    [(257, "the last 1, never used, is not drawn"), (258, "the last 2, never used, are")],
)
def test_the_blocks_that_are_not_drawn_are_counted(num_blocks, hidden, page):
    """Catches "the last 1, never used, are not drawn"."""
    table = {"blocks": [0, [200]], "num_tokens": 1}
    entry = {"step": 0, "num_waiting": 0, "planned": {"tables": {"A/0": table}}}
    load(page, trace_text({**HEADER, "num_blocks": num_blocks}, entry))
    assert hidden in drawn(page, ".mpv-usage")[0]


def test_a_pool_of_one_block_of_one_token_is_described_in_the_singular(page):
    """Catches "1 of 1 blocks" and "1 of 1 slots"."""
    header = {**HEADER, "block_size": 1, "num_blocks": 1}
    table = {"blocks": [0, [0]], "num_tokens": 1, "num_computed": 1, "token_ids": [0, [7]]}
    load(page, trace_text(header, {"step": 0, "num_waiting": 0, "planned": {"tables": {"A/0": table}}}))
    assert drawn(page, ".mpv-usage") == ["1 of 1 block of 1 token in use, 0 free"]
    page.value("document.querySelector('.mpv-pool').focus()")
    page.press("ArrowRight")
    assert drawn(page, ".mpv-detail")[0].startswith(
        "Block 0: held by A (reference count 1), 1 of 1 slot filled"
    )


@pytest.mark.parametrize(
    ("blocks", "shown_as"),
    [
        (0, "it needs no new block."),
        (1, "it asks for 1 new block, and the pool has it."),
        (2, "it asks for 2 new blocks, and the pool has them."),
    ],
)
def test_the_blocks_of_an_admission_are_counted(blocks, shown_as, page):
    """Catches "1 new block, and the pool has them"."""
    events = [{"kind": "admitted", "request": "A", "prompt_tokens": 1, "cached_tokens": 0, "blocks": blocks}]
    table = {"blocks": [0, [0]], "num_tokens": 1}
    entry = {"step": 0, "num_waiting": 0, "events": events, "planned": {"tables": {"A/0": table}}}
    load(page, trace_text(HEADER, entry))
    [admission] = [event["text"] for event in events_of(page, 0, "planned") if event["kind"] == "admission"]
    assert admission == f"A is admitted with 1 prompt token: {shown_as}"


def test_the_jumps_count_what_happened_and_not_the_steps_in_which_it_did(page, tmp_path):
    """Catches a page that says 1 copy of a run with 3."""
    requests = {"0": (range(5), BeamSearchParams(beam_width=4, max_tokens=8))}
    load(page, recorded(tmp_path / "trace", modelless(32), requests))
    copies = sum(len(record.copies) for record in read_trace(tmp_path / "trace"))
    assert copies > 3
    assert drawn(page, ".mpv-jump-copies") == [f"Copy {copies}"]


def test_playing_ends_with_the_pool_empty(page, swapping):
    """Catches a last frame in which requests that have ended still hold blocks."""
    load(page, swapping)
    page.value(
        "(() => { const speed = document.querySelector('.mpv-controls select'); speed.value = 60;"
        "speed.dispatchEvent(new Event('change')); })(); viewer.play()"
    )
    page.wait_for("!viewer.state().playing")
    state = page.value("viewer.state()")
    assert state["phase"] == "committed"
    assert state["used"] == 0


def test_the_few_used_blocks_of_a_large_pool_are_drawn_large_enough_to_read(page, swapping):
    """Catches a newcomer's first trace: of 65,536 blocks 256 without a name are drawn, for 12 in use."""
    header, _, rest = swapping.partition("\n")
    load(page, json.dumps(json.loads(header) | {"num_blocks": 65_536}) + "\n" + rest)
    assert "(the last 65,472, never used, are not drawn)" in page.value(
        "document.querySelector('.mpv-usage').textContent"
    )
    pool = "document.querySelector('.mpv-pool')"
    assert page.value(f"{pool}.clientWidth * {pool}.clientHeight / 64") > 34**2  # a cell has room for words


HEADER = {"format": "minipaged-trace", "version": 2, "block_size": 4, "num_blocks": 8, "num_host_blocks": 2}
START = {"step": 0, "num_waiting": 0, "planned": {"tables": {"A/0": {"blocks": [0, [1]], "num_tokens": 2}}}}


def trace_text(header: object, *entries: object) -> str:
    return "".join(json.dumps(line) + "\n" for line in (header, *entries))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a trace of minipaged: line 1 is not JSON"),
        ("[1]\n", "not a trace of minipaged: its first line is not a trace header"),
        ('{"traceEvents": []}\n', "not a trace of minipaged"),
        ("<script>globalThis.ran = 1</script>\n", "line 1 is not JSON"),
        (
            trace_text({**HEADER, "version": 3}),
            "of version 3, this viewer reads version 2: open it with a newer",
        ),
        (
            trace_text({**HEADER, "version": 1}),
            "of version 1, this viewer reads version 2: record the run again",
        ),
        (trace_text({**HEADER, "num_blocks": 0}), "num_blocks is 0; it must be an integer"),
        (trace_text({**HEADER, "num_blocks": 10**12}), "num_blocks is 1000000000000"),
        (trace_text({**HEADER, "block_size": "16"}), 'block_size is "16"'),
    ],
)
def test_a_file_of_another_kind_is_reported_in_one_line(page, text, message):
    """Catches a blank page, an exception in the console, or a tab that dies of a pool of 10^12 blocks."""
    load(page, text)
    state = page.value("viewer.state()")
    assert message in state["error"]
    assert "\n" not in state["error"]
    assert len(state["error"]) < 300
    assert page.value("document.querySelector('.mpv-error').textContent") == state["error"]
    assert page.value("getComputedStyle(document.querySelector('.mpv-controls')).display") == "none"
    assert page.value("globalThis.ran") is None
    assert page.problems == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"step": -1, "num_waiting": 0}, "step is -1"),
        ({"step": 1}, "num_waiting is undefined"),
        ({"step": 1, "num_waiting": 0, "scheduled": [["A", 0, 1]]}, "scheduled has"),
        ({"step": 1, "num_waiting": 0, "copies": [[1]]}, "copies has [1]"),
        ({"step": 1, "num_waiting": 0, "events": ["x"]}, "events has"),
        ({"step": 1, "num_waiting": 1, "waiting": [7]}, "waiting has 7"),
        (
            {"step": 1, "num_waiting": 0, "planned": {"tables": {"A/0": {"blocks": [5, []]}}}},
            "5 of 1 are kept",
        ),
        ({"step": 1, "num_waiting": 0, "planned": {"tables": {"A/0": {"blocks": [0, [8]]}}}}, "has block 8"),
        ({"step": 1, "num_waiting": 0, "planned": {"tables": {"A/0": {"blocks": [0, ["1"]]}}}}, 'has "1"'),
        ({"step": 1, "num_waiting": 0, "planned": {"tables": {"B/0": None}}}, "was not there"),
        (
            {"step": 1, "num_waiting": 0, "planned": {"tables": {"B": {"num_tokens": 1}}}},
            "is not the name of a sequence",
        ),
        (
            {"step": 1, "num_waiting": 0, "committed": {"evictable": [99]}},
            "evictable block 99 is not in the pool",
        ),
        ({"step": 1, "num_waiting": 0, "planned": 7}, "a change is 7"),
        ({"step": 1, "num_waiting": 0, "planned": {"tables": {"A/0": {"token_ids": [0, [1.5]]}}}}, "has 1.5"),
        (7, "not a JSON object"),
    ],
)
def test_a_trace_that_breaks_is_shown_up_to_there(page, bad, message):
    """Catches a memory that never was, and the loss of the steps before the broken one."""
    load(page, trace_text(HEADER, START, bad, START))
    state = page.value("viewer.state()")
    assert "Line 3" in state["error"]
    assert message in state["error"]
    assert "Shown: 1 step before it." in state["error"]
    assert state["steps"] == 1
    assert state["blocks"][1]["owners"] == ["A/0"]
    load(page, trace_text(HEADER, START)[:-20])
    assert "Line 2 is not JSON (was it truncated?)" in page.value("viewer.state().error")
    assert page.problems == []


HOSTILE = [
    "<img src=x onerror=globalThis.ran=1>",
    "</script><script>globalThis.ran=1</script>",
    "__proto__",
    "constructor",
    "\u202egnp.exe",
    "a\u0000b",
    "javascript:globalThis.ran=1",
    "x" * 5000,
    "{{script}}",
    "]]>",
    "<!--",
    "'\"`${ran=1}",
]


def hostile_trace() -> str:
    entries = []
    for step, text in enumerate(HOSTILE):
        tables = {
            f"{text}/0": {"blocks": [0, [0]], "num_tokens": 1, "num_prompt": 1, "token_ids": [0, [step]]}
        }
        entries.append(
            {
                "step": step,
                "num_waiting": 1,
                "scheduled": [[text, 0, 0, 1, 1]],
                "events": [
                    {"kind": text, "request": text},
                    {"kind": "preempted", "request": text, "mode": text, "reason": text},
                ],
                "finished": [text],
                "texts": {str(step): text},
                "planned": {"tables": tables},
                "committed": {"tables": {f"{text}/0": None}},
            }
        )
    return trace_text(HEADER, *entries)


def test_hostile_strings_are_shown_and_not_run(page, browser, tmp_path):
    """Catches a request id, a token or a reason that becomes an element, a script or a prototype."""
    load(page, hostile_trace())
    (tmp_path / "trace.jsonl").write_text(hostile_trace())
    (tmp_path / "index.html").write_text(trace_page(tmp_path / "trace.jsonl"))
    with served(tmp_path) as address:
        whole = browser.open(address, 400, dark=True)
        whole.wait_for("globalThis.viewer?.state().steps")
        for shown in (page, whole):
            for step, text in enumerate(HOSTILE):
                shown.value(f"viewer.seek({step})")
                assert shown.value("viewer.state().queues.running") == [text]
                shown.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
                assert (
                    shown.value("document.querySelectorAll('#viewer :is(img, script, iframe)').length") == 0
                )
                assert shown.value("document.documentElement.scrollWidth <= innerWidth")
            assert shown.value("globalThis.ran") is None
            assert shown.value("({}).num_tokens") is None
            assert shown.problems == []
        whole.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_trace_is_one_page_that_asks_nobody(browser, swapping, tmp_path, dark):
    """Catches a page that needs its neighbours or a network, too wide, or deaf to the colours asked."""
    (tmp_path / "swap.jsonl").write_text(swapping)
    text = trace_page(tmp_path / "swap.jsonl")
    assert len(text.encode()) < 300_000
    (tmp_path / "page.html").write_text(text)
    page = browser.open((tmp_path / "page.html").as_uri(), 1280, dark)
    page.wait_for("globalThis.viewer?.state().steps")
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.value("viewer.state().steps") == len(swapping.splitlines()) - 1
    theme = palette.DARK if dark else palette.LIGHT
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.value(paper) == f"rgb{palette.rgb(theme['paper'])}"
    for width in (1280, 400, 320):
        page.resize(width)
        assert page.value("document.documentElement.scrollWidth") <= width
    page.value("document.getElementById('theme').click()")
    other = palette.LIGHT if dark else palette.DARK
    assert page.value(paper) == f"rgb{palette.rgb(other['paper'])}"
    assert page.value("getComputedStyle(document.documentElement).backgroundColor") == page.value(paper)
    assert page.problems == []
    page.close()


def test_a_trace_in_a_notebook_is_the_viewer(browser, swapping, tmp_path):
    """Catches a frame that stays empty, and one that reaches beyond itself."""
    (tmp_path / "swap.jsonl").write_text(swapping)
    frame = trace_frame(read_trace(tmp_path / "swap.jsonl"))
    for text in (frame, re.sub(r' sandbox="[^"]*"', "", frame)):  # the second lets the test look inside
        (tmp_path / "notebook.html").write_text(f'<meta charset="utf-8"><title>n</title>{text}')
        page = browser.open((tmp_path / "notebook.html").as_uri(), 1280, dark=False)
        page.wait_for("document.querySelector('iframe').clientHeight > 400")
        if text != frame:
            page.wait_for("frames[0].viewer?.state().steps")
            assert page.value("frames[0].viewer.state().steps") == len(swapping.splitlines()) - 1
        assert [
            url for url in page.requests if not url.startswith(("file:", "data:", "blob:", "about:"))
        ] == []
        assert page.problems == []
        page.close()


def test_the_colours_are_those_of_the_pictures():
    """Catches a palette changed in one place: a request blue in the picture and orange in the viewer."""
    css = (WEB / "viewer.css").read_text()
    colours = re.findall(r"--mpv-(\w+): light-dark\((#\w+), (#\w+)\);", css)
    light, dark = (
        dict(re.findall(r"--mp-(\w+):(#\w+);", palette.variables(theme)))
        for theme in (palette.LIGHT, palette.DARK)
    )
    assert colours == [(name, light[name], dark[name]) for name in light]
    assert css.count("#") == 2 * len(light), "a colour is written somewhere else, too"


@pytest.mark.parametrize("theme", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_bars_borders_and_lines_stand_out_from_the_paper_that_they_are_drawn_on(theme):
    """Catches a colour that names a request, a border or a line, and that few people see."""

    def light(name: str) -> float:
        shares = [value / 255 for value in palette.rgb(theme[name])]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    for name in ("ink", "soft", "line", *(name for name in theme if name.startswith("hue"))):
        low, high = sorted((light(name), light("paper")))
        assert high / low >= (4.5 if name in ("ink", "soft") else 3), name


def test_modules_share_one_script_without_sharing_names():
    """Catches two modules with a name in common, which works as modules and fails as one script."""
    for entry in ("trace.js", "live.js"):
        text = script(entry)
        names = re.findall(r"^(?:async )?(?:const|let|class|function\*?) (\w+)", text, re.MULTILINE)
        assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
        assert "</script" not in text
        assert not re.search(r"^(import|export) ", text, re.MULTILINE)


def long_trace(num_steps: int, num_blocks: int, num_sequences: int) -> str:
    """A run written by hand, as the engine would write it: decodes, blocks, requests that come and go."""
    size, lines = 16, []
    lines.append({**HEADER, "block_size": size, "num_blocks": num_blocks, "max_num_batched_tokens": 2048})
    free = list(range(num_blocks))
    tables: dict[str, list] = {}
    for step in range(num_steps):
        entry: dict = {"step": step, "num_waiting": 3, "scheduled": [], "planned": {"tables": {}}}
        committed: dict = {}
        if len(tables) < num_sequences:
            name, length = str(step), 200 + 37 * step % 600
            blocks = [free.pop() for _ in range(-(-length // size))]
            tables[name] = [length, blocks, length + 100 + 53 * step % 400]
            tokens = list(range(length))
            entry["events"] = [
                {"kind": "admitted", "request": name, "prompt_tokens": length, "cached_tokens": 0}
            ]
            entry["scheduled"].append([name, 0, 0, length, 1])
            entry["planned"]["tables"][f"{name}/0"] = {
                "num_tokens": length, "num_prompt": length, "blocks": [0, blocks], "token_ids": [0, tokens],
            }  # fmt: skip
            committed[f"{name}/0"] = {"token_ids": [length, [step]]}
        for name in [name for name in tables if name != str(step)]:
            table = tables[name]
            entry["scheduled"].append([name, 0, table[0], 1, 1])
            if table[0] % size == 0:
                entry["planned"]["tables"][f"{name}/0"] = {"blocks": [len(table[1]), [free[-1]]]}
                table[1].append(free.pop())
            table[0] += 1
            if table[0] < table[2]:
                committed[f"{name}/0"] = {"token_ids": [table[0], [step % 1000]]}
            else:
                committed[f"{name}/0"] = None
                entry.setdefault("finished", []).append(name)
                free += tables.pop(name)[1]
        entry["committed"] = {"tables": committed}
        lines.append(entry)
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def test_10_000_steps_of_4_096_blocks_scrub_nearly_as_smoothly_as_100(browser, tmp_path, capsys):
    """Catches work in every frame that grows with the length of the run, a page that freezes."""
    for file in WEB.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "index.html").write_text(MOUNT)
    for steps in (100, 10_000):
        (tmp_path / f"{steps}.jsonl").write_text(long_trace(steps, 4096, 64))
    measured = {}
    with served(tmp_path) as address:
        for steps in (100, 10_000):
            page = browser.open(address, 1280, dark=False)
            page.wait_for("globalThis.viewer")
            measured[steps] = page.value(
                """(async () => {
                const steps = STEPS;
                const text = await (await fetch(`${steps}.jsonl`)).text();
                const frame = () => new Promise(requestAnimationFrame);
                const start = performance.now();
                viewer.load(text);
                await frame(); await frame();
                const opened = performance.now() - start;
                while (document.querySelector(".mpv-title").textContent.includes("read")) await frame();
                const input = document.querySelector(".mpv-scrub");
                const orders = [i => 3 * i, i => 9000 - 3 * i, i => i * 9973];
                const rates = [];
                for (const order of orders) {
                    const begin = performance.now();
                    for (let i = 0; i < 60; i++) {
                        input.value = order(i) % steps;
                        input.dispatchEvent(new Event("input"));
                        await frame();
                        const asked = order(i) % steps, shown = viewer.state().index;
                        if (shown !== asked) throw new Error(`slider at ${asked}, viewer at ${shown}`);
                    }
                    rates.push(60000 / (performance.now() - begin));
                }
                return { opened, rates, steps: viewer.state().steps, error: viewer.state().error };
                })()""".replace("STEPS", str(steps))
            )
            assert (measured[steps]["steps"], measured[steps]["error"]) == (steps, "")
    with capsys.disabled():
        print(f"\n10,000 steps: opened in {measured[10_000]['opened']:.0f} ms, frames a second", end=" ")
        print(*(f"{rate:.0f}" for rate in measured[10_000]["rates"]))
    assert min(measured[10_000]["rates"]) > 0.2 * min(measured[100]["rates"]), measured
