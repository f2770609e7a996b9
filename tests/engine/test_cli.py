"""The command line as a user meets it: what it prints, and one clear line for every mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from minipaged.cli.main import main
from minipaged.cli.options import LARGE, with_engine_options
from minipaged.config import EngineConfig


def call(capsys, monkeypatch, *arguments: str) -> tuple[int, str, str]:
    """Run the command in this process; exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["minipaged", *arguments])
    with pytest.raises(SystemExit) as exit_code:
        main()
    out, err = capsys.readouterr()
    return exit_code.value.code, out, err


def test_generate_prints_texts_and_an_account_of_memory(capsys, monkeypatch):
    """A main job that needs a flag to work."""
    code, out, err = call(
        capsys, monkeypatch, "generate", "--prompt", "Once upon a time", "--max-tokens", "20"
    )
    assert code == 0
    assert "Once upon a time, " in out
    assert "KV blocks of 16 tokens at peak" in err
    assert "tokens/s" in err


@pytest.mark.parametrize(
    ("sent", "is_closed", "arguments", "is_hinted"),
    [
        (b"The sun", True, (), True),
        (b"The sun", False, (), True),
        (b"", True, (), True),
        (b"", False, (), False),
        (b"The sun", True, ("The moon",), False),
        (b"The sun", True, ("--prompt-file", "-"), False),
    ],
)
def test_a_pipe_that_is_not_read_gets_a_hint(capsys, monkeypatch, sent, is_closed, arguments, is_hinted):
    """Catches `echo TEXT | minipaged generate`, which silently completed the default prompt, and one
    that waits for a pipe that it inherited."""
    reading, writing = os.pipe()
    os.write(writing, sent)
    if is_closed:
        os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        code, _, err = call(capsys, monkeypatch, "generate", *arguments, "--max-tokens", "1")
    if not is_closed:
        os.close(writing)
    assert code == 0
    assert ("--prompt-file -" in err) is is_hinted
    assert err.count("standard input") == is_hinted


