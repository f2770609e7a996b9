"""What people type, and what they see: on a terminal, and where standard output or standard error is none."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import time
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from types import SimpleNamespace

import pytest

from minipaged import LLM, __version__
from minipaged.cli import bench, view
from minipaged.cli.simulation import print_reports
from minipaged.cli.streams import StandardErrorHandler
from minipaged.progress import progress_bar
from minipaged.simulation.report import Report
from minipaged.viewer.scrape import Scrape, ServerError
from tests.engine.test_cli import call

STORY = "Once upon a time"
NO_TERMINAL = "needs a POSIX terminal"


def test_minipaged_alone_prints_help(capsys, monkeypatch):
    """Catches help squeezed into one line of error, and exit code 2 for who only looks."""
    code, out, err = call(capsys, monkeypatch)
    assert code == 0
    assert out.startswith("Usage: minipaged")
    assert len(out.splitlines()) > 5
    assert err == ""


@pytest.mark.parametrize("arguments", [("-h",), ("generate", "-h"), ("simulate", "-h"), ("learn", "-h")])
def test_the_short_flag_of_help(capsys, monkeypatch, arguments):
    """Catches `-h` being no option."""
    code, out, _ = call(capsys, monkeypatch, *arguments)
    assert code == 0
    assert out.startswith("Usage: minipaged")


def test_the_version(capsys, monkeypatch):
    """Catches a bug report without a version, because there is no way to ask."""
    code, out, _ = call(capsys, monkeypatch, "--version")
    assert (code, out) == (0, f"minipaged {__version__}\n")


def test_the_prompt_may_stand_without_a_flag(loaded, capsys, monkeypatch):
    """Catches `minipaged generate "Once upon a time"` as an error, and a prompt lost beside --prompt."""
    arguments = ("generate", "The moon", "--prompt", "The sun", "--max-tokens", "2", "--json")
    code, out, _ = call(capsys, monkeypatch, *arguments)
    assert code == 0
    assert [output["prompt"] for output in json.loads(out)["outputs"]] == ["The moon", "The sun"]


def test_piped_output_is_the_text_and_nothing_else(loaded, capsys, monkeypatch):
    """Catches boxes, markup, wrapped lines or statistics in a file that should hold a story."""
    code, out, err = call(capsys, monkeypatch, "generate", STORY, "--max-tokens", "60")
    _, as_json, _ = call(capsys, monkeypatch, "generate", STORY, "--max-tokens", "60", "--json")
    text = json.loads(as_json)["outputs"][0]["completions"][0]["text"]
    assert code == 0
    assert out == STORY + text + "\n"
    assert max(map(len, out.splitlines())) > 80, "the story is too short to tell whether it is wrapped"
    assert "KV blocks of 16 tokens at peak" in err
    assert "tokens/s" in err


def test_piped_completions_are_apart(loaded, capsys, monkeypatch):
    """Catches several completions run together, and scores of beams in the text."""
    code, out, err = call(
        capsys, monkeypatch, "generate", "The sun", "--beam-width", "3", "--n", "3", "--max-tokens", "3"
    )
    assert code == 0
    parts = out.removesuffix("\n").split("\n\n")
    assert len(parts) == 3
    assert all(part.startswith("The sun") for part in parts)
    assert "score" not in out
    assert len(re.findall(r"completion \d, stopped at 3 tokens \(--max-tokens\), score -\d", err)) == 3


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (("--repetition-penalty", "1.3"), "repetition_penalty", 1.3),
        (("--presence-penalty", "0.5"), "presence_penalty", 0.5),
        (("--frequency-penalty", "0.25"), "frequency_penalty", 0.25),
        (("--stop-token-id", "13", "--stop-token-id", "14"), "stop_token_ids", (13, 14)),
        (("--min-tokens", "3"), "min_tokens", 3),
        (("--ignore-eos",), "ignore_eos", True),
        (("--logprobs", "2"), "logprobs", 2),
    ],
)
def test_a_flag_reaches_the_sampler(loaded, llm, capsys, monkeypatch, flags, field, value):
    """Catches a flag that is read and forgotten."""
    seen = []
    generate = llm.generate
    monkeypatch.setattr(
        llm, "generate", lambda prompts, params, **other: (seen.append(params), generate(prompts, params))[1]
    )
    code, _, err = call(capsys, monkeypatch, "generate", STORY, "--max-tokens", "4", *flags)
    assert (code, err.count("minipaged: ")) == (0, 0)
    assert getattr(seen[0], field) == value


def test_beams_take_what_they_can_follow_and_refuse_the_rest(loaded, capsys, monkeypatch):
    """Catches --min-tokens dropped in silence with beams, or a penalty that does nothing."""
    beams = ("generate", STORY, "--beam-width", "2", "--max-tokens", "4")
    code, _, _ = call(capsys, monkeypatch, *beams, "--min-tokens", "2", "--ignore-eos")
    assert code == 0
    code, _, err = call(capsys, monkeypatch, *beams, "--presence-penalty", "1")
    assert code == 2
    assert "beam_width is 2, which contradicts presence_penalty 1.0; drop one of them" in err
    code, _, err = call(capsys, monkeypatch, *beams, "--regex", "a+")
    assert code == 2
    assert "beam_width is 2, which contradicts structured output; drop one of them" in err


def test_logprobs_are_shown_token_by_token(loaded, capsys, monkeypatch):
    """Catches log-probabilities asked for and not shown, or those of other tokens."""
    arguments = ("generate", "The sun", "--max-tokens", "3", "--logprobs", "2")
    _, as_json, _ = call(capsys, monkeypatch, *arguments, "--json")
    code, out, _ = call(capsys, monkeypatch, *arguments)
    completion = json.loads(as_json)["outputs"][0]["completions"][0]
    assert code == 0
    assert [entry["token_id"] for entry in completion["logprobs"]] == completion["token_ids"]
    rows = [line.split("\t") for line in out.splitlines()[-3:]]
    for row, entry in zip(rows, completion["logprobs"]):
        assert json.loads(row[0]) == entry["token"]
        assert float(row[1]) == pytest.approx(entry["logprob"], abs=1e-3)
        assert int(row[2]) == entry["rank"]
        assert len(entry["top"]) == 2
        assert entry["top"][0]["rank"] == 1
    total = sum(entry["logprob"] for entry in completion["logprobs"])
    assert total == pytest.approx(completion["cumulative_logprob"], abs=1e-4)


class Screen(io.StringIO):
    """A terminal without colours."""

    def isatty(self) -> bool:
        return True


BAD, SHOWN = "a\x1b[2J\x9b", "a\ufffd[2J\ufffd"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_control_characters_stay_out_of_a_terminal(loaded, llm, capsys, monkeypatch, is_terminal):
    """Catches a prompt, text, token, block or error that clears the screen or sets the window's title, and a
    pipe whose text was changed."""
    screen = Screen() if is_terminal else io.StringIO()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    generate = llm.generate

    def told(*arguments):
        [output] = generate(*arguments)
        output.outputs[0].text = f"text {BAD}"
        output.error = f"error {BAD}"
        return [output]

    monkeypatch.setattr(llm, "generate", told)
    flags = ("--max-tokens", "1", "--show-blocks", "--logprobs", "1")
    assert call(capsys, monkeypatch, "generate", f"the {BAD}", *flags)[0] == 1
    assert call(capsys, monkeypatch, "generate", "--prompt-file", f"file {BAD}")[0] == 2
    shown = screen.getvalue()
    expected = SHOWN if is_terminal else BAD
    for what in ("the", "text", "error", "file"):
        assert f"{what} {expected}" in shown
    assert shown.count(expected[:-1]) == 5, "in the block, too"
    assert ("\x1b" in shown) is not is_terminal


def test_control_characters_stay_out_of_a_logged_line(monkeypatch):
    """Catches a file's name that clears the screen when the log quotes it."""
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    StandardErrorHandler().handle(logging.LogRecord("x", logging.INFO, "", 0, "a %s", (BAD,), None))
    assert screen.getvalue() == f"a {SHOWN}\n"


