"""A command in bad surroundings: streams that are closed, full or ASCII, bytes that are not text."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from minipaged import BeamSearchParams, EngineConfig, SamplingParams
from minipaged.bench import run_workload
from minipaged.text_io import TextError, check_writable, read_json
from minipaged.viewer.page import live_page
from minipaged.viewer.trace import TraceWriter
from tests.engine.test_cli import call

SHORT = ("generate", "--prompt", "The sun", "--max-tokens", "3", "--num-blocks", "64")
FULL = Path("/dev/full")
needs_full_device = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")


def shell(command: str, **environment: str) -> subprocess.CompletedProcess:
    """A command of its own process, with its streams as the shell arranges them; python is `$PYTHON`."""
    variables = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(["bash", "-c", command], capture_output=True, env=variables, timeout=120)


@needs_full_device
def test_a_full_standard_output_loses_nothing(loaded, capsys, monkeypatch):
    """Catches a traceback instead of the texts that took an hour: they are in a temporary file."""
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = call(capsys, monkeypatch, *SHORT, "--json")
    assert code == 2
    assert "cannot write standard output: No space left on device; the result is in " in err
    kept = Path(re.search(r"is in (\S+)", err)[1])
    assert json.loads(kept.read_text())["outputs"][0]["prompt"] == "The sun"
    kept.unlink()


@needs_full_device
def test_a_full_trace_does_not_end_the_run(loaded, capsys, monkeypatch):
    """Catches an OSError out of a step that takes the generated texts with it."""
    code, out, err = call(capsys, monkeypatch, *SHORT, "--trace", str(FULL))
    assert code == 2
    assert "The sun" in out
    assert err.count("minipaged: ") == 1
    assert "cannot write trace /dev/full: No space left on device; choose" in err


@needs_full_device
def test_a_trace_that_fails_in_the_middle_lets_the_engine_go_on(llm):
    """Catches requests that are rolled back forever because of a disk."""
    writer = TraceWriter(FULL, llm.engine)
    (output,) = llm.generate("The sun", SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 300
    with pytest.raises(TextError, match="cannot write trace /dev/full"):
        writer.close()


@needs_full_device
def test_generated_ids_that_cannot_be_written_are_kept(capsys, monkeypatch, tmp_path):
    """Catches a benchmark whose figures and tokens are gone because of its last line."""
    workload = tmp_path / "w.json"
    workload.write_text(json.dumps([{"prompt_token_ids": [5, 6, 7], "max_tokens": 4}]))
    options = ("--num-blocks", "64", "--json", "--tokens-out", str(FULL))
    code, out, err = call(capsys, monkeypatch, "bench", "--workload", str(workload), *options)
    assert code == 2
    assert json.loads(out)["output_tokens"] == 4
    kept = Path(re.search(r"is in (\S+)", err)[1])
    assert [len(ids) for ids in json.loads(kept.read_text())] == [4]
    kept.unlink()


def test_a_result_may_go_through_a_link_to_a_file_that_is_not_there_yet(tmp_path):
    """Catches a link that is taken away by the check, with an empty file left where it led."""
    link, target = tmp_path / "latest.jsonl", tmp_path / "1.jsonl"
    link.symlink_to(target)
    check_writable("trace", link)
    assert link.is_symlink()
    assert not target.exists()


def test_the_check_of_a_result_changes_nothing(tmp_path):
    """Catches yesterday's result lost to a run that fails, an empty file after one, and a traceback about a
    source that is not there, which is reported when it is read."""
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text("yesterday's")
    for result in (old, new):
        check_writable("trace", result, tmp_path / "missing", None)
    assert old.read_text() == "yesterday's"
    assert not new.exists()


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    """Catches a prompt, or JSON, of an editor on Windows that begins with a character nobody sees."""
    file = tmp_path / "bom.json"
    file.write_bytes(b"\xef\xbb\xbf[5]")
    assert read_json("workload", file) == [5]


def test_json_that_is_nested_too_deeply_is_reported(tmp_path):
    """Catches a RecursionError."""
    file = tmp_path / "deep.json"
    file.write_text("[" * 100_000)
    with pytest.raises(TextError, match=r"workload .*deep.json is not JSON: "):
        read_json("workload", file)


def test_an_ascii_terminal_gets_every_line(loaded, capsys, monkeypatch):
    """Catches a UnicodeEncodeError; characters that the terminal lacks are replaced."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    code, _, err = call(capsys, monkeypatch, "generate", "--prompt", "Café", "--max-tokens", "2")
    assert code == 0
    assert "minipaged: " not in err
    assert "Error" not in err
    terminal.seek(0)
    assert "Caf?" in terminal.read()


