"""`reproduce` and `simulate`: what they print, what they refuse, and that they need no torch."""

import contextlib
import inspect
import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from minipaged.cli.main import app
from minipaged.cli.simulation import calibrate, reproduce, simulate
from minipaged.config import EngineConfig
from minipaged.simulation import plots
from minipaged.simulation.experiments import EXPERIMENTS, fig13
from minipaged.simulation.page import page
from minipaged.simulation.report import Report
from minipaged.simulation.reproduce import run_cases, run_experiments
from minipaged.simulation.results import Claim, Curve, Experiment, Panel, as_json
from minipaged.simulation.serving import (
    SPECULATION,
    WITHOUT_EFFECT,
    check_settings,
    parse_sweep,
    sweep_panels,
)
from tests.processes import wait_until
from tests.slow import slow_but


def command_line(*arguments: str, options: dict | None = None):
    """Both commands as a typer application; engine flags come as a dict from the real command line."""
    app = typer.Typer()
    app.command()(reproduce)

    def simulate_(**values) -> None:
        simulate(options or {}, **values)

    parameters = list(inspect.signature(simulate, eval_str=True).parameters.values())[1:]
    simulate_.__signature__ = inspect.Signature(parameters)
    app.command("simulate")(simulate_)
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_list_names_every_experiment():
    shown = command_line("reproduce", "--list")
    for name in ("fig02", "fig12", "fig13", "fig19", "growth", "prefix_aware", "chunked_prefill"):
        assert name in shown


def test_the_list_is_printed_as_json_too():
    """Catches text where a script asked for JSON."""
    listed = json.loads(command_line("reproduce", "--list", "--json"))
    assert [entry["name"] for entry in listed] == list(EXPERIMENTS)
    assert set(listed[0]) == {"name", "title", "source"}


def test_reproduce_prints_json_with_the_promised_keys():
    claims = json.loads(command_line("reproduce", "growth", "--json"))
    assert {"experiment", "claim", "source", "paper", "measured", "unit"} <= claims[0].keys()
    assert {claim["experiment"] for claim in claims} == {"growth"}


def test_each_experiment_is_shown_when_it_is_done(monkeypatch):
    """Catches minutes without output from --all, and results in the order in which their cases end."""
    seen = []

    def run_cases(cases, progress, note):
        for number in reversed(range(len(cases))):
            note(number, number)
            seen.append(number)

    monkeypatch.setattr("minipaged.simulation.reproduce.run_cases", run_cases)
    experiments = [
        Experiment(name, name, "", "", dict.fromkeys(cases, None), lambda answers: ([], []))
        for name, cases in {"one": "ab", "two": "c"}.items()
    ]
    results = run_experiments(experiments, lambda *_: None, lambda result: seen.append(result["experiment"]))
    assert [result["experiment"] for result in results] == ["one", "two"]
    assert seen == [2, 1, "one", "two", 0]


