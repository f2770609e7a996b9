"""The engine as a page of the site calls it: the same run as outside, reported step by step."""

import json
from itertools import count
from operator import mul

import pytest

from minipaged.config import ConfigError
from minipaged.decoding.checks import ParamsError
from minipaged.playground.pocket import PocketRun
from minipaged.playground.simulated import LONGEST, SimulatedRun, split
from minipaged.scheduling import RequestTooLongError
from minipaged.simulation.run import simulate
from minipaged.viewer.replay import read_trace

SETTINGS = [
    {},
    {"num_blocks": 20},
    {"num_blocks": 20, "preemption_mode": "swap"},
    {"prefix": 64},
    {"prefix": 64, "enable_prefix_caching": False},
    {"page_growth": "reserve", "num_blocks": 64},
    {"samples": 4, "num_blocks": 64, "enable_chunked_prefill": False},
    {"block_size": 4, "num_blocks": 100, "rate": 50, "requests": 12, "seed": 3},
]


def finished(settings, piece=7):
    run, lines = SimulatedRun(settings), []
    while more := run.advance(piece):
        lines += more
    return run, lines


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_in_pieces_it_is_the_run_of_the_simulator(settings):
    """Catches requests added at another time, or steps lost between two pieces."""
    run, lines = finished(settings)
    counts = run.counts()
    whole = SimulatedRun(settings)  # its engine, driven by the simulator's own loop
    _, config = split(settings)
    expected = simulate(whole.simulation, whole.load.arrivals(config.seed))
    assert counts["steps"] == expected.num_steps == len(lines) - 1
    assert counts["seconds"] == expected.seconds
    assert counts["preemptions"] == expected.num_preemptions
    assert counts["cached_tokens"] == expected.num_cached_tokens
    assert counts["finished"] == len(expected.records) == whole.load.requests
    assert counts["waste"] == pytest.approx(1 - expected.usage.tokens / expected.usage.held)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_its_lines_are_a_trace(settings, tmp_path):
    """Catches a header that comes late, and lines that the viewer cannot follow."""
    run, lines = finished(settings, piece=1)
    (tmp_path / "trace").write_text("".join(line + "\n" for line in lines))
    records = list(read_trace(tmp_path / "trace"))
    assert len(records) == run.counts()["steps"]
    assert records[-1].committed.num_used == 0
    texts = {token: text for line in lines[1:] for token, text in json.loads(line).get("texts", {}).items()}
    assert {text for token, text in texts.items() if int(token) >= 1000} == {"p "}
    assert texts["0"] == "· "


@pytest.mark.parametrize(
    "settings",
    [
        *SETTINGS,
        {"requests": 1, "prompt": 1, "output": 1},
        {"requests": 1, "output": 5, "samples": 8},
        {"num_blocks": 14, "preemption_mode": "swap", "samples": 2, "prefix": 32},
    ],
    ids=str,
)
def test_what_memory_is_in_use_is_seen_while_a_step_is_computed(settings, tmp_path):
    """Catches a look after the commit: what ends in a step is gone by then, and a short run used nothing."""
    run, begun, seconds = SimulatedRun(settings), [], []
    engine, executor = run.simulation.engine, run.simulation.executor
    engine.on_planned.append(lambda plan: begun.append(executor.now))
    engine.on_committed.append(lambda *step: seconds.append(executor.now - begun[-1]))
    lines = [line for piece in iter(lambda: run.advance(9), []) for line in piece]
    (tmp_path / "trace").write_text("".join(line + "\n" for line in lines))
    views = [record.planned for record in read_trace(tmp_path / "trace")]
    counts = run.counts()
    assert counts["peak_blocks"] == max(view.num_used for view in views) > 0
    filled = [sum(block.filled or 0 for block in view.blocks()) for view in views]
    slots = [view.num_used * view.block_size for view in views]
    waste = 1 - sum(map(mul, filled, seconds)) / sum(map(mul, slots, seconds))
    assert counts["waste"] == pytest.approx(waste)


def test_the_examples_of_the_page_show_what_they_ask_about():
    """Catches a question of the page whose run has nothing to show."""
    counts = [finished(settings)[0].counts() for settings in SETTINGS]
    assert counts[0]["preemptions"] == 0 < counts[1]["preemptions"] <= 5
    assert counts[3]["cached_tokens"] == 7 * 64
    assert counts[4]["cached_tokens"] == 0
    assert counts[5]["waste"] > 0.5 > 3 * counts[0]["waste"]
    assert counts[6]["shared"] > 0.1


