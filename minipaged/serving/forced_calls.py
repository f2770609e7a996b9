"""A text that must be a tool call: `tool_choice` is "required" or names a function.

The text follows a grammar, so what the model writes is a call even if nobody has taught it to write one:

    start: call ("\\n" call)*
    call: call_0 | call_1
    call_0: "<tool_call>\\n{\\"name\\": \\"weather\\", \\"arguments\\": " arguments_0 "}\\n</tool_call>"
    arguments_0: %json {"type": "object", "properties": {"city": {"type": "string"}}}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from minipaged.decoding.checks import ParamsError
from minipaged.decoding.structured import JSON_DEFAULTS, StructuredOutputsParams
from minipaged.serving.errors import ApiError
from minipaged.serving.schemas import Function, GenerationBody, StructuredOutputs
from minipaged.serving.service import Service
from minipaged.serving.tool_calls import END, TAG

AFTER_ARGUMENTS = f"}}\n{END}"


async def force_call(
    service: Service, body: GenerationBody, functions: Sequence[Function], name: str | None, most_one: bool
) -> None:
    """Let `body` ask for calls of these functions, one or more.

    Args:
        service: where.
        body: `structured_outputs` is set; `response_format` is dropped, as there will be no other text.
        functions: all that were given.
        name: of the only one that may be called, once; None: any.
        most_one: one call is enough.

    Raises:
        ApiError: there is no such function, its parameters cannot be followed, or the body asks for another
            text as well.
    """
    chosen = [function for function in functions if name in (None, function.name)]
    if not chosen:
        told = f"names {name[:80]!r}" if name is not None else "is 'required'"
        names = ", ".join(function.name[:80] for function in functions[:8]) or "nothing"
        raise ApiError(400, f"tool_choice {told}, but tools has {names}; give that function", "tool_choice")
    for field in ("structured_outputs", "use_beam_search"):
        if getattr(body, field):
            raise ApiError(400, f"tool_choice forces a call, and {field} is given; drop one", "tool_choice")
    for function in chosen:
        await _check(service, "json", _schema(function), f"tools: parameters of {function.name[:80]!r}")
    grammar = grammar_of(chosen, name is not None or most_one)
    await _check(service, "grammar", grammar, "tools: the grammar of their calls")
    body.response_format = None
    body.structured_outputs = StructuredOutputs.model_validate({"grammar": grammar})


async def _check(service: Service, kind: str, source: Any, place: str) -> None:
    try:
        await service.compile_structured(StructuredOutputsParams(**{kind: source}))
    except ParamsError as error:
        told = str(error).replace(f"{kind} of structured_outputs", place)
        raise ApiError(400, told if place in told else f"{place}: {told}", "tools") from error


def grammar_of(functions: Sequence[Function], most_one: bool) -> str:
    """Calls of these functions as Lark writes a grammar."""
    rules = [f"call_{i}" for i in range(len(functions))]
    lines = ["start: call" if most_one else r'start: call ("\n" call)*', f"call: {' | '.join(rules)}"]
    for i, function in enumerate(functions):
        begin = f'{TAG}\n{{"name": {_json(function.name)}, "arguments": '
        lines.append(f"call_{i}: {_json(begin)} arguments_{i} {_json(AFTER_ARGUMENTS)}")
        lines.append(f"arguments_{i}: %json {json.dumps(_schema(function))}")
    return "\n".join(lines)


def _schema(function: Function) -> dict[str, Any]:
    """Of its arguments: an object with the keys that it names and no others, unless it says more of them."""
    schema = {"type": "object", "x-guidance": JSON_DEFAULTS, **(function.parameters or {})}
    if not schema.keys() & {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}:
        schema.setdefault("additionalProperties", False)
    return schema


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