@pytest.mark.parametrize("columns", slow_but([80], [50, 80, 120]))
def test_the_table_of_claims_keeps_its_headings_whole(monkeypatch, columns):
    """Catches `publishe/d` on a small terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = command_line("reproduce", "growth")
    assert all(heading in shown for heading in ("claim", "published", "measured", "ratio"))
    assert ("source" in shown) is (columns >= 80)
    assert max(map(len, shown.splitlines())) <= columns


def test_reproduce_writes_figures_results_and_a_page(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need the extra `plot`")
    monkeypatch.setattr("minipaged.cli.simulation.EXPERIMENTS", {"growth": EXPERIMENTS["growth"]})
    monkeypatch.setattr("minipaged.cli.simulation.sensitivity", lambda progress: [])
    shown = command_line("reproduce", "--all", "--docs", str(tmp_path))
    assert "requests finished" in shown
    assert (tmp_path / "growth.svg").read_text().startswith("<?xml")
    assert json.loads((tmp_path / "results.json").read_text())[0]["experiment"] == "growth"
    assert "![Dynamic page growth](growth.svg)" in (tmp_path / "index.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["growth", "--docs", "."], "docs is '.', the page of all experiments; give --all too, or --figures"),
        (["growth", "--all"], "experiments is growth, but --all runs every one; leave one of the two out"),
        (["--all", "--list"], "--list runs nothing; leave it or --all out"),
        (
            ["--all", "--docs", ".", "--use", "allocator=mine.py:Mine"],
            "docs is '.', the page of the project's own classes; leave it or --use out",
        ),
        (["growth", "--list"], "--list runs nothing; leave it or growth out"),
        (
            ["growth", "--figure-format", "png"],
            "figure_format is 'png', but no figure is drawn; give --figures",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_before_the_run(monkeypatch, arguments, message):
    """Catches a complete page overwritten with a partial one, and options that are ignored in silence."""
    monkeypatch.setattr("minipaged.cli.simulation.run_experiments", lambda *_, **__: pytest.fail("ran"))
    with pytest.raises(ValueError, match=re.escape(message)):
        command_line("reproduce", *arguments)


def test_an_unknown_experiment_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown experiment 'fig99'; choose one of fig02"):
        command_line("reproduce", "fig99")


def test_the_guides_table_is_what_its_command_prints(monkeypatch):
    """Catches figures from before a change of the cost model, and a line that has another name by now."""
    monkeypatch.setenv("COLUMNS", "120")
    text = (Path(__file__).parents[2] / "docs/guides/simulation.md").read_text()
    printed = command_line(*re.search(r"^minipaged (simulate .*)", text, re.MULTILINE)[1].split())
    lines = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in printed.splitlines()]
    rows = re.findall(r"^\| (.+?) \| ([\d.,]+) \| ([\d.,]+) \| ([\d.,]+) \|$", text, re.MULTILINE)
    assert len(rows) == 5
    assert all(list(row) in lines for row in rows)


SMALL = ("simulate", "--workload", "alpaca", "--requests", "30", "--rate", "10")


def test_simulate_reports_what_people_who_serve_ask_for():
    report = json.loads(command_line(*SMALL, "--json"))
    assert report["requests"] == 30
    assert 0 < report["ttft_p50"] <= report["ttft_p95"]
    assert 0 < report["itl_mean"] <= report["itl_p99"]
    assert 0 < report["kv_usage"] < 1
    assert "time to first token, median [s]" in command_line(*SMALL)


def test_engine_flags_reach_the_engine():
    """A pool of 40 blocks of 16: preemptions, which the default pool does not know."""
    tight = json.loads(command_line(*SMALL, "--json", options={"num_blocks": 40}))
    assert tight["preemptions"] > 0
    assert json.loads(command_line(*SMALL, "--json"))["preemptions"] == 0


def test_a_sweep_runs_once_per_value_and_draws(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need the extra `plot`")
    file = tmp_path / "sweep.png"
    rows = json.loads(
        command_line(*SMALL, "--sweep", "max-num-batched-tokens=64,512", "--json", "--plot", str(file))
    )
    assert [row["max_num_batched_tokens"] for row in rows] == [64, 512]
    assert file.read_bytes()[:4] == b"\x89PNG"


def test_a_sweep_over_an_infinite_rate_is_json():
    """Catches `Infinity`, which JSON does not have."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    printed = command_line(*SMALL[:-2], "--sweep", "rate=inf,1", "--json")
    assert [row["rate"] for row in json.loads(printed, parse_constant=refuse)] == ["inf", 1.0]


def test_a_sweep_over_choices_and_rates():
    rows = json.loads(command_line(*SMALL, "--sweep", "page_growth=reserve,on_demand", "--json"))
    assert rows[0]["kv_waste"] > rows[1]["kv_waste"]
    rows = json.loads(command_line(*SMALL[:-2], "--sweep", "rate=1,inf", "--json"))
    assert rows[0]["request_rate"] < rows[1]["request_rate"]


def test_a_fleet_serves_everything():
    report = json.loads(command_line(*SMALL, "--replicas", "3", "--router", "prefix-aware", "--json"))
    assert report["requests"] == 30


def test_short_runs_and_idle_replicas_are_averaged_over_all_of_the_time(tmp_path):
    """Catches steps that nobody looks at, and means over busy replicas alone that are added up."""
    file = tmp_path / "lengths.json"
    for output in (1, 5):
        file.write_text(f"[[10, {output}]]")
        burst = ("simulate", "--workload", str(file), "--requests", "20", "--json")
        report = json.loads(command_line(*burst, "--rate", "inf"))
        assert report["running"] == pytest.approx(20)
        assert report["kv_usage"] > 0
        assert report["kv_waste"] == pytest.approx(1 - (10 + (output - 1) / 2) / 16, abs=0.01)
    spread = json.loads(command_line(*burst, "--rate", "0.001", "--replicas", "20"))
    alone = json.loads(command_line(*burst, "--rate", "0.001"))
    assert spread["running"] == pytest.approx(alone["running"], rel=0.01)
    assert alone["running"] == pytest.approx(
        alone["normalized_latency"] * 5 * alone["request_rate"], rel=0.01
    )
    assert spread["kv_usage"] == pytest.approx(alone["kv_usage"] / 20, rel=0.01)


def test_more_chips_do_not_cost_a_remote_call_each():
    """Catches the host time of the paper's workers, which nothing but a fit to its Fig. 12 c asks for."""
    command = ("simulate", "--hardware", "h100", "--requests", "30", "--json", "--chips")
    one, eight = (json.loads(command_line(*command, chips))["itl_mean"] for chips in "18")
    assert eight < one


