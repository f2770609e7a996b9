"""`/v1/responses`: OpenAI's newer chat API, without the parts that need state or tools on the server.

Nothing is kept between requests: to continue a conversation, a client sends its earlier items as `input`.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from minipaged.outputs import RequestOutput
from minipaged.serving.body_params import read_params
from minipaged.serving.chat import plain_messages
from minipaged.serving.errors import ApiError, api_error
from minipaged.serving.generation import Asked, Generation, respond
from minipaged.serving.schemas import JsonSchema, Message, ResponseFormat, ResponsesBody
from minipaged.serving.service import Service
from minipaged.serving.streaming import event_of

OWN_NAMES = {"response_format": "text.format", "max_tokens": "max_output_tokens"}
"""Of fields that have others in this endpoint."""


async def respond_to(service: Service, request: Request, body: ResponsesBody) -> Response:
    """Answer a body."""
    return await respond(service, request, body, _read, "resp_", "input", _Writer)


async def _read(service: Service, body: ResponsesBody) -> Asked:
    service.check_model(body.model)
    if not body.input:
        raise ApiError(400, f"input is {body.input!r}; give a text or at least one message", "input")
    body.max_tokens = body.max_output_tokens
    body.response_format = _response_format(body)
    try:
        params = await read_params(service, body, None, max_tokens=None)
    except ApiError as error:
        if error.param in OWN_NAMES:
            name = OWN_NAMES[error.param]
            raise ApiError(400, error.message.replace(error.param, name), name) from error
        raise
    try:
        prompt = await service.encode_chat(_messages(body))
    except ValueError as error:
        raise api_error(error, (), "input") from error
    return Asked([prompt], params)


def _response_format(body: ResponsesBody) -> ResponseFormat | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type != "json_schema":
        return None if wanted is None else ResponseFormat(type=wanted.type)
    if wanted.schema_ is None:
        raise ApiError(400, "text.format.schema is missing; give it", "text.format")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(name="text", schema=wanted.schema_))


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Instructions and items as a conversation."""
    given = [Message(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages = []
    for number, item in enumerate(given):
        if (kind := (item.model_extra or {}).get("type", "message")) != "message":
            name = f"input.{number}"
            raise ApiError(400, f"{name} has type {str(kind)[:40]!r}; give messages", name)
        messages.append(Message(role=item.role, content=item.content))
    told = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    return plain_messages(told, "instructions") + plain_messages(messages, "input")


class _Writer:
    """Outputs in OpenAI's form."""

    def __init__(self, service: Service, body: ResponsesBody, generation: Generation) -> None:
        self._generation = generation
        self._numbers = itertools.count()  # of the events
        self._text = ""  # so far, of a stream
        self._reason: str | None = None
        self._item_id = generation.request_id.replace("resp_", "msg_")
        self._at = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._head = {
            "id": generation.request_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": service.model_name,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
        }

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response."""
        (completion,) = outputs[0].outputs
        return self._response(completion.text, completion.finish_reason)

    def begin(self) -> str:
        """The response begins, and its one text."""
        begun = {**self._head, "status": "in_progress", "output": [], "incomplete_details": None}
        return "".join(
            (
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
                self._event(
                    "response.output_item.added", output_index=0, item=self._item(None, "in_progress")
                ),
                self._event("response.content_part.added", **self._at, part=_part("")),
            )
        )

    def events(self, position: int, output: RequestOutput) -> str:
        """The text grows."""
        events = []
        for completion in output.outputs:
            self._text += completion.text
            self._reason = completion.finish_reason
            delta = {**self._at, "delta": completion.text, "logprobs": []}
            events.append(self._event("response.output_text.delta", **delta))
        return "".join(events)

    def end(self) -> str:
        """Text and response end."""
        text, response = self._text, self._response(self._text, self._reason)
        return "".join(
            (
                self._event("response.output_text.done", **self._at, text=text, logprobs=[]),
                self._event("response.content_part.done", **self._at, part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=response["output"][0]),
                self._event(f"response.{response['status']}", response=response),
            )
        )

    def _event(self, kind: str, **values: Any) -> str:
        return event_of({"type": kind, "sequence_number": next(self._numbers), **values}, kind)

    def _response(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        status = "incomplete" if finish_reason == "length" else "completed"
        usage = self._generation.usage
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._item(text, status)],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _item(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        item = {"type": "message", "id": self._item_id, "role": "assistant"}
        return {**item, "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