def test_a_request_that_can_never_run_is_refused_and_counted():
    """Catches a page that waits forever."""
    run, _ = finished({"num_blocks": 1})
    counts = run.counts()
    assert counts["refused"] + counts["finished"] == run.load.requests
    assert counts["refused"] > 0


@pytest.mark.parametrize(("num_blocks", "cut"), [(8, 8), (128, 0)])
def test_a_request_that_is_cut_short_because_the_pool_is_too_small_is_counted(num_blocks, cut):
    """Catches a pool too small for any answer that looks fast: all finished, in two steps each."""
    run, lines = finished({"samples": 8, "max_num_seqs": 8, "num_blocks": num_blocks})
    counts = run.counts()
    assert (counts["finished"], counts["cut_short"]) == (8, cut)
    assert "".join(lines).count('"outgrown"') == cut


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({}, ""), ({"num_blocks": 1}, "blocks"), ({"samples": 8, "max_num_seqs": 1}, "max_num_seqs")],
    ids=str,
)
def test_why_requests_are_refused_is_reported(settings, reason):
    """Catches a page that blames the pool for every refusal."""
    run, _ = finished(settings)
    assert reason in run.refusal
    assert bool(reason) == bool(run.refusal)


def test_a_refusal_names_what_the_page_has():
    """Catches advice to raise a setting that the page does not have, and "1 tokens"."""
    run, _ = finished({"num_blocks": 1, "block_size": 1})
    assert "KV blocks of 1 token to be admitted" in run.refusal
    assert run.refusal.endswith("the pool has 1; raise num_blocks, or ask for less")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"requests": 1000}, "requests is 1000; give a whole number from 1 to 200"),
        ({"rate": 0}, "rate is 0; give a number from 0.01 to 1000"),
        ({"prompt": LONGEST}, f"prompt is {LONGEST}; give a number from 1 to {LONGEST - 1}"),
        ({"num_blocks": 5000}, "num_blocks is 5000; give a number from 1 to 4096"),
        ({"num_blocks": None}, "num_blocks is None; give a number from 1 to 4096"),
        ({"block_size": 0}, "block_size is 0"),
        ({"colour": "red"}, "unknown setting 'colour'"),
        ({"rate": "fast"}, "rate is 'fast'; give a number from 0.01 to 1000"),
        ({"requests": 1.5}, "requests is 1.5; give a whole number from 1 to 200"),
        ({"prefix": 0.5}, "prefix is 0.5; give a whole number from 0 to 256"),
        ({"samples": 2.5}, "samples is 2.5; give a whole number from 1 to 8"),
    ],
)
def test_a_setting_that_cannot_work_is_reported_in_a_line(settings, message):
    """Catches a traceback in a page, and a pool that takes the browser's memory."""
    with pytest.raises(ConfigError, match=message) as error:
        SimulatedRun(settings)
    assert "\n" not in str(error.value)


MODEL = {"max_model_len": 64, "vocab_size": 100, "eos_token_ids": [1], "block_bytes": 64}


class Counting:
    """A model that answers 10, 11, 12, ..., and keeps what it was sent."""

    def __init__(self) -> None:
        self.steps, self.next = [], count(10)

    def __call__(self, text: str) -> str:
        step = json.loads(text)
        self.steps.append(step)
        rows = [row for row in step["rows"] if row["candidates"]]
        return json.dumps(
            [[[next(self.next)] * row["candidates"], [-1.0] * row["candidates"]] for row in rows]
        )


def test_the_pocket_models_requests_are_scheduled_and_reported():
    """Catches token ids that reach the model without their place, and text that is never sent."""
    model = Counting()
    run = PocketRun(model, MODEL, [f"<{i}>" for i in range(100)], {"block_size": 4, "num_blocks": 8})
    assert run.add([0, 5, 6, 7, 8], 3) == "0"
    steps = [json.loads(run.step()) for _ in range(3)]
    assert [step["outputs"]["0"] for step in steps] == [[[10]], [[10, 11]], [[10, 11, 12]]]
    assert [step["more"] for step in steps] == [True, True, False]
    first, second, _ = (step["rows"][0] for step in model.steps)
    assert (first["tokens"], first["start"], len(first["table"])) == ([0, 5, 6, 7, 8], 0, 2)
    assert (second["tokens"], second["start"], second["table"]) == ([10], 5, first["table"])
    assert "<10>" in "".join(steps[0]["lines"])
    assert json.loads(run.step())["outputs"] == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2}, "beams is 3, but samples is 2 and temperature is 0.0; beam search does not sample"),
        ({"temperature": 0.8}, "samples is 1 and temperature is 0.8; beam search does not sample"),
    ],
)
def test_a_beam_search_with_samples_or_a_temperature_is_refused(options, message):
    """Catches fields of the page that are filled in and then ignored."""
    run = PocketRun(Counting(), MODEL, [f"<{i}>" for i in range(100)], {"block_size": 4, "num_blocks": 8})
    with pytest.raises(ParamsError, match=message):
        run.add([0, 5], 4, beams=3, **options)