def test_when_every_request_is_refused_the_reason_is_reported():
    """Catches advice about the trace where the pool is too small."""
    options = {"num_blocks": 30, "page_growth": "reserve"}
    with pytest.raises(
        ValueError, match=r"no request finished: the request needs 512 KV blocks .* raise num"
    ):
        command_line(*SMALL, options=options)


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("enable_prefix_caching=True,FALSE", [True, False]),
        ("max_model_len=None,100", [None, 100]),
        ("kv_cache_memory=1e9,2000000000.0", [10**9, 2 * 10**9]),
        ("gpu-memory-utilization=0.5,1.0", [0.5, 1]),
        ("max_model_len=4k,8K", [4000, 8192]),
        ("kv_cache_memory=1GiB,2G", [2**30, 2**31]),
    ],
)
def test_the_values_of_a_sweep_may_be_written_as_in_python(sweep, values):
    assert parse_sweep(sweep)[1] == values
    assert [type(value) for value in parse_sweep(sweep)[1]] == [type(value) for value in values]


def test_a_sweep_draws_every_value_under_its_name():
    """Catches an infinite rate that no axis has, and legends of field names."""
    values = [1.0, math.inf]
    reports = [Report(*[1.0] * len(fields(Report)))] * 2
    panels = sweep_panels("rate", values, {"": reports})
    assert {panel.kind for panel in panels} == {"bar"}
    assert panels[0].curves[0].x == ["1", "inf"]
    assert [curve.label for curve in panels[1].curves] == [
        "time to first token, median",
        "time to first token, p95",
    ]
    assert {panel.kind for panel in sweep_panels("rate", [1.0, 2.0], {"": reports})} == {"line"}
    both = sweep_panels("rate", values, {"": reports, ", yours": reports})
    assert [curve.label for curve in both[0].curves] == ["throughput", "throughput, yours"]


def test_the_settings_offered_for_a_sweep_are_those_that_it_takes():
    """Catches a list of names that are all refused when they are tried."""
    with pytest.raises(ValueError, match="one of") as caught:
        parse_sweep("foo=1")
    for name in str(caught.value).partition("one of ")[2].split(", "):
        check_settings([name])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "opt-175b"], "opt-175b needs 346 GB for its weights, but 1 x a100-80gb has 80 GB"),
        (["--model", "gpt"], "unknown model 'gpt'; choose one of opt-13b"),
        (["--hardware", "tpu"], "unknown chip 'tpu'"),
        (["--workload", "chatgpt"], "unknown workload 'chatgpt'"),
        (["--rate", "0"], "rate is 0.0 requests/s; give at least 1e-06"),
        (["--requests", "0"], "requests is 0; give a number from 1 to 10,000,000"),
        (["--router", "fastest"], "unknown router 'fastest'"),
        (["--sweep", "block=1,2"], "sweep is 'block=1,2'; give FLAG=V1,V2"),
        (["--sweep", "block_size=16,x"], "block_size is 'x'"),
        (["--sweep", "block_size=0"], "block_size is 0; give at least 1"),
        (["--plot", "x.svg"], "give a .svg or .png file, and --sweep"),
        (["--host-ms", "-1"], "host_ms is -1.0; give a number from 0 to 1,000,000"),
        (["--chips", "0"], "num_chips is 0"),
        (
            ["--chips", "3"],
            "num_chips is 3; the 8 KV heads of llama-3-8b can be divided among 1, 2, 4 or 8 chips",
        ),
        (
            ["--chips", "16"],
            "num_chips is 16; the 8 KV heads of llama-3-8b can be divided among 1, 2, 4 or 8 chips",
        ),
        (["--rate", "nan"], "rate is nan requests/s; give at least 1e-06"),
        (["--rate", "1e-300"], "rate is 1e-300 requests/s; give at least 1e-06"),
        (["--sweep", "rate=1,nan"], "rate is nan requests/s; give at least 1e-06"),
        (["--sweep", "rate=fast"], "sweep is 'rate=fast'; give rates"),
        (["--sweep", "rate=1,"], "sweep is 'rate=1,'; give rates"),
        (["--sweep", "rate=" + ",".join(["1"] * 1001)], "sweep has 1001 values; give 1 to 1,000"),
        (["--replicas", "100000"], "replicas is 100000; give a number from 1 to 1,000"),
        (["--requests", "1000000000000"], "requests is 1000000000000; give a number from 1 to 10,000,000"),
        (["--host-ms", "nan"], "host_ms is nan; give a number from 0 to 1,000,000"),
        (["--host-ms", "inf"], "host_ms is inf; give a number from 0 to 1,000,000"),
        (["--host-ms", "1e308"], "host_ms is 1e+308; give a number from 0 to 1,000,000"),
        (["--replicas", "1000", "--sweep", "num_blocks=10,100000"], "num_blocks is 100000 in 1000 replicas"),
        (["--sweep", "num_blocks=1e23"], "num_blocks is 1e+23; give an integer"),
        (["--sweep", "block_size=1000000000000"], "block_size is 1000000000000; one block takes"),
        (
            ["--sweep", "kv_cache_memory=5"],
            "kv_cache_memory is 5; one block takes 2097152 bytes",
        ),
        (["--sweep", "dtype=float32,bfloat16"], "dtype has no effect in a simulation; leave it out"),
        (["--sweep", "quantization=none,int8"], "quantization has no effect in a simulation; leave it out"),
        (["--rate", "5", "--sweep", "rate=1,2"], "rate is 5.0, but the sweep has its own; leave --rate out"),
        (
            ["--sweep", "rate=1,2", "--sweep", "num_blocks=40,80"],
            "sweep is given 2 times; give it once",
        ),
        (["--router", "prefix-aware"], "router is 'prefix-aware', but there is 1 replica; give --replicas 2"),
        (
            ["--plot", "no/such/folder/x.svg", "--sweep", "rate=1,2"],
            "cannot write to no/such/folder: No such file",
        ),
    ],
)
def test_what_cannot_be_simulated_gets_a_clear_line(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        command_line("simulate", *arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[10, -3]]", r"entry 0 is \[10, -3\]"),
        ("[[10, 3], [1, 2, 3]]", r"entry 1 is \[1, 2, 3\]"),
        ("[[10, 3], [1, true]]", r"entry 1 is \[1, True\]"),
        ("[[10, 1e3]]", r"entry 0 is \[10, 1000.0\]"),
        ("{}", "must be a JSON list"),
        ("[", "is not JSON: .*; give a JSON file"),
        ("[" * 100_000, "is not JSON: .*; give a JSON file"),
        ("[[1, " + "9" * 5000 + "]]", "is not JSON: .*; give a JSON file"),
        ("\udcff", "is not UTF-8 text"),
        ("[[1000000000000, 1000000000000]]", "no request finished"),
    ],
)
def test_a_length_file_that_cannot_be_used_gets_a_clear_line(tmp_path, text, message):
    """Catches lengths that are made into tokens before they are looked at, and the parser's own errors."""
    file = tmp_path / "lengths.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message) as caught:
        command_line("simulate", "--workload", str(file), "--requests", "3")
    assert "\n" not in str(caught.value)


