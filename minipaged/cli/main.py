"""The `minipaged` command; errors a user can cause are one line on standard error and exit code 2."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import typer

from minipaged.cli import simulation
from minipaged.cli.bench import bench
from minipaged.cli.generate import generate
from minipaged.cli.options import with_engine_options
from minipaged.environment import prepare_process
from minipaged.learn import lessons

app = typer.Typer(
    name="minipaged",
    help="PagedAttention, the paper behind vLLM, as code to learn from and to generate with.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(with_engine_options(generate))
app.command()(with_engine_options(bench))
app.command()(simulation.reproduce)
app.command()(with_engine_options(simulation.simulate))
app.command()(with_engine_options(simulation.calibrate))
app.add_typer(lessons.app, name="learn")

# Some versions of typer bring their own copy of click: this is the exception base of whichever is in use.
UsageError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main() -> None:
    """Entry point of the `minipaged` command."""
    prepare_process()
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("minipaged").setLevel(logging.INFO)
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        _fail(error.format_message())
    except typer.Abort:
        raise SystemExit(130) from None
    except (ValueError, NotImplementedError) as error:  # the latter: a stub of --use that says what is to do
        _fail(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    raise SystemExit(code or 0)


def _fail(message: str) -> None:
    print("minipaged: " + " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)
