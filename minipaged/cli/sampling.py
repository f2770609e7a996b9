"""The options that say how tokens are chosen, shared by the commands that generate text."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import fields, replace
from typing import Annotated, Any

from typer import Option

from minipaged.decoding.params import (
    GREEDY_BELOW,
    BeamSearchParams,
    DecodingParams,
    ParamsError,
    SamplingParams,
)
from minipaged.decoding.structured import StructuredOutputsParams
from minipaged.prompts import shortened
from minipaged.text_io import read_text

TopP = Annotated[float, Option(help="Sample from the likeliest tokens with this total probability.")]
TopK = Annotated[int, Option(help="Sample from this many of the likeliest tokens; 0 means all.")]
MinP = Annotated[
    float, Option(help="Drop tokens with less than this share of the likeliest token's probability.")
]
RepetitionPenalty = Annotated[
    float, Option(help="Values above 1 discourage repeating the prompt or the output.")
]
PresencePenalty = Annotated[
    float, Option(help="Subtract this from the logits of tokens already in the output.")
]
FrequencyPenalty = Annotated[
    float, Option(help="Subtract this from a token's logit for each time it occurs in the output.")
]
Stop = Annotated[list[str] | None, Option(help="Text that ends a completion; may be repeated.")]
StopTokenId = Annotated[list[int] | None, Option(help="Token id that ends a completion; may be repeated.")]
MinTokens = Annotated[int, Option(help="Minimum number of tokens to generate before a completion may end.")]
IgnoreEos = Annotated[bool, Option("--ignore-eos", help="Ignore end tokens and keep generating.")]

OFF = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
}
"""Values without effect, given or not."""


def set_values(**values: Any) -> dict[str, Any]:
    """Options with an effect, as fields of `SamplingParams`."""
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return {name: value for name, value in plain.items() if value not in (None, (), *OFF.get(name, ()))}


def samples(given: dict[str, Any], default_temperature: float = 0.0) -> SamplingParams:
    """`SamplingParams` of `set_values`. Raises `ParamsError` for a value out of range, or without effect."""
    params = SamplingParams(**{"temperature": default_temperature, **given})
    for name in ("top_p", "top_k", "min_p"):
        if params.is_greedy and name in given:
            raise ParamsError(
                f"{name} is {given[name]}, but temperature {params.temperature} is greedy; "
                f"give --temperature {GREEDY_BELOW} or more, or drop {name}"
            )
    return params


def beams(given: dict[str, Any], beam_width: int, n: int, length_penalty: float | None) -> BeamSearchParams:
    """`BeamSearchParams` from `set_values`. Raises `ParamsError` for what beams do not support."""
    known = {field.name for field in fields(BeamSearchParams)}
    for name, value in given.items():
        if name not in known or name == "structured_outputs":
            other = "structured output" if name == "structured_outputs" else f"{name} {value}"
            raise ParamsError(f"beam_width is {beam_width}, which contradicts {other}; drop one of them")
    if length_penalty is not None:
        given = given | {"length_penalty": length_penalty}
    params = BeamSearchParams(**given, beam_width=beam_width)
    if not 1 <= n <= beam_width:
        raise ParamsError(f"n is {n} with beam_width {beam_width}; set n to a number from 1 to {beam_width}")
    return replace(params, num_return_sequences=n)


def decoding_params(
    given: dict[str, Any], n: int, beam_width: int | None, length_penalty: float | None
) -> DecodingParams:
    """The decoding method that the options of `generate` ask for. Raises `ParamsError`."""
    if beam_width is not None:
        return beams(given, beam_width, n, length_penalty)
    if length_penalty is not None:
        raise ParamsError(
            f"length_penalty is {length_penalty} without beams; give --beam-width, or drop length_penalty"
        )
    return samples({**given, "n": n}, default_temperature=1.0 if n > 1 else 0.0)


def structured(
    json_schema: str | None, regex: str | None, choice: list[str] | None
) -> StructuredOutputsParams | None:
    """What the text must follow, if anything: a schema is a file, or the schema itself."""
    if json_schema is None and regex is None and choice is None:
        return None
    if json_schema is not None and not re.match(r"\s*([{[]|(true|false)\s*$)", json_schema):
        json_schema = read_text("JSON schema", json_schema)
    params = StructuredOutputsParams(json=json_schema, regex=regex, choice=choice)
    if json_schema is not None:
        _check_json(json_schema)
        params.check("--json-schema")
    elif regex is not None:
        params.check("--regex")
    return params


def _check_json(schema: str) -> None:
    with suppress(RecursionError):  # (the check of the schema reports it)
        try:
            json.loads(schema)
        except ValueError as error:
            raise ParamsError(
                f"--json-schema is {shortened(schema)}, which is not JSON: {error}; "
                """give a schema such as '{"type": "object"}', or a file with one"""
            ) from error
