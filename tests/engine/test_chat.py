"""`minipaged chat`: what is printed, what is computed, and what Ctrl-C ends."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from minipaged import LLM, SamplingParams
from minipaged.cli import chat as chat_module
from minipaged.cli.conversation import PLAIN_STOP, PLAIN_TEMPLATE, Conversation
from minipaged.cli.wrapping import WordWrap
from minipaged.prompts import RequestError
from minipaged.text_io import without_controls
from tests.engine.test_cli import call
from tests.engine.test_terminal import BAD, SHOWN, Screen
from tests.tagged_tokenizer import write_tokenizer

FOX, TABLE = "Tell me a story about a fox.", "What is a block table?"
ANSWER = "A block table maps the logical blocks of a sequence to physical blocks."
GREEDY = SamplingParams(temperature=0, max_tokens=None)


@pytest.fixture
def llm():
    return LLM(num_blocks=64, disable_log_stats=True)


@pytest.fixture
def conversation(llm):
    return Conversation(llm, GREEDY)


def ask(conversation: Conversation, question: str) -> str:
    return "".join(conversation.ask(question))


def test_an_answer_is_that_of_chat(conversation, llm):
    """Catches a prompt of its own making: another template, or a token more."""
    assert ask(conversation, TABLE) == ANSWER
    assert llm.chat([{"role": "user", "content": TABLE}], GREEDY)[0].outputs[0].text == ANSWER


def test_a_turn_computes_only_what_the_turns_before_did_not(conversation):
    """Catches a conversation that is computed anew at every turn, and a number that is not the cache's."""
    ask(conversation, FOX)
    first = conversation.last
    assert (first.num_reused, first.finish_reason) == (0, "stop")
    total = first.num_prompt_tokens + first.num_tokens
    ask(conversation, TABLE)
    second = conversation.last
    # The last token of an answer has no slot: it was generated and never computed.
    assert second.num_reused == (total - 1) // 16 * 16
    assert second.num_reused > 100
    assert second.num_prompt_tokens > total


def test_generated_tokens_are_kept_as_they_were_generated(conversation, llm):
    """Catches an answer that is encoded again: other tokens of the same text are not in the cache."""
    tokenizer, sampled = (
        llm.tokenizer,
        SamplingParams(temperature=1.5, seed=3, max_tokens=120, ignore_eos=True),
    )
    conversation.params = sampled
    said = ask(conversation, FOX)
    own = conversation.token_ids[-conversation.last.num_tokens :]
    assert tokenizer.decode(own) == said
    assert tokenizer.encode(said, add_special_tokens=False) != own, "the usual tokens: nothing to tell apart"
    total = len(conversation.token_ids)
    ask(conversation, TABLE)
    assert conversation.last.num_reused == (total - 1) // 16 * 16


def test_the_text_of_a_turn_is_what_the_template_makes_of_the_messages(conversation, llm):
    """Catches a prompt whose joined tokens spell something else than the messages."""
    ask(conversation, FOX)
    ask(conversation, TABLE)
    before = conversation.messages[:-1]
    token_ids = conversation.token_ids[: conversation.last.num_prompt_tokens]
    template = llm.tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
    assert llm.tokenizer.decode(token_ids) == template


def test_an_answer_left_early_is_kept_as_far_as_it_came(conversation, llm):
    """Catches a stopped answer that leaves its request running, or a question without its answer."""
    pieces = conversation.ask(FOX)
    said = next(pieces) + next(pieces) + next(pieces)
    pieces.close()
    assert not llm.engine.has_unfinished
    llm.engine.check_invariants()
    assert conversation.messages == [
        {"role": "user", "content": FOX},
        {"role": "assistant", "content": said},
    ]
    assert conversation.last.finish_reason is None
    assert ask(conversation, TABLE) == ANSWER


