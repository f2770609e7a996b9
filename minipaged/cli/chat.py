"""`minipaged chat`: questions and answers in the terminal, and what the prefix cache saves between them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Exit, Option

from minipaged.cli import sampling
from minipaged.cli.conversation import PLAIN_STOP, PLAIN_TEMPLATE, Conversation, Turn
from minipaged.cli.options import Model, Use, load, template_variables
from minipaged.cli.streams import held_log
from minipaged.cli.wrapping import wrap_for_output
from minipaged.config import EngineConfig
from minipaged.metrics import draft_summary
from minipaged.progress import restored_at_end
from minipaged.scheduling import RequestTooLongError
from minipaged.text_io import TextError, check_line, counted, read_text, without_controls
from minipaged.viewer.highlights import engine_texts
from minipaged.viewer.snapshot import look
from minipaged.viewer.terminal import Pool, Table

HELP = """\
/reset    begin a new conversation
/history  show the conversation
/blocks   show the KV pool, and where the conversation is in it
/help     show this
/exit     leave (so does Ctrl-D)
Ctrl-C stops an answer. Arrow keys bring back earlier questions."""

COMMAND = re.compile(r"/[^/\s]+")
"""A question may begin with a slash, too, as a path does."""

LEAVE = ("/exit", "/quit")

HISTORY_LENGTH = 1000


def chat(
    options: dict[str, Any],
    model: Model = None,
    system: Annotated[str | None, Option(help="System message, which sets the model's role.")] = None,
    chat_template: Annotated[
        Path | None, Option(help="Jinja file that replaces the model's chat template.")
    ] = None,
    chat_template_kwargs: Annotated[
        str | None, Option(help="Variables for the chat template, as a JSON object.")
    ] = None,
    max_tokens: Annotated[
        int | None, Option(help="Maximum tokens per answer. [default: as many as fit]")
    ] = None,
    temperature: Annotated[float, Option(help="0 means greedy decoding.")] = 0.0,
    top_p: sampling.TopP = 1.0,
    top_k: sampling.TopK = 0,
    min_p: sampling.MinP = 0.0,
    repetition_penalty: sampling.RepetitionPenalty = 1.0,
    presence_penalty: sampling.PresencePenalty = 0.0,
    frequency_penalty: sampling.FrequencyPenalty = 0.0,
    stop: sampling.Stop = None,
    use: Use = None,
) -> None:
    """Chat with a model; type /help there."""
    given = sampling.set_values(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop,
    )
    given["max_tokens"] = max_tokens  # (None is a value)
    sampling.samples(given)
    variables = template_variables(chat_template_kwargs)
    template = None if chat_template is None else read_text("chat template", chat_template)
    if template is not None and not template.strip():
        raise ValueError(
            f"chat template {chat_template} is empty; give a Jinja template, or drop --chat-template"
        )
    if sys.stdin is None:
        raise ValueError("standard input is closed; chat from a terminal, or pipe the questions in")
    llm = load(model, {"disable_log_stats": True, **options}, use)
    notes = Console(stderr=True, highlight=False, markup=False, emoji=False)
    notes.soft_wrap = not notes.is_terminal
    if llm.tokenizer is not None and template is not None:
        llm.tokenizer.chat_template = template
    elif llm.tokenizer is not None and not getattr(llm.tokenizer, "chat_template", None):
        notes.print("The model has no chat template; turns are marked User: and Assistant:.", style="dim")
        llm.tokenizer.chat_template = PLAIN_TEMPLATE
        given["stop"] = (*given.get("stop", ()), *PLAIN_STOP)
    conversation = Conversation(llm, sampling.samples(given), system, variables)
    conversation.check_template()
    with _line_editing():
        if not Chat(conversation, notes).run():
            raise Exit(1)


class Chat:
    """Reads questions and commands and prints answers; everything else goes to standard error."""

    def __init__(self, conversation: Conversation, notes: Console) -> None:
        self._conversation = conversation
        self._notes = notes
        self._show = Console(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._num_lines = 0  # read from a pipe
        self._commands: dict[str, Callable[[], None]] = {
            "/reset": self._reset,
            "/history": self._history,
            "/blocks": self._blocks,
            "/help": lambda: self._show.print(HELP),
        }

    def run(self) -> bool:
        """Until the input ends or /exit; Ctrl-C stops only what is running. False: questions came from a
        pipe, and all of them failed. Raises `TextError` if a pipe has something other than text."""
        failed = succeeded = False
        line: str | None = ""
        if self._interactive:
            self._note(f"The context is {self._conversation.room:,} tokens. /help lists the commands.")
        while True:
            try:
                line = self._read()
                if line is None or line in LEAVE:
                    return self._interactive or succeeded or not failed
                self._act(line)
                succeeded |= bool(line)
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._note("\nCtrl-D or /exit leaves.")
            except ValueError as error:  # this question cannot be answered; the next may be
                if isinstance(error, TextError):  # (what follows in the pipe is no text either)
                    raise
                failed = True
                self._notes.print(
                    without_controls(f"minipaged: {error}", sys.stderr.isatty()), soft_wrap=True
                )
                if isinstance(error, RequestTooLongError) and line and self._conversation.fits_alone(line):
                    self._note("/reset begins a new conversation, which has room for this question.")

    def _read(self) -> str | None:
        """A stripped line; None at the end of the input. Raises `TextError`."""
        if not self._interactive:
            line = sys.stdin.readline()
            self._num_lines += 1
            check_line(f"line {self._num_lines} of standard input", line)
            return line.strip() if line else None
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None

    def _act(self, line: str) -> None:
        word, *more = line.split() or [""]
        if COMMAND.fullmatch(word) and (not more or word in (*self._commands, *LEAVE)):
            command = self._commands.get(line)
            if command is None:
                raise ValueError(f"{line} is not a command; /help lists them")
            command()
        elif line:
            self._answer(line)

    def _answer(self, question: str) -> None:
        with held_log():
            self._print_answer(question)
        if self._conversation.last is None:
            self._note("stopped before the first word; the question is forgotten")
        else:
            self._note(_account(self._conversation.last, self._conversation.llm.config))

    def _print_answer(self, question: str) -> None:
        wrap = wrap_for_output()
        answered = stopped = False
        try:
            with closing(self._conversation.ask(question)) as pieces:
                for piece in pieces:
                    shown = piece if answered else piece.lstrip()
                    answered = answered or bool(shown)
                    print(wrap.feed(shown), end="", flush=True)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            stopped = True
        finally:
            if answered or stopped:
                print(wrap.rest(), flush=True)

    def _reset(self) -> None:
        self._conversation.reset()
        self._note("A new conversation. The blocks of the old one stay cached until they are needed.")

    def _history(self) -> None:
        for message in self._conversation.messages:
            text = f"{message['role']}: {message['content'].strip()}"
            self._show.print(without_controls(text, sys.stdout.isatty()))

    def _blocks(self) -> None:
        engine = self._conversation.llm.engine
        table = self._conversation.kept()
        if table is None:
            raise ValueError("enable_prefix_caching is off, so nothing is kept between answers")
        size = engine.scheduler.kv.block_size
        self._show.print(Table("This conversation", table, size, engine_texts(engine)))
        if rest := len(self._conversation.token_ids) - table.num_tokens:
            self._note(f"In no cached block: the last {counted(rest, 'token')}.")
        self._show.print(Pool(look(engine.scheduler)))

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim")


def _account(turn: Turn, config: EngineConfig) -> str:
    """What an answer cost, in a line."""
    speed = "" if turn.tokens_per_second is None else f", {turn.tokens_per_second:.0f}/s"
    ends = {"stop": "", "length": ", cut off at the limit", None: ", stopped"}[turn.finish_reason]
    reused = f"{turn.num_reused} of {turn.num_prompt_tokens} tokens reused"
    drafts = draft_summary(turn.num_accepted, turn.num_drafted) if config.num_speculative_tokens else ""
    return f"[{reused}; {turn.num_tokens} generated{speed}{ends}{drafts and f'; {drafts}'}]"


def _history_file() -> Path | None:
    """Where the questions are kept; None for a user without a home directory."""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:
        return None
    return state / "minipaged" / "chat"


@contextmanager
def _line_editing() -> Iterator[None]:
    """Arrow keys at the prompt, and the questions of earlier chats, where the system has readline."""
    if hasattr(sys.stdin, "reconfigure"):
        encoding = None if sys.stdin.isatty() else "utf-8-sig"
        sys.stdin.reconfigure(encoding=encoding, errors="surrogateescape")  # invalid text is reported
    try:
        import readline
    except ImportError:
        yield
        return
    path = _history_file()
    if path is None or not sys.stdin.isatty():
        yield
        return
    with suppress(OSError):
        readline.read_history_file(path)
    give_back = _terminal_as_now()

    def keep() -> None:
        readline.set_history_length(HISTORY_LENGTH)
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            readline.write_history_file(path)

    def end() -> None:
        keep()
        give_back()

    try:
        with restored_at_end(end):
            yield
    finally:
        keep()


def _terminal_as_now() -> Callable[[], None]:
    """Restores the terminal's settings, which readline changes while it waits for a line."""
    try:
        import termios

        settings = termios.tcgetattr(sys.stdin)
    except (ImportError, ValueError, OSError):
        return lambda: None

    def restore() -> None:
        with suppress(termios.error):
            if os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():  # else they are the shell's again
                termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)

    return restore