def test_a_file_as_standard_input_gets_the_hint_of_a_pipe(capsys, monkeypatch, tmp_path):
    """Catches `minipaged generate < prompts.txt`, which completed the default prompt."""
    path = tmp_path / "prompts.txt"
    path.write_text("The sun\n")
    with path.open(encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert "--prompt-file -" in call(capsys, monkeypatch, "generate", "--max-tokens", "1")[2]


def test_one_is_not_plural_in_the_account(capsys, monkeypatch):
    """Catches "1 tokens in 0.01 s" and "1 steps"."""
    arguments = ("--max-tokens", "1", "--block-size", "1", "--num-speculative-tokens", "2")
    code, _, err = call(capsys, monkeypatch, "generate", *arguments)
    assert code == 0
    assert "KV blocks of 1 token at peak" in err
    assert "\n1 token in " in err
    assert err.endswith("; 1 step\n")


def test_generate_json_has_the_documented_shape(capsys, monkeypatch):
    """Scripts that read the output."""
    code, out, _ = call(
        capsys, monkeypatch, "generate", "--prompt", "a", "--prompt", "b", "--n", "2", "--json"
    )
    assert code == 0
    result = json.loads(out)
    assert [o["prompt"] for o in result["outputs"]] == ["a", "b"]
    completion = result["outputs"][0]["completions"][1]
    assert set(completion) == {"text", "token_ids", "finish_reason", "cumulative_logprob"}
    assert result["stats"]["peak_kv_blocks"] > 0


def test_beam_search_reports_what_sharing_saved(capsys, monkeypatch):
    """The saving of the paper's Fig. 15 not shown."""
    code, _, err = call(
        capsys, monkeypatch, "generate", "--beam-width", "4", "--n", "2", "--max-tokens", "24"
    )
    assert code == 0
    assert "sharing saved" in err
    assert "\n96 tokens of all beams, kept or dropped, in " in err
    assert "completion 2" in err


def test_prompts_come_from_a_file(capsys, monkeypatch, tmp_path):
    """A line lost, or the empty line taken for a prompt."""
    path = tmp_path / "prompts.txt"
    path.write_text("The sun\u2028up\n\nThe moon\n")  # (a line separator of Unicode's is text)
    code, out, _ = call(
        capsys, monkeypatch, "generate", "--prompt-file", str(path), "--max-tokens", "3", "--json"
    )
    assert code == 0
    assert [o["prompt"] for o in json.loads(out)["outputs"]] == ["The sun\u2028up", "The moon"]


def test_a_file_of_ones_own_is_loaded_once(capsys, monkeypatch, tmp_path):
    """Catches what it prints, and warnings about it, twice."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from minipaged.memory import BlockAllocator\nprint('loaded')\nclass Mine(BlockAllocator): pass\n"
    )
    code, out, _ = call(
        capsys,
        monkeypatch,
        "generate",
        "--prompt",
        "a",
        "--max-tokens",
        "2",
        "--use",
        f"allocator={mine}:Mine",
    )
    assert code == 0
    assert out.count("loaded") == 1


def test_stream_prints_the_same_text(capsys, monkeypatch):
    """A stream that loses its last piece."""
    arguments = ("generate", "--prompt", "The sun", "--max-tokens", "12")
    _, streamed, err = call(capsys, monkeypatch, *arguments, "--stream")
    _, out, _ = call(capsys, monkeypatch, *arguments, "--json")
    assert streamed == json.loads(out)["outputs"][0]["completions"][0]["text"] + "\n"
    assert "12 tokens in " in err


def test_a_stream_shows_the_same_blocks(capsys, monkeypatch):
    """Catches a pool without the tables in it, because a stream has no output of its own."""
    arguments = ("generate", "--max-tokens", "20", "--show-blocks")
    _, streamed, _ = call(capsys, monkeypatch, *arguments, "--stream")
    _, whole, _ = call(capsys, monkeypatch, *arguments)
    assert "\nRequest 0: 24 tokens in 2 blocks" in streamed
    begin = "\nThe pool at its fullest"
    assert streamed[streamed.index(begin) :] == whole[whole.index(begin) :]


def test_a_result_does_not_overwrite_what_it_is_made_from(capsys, monkeypatch, tmp_path):
    """Catches prompts, a workload, a schema or a class of one's own that is lost, by whatever path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))  # it may not be installed
    sources = {
        "prompts.txt": "The robot",
        "workload.json": '[{"prompt_token_ids": [5], "max_tokens": 2}]',
        "lengths.json": "[[5, 2]]",
        "schema.json": '{"type": "object"}',
        "mine.py": "from minipaged.memory import BlockAllocator\nclass Mine(BlockAllocator): pass\n",
    }
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.jsonl").symlink_to("mine.py")
    (tmp_path / "link.svg").symlink_to("lengths.json")
    for line in (
        "generate --prompt-file prompts.txt --trace prompts.txt",
        "generate --json-schema schema.json --trace ./schema.json",
        "generate --use allocator=mine.py:Mine --trace mine.py",
        f"generate --use allocator={tmp_path}/mine.py:Mine --trace link.jsonl",
        "bench --workload workload.json --tokens-out workload.json",
        "bench --workload workload.json --use allocator=mine.py:Mine --tokens-out mine.py",
        "simulate --workload lengths.json --sweep block-size=8,16 --plot link.svg",
    ):
        code, _, err = call(capsys, monkeypatch, *line.split())
        assert (code, "is the input itself" in err) == (2, True), (line, err)
    assert {name: (tmp_path / name).read_text() for name in sources} == sources


def test_a_schema_may_be_longer_than_a_path(capsys, monkeypatch, tmp_path):
    """Catches a schema that is taken for the name of a file before the trace is written."""
    trace, schema = tmp_path / "t.jsonl", json.dumps({"const": 7, "title": "x" * 5000})
    arguments = "generate", "--prompt", "a", "--json-schema", schema, "--trace", str(trace)
    code, out, err = call(capsys, monkeypatch, *arguments)
    assert (code, out) == (0, "7\n"), err
    assert trace.exists()


def test_samples_and_beams_say_why_they_have_no_drafts(capsys, monkeypatch):
    """Catches a user who waits for drafts that these requests never get."""
    arguments = ("generate", "--prompt", "a", "--max-tokens", "4", "--num-speculative-tokens", "2")
    for more in (("--n", "2"), ("--beam-width", "2")):
        err = call(capsys, monkeypatch, *arguments, *more)[2]
        assert "no draft tokens, which only --n 1 without beams gets; " in err, more
    assert "no draft tokens; " in call(capsys, monkeypatch, *arguments)[2]


def test_json_says_why_a_completion_ended_and_what_it_scored(capsys, monkeypatch):
    """Catches figures that only the text has."""
    options = ("--max-tokens", "12", "--json")
    _, out, _ = call(capsys, monkeypatch, "generate", "Once upon a time", *options, "--beam-width", "2")
    (completion,) = json.loads(out)["outputs"][0]["completions"]
    assert completion["score"] < 0
    _, out, _ = call(capsys, monkeypatch, "generate", "Once upon a time", *options, "--stop", " a")
    (completion,) = json.loads(out)["outputs"][0]["completions"]
    assert (completion["finish_reason"], completion["stop_reason"]) == ("stop", " a")


def test_trace_has_a_header_and_a_line_per_step(capsys, monkeypatch, tmp_path):
    """A trace that cannot be read back."""
    path = tmp_path / "trace.jsonl"
    call(capsys, monkeypatch, "generate", "--max-tokens", "5", "--trace", str(path))
    header, *steps = map(json.loads, path.read_text().splitlines())
    assert header["format"] == "minipaged-trace"
    assert [step["step"] for step in steps] == list(range(5))
    assert steps[0]["events"][0]["kind"] == "admitted"
    assert steps[-1]["finished"] == ["0"]


def test_a_refused_request_leaves_the_trace_of_another_run(capsys, monkeypatch, tmp_path):
    """Catches a trace that is emptied before its first step: the run that was to replace it never began."""
    path = tmp_path / "trace.jsonl"
    path.write_text("kept")
    for options in (("--num-blocks", "1"), ("--max-model-len", "2"), ("--n", "2", "--max-num-seqs", "1")):
        arguments = "generate", "--prompt", "The sun " * 20, *options, "--trace", str(path)
        assert call(capsys, monkeypatch, *arguments)[0] == 2
        assert path.read_text() == "kept"


def test_bench_reports_every_documented_figure(capsys, monkeypatch, tmp_path):
    """A figure that scripts compare is missing."""
    workload = tmp_path / "w.json"
    workload.write_text(json.dumps([{"prompt_token_ids": [5, 6, 7], "max_tokens": 4}] * 3))
    tokens = tmp_path / "t.json"
    monkeypatch.setenv("MINIPAGED_API_KEY", "for a server")  # (not refused, as the option is)
    code, out, _ = call(
        capsys, monkeypatch, "bench", "--workload", str(workload), "--json", "--tokens-out", str(tokens),
        "--threads", "1",
    )  # fmt: skip
    assert code == 0
    assert list(json.loads(out)) == [
        "wall_s",
        "cpu_s",
        "requests",
        "prompt_tokens",
        "output_tokens",
        "out_tok_per_s",
        "out_tok_per_cpu_s",
        "prefill_tok_per_s",
        "decode_tok_per_s",
        "decode_steps_per_s",
        "decode_kv_tokens",
        "steps",
        "ttft_ms_p50",
        "ttft_ms_p95",
        "itl_ms_p50",
        "itl_ms_p99",
        "preemptions",
        "draft_tokens",
        "accepted_tokens",
        "prefix_cache_hit_tokens",
        "peak_kv_blocks",
        "kv_waste",
    ]
    assert [len(ids) for ids in json.loads(tokens.read_text())] == [4, 4, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--blok-size", "3"], "--blok-size"),
        (["generate", "--block-size", "0"], "block_size is 0"),
        (["generate", "--block-size", "x"], "--block-size"),
        (["generate", "--model", "./no/such/model"], "there is no directory ./no/such/model"),
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate", "--prompt", "word " * 5000], "max_model_len"),
        (["generate", "--temperature", "-1"], "temperature is -1"),
        (["generate", "--temperature", "nan"], "temperature is nan"),
        (["generate", "--top-p", "0"], "top_p is 0"),
        (["generate", "--n", "0"], "n is 0"),
        (["generate", "--seed", "1.5"], "--seed"),
        (["generate", "--beam-width", "4", "--top-p", "0.5"], "contradicts top_p"),
        (["generate", "--beam-width", "99999"], "beam_width is 99999"),
        (["generate", "--preemption-mode", "maybe"], "'--preemption-mode': 'maybe' is not one of 'auto',"),
        (["generate", "--json-schema", "[]"], "--json-schema is '[]': no text follows it; give an object"),
        (["generate", "--json-schema", "false"], "--json-schema is 'false': no text follows it"),
        (["generate", "--json-schema", "{bad"], "--json-schema is '{bad', which is not JSON: Expecting"),
        (["generate", "--json-schema", '{"type": "foo"}'], '--json-schema is \'{"type": "foo"}\': Invalid'),
        (["generate", "--regex", "a("], "--regex is 'a(': unclosed group"),
        (["generate", "--prompt-file", "no-such-file"], "cannot read prompt file no-such-file"),
        (["bench", "--workload", "no-such-file"], "cannot read workload no-such-file"),
        (["bench"], "no workload; give --workload FILE, --prompt-tokens and --output-tokens, or --url"),
        (["bench", "--prompt-tokens", "5", "--output-tokens", "5000"], "entry 0 has 5005 tokens"),
        (["calibrate", "--threads", "4096"], "threads is 4096; give a number from 1 to"),
        (["bench", "--prompt-tokens", "4"], "no workload; give --workload FILE"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(capsys, monkeypatch, arguments, message):
    """A traceback, or a mistake that is silently accepted."""
    code, out, err = call(capsys, monkeypatch, *arguments)
    lines = [line for line in err.splitlines() if line.startswith("minipaged: ")]
    assert code == 2
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in out + err


@pytest.mark.parametrize("given", [("--json-schema", "{bad"), ("--json-schema", "[]"), ("--regex", "a(")])
def test_a_schema_that_cannot_be_followed_is_reported_before_the_model_is_loaded(capsys, monkeypatch, given):
    """Catches a wait of minutes for a typing mistake."""
    monkeypatch.setattr("minipaged.cli.generate.load", lambda *_: pytest.fail("loaded"))
    code, _, err = call(capsys, monkeypatch, "generate", *given)
    assert code == 2
    assert err.startswith(f"minipaged: {given[0]} is {given[1]!r}")


def test_into_a_pipe_structured_output_is_nothing_but_itself(capsys, monkeypatch):
    """Catches `generate --json-schema ... | jq`, which read the prompt before the JSON."""
    schema = '{"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3}'
    arguments = ("generate", "A cat: ", "--json-schema", schema)
    code, out, err = call(capsys, monkeypatch, *arguments)
    assert code == 0
    assert isinstance(json.loads(out), list)
    assert "cut off" not in err


@pytest.mark.parametrize(
    ("more", "texts"), [((), "1 text"), (("--n", "2"), "2 texts"), (("--stream",), "1 text")]
)
def test_structured_output_that_is_cut_off_is_reported(capsys, monkeypatch, more, texts):
    """Catches the beginning of a JSON text that looks like an answer."""
    arguments = ("generate", "A cat: ", "--regex", "[0-9]{9}", "--max-tokens", "2", *more)
    _, _, err = call(capsys, monkeypatch, *arguments)
    assert f"minipaged: {texts} cut off before the end; raise --max-tokens (it is 2)\n" in err


def test_a_text_that_ends_at_max_tokens_says_so(capsys, monkeypatch):
    """Catches "completion, length", which tells a newcomer nothing."""
    _, _, err = call(capsys, monkeypatch, "generate", "--max-tokens", "3")
    assert err.startswith("completion, stopped at 3 tokens (--max-tokens)\n")
    _, _, err = call(capsys, monkeypatch, "generate", "--max-tokens", "30", "--max-model-len", "9")
    assert err.startswith("completion, length\n")


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), ("4k", 4000), ("4K", 4096), ("4KiB", 4096), ("2m", 2 * 10**6), ("1GiB", 2**30), ("1T", 2**40)],
)
def test_bytes_and_tokens_may_be_given_in_thousands_and_more(text, number):
    """Catches `--kv-cache-memory 1GiB` and vLLM's `--max-model-len 4k` refused."""
    seen = {}
    app = typer.Typer()
    app.command()(with_engine_options(lambda options: seen.update(options)))
    given = [f"--{name.replace('_', '-')}={text}" for name in LARGE]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert seen == dict.fromkeys(LARGE, number)