@pytest.mark.parametrize(
    ("stdin", "expected"),
    [
        (None, "standard input is closed; give a file"),
        (
            io.TextIOWrapper(io.BytesIO(b"caf\xe9\n")),
            "standard input is not UTF-8 text: byte 0xe9 at position 3",
        ),
        (io.TextIOWrapper(io.BytesIO(b"\n")), "standard input has no prompt; give one per line"),
    ],
    ids=["closed", "latin-1", "blank"],
)
def test_standard_input_that_is_not_text(stdin, expected, capsys, monkeypatch):
    """Catches an AttributeError of None, or a codec's message without a name."""
    monkeypatch.setattr(sys, "stdin", stdin)
    code, out, err = call(capsys, monkeypatch, "generate", "--prompt-file", "-")
    assert (code, out) == (2, "")
    assert expected in err


def test_prompts_come_from_standard_input_as_utf_8(loaded, capsys, monkeypatch):
    """Catches a locale that decides what a prompt is."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Café\n".encode()), encoding="latin-1"))
    code, out, _ = call(capsys, monkeypatch, "generate", "--prompt-file", "-", "--max-tokens", "2", "--json")
    assert code == 0
    assert json.loads(out)["outputs"][0]["prompt"] == "Café"


@pytest.mark.parametrize(
    ("command", "code", "expected"),
    [
        ("$PYTHON -m minipaged generate --prompt $'caf\\xe9'", 2, "'\\udce9' at position 3"),
        (
            "$PYTHON -m minipaged generate --max-tokens 2 >&-",
            2,
            "it is closed; the result is in",
        ),
        pytest.param(
            "$PYTHON -m minipaged generate --max-tokens 2 > /dev/full",
            2,
            "No space left on device",
            marks=pytest.mark.slow,
        ),
        ("$PYTHON -m minipaged generate --prompt-file - <&-", 2, "standard input"),
        ("$PYTHON -m minipaged generate --top-p 0 2>&-", 2, ""),
        pytest.param("$PYTHON -m minipaged generate --top-p 0 2> /dev/full", 2, "", marks=needs_full_device),
        ("PYTHONIOENCODING=ascii $PYTHON -m minipaged learn --help", 0, ""),
        ("$PYTHON -m minipaged --help | true", 0, ""),
        pytest.param("$PYTHON -m minipaged serve --port 0 | true", 0, "", marks=pytest.mark.slow),
    ],
)
def test_a_process_with_bad_streams(command, code, expected):
    """Catches what only a process of its own shows: errors at exit, file descriptors that are missing."""
    done = shell(command)
    err = done.stderr.decode(errors="replace")
    assert done.returncode == code, err
    assert expected in err
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    for kept in re.findall(r"is in (/\S+)", err):
        Path(kept).unlink()


def test_a_page_does_not_depend_on_the_encoding_of_the_locale():
    """Catches a viewer with garbage for its arrows on Windows, whose locale is not UTF-8."""
    code = (
        "import sys; from minipaged.viewer.page import live_page; "
        "sys.stdout.buffer.write(live_page().encode())"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    variables = {**os.environ, **ascii_only}
    page = subprocess.run([sys.executable, "-c", code], capture_output=True, env=variables, check=True).stdout
    assert page.decode() == live_page()
    assert not page.isascii()


@pytest.mark.parametrize("folder", ["minipaged", "kernels"])
def test_every_text_file_is_read_and_written_in_an_encoding_that_is_named(folder):
    """Catches text that Windows reads as cp1252."""
    unnamed = []
    for file in sorted((Path(__file__).parents[2] / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            is_text = name in ("read_text", "write_text") and isinstance(node.func, ast.Attribute)
            if name == "open" and node.args and isinstance(node.args[-1], ast.Constant):
                is_text = "b" not in str(node.args[-1].value)
            if is_text and "encoding" not in [keyword.arg for keyword in node.keywords]:
                unnamed.append(f"{file.name}, line {node.lineno}: {ast.unparse(node)}")
    assert unnamed == []


@pytest.mark.parametrize("module", ["typer", "minipaged.cli.bench", "minipaged.execution.model_runner"])
def test_ctrl_c_during_an_import_prints_no_traceback(module):
    """Catches a traceback in the first second, before the command line runs."""
    code = f"""
        import runpy, signal, sys
        class Interrupting:
            def find_spec(self, name, *others):
                if name == "{module}":
                    signal.raise_signal(signal.SIGINT)
        sys.meta_path.insert(0, Interrupting())
        runpy.run_module("minipaged", run_name="__main__", alter_sys=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), "generate", "hi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.strip()) == (130, "")


