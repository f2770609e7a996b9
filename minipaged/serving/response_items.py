"""The items of `/v1/responses`: from its input to a conversation, from an answer to its output.

Reasoning, a call and its result are items there, but belong to messages in a conversation:

    reasoning "They ask for Rome."         assistant "Let me look." + its reasoning + call c1
    message "Let me look."             ->  tool (of c1) "sunny"
    function_call c1 weather {...}
    function_call_output c1 "sunny"
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minipaged.prompts import shortened
from minipaged.serving.chat import check_parts, plain_message
from minipaged.serving.errors import ApiError
from minipaged.serving.response_schemas import ResponseItem, ResponseTool
from minipaged.serving.schemas import Function, Message, Tool

TYPES = "give a message, a reasoning, a function_call or a function_call_output"


def conversation_of(items: Sequence[ResponseItem]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them.

    Raises:
        ApiError: an item of another type, or one that lacks a field.
    """
    messages: list[dict[str, Any]] = []
    reasoning = ""  # of the message that follows
    for number, item in enumerate(items):
        place = f"input.{number}"
        match item.type or "message":
            case "reasoning":
                parts = item.content or []
                if isinstance(parts, str):
                    parts = [{"type": "text", "text": parts}]
                check_parts(parts, f"{place}.content")
                reasoning = "".join(part["text"] for part in parts)
                continue
            case "message":
                _check_fields(item, place, "role")
                message = plain_message(Message(role=str(item.role), content=item.content), place)
            case "function_call":
                message = _message_with(item, place)
            case "function_call_output":
                _check_fields(item, place, "call_id", "output")
                values = {"role": "tool", "content": item.output, "tool_call_id": item.call_id}
                message = plain_message(Message.model_validate(values), place, "output")
            case other:
                raise ApiError(400, f"{place} has type {other[:40]!r}; {TYPES}", place)
        if reasoning and message["role"] == "assistant":
            message["reasoning"] = message["reasoning_content"] = reasoning
        elif item.type == "function_call" and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        reasoning = ""
        messages.append(message)
    return messages


def _message_with(item: ResponseItem, place: str) -> dict[str, Any]:
    """A message that only makes a call."""
    _check_fields(item, place, "call_id", "name", "arguments")
    function = {"name": item.name, "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    try:
        return plain_message(Message.model_validate({"role": "assistant", "tool_calls": [call]}), place)
    except ApiError as error:
        field = f"{place}.arguments"
        raise ApiError(400, f"{field} is {shortened(item.arguments)}; give JSON", field) from error


def _check_fields(item: ResponseItem, place: str, *names: str) -> None:
    for name in names:
        if getattr(item, name) is None:
            raise ApiError(400, f"{place}.{name} is missing; give it", f"{place}.{name}")


def as_chat_tools(tools: Sequence[ResponseTool]) -> list[Tool]:
    """Functions as `/v1/chat/completions` takes them: one level deeper."""
    return [
        Tool(type="function", function=Function(**tool.model_dump(exclude={"type"}, exclude_unset=True)))
        for tool in tools
    ]


class ItemKind(NamedTuple):
    """How items with a text differ."""

    prefix: str
    """Of their ids."""
    event: str
    """The beginning of their events' names."""
    item: Callable[[str, str | None, str], dict[str, Any]]
    """From an id, a text (None: there is none yet) and a status."""
    part: Callable[[str], dict[str, Any]]
    """Their content, from a text."""
    extra: dict[str, Any]
    """Further fields of their events about the text."""


def _text_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_text_part(text)]
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_reasoning_part(text)]
    return {"type": "reasoning", "id": item_id, "summary": [], "status": status, "content": content}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


TEXT = ItemKind("msg", "response.output_text", _text_item, _text_part, {"logprobs": []})
REASONING = ItemKind("rs", "response.reasoning_text", _reasoning_item, _reasoning_part, {})


def call_item(call: dict[str, Any]) -> dict[str, Any]:
    """A call that `ToolCallReader` found."""
    named = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"]}
    return {**named, **call["function"], "status": "completed"}