def test_a_question_that_does_not_fit_changes_nothing(conversation):
    """Catches a conversation that can never be continued after one long question."""
    ask(conversation, TABLE)
    before = list(conversation.messages)
    with pytest.raises(ValueError, match="max_model_len"):
        ask(conversation, "word " * 3000)
    assert conversation.messages == before
    assert ask(conversation, TABLE) == ANSWER


def test_reset_leaves_the_system_message(llm):
    """Catches a system message that is lost, or questions that are not."""
    conversation = Conversation(llm, GREEDY, system="Be brief.")
    ask(conversation, TABLE)
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert conversation.kept().blocks == ()


def test_the_kept_blocks_are_those_of_the_cache(conversation, llm):
    """Catches blocks that hold something else by now."""
    ask(conversation, FOX)
    kept = conversation.kept()
    assert len(kept.blocks) == (len(conversation.token_ids) - 1) // 16
    assert set(kept.blocks) == set(llm.engine.scheduler.kv.prefix_cache.evictable)
    llm.engine.reset_prefix_cache()
    assert conversation.kept().blocks == ()


THOUGHTLESS = (
    "{% for message in messages %}"
    "{{ message.role }}: {{ message.content.split('</think>')[-1] }}\n"
    "{% endfor %}"
)


def test_thoughts_keep_their_tags_and_the_template_can_drop_them(tmp_path):
    """Catches thoughts that look like the answer, and come back as one, where the tags are special tokens."""
    llm = LLM(tokenizer=str(write_tokenizer(tmp_path, "think")), num_blocks=64, disable_log_stats=True)
    llm.tokenizer.chat_template = THOUGHTLESS
    said = "<think>The sun.</think>The moon."
    token_ids = llm.tokenizer.encode(said, add_special_tokens=False)

    def say(generated, logits):
        logits[token_ids[len(generated)]] = 1e4
        return logits

    params = SamplingParams(temperature=0, max_tokens=len(token_ids), logits_processors=[say])
    conversation = Conversation(llm, params)
    assert ask(conversation, "Up?") == said
    assert conversation.token_ids[-len(token_ids) :] == token_ids
    ask(conversation, "Now?")
    prompt = llm.tokenizer.decode(conversation.token_ids[: conversation.last.num_prompt_tokens])
    assert prompt == "user: Up?\nassistant: The moon.\nuser: Now?\n"


def test_a_model_without_a_template_gets_plain_turns(llm):
    """Catches an answer that goes on with the user's next question, and turns that cannot be reused."""
    llm.tokenizer.chat_template = PLAIN_TEMPLATE
    params = SamplingParams(temperature=0, max_tokens=40, stop=PLAIN_STOP)
    conversation = Conversation(llm, params)
    ask(conversation, "The sun " * 12)
    first = conversation.last
    ask(conversation, "The moon")
    text = llm.tokenizer.decode(conversation.token_ids[: conversation.last.num_prompt_tokens])
    assert text.startswith("<|begin|>User: The sun The sun ")
    assert text.endswith("\nUser: The moon\nAssistant:")
    assert first.finish_reason == "length"
    assert conversation.last.num_reused == (first.num_prompt_tokens + first.num_tokens - 1) // 16 * 16 > 32


def test_a_model_without_a_tokenizer_cannot_chat(llm):
    """Catches an AttributeError."""
    llm.tokenizer = None
    with pytest.raises(
        RequestError, match="no tokenizer that can be read, so it cannot chat; see the warning"
    ):
        Conversation(llm, GREEDY)


# -- the command ---------------------------------------------------------------------------------------------


