"""The scripts of a GPU machine, run dry where there is none."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import is_alive, wait_until

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_dry(script: str, folder: Path, *options: str) -> list[dict]:
    """What a script recorded."""
    pytest.importorskip("triton", reason="needs the package triton")
    if script != "check_kernels" and torch.version.cuda is None and shutil.which("c++") is None:
        pytest.skip("a pretend GPU needs a C++ compiler")
    command = [sys.executable, "-m", f"tests.gpu.{script}", "--dry-run", "--out", str(folder), *options]
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, timeout=280)
    [file] = folder.glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_a_dry_run_takes_every_step_and_writes_its_results(tmp_path):
    """Catches a script that rots unseen until a GPU is paid for."""
    from tests.gpu.benchmarks.__main__ import DEFAULT, ENGINES

    header, *results = run_dry("benchmarks", tmp_path, *DEFAULT, *ENGINES)
    assert header["dry_run"]
    measured = {result["benchmark"] for result in results if "value" in result}
    assert measured >= {"read ceiling", "decode", "paging overhead", "prefill", "copy", "swap in"}
    assert measured >= {"engine", "step"}
    missing = [result["parameters"] for result in results if "not_measured" in result]
    # What a CPU lacks, and what a pretend GPU cannot run.
    expected = ("varlen_attn", "cuDNN", "flex_attention", "5 new of 33 tokens, GQA 4: SDPA")
    assert all(any(name in p for name in expected) for p in missing), missing


@pytest.mark.slow
def test_the_checks_pass_dry(tmp_path):
    """Catches a check that fails for reasons of its own."""
    results = run_dry("check_kernels", tmp_path, "--jobs", "2")
    assert {result["result"] for result in results} <= {"passed", "not run"}
    assert sum(result["result"] == "passed" for result in results) > 20


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_stopped(tmp_path):
    """Catches tilings timed twice, and results lost between two calls of a few minutes."""
    first = run_dry("sweep", tmp_path)
    assert {record["kernel"] for record in first} == {"decode", "prefill"}
    assert all(record["ms"] > 0 for record in first)
    assert run_dry("sweep", tmp_path) == first


def test_a_failed_check_and_a_failed_benchmark_are_recorded_and_end_nothing_else(tmp_path):
    """Catches an exception that takes the results before it, and the checks after it, along."""
    pytest.importorskip("triton", reason="needs the package triton")
    from tests.gpu.benchmarks.timing import Machine
    from tests.gpu.check_kernels import run
    from tests.gpu.records import Records

    def wrong() -> None:
        raise RuntimeError("illegal access\nof memory")

    records = Records(tmp_path / "records.jsonl")
    assert not run({"wrong": wrong, "fine": lambda: None}, records, seconds=60)
    machine = Machine(dry_run=True, records=records)
    with machine.attempt("decode", "batch 1"):
        wrong()
    found = records.read()
    assert [record.get("result") for record in found] == ["failed", "passed", None]
    assert found[0]["reason"] == found[2]["not_measured"] == "RuntimeError: illegal access"


ALL_TIME_TAKEN = """
python3() { :; }
timeout() { echo "$3" > "$CALLS.given"; echo "${*:4}" >> "$CALLS"; return 124; }
wait() {
    local status=0
    builtin wait "$@" || status=$?
    SECONDS=$((SECONDS + $(< "$CALLS.given")))
    return $status
}
trap 'echo $SECONDS >> "$CALLS"' EXIT
"""
"""What bash reads before a script: its processes take no time, but all that they are given is over."""


@pytest.mark.parametrize(
    ("step", "count"), [("correctness", 4), ("benchmarks", 1), ("engine", 1), ("sweep", 1)]
)
def test_a_step_takes_less_than_four_minutes_even_if_everything_in_it_hangs(tmp_path, step, count):
    """Catches limits that are each short enough, but not together: who waits four minutes loses the rest."""
    pytest.importorskip("triton", reason="needs the package triton")  # (a script for Linux)
    (tmp_path / "before.sh").write_text(ALL_TIME_TAKEN)
    own = {"BASH_ENV": str(tmp_path / "before.sh"), "CALLS": str(tmp_path / "calls")}
    command = ["bash", str(ROOT / "tests/gpu/run.sh"), f"--{step}", "--out", str(tmp_path / "out")]
    assert subprocess.run(command, env=ENVIRONMENT | own, capture_output=True, check=False).returncode == 1
    *calls, seconds = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == count
    assert int(seconds) < 240


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process_behind(tmp_path, sent):
    """Catches jobs that go on using the device, and writing into the results of the next run."""
    pytest.importorskip("triton", reason="needs the package triton")  # (a script for Linux)
    program = tmp_path / "python3"
    program.write_text(
        "#!/bin/bash\nsleep 100 &\n"
        f"echo $$ $! > {tmp_path}/started && mv {tmp_path}/started {tmp_path}/pids\nwait\n"
    )
    program.chmod(0o755)
    command = ["bash", str(ROOT / "tests/gpu/run.sh"), "--sweep", "--dry-run", "--out", str(tmp_path / "out")]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.Popen(command, env=ENVIRONMENT | path, start_new_session=True)
    pids = tmp_path / "pids"
    wait_until(pids.exists, 20, "the job starts")
    run.send_signal(sent)
    assert run.wait(10) == 130
    jobs = list(map(int, pids.read_text().split()))
    assert len(jobs) == 2
    wait_until(lambda: not any(map(is_alive, jobs)), 10, "the job has ended")


def test_checks_that_had_no_time_are_no_success(tmp_path):
    """Catches a slow machine on which nearly nothing was checked, and all is well."""
    pytest.importorskip("triton", reason="needs the package triton")
    from tests.gpu.check_kernels import run
    from tests.gpu.records import Records

    records = Records(tmp_path / "records.jsonl")
    assert not run({"fine": int}, records, seconds=-1)
    assert [record["result"] for record in records.read()] == ["not run"]


def test_after_a_lost_context_no_check_is_called_failed(tmp_path, monkeypatch):
    """Catches a hundred failures that are one: after an illegal access every call of the process fails."""
    pytest.importorskip("triton", reason="needs the package triton")
    from tests.gpu import check_kernels
    from tests.gpu.records import Records

    def wrong() -> None:
        raise RuntimeError("illegal access")

    records = Records(tmp_path / "records.jsonl")
    monkeypatch.setattr(check_kernels, "has_context", lambda: False)
    assert not check_kernels.run(
        {"fine": int, "wrong": wrong, "next": wrong, "last": int}, records, seconds=60
    )
    assert [record["result"] for record in records.read()] == ["passed", "failed", "not run", "not run"]
    assert records.read()[-1]["reason"] == "the context is lost after wrong"


@pytest.mark.slow
def test_kernels_are_checked_without_pytest_or_transformers():
    """Catches an import that a machine with torch and triton alone does not have."""
    pytest.importorskip("triton", reason="needs the package triton")
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('pytest', 'transformers', 'hypothesis', 'typer')));"
        "import tests.gpu.check_kernels, tests.gpu.sweep, tests.gpu.benchmarks.__main__"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_package_needs_no_triton():
    """Catches an import of triton where nobody has chosen it; who chooses it reads what is missing."""
    program = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import minipaged.llm\n"
        "from minipaged.kernels import dispatch\n"
        "dispatch.importlib.util.find_spec = lambda name: None\n"
        "try: dispatch.select_backend('triton', 'cpu')\n"
        "except ValueError as error: print(error)"
    )
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert "the package triton is not installed (pip install triton); use 'torch' or 'auto'" in output