def test_an_endless_output_ends_at_the_longest_sequence_and_is_counted_as_generated(tmp_path):
    """10 tokens in, 10^12 wanted out, room for 8,192. Catches a throughput of tokens that never were."""
    file = tmp_path / "lengths.json"
    file.write_text("[[10, 1000000000000]]")
    report = json.loads(command_line("simulate", "--workload", str(file), "--requests", "2", "--json"))
    assert report["token_rate"] * report["seconds"] == pytest.approx(2 * (8192 - 10))


@pytest.mark.parametrize(
    "setting",
    [
        *("attention_backend", "enable_cuda_graphs", "async_scheduling", "dtype"),
        *("quantization", "device", "trust_remote_code", "pipeline_parallel_size", "disable_log_stats"),
        *("num_speculative_tokens", "speculative_model"),
    ],
)
def test_a_setting_that_changes_nothing_in_a_simulation_is_refused(setting):
    """Catches `--dtype float32` that is taken in silence: the figures stay those of 16 bits."""
    with pytest.raises(ValueError, match=f"{setting} has no effect in a simulation; leave it out"):
        command_line(*SMALL, options={setting: getattr(EngineConfig(), setting)})


@pytest.mark.parametrize(("command", "refused"), [("simulate", WITHOUT_EFFECT), ("calibrate", SPECULATION)])
def test_the_help_offers_no_setting_that_is_refused(command, refused):
    """Catches an option of the help whose only answer is to leave it out."""
    shown = CliRunner().invoke(app, [command, "--help"]).stdout
    offered = {name for name in EngineConfig.__dataclass_fields__ if f"--{name.replace('_', '-')}" in shown}
    assert offered == set(EngineConfig.__dataclass_fields__) - set(refused)


def test_ranks_are_called_chips_in_a_simulation():
    with pytest.raises(ValueError, match="tensor_parallel_size has no effect in a simulation; use --chips"):
        command_line(*SMALL, options={"tensor_parallel_size": 2})


def test_a_setting_is_given_once():
    """Catches a flag whose value the sweep replaces in silence."""
    with pytest.raises(
        ValueError, match="num_blocks is 40, but the sweep has its own; leave --num-blocks out"
    ):
        command_line(*SMALL, "--sweep", "num_blocks=50,60", options={"num_blocks": 40})