def chat(capsys, monkeypatch, llm, *lines: str, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """`minipaged chat` with these lines as its input."""
    monkeypatch.setattr(chat_module, "load", lambda *arguments: llm)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    return call(capsys, monkeypatch, "chat", *flags)


def test_answers_are_all_of_standard_output(capsys, monkeypatch, llm):
    """Catches prompts and accounts among the answers of a script."""
    code, out, err = chat(capsys, monkeypatch, llm, TABLE, "", TABLE)
    assert (code, out) == (0, f"{ANSWER}\n{ANSWER}\n")
    assert re.findall(r"\[(\d+) of (\d+) tokens reused; 15 generated", err) == [("0", "10"), ("16", "34")]


def test_an_answer_shows_how_many_draft_tokens_were_accepted(capsys, monkeypatch):
    """Catches counts that go on from answer to answer, and counts where nothing is drafted."""
    llm = LLM(num_blocks=64, disable_log_stats=True, num_speculative_tokens=4)
    _, _, err = chat(capsys, monkeypatch, llm, FOX, TABLE, FOX)
    counts = re.findall(r"; (\d+) of (\d+) draft tokens accepted\]", err)
    pairs = [tuple(map(int, pair)) for pair in counts]
    assert len(pairs) == err.count("tokens reused") == 3
    metrics = llm.engine.metrics
    assert tuple(map(sum, zip(*pairs))) == (metrics.accepted_tokens, metrics.draft_tokens)
    assert pairs[0][0] > 0, "nothing to tell apart"


def test_commands(capsys, monkeypatch, llm):
    """Catches a command that is asked as a question, and one that ends the chat."""
    lines = (TABLE, "/history", "/blocks", "/reset", "/history", "/help", "/frobnicate", "/exit", TABLE)
    code, out, err = chat(capsys, monkeypatch, llm, *lines)
    assert code == 0
    assert f"user: {TABLE}\nassistant: {ANSWER}\n" in out
    assert "This conversation: 16 tokens in 1 block, " in out
    assert "0 of 64 blocks in use, 1 cached and evictable, 63 free" in out
    assert re.search(r"In no cached block: the last \d+ tokens\.\n", err), "more may be computed again"
    assert "/blocks" in out
    assert out.count(ANSWER) == 2, "history after /reset, or a question after /exit"
    assert "minipaged: /frobnicate is not a command; /help lists them" in err


def test_the_history_on_a_terminal_has_no_control_characters(capsys, monkeypatch, llm):
    """Catches a question or an answer that clears the screen when it is shown again."""
    screen = Screen()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", screen)
    assert chat(capsys, monkeypatch, llm, f"What is {BAD}?", "/history", "/blocks")[0] == 0
    assert f"user: What is {SHOWN}?\nassistant: " in screen.getvalue()
    assert "\x1b" not in screen.getvalue()


def test_a_bad_question_does_not_end_the_chat(capsys, monkeypatch, llm):
    """Catches a chat that ends with an exception, and the whole conversation with it."""
    code, out, err = chat(capsys, monkeypatch, llm, "word " * 3000, TABLE)
    assert (code, out) == (0, f"{ANSWER}\n")
    assert "max_model_len" in err
    assert "/reset" not in err  # there was no conversation yet


@pytest.mark.parametrize(
    ("data", "num_answers", "expected"),
    [
        (
            f"{TABLE}\n{TABLE}\n".encode("utf-16"),
            0,
            "line 1 of standard input is not UTF-8 text: byte 0xff at",
        ),
        (f"{TABLE}\n{TABLE}\n".encode("utf-16-le"), 0, "line 1 of standard input has a null character at"),
        (
            f"\n{TABLE}\ncaf\xe9\n{TABLE}\n".encode("latin-1"),
            1,
            "line 3 of standard input is not UTF-8 text: byte",
        ),
    ],
    ids=["utf-16", "utf-16-le", "latin-1"],
)
def test_a_pipe_of_another_encoding_ends_the_chat(capsys, monkeypatch, llm, data, num_answers, expected):
    """Catches null characters and half lines that are answered as questions, and exit code 0."""
    monkeypatch.setattr(chat_module, "load", lambda *_: llm)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    code, out, err = call(capsys, monkeypatch, "chat")
    assert (code, out) == (2, f"{ANSWER}\n" * num_answers)
    assert err.count("minipaged: ") == 1
    assert f"minipaged: {expected}" in err
    assert "save it as UTF-8" in err


def test_typed_text_of_another_encoding_does_not_end_the_chat(capsys, monkeypatch, llm):
    """Catches a conversation that is lost with one wrong key."""
    screen, typed = Screen(), iter(["caf\udce9", TABLE, "/exit"])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert chat_module.Chat(Conversation(llm, GREEDY), Console(file=screen, width=200)).run()
    assert "which is no Unicode character" in screen.getvalue()
    assert ANSWER in screen.getvalue().replace("\n", " ")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(capsys, monkeypatch, llm, encoding):
    """Catches a command that is asked as a question, and a locale that decides what a pipe says."""
    data = f"\ufeff/history\n{TABLE}\n/history\nCafé?\n/history\n".encode()
    monkeypatch.setattr(chat_module, "load", lambda *_: llm)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding=encoding))
    code, out, _ = call(capsys, monkeypatch, "chat")
    assert code == 0
    assert out.startswith(f"{ANSWER}\nuser: {TABLE}\n")
    assert "user: Café?" in out