def screen_with_log(monkeypatch) -> Screen:
    """Shows what a command prints and logs, in its order."""
    screen, root = Screen(), logging.getLogger()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(root, "handlers", [*root.handlers, StandardErrorHandler()])
    return screen


@pytest.mark.parametrize(
    ("command", "account"),
    [
        (("generate", "Tell me a story", "--stream", "--max-tokens", "200"), "8 of 8 KV blocks"),
        (("chat",), "[0 of 12 tokens reused"),
    ],
)
def test_a_warning_waits_for_the_end_of_an_answer(capsys, monkeypatch, command, account):
    """Catches a line of the log in the middle of a sentence."""
    screen, llm = screen_with_log(monkeypatch), LLM(num_blocks=8, disable_log_stats=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me a story about a fox.\n"))
    monkeypatch.setattr(f"minipaged.cli.{command[0]}.load", lambda *_: llm)
    assert call(capsys, monkeypatch, *command)[0] == 0
    text, warning, after = screen.getvalue().partition("\nRequest 0 ends with finish reason length: ")
    assert warning
    assert text.count(" ") > 80
    assert after.split("\n", 1)[1].startswith(account)


@pytest.mark.parametrize(("error", "code"), [(ValueError, 2), (KeyboardInterrupt, 130)])
def test_an_answer_that_breaks_off_is_followed_by_its_warnings(loaded, llm, capsys, monkeypatch, error, code):
    """Catches a warning, or the word that waits for its end, that is lost with the rest of the text."""

    def stream(*_):
        yield "Once upon a "
        logging.getLogger("minipaged").warning("the pool is full")
        yield "ti"
        raise error("broken off")

    screen = screen_with_log(monkeypatch)
    monkeypatch.setattr(llm, "stream", stream)
    assert call(capsys, monkeypatch, "generate", "--stream")[0] == code
    assert screen.getvalue().startswith("Once upon a ti\nthe pool is full\n")


def test_control_characters_of_a_server_stay_out_of_a_terminal(monkeypatch):
    """Catches an answer of another machine that clears the screen of `bench --url` or `top`."""
    screen = Screen()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", screen)
    bench._print({"first_error": f"bench {BAD}"}, "x", None, as_json=False)
    answers = iter([Scrape(0, {}, {}), ServerError(f"top {BAD}")])

    def look(*_):
        if isinstance(answer := next(answers), ServerError):
            raise answer
        return answer

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(view, "_look", look)
    monkeypatch.setattr(view.time, "sleep", lambda seconds: None)
    with suppress(RuntimeError):  # (there is no third answer)
        view.top(api_key=None)
    assert f"first error: bench {SHOWN}" in screen.getvalue()
    assert f"not up to date: top {SHOWN}" in screen.getvalue()


def on_terminal(code: str, *, columns: int = 80, status: int = 0, environment=None) -> str:
    """Run Python code with standard error on a terminal; returns all that was written there."""
    fcntl = pytest.importorskip("fcntl", reason=NO_TERMINAL)
    termios = pytest.importorskip("termios", reason=NO_TERMINAL)
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=follower,
        stdout=subprocess.DEVNULL,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "", "NO_COLOR": "1", **(environment or {})},
    )
    os.close(follower)
    shown, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([leader], [], [], 1)[0]:
            continue
        try:
            data = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
    os.close(leader)
    assert child.wait(10) == status, shown.decode()
    return shown.decode()


