"""The items of `/v1/responses`: from its input to a conversation, from an answer to its output.

A call and its result are items of their own there, and parts of messages in a conversation:

    message "I look."                       assistant "I look." + call c1
    function_call c1 weather {...}     ->   tool (of c1) "sunny"
    function_call_output c1 "sunny"
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from minipaged.serving.errors import ApiError
from minipaged.serving.schemas import Function, Message, ResponseItem, ResponseTool, Tool

TYPES = "give a message, a function_call or a function_call_output"


def messages_of(items: Sequence[ResponseItem]) -> list[Message]:
    """A conversation.

    Raises:
        ApiError: an item of another type, or one that lacks a field.
    """
    messages: list[Message] = []
    for number, item in enumerate(items):
        match item.type or "message":
            case "message":
                messages.append(Message(role=_field(item, number, "role"), content=item.content))
            case "function_call":
                function = {name: _field(item, number, name) for name in ("name", "arguments")}
                call = {"id": _field(item, number, "call_id"), "type": "function", "function": function}
                if not messages or messages[-1].role != "assistant":
                    messages.append(Message(role="assistant"))
                last = messages[-1]
                calls = [*(getattr(last, "tool_calls", None) or ()), call]
                messages[-1] = last.model_copy(update={"tool_calls": calls})
            case "function_call_output":
                values = {"tool_call_id": _field(item, number, "call_id")}
                output = _field(item, number, "output", str | list)
                messages.append(Message(role="tool", content=output, **values))
            case other:
                name = f"input.{number}"
                raise ApiError(400, f"{name} has type {other[:40]!r}; {TYPES}", name)
    return messages


def _field(item: ResponseItem, number: int, name: str, kind: Any = str) -> Any:
    value = getattr(item, name, None)
    if not isinstance(value, kind):
        place = f"input.{number}.{name}"
        told = "missing" if value is None else f"{str(value)[:40]!r}"
        raise ApiError(400, f"{place} is {told}; give a text", place)
    return value


def as_chat_tools(tools: Sequence[ResponseTool]) -> list[Tool]:
    """Functions as `/v1/chat/completions` takes them: one level deeper."""
    return [
        Tool(type="function", function=Function(**tool.model_dump(exclude={"type"}, exclude_unset=True)))
        for tool in tools
    ]


def text_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    """A message with one text; with None, none yet."""
    content = [] if text is None else [text_part(text)]
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def text_part(text: str) -> dict[str, Any]:
    """A piece of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(call: dict[str, Any]) -> dict[str, Any]:
    """A call that `ToolCallReader` found."""
    named = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"]}
    return {**named, **call["function"], "status": "completed"}
