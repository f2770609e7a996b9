"""The items of `/v1/responses`: from its input to a conversation, from an answer to its output.

A call and its result are items there, but belong to messages in a conversation:

    message "Let me look."                 assistant "Let me look." + call c1
    function_call c1 weather {...}     ->  tool (of c1) "sunny"
    function_call_output c1 "sunny"
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from minipaged.prompts import shortened
from minipaged.serving.chat import plain_message
from minipaged.serving.errors import ApiError
from minipaged.serving.response_schemas import ResponseItem, ResponseTool
from minipaged.serving.schemas import Function, Message, Tool

TYPES = "give a message, a function_call or a function_call_output"


def conversation_of(items: Sequence[ResponseItem]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them.

    Raises:
        ApiError: an item of another type, or one that lacks a field.
    """
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        place = f"input.{number}"
        match item.type or "message":
            case "message":
                _check_fields(item, place, "role")
                messages.append(plain_message(Message(role=str(item.role), content=item.content), place))
            case "function_call":
                _check_fields(item, place, "call_id", "name", "arguments")
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                values: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
                try:
                    message = plain_message(Message(**values), place)
                except ApiError as error:
                    field = f"{place}.arguments"
                    problem = f"{field} is {shortened(item.arguments)}; give JSON"
                    raise ApiError(400, problem, field) from error
                if messages and messages[-1]["role"] == "assistant":
                    messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
                else:
                    messages.append(message)
            case "function_call_output":
                _check_fields(item, place, "call_id", "output")
                values = {"role": "tool", "content": item.output, "tool_call_id": item.call_id}
                messages.append(plain_message(Message(**values), place, "output"))
            case other:
                raise ApiError(400, f"{place} has type {other[:40]!r}; {TYPES}", place)
    return messages


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


def text_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    """A message with one text, or none yet if `text` is None."""
    content = [] if text is None else [text_part(text)]
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def text_part(text: str) -> dict[str, Any]:
    """A piece of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(call: dict[str, Any]) -> dict[str, Any]:
    """A call that `ToolCallReader` found."""
    named = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"]}
    return {**named, **call["function"], "status": "completed"}