BAR = """
    from minipaged.progress import progress_bar
    import time
    with progress_bar("counting sheep", 3) as advance:
        for sheep in range(3):
            time.sleep(0.2)
            advance(sheep + 1)
"""


ENDED = "__import__('signal').raise_signal(15)"

TOP = """
    from minipaged.cli import view
    import os, signal, sys
    sys.stdout = sys.stderr
    view._look = view.dashboard = lambda *_: "requests"
    view.time.sleep = lambda seconds: os.kill(os.getpid(), signal.SIGTERM)
    view.top(api_key=None)
"""


@pytest.mark.skipif(os.name != "posix", reason=NO_TERMINAL)
@pytest.mark.parametrize("code", [BAR.replace("time.sleep(0.2)", ENDED), TOP])
def test_a_terminated_command_gives_the_terminal_back(code):
    """Catches a cursor that stays hidden, or a screen that stays the dashboard's, after `kill`."""
    shown = on_terminal(code, status=-signal.SIGTERM)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is hidden"
    assert shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l") == (code == TOP)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_what_is_to_stop_stops_from_the_inside_out():
    """Catches a process of the inner block that goes on because a bar around it has the signal."""
    code = """
    import os, signal
    from minipaged.progress import restored_at_end
    with restored_at_end(lambda: print("bar", flush=True)):
        with restored_at_end(lambda: print("tests", flush=True)):
            pass
        with restored_at_end(lambda: print("more tests", flush=True)):
            os.kill(os.getpid(), signal.SIGTERM)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (-signal.SIGTERM, "more tests\nbar\n")


@pytest.mark.parametrize("kind", ["none", "own", "closed"])
def test_without_a_standard_error_of_the_usual_kind_there_is_no_bar(kind, monkeypatch):
    """Catches `generate` that fails under pythonw, or where standard error goes to a logger."""
    closed = io.StringIO()
    closed.close()
    own = SimpleNamespace(write=len, flush=lambda: None)
    monkeypatch.setattr("sys.stderr", {"none": None, "own": own, "closed": closed}[kind])
    with progress_bar("counting sheep", 3) as advance:
        assert advance(1) is None
        assert advance(2, 4) is None


@pytest.mark.parametrize("columns", [40, 80])
def test_a_bar_fits_the_terminal_and_leaves_nothing_behind(columns):
    """Catches a bar wrapped at every refresh, and one that stays above the result."""
    shown = on_terminal(BAR, columns=columns)
    frames = re.split(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n", shown)
    assert any("counting sheep" in frame and "3/3" in frame for frame in frames)
    assert max(map(len, frames)) <= columns
    assert "\x1b[2K" in shown[-40:], "the last frame is not erased"


def test_there_is_no_bar_where_standard_error_is_not_a_terminal():
    """Catches escape sequences in a log file, also where FORCE_COLOR makes rich take it for a terminal."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BAR)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "FORCE_COLOR": "1"},
    )
    assert done.stdout + done.stderr == ""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is installed")