@pytest.mark.parametrize("option", ["--figures", "--docs"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_run(monkeypatch, tmp_path, option):
    """Catches minutes of simulation whose results are lost."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("minipaged.cli.simulation.run_experiments", lambda *_, **__: pytest.fail("ran"))
    with pytest.raises(ValueError, match=r"cannot write to .*file"):
        command_line("reproduce", "--all", option, str(tmp_path / "file"))


def test_without_matplotlib_nothing_is_run(monkeypatch, tmp_path):
    """Catches minutes of simulation before the missing package is reported."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("minipaged.cli.simulation.run_experiments", lambda *_, **__: pytest.fail("ran"))
    with pytest.raises(plots.PlotError, match=r'pip install -c constraints.txt -e "\.\[plot\]"'):
        command_line("reproduce", "growth", "--figures", str(tmp_path))


def running() -> dict[int, int]:
    """The parent of every process that has not ended."""
    command = ["ps", "-eo", "pid=,ppid=,stat="]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {int(pid): int(parent) for pid, parent, state in map(str.split, lines) if state[0] != "Z"}


def descendants(pid: int) -> set[int]:
    """The processes below this one."""
    parents, found = running(), [pid]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return set(found[1:])


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX terminal")
@pytest.mark.skipif(shutil.which("ps") is None, reason="ps is not installed")
@pytest.mark.parametrize("after", [1.0, pytest.param(6.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "arguments",
    slow_but(
        [["reproduce", "fig12", "fig19"]],
        [["reproduce", "fig12", "fig19"], ["simulate", "--requests", "30000", "--sweep", "rate=1,2,3,4"]],
    ),
    ids=["reproduce", "sweep"],
)
def test_ctrl_c_stops_everything_and_progress_was_shown(arguments, after):
    """As a terminal does it: SIGINT to the whole foreground group, while workers start or compute. Catches
    workers that go on, a parent that waits for them, tracebacks, and a command that is silent for minutes."""
    screen, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "minipaged", *arguments],
        stdout=subprocess.PIPE, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    try:
        shown = b""
        while b"simulating" not in shown:
            assert select.select([screen], [], [], 30)[0], "no progress"
            shown += os.read(screen, 10_000)
        time.sleep(after)
        below = descendants(process.pid)
        assert below
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(10) == 130, "(the work would take minutes)"
        wait_until(lambda: not below & running().keys(), 10, "its workers end")
        with contextlib.suppress(OSError):  # the end of a terminal
            while more := os.read(screen, 10_000):
                shown += more
        assert b"Traceback" not in shown
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        os.close(screen)


def test_a_model_length_beyond_the_model_is_refused():
    with pytest.raises(ValueError, match="max_model_len is 99999; llama-3-8b was trained for 8192"):
        command_line(*SMALL, options={"max_model_len": 99999})


def test_no_torch_is_imported():
    """Everything that the two commands import, in a fresh interpreter."""
    program = (
        "import sys, minipaged.cli.simulation\n"
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_matplotlib_a_figure_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(plots.PlotError, match=r'pip install -c constraints.txt -e "\.\[plot\]"'):
        plots.save_figure({"panels": []}, tmp_path / "x.svg")


def _result(source: str = "PagedAttention paper, Fig. 1") -> dict:
    panels = [
        Panel(
            "a",
            "x",
            "y",
            [Curve("one", [1, 2], [1.0, 2.0]), Curve("two", [1, 2], [2.0, 3.0], published=True)],
        ),
        Panel("b", "", "y", [Curve("one", ["p", "q"], [1.0, 2.0])], kind="bar"),
        Panel("c", "", "y", [Curve("one", ["p"], [1.0]), Curve("two", ["p"], [2.0])], kind="stacked"),
        Panel("d", "x", "y", [Curve("one", [1, 2], [1.0, 2.0])], x_scale="log2", y_scale="log"),
    ]
    claims = [
        Claim("speed", "Fig. 1", 2.0, 3.0, "x", "because of this"),
        Claim("size", "Fig. 1", (None, 5.0), 3.0, "B"),
        Claim("other", "Fig. 1", None, 12300.0, "B"),
        Claim("knee", "Fig. 1", 10.0, 2.0, "B", reading="plot"),
    ]
    experiment = Experiment("demo", "A demo", source, "Nothing.", dict, lambda results: (claims, panels))
    return as_json(experiment, {})


def test_the_same_result_gives_the_same_figure_byte_for_byte(tmp_path):
    """Catches a date or a random id in the SVG, which would change the docs with every run."""
    pytest.importorskip("matplotlib", reason="figures need the extra `plot`")
    for name in ("a.svg", "b.svg"):
        plots.save_figure(_result(), tmp_path / name)
    drawn = (tmp_path / "a.svg").read_bytes()
    assert drawn == (tmp_path / "b.svg").read_bytes()
    assert b"#ffffff" not in drawn.lower(), "a white background hides the grey text of a dark page's theme"


def test_the_legend_lies_below_all_panels_and_on_the_sheet():
    """Catches a legend over the bars or the axis' name, and one whose ends are cut off."""
    pytest.importorskip("matplotlib", reason="figures need the extra `plot`")
    result = _result()
    for panels in (result["panels"], result["panels"][2:3]):
        for curve in panels[0]["curves"]:
            curve["label"] += ", with a name that takes the room of a few"
        figure = plots.draw({"panels": panels})
        figure.draw_without_rendering()
        (legend,) = figure.legends
        box, sheet = legend.get_window_extent(), figure.bbox
        assert sheet.x0 <= box.x0 < box.x1 <= sheet.x1
        assert all(axis.get_tightbbox().y0 >= box.y1 for axis in figure.axes)
        assert [text.get_text() for text in legend.get_texts()][:2] == [
            curve["label"] for curve in panels[0]["curves"]
        ]


def test_a_label_looks_the_same_in_all_panels_and_a_system_in_all_figures():
    """Catches colours counted panel by panel: one legend would be wrong for all but the first."""
    pytest.importorskip("matplotlib", reason="figures need the extra `plot`")
    lines = [
        Panel(title, "x", "y", [Curve(label, [1, 2], [1.0, 2.0]) for label in labels])
        for title, labels in (("a", ["one", "two"]), ("b", ["two"]), ("c", ["paged", "one"]))
    ]

    def colours(*panels: Panel) -> list[dict[str, str]]:
        figure = plots.draw({"panels": [asdict(panel) for panel in panels]})
        return [{line.get_label(): line.get_color() for line in axis.lines} for axis in figure.axes]

    first, second = colours(*lines[:2])
    assert second["two"] == first["two"] != first["one"]
    alone = Panel("d", "x", "y", [Curve("paged", [1], [1.0])])
    several = Panel("e", "x", "y", [Curve(name, [1], [1.0]) for name in ("Orca (Max)", "paged")])
    beside = Panel("f", "x", "y", [Curve(name, [1], [1.0]) for name in ("shared", "plain", "paged")])
    looks = colours(beside)[0]
    assert colours(alone)[0]["paged"] == colours(several)[0]["paged"] == looks["paged"]
    assert len(set(looks.values())) == 3


def test_the_page_shows_published_beside_measured_with_reason_and_command():
    moved = [{"figure": "speed", "source": "Fig. 1", "value": 3.0, "change": {"step_seconds": [4.0, -3.5]}}]
    shown = page([_result()], moved)
    assert "| speed (1) | Fig. 1 | 2 x | 3 x | 1.50 |" in shown
    assert "(1) Because of this." in shown
    assert "| size | Fig. 1 | up to 5 B | 3 B | holds |" in shown
    assert "| knee | Fig. 1 | 10 B (plot) | 2 B | 0.20 |" in shown
    assert "| speed | Fig. 1 | 3 | +4 / -3.5 |  |" in shown
    assert "| other | Fig. 1 | 12,300 B |" in shown
    assert "minipaged reproduce demo" in shown
    assert "`step_seconds`" in shown


def test_a_number_is_rounded_once():
    """Catches 308 / 121 = 2.5454..., rounded to 2.545 for the JSON, and from there to 2.54 for the page."""
    claims = [Claim("gain", "Fig. 1", 2.0, 308 / 121), Claim("more", "Fig. 1", 2.0, 2 * 1.12498)]
    experiment = Experiment("demo", "A demo", "source", "Nothing.", {}, lambda results: (claims, []))
    shown = page([as_json(experiment, {})], [])
    assert "| gain | Fig. 1 | 2 x | 2.55 x | 1.27 |" in shown
    assert "| more | Fig. 1 | 2 x | 2.25 x | 1.12 |" in shown


def test_the_page_is_made_from_the_results_beside_it_and_names_the_set_ups_of_today():
    """Catches a text that is changed in the code but not on the page, or the other way round."""
    folder = Path(__file__).parents[2] / "docs/reproduce"
    results, changes = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("results", "sensitivity")
    )
    assert page(results, changes) == (folder / "index.md").read_text(encoding="utf-8")
    shown = {name: (experiment.title, experiment.setup) for name, experiment in EXPERIMENTS.items()}
    assert {result["experiment"]: (result["title"], result["setup"]) for result in results} == shown


def test_the_page_tells_the_papers_own_figures_from_those_of_other_sources():
    """Catches a list of the furthest off in which one source leaves no room for the paper."""
    shown = page([_result(), _result("a pull request")], [])
    furthest = shown.split("## Furthest off")[1].split("\n## ")[0]
    paper, others = furthest.split("In other sources:")
    assert "In the paper:" in paper
    for rows in (paper, others):
        names = [row.split(" | ")[0] for row in rows.splitlines() if row.startswith("| ")]
        assert names == ["| claim", "| knee", "| speed"]
    assert "other sources" not in page([_result()], []), "a table without rows"


@pytest.mark.parametrize(
    ("platform", "threads", "clock"),
    [
        ("linux", 1, time.process_time),
        ("linux", 2, time.perf_counter),
        ("win32", 1, time.perf_counter),
    ],
)
def test_steps_are_measured_with_a_clock_that_is_finer_than_a_step(platform, threads, clock, monkeypatch):
    """Catches a fit of steps of 0 s on Windows, whose CPU time goes on by 16 ms."""

    class Measured(Exception):
        pass

    def measure(engine, **options):
        assert options["clock"] is clock
        raise Measured

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr("minipaged.simulation.calibration.calibrate", measure)
    monkeypatch.setattr(
        "minipaged.cli.simulation.load", lambda *args, **options: SimpleNamespace(engine=None)
    )
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(Measured):
        calibrate(options={}, threads=threads)


def test_experiments_run_on_a_windows_machine_of_many_cores(monkeypatch):
    """Catches a ValueError: a pool has at most 61 processes there."""
    monkeypatch.setattr("os.cpu_count", lambda: 128)
    monkeypatch.setattr(sys, "platform", "win32")
    assert run_cases([], lambda done, total: None) == []


def test_guesses_cannot_be_calibrated():
    """Catches a fit of steps that the simulation does not have."""
    with pytest.raises(
        ValueError, match="num_speculative_tokens has no effect in a simulation; leave it out"
    ):
        calibrate(options={"num_speculative_tokens": 4})


LARGEST = """
from minipaged.scheduling import Recompute

class LargestVictim(Recompute):
    def choose_victim(self, candidates):
        return max(candidates, key=lambda request: sum(s.num_computed_tokens for s in request.sequences))
"""


def test_a_class_of_your_own_is_simulated_beside_the_default(tmp_path):
    """Catches a policy that nobody can judge without wiring the simulator up by hand."""
    file = tmp_path / "mine.py"
    file.write_text(LARGEST)
    mine = ("--use", f"preemption={file}:LargestVictim")
    tight = {"num_blocks": 40, "preemption_mode": "recompute"}
    default, yours = json.loads(command_line(*SMALL, *mine, "--json", options=tight))
    assert default.pop("use") == {}
    assert yours.pop("use") == {"preemption": f"{file}:LargestVictim"}
    assert default.pop("rate") == yours.pop("rate") == 10
    assert default == json.loads(command_line(*SMALL, "--json", options=tight))
    assert yours["requests"] == default["requests"]
    assert yours["preemptions"] > 0
    assert yours != default
    table = command_line(*SMALL, *mine, options=tight)
    assert re.search("metric .* default .* yours", table)
    swept = command_line(*SMALL, *mine, "--sweep", "block_size=8,16", options=tight)
    assert re.search("8, default .* 8, yours", swept)


def test_an_experiment_gets_its_results_in_the_order_of_its_cases(monkeypatch):
    """Catches claims whose order depends on which process is done first."""
    monkeypatch.setattr(
        "minipaged.simulation.reproduce.run_cases",
        lambda cases, progress, note: [note(number, cases[number]()) for number in (1, 0)],
    )
    cases = {"first": lambda: 1.0, "second": lambda: 2.0}
    one = Experiment("x", "X", "", "", cases, lambda results: ([Claim(key, "", 1, 1) for key in results], []))
    [result] = run_experiments([one], lambda done, total: None)
    assert [claim["claim"] for claim in result["claims"]] == ["first", "second"]


WASTEFUL = """
from minipaged.memory import OnDemand

class Wasteful(OnDemand):
    def at_admission(self, needed, remaining):
        return (min(remaining, 4 * needed + 10),)
"""


def test_an_experiment_runs_with_a_class_of_your_own(monkeypatch, tmp_path):
    """Catches baselines that change, reasons that were found for another class, and a command without it."""
    file = tmp_path / "mine.py"
    file.write_text(WASTEFUL)
    short = {name: partial(fig13.batched, "b", name, 8.0) for name in ("orca-oracle", "paged")}
    claims = lambda results: ([Claim(n, "Fig. 13 b", 1.0, v, note="why") for n, v in results.items()], [])  # noqa: E731
    monkeypatch.setitem(EXPERIMENTS, "fig13", Experiment("fig13", "Batched", "", "", short, claims))
    use = f"page_growth={file}:Wasteful"
    own = json.loads(command_line("reproduce", "fig13", "--json"))
    mine = json.loads(command_line("reproduce", "fig13", "--json", "--use", use))
    assert mine[0]["measured"] == own[0]["measured"]
    assert mine[1]["measured"] < 0.9 * own[1]["measured"]
    assert [claim["note"] for claim in own + mine] == ["why", "why", "", ""]
    assert mine[1]["command"] == f"minipaged reproduce fig13 --use {use}"
    assert re.search("published .* yours .* ratio", command_line("reproduce", "fig13", "--use", use))


def test_a_class_that_asks_where_a_request_of_an_experiment_ends_is_told_that_it_cannot(tmp_path):
    """Catches "'NoParams' object has no attribute 'n'" alone, from a worker."""
    file = tmp_path / "mine.py"
    file.write_text(
        LARGEST.replace("sum(s.num_computed_tokens for s in request.sequences)", "request.params.n")
    )
    with pytest.raises(ValueError, match=r"simulated requests have no request.params: go by"):
        command_line("reproduce", "fig02", "--use", f"preemption={file}:LargestVictim")


@pytest.mark.parametrize(
    ("experiment", "concept"),
    [("growth", "page_growth"), ("growth", "prefill_first"), ("fig19", "preemption")],
)
def test_an_experiment_keeps_the_classes_that_it_is_about(experiment, concept, monkeypatch, tmp_path):
    """Catches "requests finished, reserve all" of a class of your own, and one that is not used at all."""
    monkeypatch.setattr("minipaged.simulation.reproduce.run_cases", lambda *_: pytest.fail("ran"))
    names = {"page_growth": "OnDemand", "prefill_first": "PrefillFirst", "preemption": "Recompute"}
    file = tmp_path / "mine.py"
    file.write_text("from minipaged.memory import *\nfrom minipaged.scheduling import *\n")
    message = f"{experiment} chooses {concept} itself; leave it or --use {concept} out"
    with pytest.raises(ValueError, match=re.escape(message)):
        command_line("reproduce", "fig02", experiment, "--use", f"{concept}={file}:{names[concept]}")


def test_a_class_that_breaks_its_contract_in_a_simulation_gets_one_line(tmp_path):
    """Catches the traceback of a worker."""
    file = tmp_path / "mine.py"
    file.write_text(LARGEST.replace("return max", "return [max").replace("sequences))", "sequences))]"))
    message = r"preemption: choose_victim chose .*, which is not one of the candidates"
    with pytest.raises(ValueError, match=message) as caught:
        command_line(*SMALL, "--use", f"preemption={file}:LargestVictim", options={"num_blocks": 40})
    assert "\n" not in str(caught.value)


def test_a_class_that_asks_where_a_simulated_request_ends_is_told_that_it_cannot(tmp_path):
    """Catches "'NoParams' object has no attribute 'max_tokens'" alone."""
    file = tmp_path / "mine.py"
    file.write_text(
        LARGEST.replace("sum(s.num_computed_tokens for s in request.sequences)", "request.params.n")
    )
    message = (
        r"\(mine.py, line 6\); simulated requests have no request.params: go by request.prompt_token_ids"
    )
    with pytest.raises(ValueError, match=message):
        command_line(*SMALL, "--use", f"preemption={file}:LargestVictim", options={"num_blocks": 40})


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("preemption=nowhere.py:Mine", "there is no file nowhere.py"),
        ("drafter=nowhere.py:Mine", "--use drafter has no effect in a simulation; leave it out"),
    ],
)
def test_a_class_that_cannot_be_simulated_is_refused_before_the_run(monkeypatch, use, message):
    """Catches a wait for nothing, and a drafter whose two columns are the same."""
    monkeypatch.setattr("minipaged.simulation.serving.run_cases", lambda *_: pytest.fail("ran"))
    monkeypatch.setattr("minipaged.simulation.reproduce.run_cases", lambda *_: pytest.fail("ran"))
    with pytest.raises(ValueError, match=re.escape(message)):
        command_line("reproduce", "fig02", "--use", use)
    with pytest.raises(ValueError, match=re.escape(message)):
        command_line(*SMALL, "--use", use)


def test_a_pool_that_the_chips_do_not_have_is_refused():
    """Catches a mistyped size that gives a fifth more throughput than the chip can."""
    for name, value in (("kv_cache_memory", 10 * 2**40), ("num_blocks", 10**6)):
        with pytest.raises(
            ValueError, match=f"{name} is {value}; beside the weights, the memory has room for"
        ):
            command_line("simulate", "--hardware", "a10g", "--requests", "3", options={name: value})


LOOPS = """
from minipaged.scheduling import FCFSScheduler

class Loops(FCFSScheduler):
    def schedule(self):
        print("looping", flush=True)
        while True:
            pass
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process")
@pytest.mark.parametrize(
    "command", [("simulate", "--requests", "5"), pytest.param(("learn", "score"), marks=pytest.mark.slow)]
)
def test_the_processes_of_a_command_end_with_it(tmp_path, command):
    """Catches an endless loop in a student's class that goes on when its command was killed."""
    file = tmp_path / "loops.py"
    file.write_text(LOOPS)
    line = [sys.executable, "-m", "minipaged", *command, "--use", f"scheduler={file}:Loops"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert any("looping" in text for text in process.stdout)
        process.kill()
        assert process.stdout.read().count("Traceback") == 0, "ends when nobody can write any more"