def test_what_is_on_by_default_can_be_turned_off():
    """Catches a default that changed, and an option that only turns on."""
    seen = {}
    app = typer.Typer()
    app.command()(with_engine_options(lambda options: seen.update(options)))
    switches = {field.name: field.default for field in fields(EngineConfig) if type(field.default) is bool}
    assert set(switches.values()) == {True, False}
    given = [f"--{'no-' * is_on}{name.replace('_', '-')}" for name, is_on in switches.items()]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert seen == {name: not is_on for name, is_on in switches.items()}


def test_python_dash_m_is_the_same_command():
    """A package without a __main__."""
    done = subprocess.run(
        [sys.executable, "-m", "minipaged", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "generate" in done.stdout


def test_bench_profile_shows_the_parts_of_a_step(capsys, monkeypatch, tmp_path):
    """A part that is not measured, or measured twice: more CPU seconds than the run took."""
    workload = tmp_path / "w.json"
    workload.write_text(json.dumps([{"prompt_token_ids": [5, 6, 7], "max_tokens": 4}] * 3))
    code, out, _ = call(capsys, monkeypatch, "bench", "--workload", str(workload), "--json", "--profile")
    assert code == 0
    figures = json.loads(out)
    assert set(figures["profile"]) == {
        "schedule", "plan -> tensors", "forward: all but attention", "attention: write K/V",
        "attention: read and attend", "sample", "commit", "rest of the step",
    }  # fmt: skip
    assert all(seconds >= 0 for seconds in figures["profile"].values())
    assert 0 < sum(figures["profile"].values()) <= figures["cpu_s"]


def test_bench_makes_a_workload_repeats_it_and_compares_with_the_limits(capsys, monkeypatch):
    """Catches sizes that do not arrive, and a spread or limits that are left out."""
    sizes = "--prompt-tokens", "9", "--output-tokens", "4", "--batch", "2"
    code, out, _ = call(capsys, monkeypatch, "bench", *sizes, "--repeat", "2", "--limits", "--json")
    result = json.loads(out)
    assert code == 0
    assert (result["requests"], result["prompt_tokens"], result["output_tokens"]) == (2, 18, 8)
    assert result["spread"]["output_tokens"] == [8, 8]
    assert result["decode_share_of_limit"] > 0
    assert result["prefill_share_of_limit"] > 0


def test_bench_measures_a_class_of_your_own_after_its_contract_was_checked(capsys, monkeypatch, tmp_path):
    """Catches the time of the checks in the figures of a class."""
    file = tmp_path / "mine.py"
    file.write_text("from minipaged.memory import BlockAllocator\n\nclass Mine(BlockAllocator):\n    pass\n")
    ran = []

    def run_workload(llm, items, **options):
        ran.append(type(llm.engine.scheduler.kv.allocator).__name__)
        return {"tokens": []}

    monkeypatch.setattr("minipaged.bench.run_workload", run_workload)
    sizes = ("--prompt-tokens", "4", "--output-tokens", "2")
    code, _, err = call(capsys, monkeypatch, "bench", *sizes, "--use", f"allocator={file}:Mine")
    assert code == 0, err
    assert ran == ["AllocatorContract", "Mine"]


def test_bench_counts_preemptions_and_logs_none(capsys, monkeypatch):
    """Catches a hundred warnings above the table that has their number."""
    sizes = ("--prompt-tokens", "20", "--output-tokens", "60", "--requests", "3", "--num-blocks", "9")
    code, out, err = call(capsys, monkeypatch, "bench", *sizes, "--json")
    assert code == 0
    assert json.loads(out)["preemptions"] > 0
    assert "preempted" not in err


@pytest.mark.parametrize("repeat", [(), ("--repeat", "2")])
@pytest.mark.parametrize("columns", [40, 80])
def test_bench_keeps_the_names_of_its_figures_whole(capsys, monkeypatch, columns, repeat):
    """Catches `pro/mpt/_to/ken/s` on a small terminal, and the middle column cut."""
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = call(capsys, monkeypatch, "bench", "--prompt-tokens", "4", "--output-tokens", "2", *repeat)
    assert code == 0
    assert all(name in out for name in ("wall_s", "prompt_tokens", "prefix_cache_hit_tokens"))
    assert "\u2026" not in out
    assert ("most" in out) is (columns == 80 and bool(repeat))
    assert max(map(len, out.splitlines())) <= columns


def test_bench_shows_large_figures_without_an_exponent(capsys, monkeypatch):
    """Catches 2.007e+04 tokens per second in the table, beside 9,999."""
    figures = {"large": 20_071.3, "just_below": 9_999.6, "small": 0.638213}
    monkeypatch.setattr("minipaged.bench.run_workload", lambda *_, **__: {"tokens": []} | figures)
    code, out, _ = call(capsys, monkeypatch, "bench", "--prompt-tokens", "4", "--output-tokens", "2")
    assert code == 0
    assert re.findall(r"(\w+) +│ (\S+)", out) == [
        ("large", "20,071"),
        ("just_below", "10,000"),
        ("small", "0.6382"),
    ]