def test_numbers_of_numpy_are_numbers(llm):
    """Catches "ids are 0 to 2047" as an answer to np.int64(5)."""
    plain = SamplingParams(temperature=0.5, max_tokens=4, seed=3, stop_token_ids=[7])
    own = SamplingParams(
        temperature=np.float32(0.5), max_tokens=np.int64(4), seed=np.int32(3), stop_token_ids=[np.int64(7)]
    )
    assert own == plain
    assert type(own.max_tokens) is int
    assert EngineConfig(block_size=np.int64(16)) == EngineConfig(block_size=16)
    assert type(EngineConfig(num_blocks=np.int64(16)).num_blocks) is int
    (expected,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, plain)
    (output,) = llm.generate({"prompt_token_ids": np.array([5, 6, 7])}, own)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert all(type(token) is int for token in output.prompt_token_ids)
    request = llm.engine.add_request("own", [np.int64(5)], BeamSearchParams(beam_width=np.int64(2)))
    assert type(request.prompt_token_ids[0]) is int
    llm.engine.abort("own")


def test_a_workload_is_checked_before_it_runs(llm):
    """Catches an entry that is refused after the ones before it have been computed."""
    item = {"prompt_token_ids": [5], "max_tokens": 2}
    steps = llm.engine.metrics.steps
    with pytest.raises(ValueError, match="entry 1: the prompt has token id 9999"):
        run_workload(llm, [item, {**item, "prompt_token_ids": [9999]}])
    assert llm.engine.metrics.steps == steps
    assert not llm.engine.has_unfinished


def test_a_failed_request_leaves_the_results_of_the_others(loaded, capsys, monkeypatch):
    """Catches an exit code 0, or texts that are thrown away."""
    runner = loaded.engine.executor
    forward = runner.forward

    def spoilt(batch):
        logits = forward(batch)
        for row, scheduled in enumerate(batch.sampling):
            if scheduled.sequence.request.request_id == failing:
                logits[row] = float("nan")
        return logits

    last = int(loaded.generate("The fox", SamplingParams(max_tokens=1))[0].request_id)
    failing = str(last + 2)
    monkeypatch.setattr(runner, "forward", spoilt)
    arguments = ("generate", "--prompt", "The sun", "--prompt", "The moon", "--max-tokens", "3")
    code, out, err = call(capsys, monkeypatch, *arguments)
    assert code == 1
    assert "The sun" in out
    assert f"minipaged: request {failing} failed: " in err
    assert "not finite" in err
    failing = str(last + 3)
    code, out, err = call(capsys, monkeypatch, "generate", "--max-tokens", "3", "--stream")
    assert code == 1
    assert "not finite" in err