def test_what_begins_with_a_slash_may_be_a_question(capsys, monkeypatch, llm):
    """Catches a path that cannot be asked about, and a mistyped command that is asked."""
    code, _, err = chat(
        capsys, monkeypatch, llm, "/etc/passwd is what?", "/usr/bin", "/ or \\?", "/rest", "/reset now"
    )
    assert code == 0
    assert err.count("tokens reused") == 3
    assert err.count("is not a command") == 2


def test_a_conversation_that_is_full_says_how_to_go_on(capsys, monkeypatch, llm):
    """Catches a chat that can only refuse from here on, and advice that would not help."""
    code, out, err = chat(capsys, monkeypatch, llm, TABLE, "word " * 3000)
    assert (code, out) == (0, f"{ANSWER}\n")
    assert "max_model_len" in err
    assert "/reset" not in err  # alone, the question is too long as well
    small = LLM(num_blocks=8, disable_log_stats=True)
    code, _, err = chat(capsys, monkeypatch, small, FOX, FOX, "/reset", FOX)
    assert code == 0
    assert err.count("/reset begins a new conversation, which has room for this question") == 1
    assert err.count("tokens reused") == 2


@pytest.mark.parametrize(("options", "room"), [({"num_blocks": 8}, "128"), ({"num_blocks": 200}, "2,048")])
def test_the_context_is_no_larger_than_the_pool(monkeypatch, options, room):
    """Catches a chat of 2,048 tokens that is full after 128."""
    llm = LLM(disable_log_stats=True, **options)
    screen = Screen()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr("builtins.input", lambda prompt: "/exit")
    assert chat_module.Chat(
        Conversation(llm, GREEDY), Console(file=screen, highlight=False, color_system=None)
    ).run()
    assert f"The context is {room} tokens." in screen.getvalue()


def test_a_script_hears_of_a_chat_that_failed_throughout(capsys, monkeypatch, llm):
    """Catches exit code 0 for no answer at all, and a traceback where there is no input."""
    code, out, err = chat(capsys, monkeypatch, llm, "word " * 3000)
    assert (code, out) == (1, "")
    monkeypatch.setattr(sys, "stdin", None)
    code, out, err = call(capsys, monkeypatch, "chat")
    assert (code, "standard input is closed" in err) == (2, True)


def test_an_answer_that_was_cut_says_so(capsys, monkeypatch, llm):
    """Catches an answer that silently ends in the middle."""
    code, _, err = chat(capsys, monkeypatch, llm, FOX, flags=("--max-tokens", "5"))
    assert code == 0
    assert "5 generated" in err
    assert "cut off at the limit]" in err