def test_a_prompt_that_the_pocket_models_pool_cannot_hold_is_refused_in_the_pages_terms():
    """Catches advice to raise a setting that the page does not have."""
    run = PocketRun(Counting(), MODEL, [f"<{i}>" for i in range(100)], {"block_size": 4, "num_blocks": 8})
    with pytest.raises(RequestTooLongError, match=r"but the pool has 8; shorten the prompt$"):
        run.add([5] * 40, 4)


def test_a_beam_search_of_the_pocket_model_draws_nothing_at_random():
    """Catches candidates drawn at a temperature: all beams were the same text."""
    model = Counting()
    run = PocketRun(model, MODEL, [f"<{i}>" for i in range(100)], {"block_size": 4, "num_blocks": 8})
    run.add([0, 5], 3, beams=3)
    run.add([0, 6], 3, temperature=0.7)
    run.step()
    assert [row["temperature"] for row in model.steps[0]["rows"]] == [0, 0.7]


def answer(tokens: list[int], logprobs: list[float]):
    """A model that gives every row these candidates."""
    return lambda step: json.dumps([[tokens, logprobs] for _ in json.loads(step)["rows"]])


def test_the_pocket_models_beams_are_reported_best_first_and_its_samples_by_their_numbers():
    """Catches an answer that is not the best, and texts that change places when a sample ends."""
    beams = PocketRun(answer([10, 1, 11, 12], [-1.0, -1.5, -2.0, -3.0]), MODEL, [""] * 100, {"num_blocks": 8})
    beams.add([0, 5], 2, beams=2)
    outputs = [json.loads(beams.step())["outputs"]["0"] for _ in range(2)]
    assert outputs == [[[10], [11]], [[10, 10], [10, 1]]]
    draws = iter([[10, 11], [12, 1], [13, 13]])

    def drawn(step: str) -> str:
        tokens, rows = next(draws), json.loads(step)["rows"]
        each = [tokens] if len(rows) == 1 and rows[0]["candidates"] == 2 else [[token] for token in tokens]
        return json.dumps([[some, [-1.0] * len(some)] for some in each[: len(rows)]])

    samples = PocketRun(drawn, MODEL, [""] * 100, {"num_blocks": 8})
    samples.add([0, 5], 3, temperature=1.0, n=2)
    outputs = [json.loads(samples.step())["outputs"]["0"] for _ in range(3)]
    assert outputs == [[[10], [11]], [[10, 12], [11, 1]], [[10, 12, 13], [11, 1]]]


def test_stopping_the_pocket_model_frees_its_blocks():
    """Catches an answer that goes on unseen, and one whose blocks the viewer still shows as taken."""
    run = PocketRun(Counting(), MODEL, [f"<{i}>" for i in range(100)], {"block_size": 4, "num_blocks": 8})
    run.add([0, 5], 50)
    run.step()
    run.abort()
    state = json.loads(run.step())
    assert not state["more"]
    assert run.engine.scheduler.kv.num_used == 0
    last = json.loads(state["lines"][-1])
    assert last["events"] == [{"kind": "idle"}]
    assert last["committed"]["tables"] == {"0/0": None}


def test_one_of_several_answers_is_stopped_and_the_others_go_on():
    """Catches a stop that ends other requests, and a button beside an answer that has ended."""
    run = PocketRun(Counting(), MODEL, [f"<{i}>" for i in range(100)], {"block_size": 4, "num_blocks": 8})
    for _ in range(3):
        run.add([0, 5], 4)
    assert json.loads(run.step())["running"] == ["0", "1", "2"]
    run.abort("1")
    run.abort("1")  # once more, as a second click does
    steps = [json.loads(run.step()) for _ in range(3)]
    assert [list(step["outputs"]) for step in steps] == [["0", "2"]] * 3
    assert [step["running"] for step in steps] == [["0", "2"], ["0", "2"], []]
    assert run.engine.scheduler.kv.num_used == 0
