"""The comparison with other engines: who takes part, and what the page says of it. No engine runs here."""

import re
import sys

import pytest

from minipaged.metrics import quantile
from tests.benchmarks.peers import contest, report
from tests.benchmarks.peers.__main__ import parse
from tests.benchmarks.peers.contest import (
    DRIVERS,
    ENVIRONMENTS,
    OURS,
    Driver,
    DriverError,
    Spread,
    compare,
    environment_of,
)
from tests.benchmarks.peers.materials import workload
from tests.benchmarks.peers.report import NAMES, page
from tests.benchmarks.peers.rows import ROWS
from tests.benchmarks.peers.serve import percentile_ms

ROW = next(row for row in ROWS if row.name == "m100-single")


class FakeDriver:
    """An engine that takes a second; ours two."""

    def __init__(self, python, script, task):
        self.python = python
        self.engine = task["engine"]
        self.about = {"versions": {self.engine: "1.0"}}

    def run(self):
        """The same tokens from everybody."""
        return {"wall_s": 1.0, "cpu_s": 2.0 if self.engine == OURS else 1.0, "tokens": [[1, 2]]}

    def close(self):
        """Nothing to end."""


@pytest.fixture
def outcome(monkeypatch, tmp_path):
    """`m100-single` where only ONNX Runtime has an environment; (outcome, what was reported)."""
    monkeypatch.setattr(contest, "Driver", FakeDriver)
    monkeypatch.setattr(contest, "model_directory", lambda name, folder: folder / name)
    lines = []
    pythons = {"ort": "ort-python"}
    found = compare(
        ROW, pythons=pythons, models=tmp_path, workloads=None, pairs=1, report=lambda line: lines.append(line)
    )
    return found, "\n".join(lines)


def test_an_engine_without_an_environment_is_left_out_and_named(outcome):
    """Catches a peer that is missing from a table as if it had been measured and lost."""
    found, log = outcome
    assert list(found["engines"]) == [OURS, "ort"]
    assert found["absent"] == ["openvino", "llama.cpp"]
    assert "left out, as no interpreter is given: openvino, llama.cpp" in log


def test_a_faster_engine_is_named_in_words(outcome):
    """Catches a page that shows only rows that flatter, or that fails on an engine without torch."""
    run = {"date": "2026-11-22", "machine": "a machine", "command": "a command", "rows": [outcome[0]]}
    text = page([run], [])
    assert "- one request, 134 M (float32, threads: 1): ONNX Runtime GenAI is 2.00 times as fast." in text
    assert "minipaged 1.0, ort 1.0:" in text
    assert "openvino" not in text


def test_the_chart_fits_on_a_phone_with_its_names_and_numbers(outcome):
    """Catches bars that are cut off before they end, so that all look alike, and numbers out of sight."""
    svg = report.chart([outcome[0]] * 5)
    sizes = [(int(width), int(height)) for width, height in re.findall(r'viewBox="0 0 (\d+) (\d+)', svg)]
    assert len(sizes) == 2, "on a wide screen, one column of all rows leaves half of it empty"
    assert max(width for width, _ in sizes) <= 350
    assert sizes[0][1] / sizes[1][1] == 3 / 2, "five rows: three, then two"
    assert svg.index(">1.00<") < svg.index("<rect"), "the number stands behind the bar"


def test_the_chart_tells_rows_of_one_workload_apart(outcome):
    """Catches "mixed, 3.4 M" twice, with another minipaged each time, and a title that is cut off."""
    rows = [outcome[0] | {"title": row.title, "dtype": row.dtype, "threads": row.threads} for row in ROWS]
    titles = re.findall(r'font-weight="600">([^<]*)<', report.chart(rows))
    assert len(titles) == len(ROWS)
    assert len(set(titles)) == len(titles)
    assert max(map(len, titles)) <= 53  # letters in 350 pixels


def test_every_peer_of_every_row_has_a_driver_a_name_and_a_place_to_run():
    """Catches a row that fails after minutes of measuring the rows before it."""
    for engine in {peer for row in ROWS for peer in row.goals}:
        assert (contest.HERE / DRIVERS[engine]).exists()
        assert engine in NAMES
        assert environment_of(engine) in (*ENVIRONMENTS, None)
    assert environment_of("vllm-compiled") == "vllm"
    assert environment_of("padded") is None


@pytest.mark.parametrize(
    ("name", "prompt_tokens", "output_tokens"),
    [("mixed", 8704, 4155), ("shared", 17562, 757), ("long", 7021, 2048), ("single", 64, 256)],
)
def test_the_requests_drawn_here_are_those_of_the_published_tables(name, prompt_tokens, output_tokens):
    """Catches figures that nobody could measure again, since their requests were drawn elsewhere."""
    items = workload(name, None)
    assert sum(len(item["prompt_token_ids"]) for item in items) == prompt_tokens
    assert sum(item["max_tokens"] for item in items) == output_tokens


def test_weights_in_8_bits_need_not_give_the_same_tokens():
    """Catches a run that fails because two engines round differently."""
    exact = {row.name for row in ROWS if row.is_exact and row.model == "m100" and row.workload == "single"}
    assert exact == {"m100-single"}


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"ort ended early \(SIGSEGV\):\nloading"),
        ("sys.exit(3)", r"ort ended early \(exit status 3\):\nloading"),
    ],
)
def test_an_engine_that_crashes_is_named_with_its_end(tmp_path, ending, words):
    """Catches an engine that died of a signal, of which its log says nothing."""
    script = tmp_path / "driver.py"
    script.write_text(f"import os, signal, sys; print('loading', file=sys.stderr, flush=True); {ending}\n")
    with pytest.raises(DriverError, match=words):
        Driver(sys.executable, str(script), {"engine": "ort", "threads": 1})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pairs", "0"], "pairs is 0; give at least 1"),
        (["--out", "none/peers.json"], "--out: there is no folder none"),
        (["--vllm-python", "none/python"], "--vllm-python: there is no none/python"),
    ],
)
def test_what_cannot_be_run_or_written_is_refused_before_the_first_row(arguments, words, monkeypatch, capsys):
    """Catches minutes of measuring that end in a traceback, and are lost."""
    command = ["peers", "--models", "models", "--out", "peers.json", *arguments]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="2"):
        parse()
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 20, 100, 150, 200])
def test_percentiles_of_peers_are_those_of_bench(count):
    """Catches a rank one too high for everybody but minipaged, whose driver uses `minipaged bench`."""
    gaps = [float(gap) for gap in range(count)]
    for share in (0.5, 0.95, 0.99):
        assert percentile_ms(gaps, share) == 1e3 * quantile(gaps, share)


def test_a_spread_is_of_all_rounds():
    """Catches a median of the first round alone."""
    assert Spread.of([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