def test_blocks_without_prefix_caching(capsys, monkeypatch):
    """Catches an AttributeError of the cache that is not there."""
    llm = LLM(num_blocks=64, enable_prefix_caching=False, disable_log_stats=True)
    code, _, err = chat(capsys, monkeypatch, llm, TABLE, "/blocks", TABLE)
    assert code == 0
    assert "enable_prefix_caching is off" in err
    assert err.count("0 of") == 2


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--top-p", "0.5"), "temperature 0.0 is greedy"),
        (("--chat-template", "no-such-file"), "cannot read chat template no-such-file"),
        (("--max-tokens", "0"), "max_tokens is 0"),
    ],
)
def test_mistakes_are_reported_before_the_model_is_loaded(capsys, monkeypatch, flags, expected):
    """Catches a typo that costs the minutes of a large model's loading."""
    code, _, err = chat(capsys, monkeypatch, None, flags=flags)
    assert code == 2
    assert expected in err


def test_variables_for_the_template(capsys, monkeypatch, llm, tmp_path):
    """Catches --chat-template-kwargs without effect."""
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[-1].content }}{{ raise_exception('thinking: ' ~ enable_thinking) }}")
    flags = ("--chat-template", str(path), "--chat-template-kwargs", '{"enable_thinking": false}')
    _, _, err = chat(capsys, monkeypatch, llm, TABLE, flags=flags)
    assert "the chat template rejects the messages: thinking: False" in err


@pytest.mark.parametrize(
    ("template", "expected", "exit_code"),
    [
        (
            "{{ raise_exception('no ' + messages[0].content) }}",
            f"the chat template rejects the messages: no {TABLE}",
            1,  # no question was answered
        ),
        ("Hello\n{% x", "the chat template is wrong in line 2: Encountered unknown tag 'x'; correct it", 2),
        ("Hello {{ messages[0].role }}", "the chat template leaves out what the user says; give one that", 2),
        ("{{ messages[-1].content | upper }}", "generated", 0),
    ],
)
def test_a_template_of_ones_own(capsys, monkeypatch, llm, tmp_path, template, expected, exit_code):
    """Catches --chat-template without an effect, and a mistake in it that is reported with each question."""
    path = tmp_path / "template.jinja"
    path.write_text(template)
    code, _, err = chat(capsys, monkeypatch, llm, TABLE, TABLE, flags=("--chat-template", str(path)))
    assert code == exit_code
    assert err.count(expected) == (1 if exit_code == 2 else 2)