def test_the_first_compile_says_what_it_does(tmp_path):
    """Catches seconds of silence at the first start, where g++ works."""
    code = """
        import logging
        logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
        from minipaged.kernels.cpp import build
        build.load_library()
        build.load_library.cache_clear()
        print("again", file=__import__("sys").stderr)
        build.load_library()
    """
    compiler = tmp_path / "c++"  # (compiling takes several seconds)
    real = tmp_path / "nearly_empty.c"
    real.write_text("void write_tokens(void) {}")
    compiler.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo fake 1; exit; fi\n'
        "for last; do :; done\n"
        f'sleep 0.5; exec cc -shared -fPIC {real} -o "$last"\n'
    )
    compiler.chmod(0o755)
    shown = on_terminal(code, environment={"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")})
    first, again = shown.split("again")
    assert "compiling the C++ kernels" in first
    assert str(compiler) in first.replace("\r\n", "")
    assert "0:00:00" in first
    assert "compiling" not in again


@pytest.mark.slow
def test_loading_shows_a_bar_with_the_weights():
    """Catches a large model that loads in silence, and bars of transformers beside our own."""
    code = """
        from minipaged import LLM
        LLM(attention_backend="torch", num_blocks=16)
    """
    shown = on_terminal(code)
    frames = re.split(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n", shown)
    assert any("loading" in frame and "38/38" in frame for frame in frames)
    assert "it/s" not in shown


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_sweep_shows_every_digit_at_every_width(monkeypatch, columns):
    """Catches figures cut to `0.03…` where the values of a sweep do not fit side by side."""
    monkeypatch.setenv("COLUMNS", str(columns))
    # 0.5 is of every field; the other differs from column to column.
    reports = [Report(**{f.name: 0.5 for f in fields(Report)} | {"seconds": 1234.5 + i}) for i in range(6)]
    table = io.StringIO()
    with redirect_stdout(table):
        print_reports(reports, "block_size", [8, 16, 32, 64, 128, 256])
    shown = table.getvalue()
    assert "\u2026" not in shown
    assert all(f"{1234.5 + i:,.4g}" in shown for i in range(6))
    assert max(map(len, shown.splitlines())) <= columns
    assert shown.count("block_size") == {40: 3, 80: 1, 200: 1}[columns]
