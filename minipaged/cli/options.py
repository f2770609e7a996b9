"""Options that several commands share. Every engine flag is a field of `EngineConfig`."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import BadParameter, Option

from minipaged.config import EngineConfig, config_from
from minipaged.progress import progress_bar
from minipaged.prompts import shortened
from minipaged.text_io import to_count

if TYPE_CHECKING:
    from minipaged.components import Components
    from minipaged.llm import LLM

LARGE = ("kv_cache_memory", "swap_space", "max_model_len", "max_num_batched_tokens")
"""Bytes and tokens, which may have a suffix, as in 4k or 2GiB."""

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY

Model = Annotated[str | None, Option(help="Model directory, GGUF file or hub id. [default: pocket]")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of text.")]
ApiKey = Annotated[str | None, Option(envvar="MINIPAGED_API_KEY", help="API key of the server.")]
Use = Annotated[
    list[str] | None,
    Option(
        metavar="CONCEPT=FILE.py:Class", help="Use a class of your own, e.g. an allocator; may be repeated."
    ),
]


def read_count(text: str) -> int:
    """`to_count`, whose message typer would drop."""
    try:
        return to_count(text)
    except ValueError as error:
        raise BadParameter(str(error)) from error


def _parameter(option: Field[Any], kind: Any, hidden: bool) -> inspect.Parameter:
    """The parameter of a command for a field of the config, for typer."""
    flag = option.name.replace("_", "-")
    names = f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}"
    text = option.metadata["help"] + ("" if option.default is None else f" [default: {option.default}]")
    parsed: Any = {"parser": read_count, "metavar": "<int, 4k, 2GiB>"} if option.name in LARGE else {}
    setting = Option(names, help=text, show_default=False, hidden=hidden, **parsed)
    annotation = Annotated[kind | None, setting]
    return inspect.Parameter(option.name, KEYWORD_ONLY, default=None, annotation=annotation)


def with_engine_options(command: Callable[..., None], hidden: Collection[str] = ()) -> Callable[..., None]:
    """Give a command one option per field of `EngineConfig`; it receives them as the dict `options`.

    An option that is not given is left out, so that the config's own default holds. The help does not show
    `hidden` ones, which the command refuses.
    """
    hints = get_type_hints(EngineConfig)
    own = inspect.signature(command, eval_str=True).parameters.values()
    extra = [_parameter(option, hints[option.name], option.name in hidden) for option in fields(EngineConfig)]

    def wrapper(**values: Any) -> None:
        given = {option.name: values.pop(option.name) for option in extra}
        command(**values, options={name: value for name, value in given.items() if value is not None})

    parameters = [*(p.replace(kind=KEYWORD_ONLY) for p in own if p.name != "options"), *extra]
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return wrapper


def template_variables(text: str | None) -> dict[str, Any]:
    """The variables for a chat template in the JSON of an option. Raises `ValueError`."""
    from minipaged.conversations import check_variables  # (it needs jinja2, which takes a while)

    try:
        variables = json.loads("{}" if text is None else text)
    except (ValueError, RecursionError):
        variables = text
    if not isinstance(variables, dict):
        raise ValueError(
            f"chat_template_kwargs is {shortened(text)}; give a JSON object such as "
            """'{"enable_thinking": false}'"""
        )
    check_variables(variables)
    return variables


def check_threads(threads: int | None) -> None:
    """Raise `ValueError` for more threads than there are cores: they only wait, and too many crash."""
    cores = os.cpu_count() or 1
    if threads is not None and not 1 <= threads <= cores:
        raise ValueError(
            f"threads is {threads}; give a number from 1 to {cores}, the number of cores of this machine"
        )


def check_parts(options: dict[str, Any], use: list[str] | None) -> Components:
    """The replaced parts; a mistake in them or in the settings is reported before torch is loaded."""
    from minipaged.learn.overrides import components_from, parse_use

    config_from(options)
    return components_from(parse_use(use or ()))


def files_of(use: list[str] | None) -> list[str]:
    """The files that `--use` names."""
    from minipaged.learn.overrides import parse_use

    return [where.rpartition(":")[0] for where in parse_use(use or ()).values()]


def load(model: str | None, options: dict[str, Any], use: list[str] | None) -> LLM:
    """The model with these settings and replaced parts."""
    parts = check_parts(options, use)
    with progress_bar("loading libraries"):  # transformers imports most of its modules on first use
        from transformers.utils import logging as transformers_logging

        import minipaged.execution.model_runner  # noqa: F401
        from minipaged.llm import LLM

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    return LLM(model, components=parts, **options)
