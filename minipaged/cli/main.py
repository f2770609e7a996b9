"""The `minipaged` command; errors a user can cause are one line on standard error and exit code 2."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import suppress
from typing import Annotated, Any

import typer

from minipaged import __version__
from minipaged.cli import simulation
from minipaged.cli.bench import bench
from minipaged.cli.chat import chat
from minipaged.cli.generate import generate
from minipaged.cli.options import with_engine_options
from minipaged.cli.score import score
from minipaged.cli.serve import serve
from minipaged.cli.streams import StandardErrorHandler, standard_streams, to_nowhere
from minipaged.cli.view import top, view
from minipaged.cli.vllm_options import ARGUMENTS, message_about
from minipaged.environment import prepare_process
from minipaged.execution.distributed import RankError
from minipaged.learn import command as learn
from minipaged.prompts import FailedRequestError
from minipaged.simulation.serving import SPECULATION, WITHOUT_EFFECT
from minipaged.text_io import without_controls

NAME = "minipaged"

app = typer.Typer(
    name=NAME,
    help="Learn PagedAttention, the paper behind vLLM, by building a small LLM engine.",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _without_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"{NAME} {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command()(with_engine_options(generate))
app.command()(with_engine_options(chat))
app.command()(with_engine_options(bench))
app.command()(with_engine_options(serve))
app.command()(simulation.reproduce)
app.command()(with_engine_options(simulation.simulate, hidden=WITHOUT_EFFECT))
app.command()(with_engine_options(simulation.calibrate, hidden=SPECULATION))
app.command()(view)
app.command()(top)
learn.app.command()(score)  # needs the simulator, a layer above `learn`
app.add_typer(learn.app, name="learn")


def main() -> None:
    """Entry point of the `minipaged` command."""
    prepare_process()
    with standard_streams() as output:
        handlers: list[logging.Handler] = [StandardErrorHandler()]
        logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING, handlers=handlers)
        logging.getLogger("minipaged").setLevel(logging.INFO)
        # The packages that it names, if a hybrid model does without them, are for GPUs.
        logging.getLogger("transformers.integrations.hub_kernels").addFilter(
            lambda _: sys.modules["torch"].cuda.is_available()
        )
        try:
            try:
                code = app(prog_name=NAME, standalone_mode=False) or 0
            except (Exception, SystemExit) as error:
                code = _report(error)
            output.close_kept()
        except BrokenPipeError:
            to_nowhere(sys.stdout)
            code = 1
        except ValueError as error:
            code = _report(error)
    raise SystemExit(code)


def _report(error: BaseException) -> int:
    """Report in one line an error that the user can fix, and return the exit code; raise any other error."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, typer.Abort):
        return 130
    if isinstance(error, typer.TyperException):
        where: Any = getattr(error, "ctx", None)
        message = error.format_message().rstrip(".").replace(": Value error, ", ": ") + _given(error)
        # Pydantic's words for what is not a number.
        message = re.sub("Input should be (a valid [a-z]+).*(?= [(]it is)", r"give \1", message)
        if message.startswith("No such option"):
            message = message_about(getattr(error, "option_name", ""), sys.argv[1:]) or message
        options = [name for param in where.command.params for name in param.opts] if where else []
        if "--model" in options:  # (`vllm serve MODEL`)
            fix = ARGUMENTS.get(" ".join(sys.argv[1:3]), "give a model with --model")
            message = re.sub("^Got unexpected extra argument.*", rf"\g<0>; {fix}", message)
        _print(f"{message}; see {where.command_path if where else _command_path()} --help")
    elif isinstance(error, BrokenPipeError):
        raise error
    elif isinstance(error, OSError):
        _print(
            f"{error.filename or 'input or output'}: {error.strerror or error}; use another file or folder"
        )
    elif isinstance(error, RankError):
        _print(str(error))
        return 1
    elif isinstance(error, (ValueError, NotImplementedError)):  # the latter: a stub that says what to do
        _print(str(error) or f"{type(error).__name__}, without a message")
        return 1 if isinstance(error, FailedRequestError) else 2
    else:
        raise error
    return 2


def _command_path() -> str:
    """The command that was typed, for an error without a context (an option without its value)."""
    path = NAME
    command: Any = typer.main.get_command(app)
    for word in sys.argv[1:]:
        if (command := getattr(command, "commands", {}).get(word)) is None:
            break
        path += f" {word}"
    return path


def _given(error: Any) -> str:
    """What was typed for the option of a usage error, if the message does not show it."""
    names = getattr(getattr(error, "param", None), "opts", ())
    given = [value for name, value in zip(sys.argv, sys.argv[1:]) if name in names]
    return f" (it is {given[-1]!r})" if given and repr(given[-1]) not in error.format_message() else ""


def _print(message: str) -> None:
    with suppress(OSError):
        line = without_controls(" ".join(message.split()), sys.stderr.isatty())
        print(f"minipaged: {line}", file=sys.stderr)