class Terminal:
    """A command on a pseudo terminal."""

    def __init__(self, *command: str, **environment: str) -> None:
        pty = pytest.importorskip("pty", reason="needs a POSIX terminal")
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.environ.update(environment)
            os.execv(command[0], command)
        self.shown = ""

    def type(self, text: str) -> None:
        self.shown = ""
        os.write(self.file, text.encode())

    def wait_for(self, text: str, press: str = "") -> str:
        """Until the text is shown after what was typed or waited for last; returns all up to it.

        `press` is typed each second: a Ctrl-C between a prompt and Python's wait for a key is not noticed.
        """
        deadline, pressed = time.monotonic() + 60, float("-inf")
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} was not shown: {self.shown!r}"
            if press and time.monotonic() > pressed + 1:
                os.write(self.file, press.encode())
                pressed = time.monotonic()
            if select.select([self.file], [], [], 0.1)[0]:
                self.shown += os.read(self.file, 65536).decode(errors="replace")
        before, text, self.shown = self.shown.partition(text)
        return before + text

    def kill(self) -> None:
        """Leave no process, however the test ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """The exit code, after the command has ended."""
        with open(self.file, "rb", buffering=0) as file:
            try:
                while file.read(65536):
                    pass
            except OSError:  # its end, on Linux
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path, request):
    """Catches a chat that dies with its answer, an interrupt that is ignored, a lost history."""
    command = (
        sys.executable,
        "-m",
        "minipaged",
        "chat",
        "--num-blocks",
        "64",
        "--attention-backend",
        "torch",
    )
    environment = {"XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    terminal = Terminal(*command, **environment)
    request.addfinalizer(terminal.kill)
    terminal.wait_for("> ")
    terminal.type(FOX + "\r")
    terminal.wait_for("there was")
    terminal.type("\x03")
    assert "people talk about it" not in terminal.wait_for("stopped]")
    terminal.wait_for("> ")
    terminal.wait_for("Ctrl-D or /exit leaves.", press="\x03")
    terminal.wait_for("> ")
    terminal.type("/history\r")
    terminal.wait_for("assistant: Once upon a time")
    terminal.wait_for("> ")
    terminal.type(TABLE + "\r")
    terminal.wait_for("physical blocks.")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert TABLE in (tmp_path / "minipaged" / "chat").read_text()


@pytest.mark.usefixtures("hangups_end")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_terminated_chat_gives_the_terminal_back_and_keeps_its_questions(name, tmp_path, request):
    """Catches a shell that no longer shows what is typed, and questions lost with a closed window."""
    termios = pytest.importorskip("termios", reason="needs a POSIX terminal")
    code = "from minipaged.cli.chat import _line_editing\nwith _line_editing():\n    while True: input('> ')"
    terminal = Terminal(sys.executable, "-c", code, XDG_STATE_HOME=str(tmp_path), TERM="dumb")
    request.addfinalizer(terminal.kill)
    before = termios.tcgetattr(terminal.file)
    terminal.wait_for("> ")
    terminal.type(FOX + "\r")
    terminal.wait_for("> ")
    ended, deadline = 0, time.monotonic() + 60
    while not ended and time.monotonic() < deadline:  # (one just before the wait for a key is not noticed)
        os.kill(terminal.pid, getattr(signal, name))
        time.sleep(0.1)
        ended, status = os.waitpid(terminal.pid, os.WNOHANG)
    assert ended
    assert termios.tcgetattr(terminal.file) == before
    os.close(terminal.file)
    assert os.waitstatus_to_exitcode(status) == -getattr(signal, name)
    assert (tmp_path / "minipaged" / "chat").read_text() == FOX + "\n"


def test_a_chat_without_a_home_has_no_history(monkeypatch):
    """Catches a traceback in a container whose user has no home directory."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with chat_module._line_editing():
        has_begun = True
    assert has_begun


# -- lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_break_between_words(size):
    """Catches words cut at the edge of the terminal, wherever the pieces were cut."""
    text = "Once upon a time, there was a little extraordinarily-long-eared fox.\nThe end.  Really."
    wrap = WordWrap(12)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    shown = "".join(map(wrap.feed, pieces)) + wrap.rest()
    lines = shown.split("\n")
    assert lines[:4] == ["Once upon a ", "time, there ", "was a little", "extraordinar"]
    assert max(map(len, lines)) <= 12
    assert shown.replace("\n", "").replace(" ", "") == text.replace("\n", "").replace(" ", "")
    assert lines[-2:] == ["The end.  ", "Really."]


def test_wide_characters_may_break_anywhere():
    """Catches a line of Chinese that is held back to its end, or counted as half as wide."""
    wrap = WordWrap(6)
    assert wrap.feed("你好世界") == "你好世\n界"


def test_control_characters_do_not_reach_the_terminal():
    """Catches a model that clears the screen or sets the window's title."""
    wrap = WordWrap(20)
    assert wrap.feed("a\x1b[2J \x9bb ") == "a\ufffd[2J \ufffdb "
    assert without_controls("a\tb\n\x1b[2J\r\x7f\x9b\u2028") == "a    b\n\ufffd[2J\ufffd\ufffd\ufffd\u2028"
    assert without_controls("a\tb\x1b", is_terminal=False) == "a\tb\x1b"


def test_nothing_is_wrapped_in_a_pipe():
    """Catches line breaks that the model did not write."""
    wrap = WordWrap(None)
    assert wrap.feed("word " * 50) + wrap.rest() == "word " * 50
