"""Forced tool calls: `tool_choice` is "required" or names functions.

The text follows a grammar, so the model writes a call even if it was never trained to:

    start: call ("\\n" call)*
    call: call_0 | call_1
    call_0: "<tool_call>" "\\n{\\"name\\": \\"weather\\", \\"arguments\\": " arguments_0 "}\\n" "</tool_call>"
    arguments_0: %json {"type": "object", "properties": {"city": {"type": "string"}}}

Where calls are not forced, but an answer would follow a schema, the text is either:

    start: answer | calls
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from minipaged.conversations import supports_tools
from minipaged.decoding.checks import ParamsError
from minipaged.decoding.free_formats import followed_schema
from minipaged.decoding.params import DecodingParams, SamplingParams
from minipaged.decoding.structured import JSON_DEFAULTS, StructuredOutputsParams
from minipaged.prompts import shortened
from minipaged.serving.errors import ApiError
from minipaged.serving.response_schemas import ResponseAllowedTools, ResponsesBody, ResponseToolChoice
from minipaged.serving.schemas import (
    AllowedToolsChoice,
    ChatBody,
    Function,
    StructuredOutputs,
    Tool,
    ToolChoice,
)
from minipaged.serving.service import Service
from minipaged.serving.tool_calls import END, TAG


async def tools_of(
    service: Service, body: ChatBody | ResponsesBody, tools: Sequence[Tool]
) -> list[dict[str, Any]] | None:
    """The tools for the chat template; if `tool_choice` forces a call, its grammar goes into `body`.

    Raises:
        ApiError: there is no such function, its parameters cannot be compiled, or the body asks for another
            text as well.
    """
    mode, allowed = _choice(body.tool_choice, tools)
    # (A model free to answer in text calls what it is shown. Else all are shown: the prompt stays cached.)
    shown = [tool.model_dump(exclude_unset=True) for tool in (allowed if mode == "auto" else tools)] or None
    try:
        json.dumps(shown, allow_nan=False)
    except ValueError as error:
        raise ApiError(400, "tools have a number that is not JSON's; give a smaller one", "tools") from error
    except RecursionError as error:
        raise ApiError(400, "tools are nested too deeply; give flatter parameters", "tools") from error
    if mode == "none":
        return None
    if mode == "auto":
        return shown
    if not allowed:
        raise ApiError(400, "tool_choice is 'required', but there are no tools; give some", "tool_choice")
    functions = [tool.function for tool in allowed]
    is_one = mode == "one" or body.parallel_tool_calls is False
    for field in ("structured_outputs", "use_beam_search"):
        if getattr(body, field):
            raise ApiError(400, f"tool_choice forces a call, and {field} is given; drop one", "tool_choice")
    try:
        grammar = _grammar_of(functions, is_one, service.tokenizer)
        await service.compile_structured(StructuredOutputsParams(grammar=grammar))
    except ParamsError as error:
        raise await _blame(service, functions, error) from error
    body.response_format = None  # there will be no other text
    body.structured_outputs = StructuredOutputs.model_validate({"grammar": grammar})
    # (A template need not have a place for tools: the grammar has them.)
    return shown if supports_tools(service.tokenizer, shown) else None


async def with_calls(
    service: Service, body: ChatBody | ResponsesBody, params: DecodingParams, tools: Any
) -> DecodingParams:
    """The same, but the model may call one of these tools before it answers in the format of the body.

    Raises:
        ApiError: the parameters of a tool cannot be compiled.
    """
    if not tools or body.response_format is None or not isinstance(params, SamplingParams):
        return params
    if (wanted := params.structured_outputs) is None:
        return params
    functions = [Function(**tool["function"]) for tool in tools]
    answer = json.dumps({"x-guidance": JSON_DEFAULTS, **followed_schema(wanted.json)})
    is_one = body.parallel_tool_calls is False
    calls = _grammar_of(functions, is_one, service.tokenizer).replace("start", "calls", 1)
    either = StructuredOutputsParams(grammar=f"start: answer | calls\nanswer: %json {answer}\n{calls}")
    try:
        await service.compile_structured(either)
    except ParamsError as error:
        raise await _blame(service, functions, error) from error
    return params.clone(structured_outputs=either)


def _tag(tag: str, tokenizer: Any) -> str:
    """A tag in a grammar; a model may write it as one token, if its tokenizer has that."""
    token = tokenizer.convert_tokens_to_ids(tag)
    is_token = token is not None and tokenizer.convert_ids_to_tokens(token) == tag
    return f"({_json(tag)} | <[{token}]>)" if is_token else _json(tag)


def _choice(choice: Any, tools: Sequence[Tool]) -> tuple[str, Sequence[Tool]]:
    """The mode ("auto", "none", "required" or "one") and the tools that may be called."""
    match choice:
        case AllowedToolsChoice() | ResponseAllowedTools():
            names = {tool.function.name for name in choice.names for tool in _named(tools, name)}
            return choice.mode, [tool for tool in tools if tool.function.name in names]
        case ToolChoice() | ResponseToolChoice():
            return "one", _named(tools, choice.name)
    return choice or "auto", tools


def _named(tools: Sequence[Tool], name: str) -> list[Tool]:
    found = [tool for tool in tools if tool.function.name == name]
    if not found:
        message = f"tool_choice names {name[:80]!r}, which is not in tools; add it"
        raise ApiError(400, message, "tool_choice")
    return found


async def _blame(service: Service, functions: Sequence[Function], error: ParamsError) -> ApiError:
    """An error in the grammar, under the name of the function at fault."""
    for function in functions:
        try:
            await service.compile_structured(StructuredOutputsParams(json=_schema(function)))
        except ParamsError as own:
            reason = str(own).replace("json of structured_outputs", f"parameters of {function.name[:80]!r}")
            return ApiError(400, f"tools: {reason}", "tools")
    reason = str(error).replace("grammar of structured_outputs", "the grammar of their calls")
    return ApiError(400, f"tools: {reason}", "tools")


def _grammar_of(functions: Sequence[Function], is_one: bool, tokenizer: Any) -> str:
    """A Lark grammar for calls of these functions, for one of them if `is_one`.

    Raises:
        ApiError: the parameters of a function are not those of an object.
    """
    rules = [f"call_{i}" for i in range(len(functions))]
    lines = ["start: call" if is_one else r'start: call ("\n" call)*', f"call: {' | '.join(rules)}"]
    tag, end = _tag(TAG, tokenizer), _tag(END, tokenizer)
    for i, function in enumerate(functions):
        begin = f'\n{{"name": {_json(function.name)}, "arguments": '
        lines.append(rf'call_{i}: {tag} {_json(begin)} arguments_{i} "}}\n" {end}')
        lines.append(f"arguments_{i}: %json {json.dumps(_schema(function))}")
    return "\n".join(lines)


def _schema(function: Function) -> dict[str, Any]:
    """Of a function's arguments."""
    schema = function.parameters or {"properties": {}}
    if schema.get("type", "object") != "object":
        problem = f"parameters of {function.name[:80]!r} have the type {shortened(schema['type'])}"
        raise ApiError(400, f"tools: {problem}; give 'object'", "tools")
    return {"x-guidance": JSON_DEFAULTS, **followed_schema(schema), "type": "object"}


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # (invalid in a grammar)
