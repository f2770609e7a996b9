"""The command line. Every engine flag is a field of `EngineConfig`; nothing is decided here.

Errors a user can cause are one line on standard error, with the value and the fix, and exit code 2.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console

from minipaged.cli import simulation as commands
from minipaged.config import EngineConfig
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


DEFAULT_PROMPT = "Once upon a time"

# Some versions of typer bring their own copy of click: this is the exception base of whichever is in use.
UsageError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

Model = Annotated[str | None, typer.Option(help="Model directory or hub id; default: the pocket model.")]


Use = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CONCEPT=FILE.py:Class", help="Run a part of your own, e.g. an allocator; may be repeated."
    ),
]


def _choice(name: str, choices: list[str]) -> Any:
    return Enum(name, {choice: choice for choice in choices})


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option per field of `EngineConfig`; it receives them as the dict `options`.

    An option that is not given is left out, so that the config's own default holds.
    """
    hints = get_type_hints(EngineConfig)
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
    extra = []
    for option in fields(EngineConfig):
        flag = option.name.replace("_", "-")
        kind: Any = hints[option.name]
        choices = [choice for choice in get_args(kind) if isinstance(choice, str)]
        if choices:
            kind = _choice(option.name, choices)
        elif get_args(kind):
            kind = next(argument for argument in get_args(kind) if argument is not type(None))
        names = [f"--{flag}/--no-{flag}" if option.name.startswith("enable_") else f"--{flag}"]
        default = "" if option.default is None else f" [default: {option.default}]"
        setting = typer.Option(
            *names, help=option.metadata["help"] + default, show_default=False, rich_help_panel="Engine"
        )
        parameter = inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, setting],
        )
        extra.append(parameter)

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        given = {option.name: values.pop(option.name) for option in fields(EngineConfig)}
        options = {
            name: value.value if isinstance(value, Enum) else value
            for name, value in given.items()
            if value is not None
        }
        command(**values, options=options)

    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    wrapper.__signature__ = inspect.Signature([*keyword_only, *extra])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in (*keyword_only, *extra)}
    del wrapper.__wrapped__  # type: ignore[attr-defined]  # typer would look at it instead
    return wrapper


@app.command()
@with_engine_options
def generate(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(help="A file with one prompt a line; - reads standard input."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model directory or hub id; default: the pocket model.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: 0; 1 if --n > 1]")] = None,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens with this probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from so many likeliest tokens; 0: all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")] = 0.0,
    n: Annotated[int, typer.Option("--n", help="Completions per prompt.")] = 1,
    beam_width: Annotated[int | None, typer.Option(help="Beam search with so many beams.")] = None,
    length_penalty: Annotated[float, typer.Option(help="Beam search: above 0 favours long texts.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a completion.")] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print the text of one prompt as it comes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write what each step did to this file.")] = None,
    show_blocks: Annotated[
        bool, typer.Option("--show-blocks", help="Show the KV pool at its fullest and where the tokens lay.")
    ] = False,
    use: Use = None,
    options: dict[str, Any] = {},  # noqa: B006 (filled by the decorator)
) -> None:
    """Complete prompts."""
    from minipaged.decoding.params import BeamSearchParams, ParamsError, SamplingParams

    prompts = list(prompt or [])
    if prompt_file is not None:
        prompts += _read_prompts(prompt_file)
    params: SamplingParams | BeamSearchParams
    if beam_width is not None:
        if temperature or stop or n > beam_width:
            what = (
                f"temperature {temperature}"
                if temperature is not None
                else f"stop {stop}"
                if stop
                else f"n {n}"
            )
            raise ParamsError(f"beam_width is {beam_width}, which contradicts {what}; drop one of them")
        params = BeamSearchParams(
            beam_width=beam_width,
            num_return_sequences=n,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
        )
    else:
        if temperature is None:
            temperature = 1.0 if n > 1 else 0.0
        params = SamplingParams(
            n=n,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
        )
    llm = _load(model, options, use)
    from minipaged.viewer.highlights import Highlights
    from minipaged.viewer.report import outputs_json, print_outputs
    from minipaged.viewer.terminal import print_blocks
    from minipaged.viewer.trace import TraceWriter

    writer = TraceWriter(trace, llm.engine) if trace is not None else None
    seen = Highlights(llm.engine) if show_blocks else None
    prompts = prompts or [DEFAULT_PROMPT]
    outputs: list[Any] = []
    if stream:
        if len(prompts) != 1 or not isinstance(params, SamplingParams):
            raise ParamsError(f"--stream prints one completion of one prompt, not of {len(prompts)}; drop it")
        for piece in llm.stream(prompts[0], params):
            print(piece, end="", flush=True)
        print()
    else:
        show = not as_json and sys.stderr.isatty()
        outputs = llm.generate(prompts, params, progress=show)
        if as_json:
            print(json.dumps(outputs_json(outputs, llm.engine), indent=2))
        else:
            print_outputs(outputs, llm.engine)
    if seen is not None:
        print_blocks(seen, outputs, Console(stderr=as_json, highlight=False))
    if writer is not None:
        writer.close()


@app.command()
@with_engine_options
def bench(
    workload: Annotated[Path, typer.Option(help="JSON list of {prompt_token_ids, max_tokens}.")],
    model: Annotated[
        str | None, typer.Option(help="Model directory or hub id; default: the pocket model.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the matrix products.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests arrive at this mean rate a second.")] = None,
    tokens_out: Annotated[Path | None, typer.Option(help="Write the generated ids to this file.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time of a step goes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    use: Use = None,
    options: dict[str, Any] = {},  # noqa: B006 (filled by the decorator)
) -> None:
    """Run a workload and report speed, latency and memory."""
    from minipaged.bench import read_workload, run_workload

    items = read_workload(workload)
    if rate is not None and not 0 < rate < float("inf"):
        raise ValueError(f"rate is {rate}; give requests a second, above 0")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    llm = _load(model, {"disable_log_stats": True, **options}, use)
    from minipaged.llm import progress_bar
    from minipaged.viewer.profile import StepProfile
    from minipaged.viewer.report import print_figures

    parts = StepProfile()
    measuring = parts.watch(llm.engine) if profile else None
    with progress_bar(len(items), enabled=not as_json and sys.stderr.isatty()) as advance:
        result = run_workload(llm, items, rate=rate, measuring=measuring, progress=advance)
    tokens = result.pop("tokens")
    if tokens_out is not None:
        tokens_out.write_text(json.dumps(tokens))
    if as_json:
        print(json.dumps(result | ({"profile": parts.seconds} if profile else {}), indent=2))
    else:
        print_figures(workload.name, result, parts.seconds)


app.command()(commands.reproduce)
app.command()(with_engine_options(commands.simulate))
app.command()(with_engine_options(commands.calibrate))
app.add_typer(lessons.app, name="learn")


def _load(model: str | None, options: dict[str, Any], use: list[str] | None) -> Any:
    from minipaged.config import config_from
    from minipaged.learn.overrides import components_from, parse_use

    # A bad setting or part is told before torch takes its seconds to load.
    config_from(options)
    parts = parse_use(use or ())
    components_from(parts)
    from transformers.utils import logging as transformers_logging

    from minipaged.llm import LLM

    transformers_logging.disable_progress_bar()
    return LLM(model, use=parts, **options)


def _read_prompts(name: str) -> list[str]:
    if name == "-":
        text = sys.stdin.read()
    else:
        try:
            text = Path(name).read_text()
        except OSError as error:
            raise ValueError(f"cannot read prompt file {name}: {error.strerror}") from error
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"prompt file {name} has no prompt; give one a line")
    return prompts


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
