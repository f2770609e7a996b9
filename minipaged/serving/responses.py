"""`/v1/responses`: OpenAI's newer chat API, without what needs state or tools on the server.

Nothing is kept between requests: to continue a conversation, a client sends its earlier items as `input`.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from minipaged.outputs import RequestOutput
from minipaged.serving.answer_parts import Division, keep_tags, with_reasoning
from minipaged.serving.body_params import read_params
from minipaged.serving.chat import check_text
from minipaged.serving.errors import ApiError, api_error
from minipaged.serving.forced_calls import tools_of, with_calls
from minipaged.serving.generation import Asked, Endpoint, Generation, Writer
from minipaged.serving.response_items import (
    REASONING,
    TEXT,
    ItemKind,
    as_chat_tools,
    call_item,
    conversation_of,
)
from minipaged.serving.response_schemas import ResponsesBody
from minipaged.serving.schemas import JsonSchema, ResponseFormat
from minipaged.serving.service import Service
from minipaged.serving.streaming import event_of, response_failed


async def _read(service: Service, body: ResponsesBody) -> Asked:
    service.check_model(body.model)
    if not body.input:
        raise ApiError(400, f"input is {body.input!r}; give a text or at least one message", "input")
    body.max_tokens = body.max_output_tokens
    body.response_format = _response_format(body)
    tools = await tools_of(service, body, as_chat_tools(body.tools or ()))
    keep_tags(service, body)
    try:
        params = await read_params(service, body, None, max_tokens=None)
    except ApiError as error:
        if error.param != "response_format":
            raise
        raise ApiError(400, error.message.replace(error.param, "text.format"), "text.format") from error
    params = await with_calls(service, body, params, tools)
    try:
        options = {"tools": tools, "chat_template_kwargs": body.chat_template_kwargs}
        prompt = await service.encode_chat(_messages(body), **options)
    except ValueError as error:
        raise api_error(error, ("tools", "chat_template_kwargs"), "input") from error
    return Asked([prompt], with_reasoning(service, params))


def _response_format(body: ResponsesBody) -> ResponseFormat | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    if wanted.schema_ is None:
        raise ApiError(400, "text.format.schema is missing; give it", "text.format")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(name="text", schema=wanted.schema_))


def _text_options(body: ResponsesBody) -> dict[str, Any]:
    """What a response says about its text: clients look here whether it follows a schema."""
    given = {} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
    return {"format": {"type": "text"}, **given}


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Instructions and items as a conversation."""
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    check_text(body.instructions or "", "instructions")
    if isinstance(body.input, str):
        check_text(body.input, "input")
        return [*messages, {"role": "user", "content": body.input}]
    return messages + conversation_of(body.input)


class _Writer(Writer):
    """Outputs in OpenAI's format."""

    def __init__(self, service: Service, body: ResponsesBody, generation: Generation) -> None:
        self._generation = generation
        self._numbers = itertools.count()  # of the events
        tools = [] if body.tool_choice == "none" else body.tools or []
        has_format = body.response_format is not None
        division = Division(service, generation, as_chat_tools(tools), has_format)
        self._reader = division.reader()
        self._is_plain = not division.is_needed
        self._items: list[dict[str, Any]] = []  # finished
        self._kind: ItemKind | None = None  # of the open item; None: there is none
        self._text = ""  # of the open item
        self._reason: str | None = None
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
            "text": _text_options(body),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tools": [],
            "tool_choice": "auto",
            **body.model_dump(include={"tools", "tool_choice"}, exclude_none=True),
        }

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response: what a stream of one piece would end with."""
        self.events(0, outputs[0])
        self._end_items()
        return self._response()

    def begin(self) -> str:
        """Open the response and, if there will be nothing else, its text."""
        begun = {**self._head, "status": "in_progress", "output": [], "incomplete_details": None}
        events = self._event("response.created", response=begun)
        events += self._event("response.in_progress", response=begun)
        return events + (self._begin_item(TEXT) if self._is_plain else "")

    def events(self, position: int, output: RequestOutput) -> str:
        """Extend the text; each call comes in one piece."""
        (completion,) = output.outputs
        self._reason = completion.finish_reason
        if self._is_plain:
            return self._grow(TEXT, completion.text)
        reasoning, parts = self._reader.read(completion)
        events = self._grow(REASONING, reasoning) if reasoning else ""
        return events + "".join(
            self._grow(TEXT, part) if isinstance(part, str) else self._call(part) for part in parts
        )

    def end(self) -> str:
        """End the text and the response."""
        events, response = self._end_items(), self._response()
        return events + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> str:
        """The event that reports an error and ends the stream."""
        return response_failed(error, next(self._numbers))

    # -- the events of items --------------------------------------------------------------------

    @property
    def _at(self) -> dict[str, Any]:
        assert self._kind is not None
        number, request = len(self._items), self._generation.request_id.removeprefix("resp_")
        item_id = f"{self._kind.prefix}_{request}_{number}"
        return {"item_id": item_id, "output_index": number, "content_index": 0}

    def _begin_item(self, kind: ItemKind) -> str:
        if self._kind is kind:
            return ""
        events = self._end_item()
        self._kind, self._text = kind, ""
        item, number = kind.item(self._at["item_id"], None, "in_progress"), len(self._items)
        events += self._event("response.output_item.added", output_index=number, item=item)
        return events + self._event("response.content_part.added", **self._at, part=kind.part(""))

    def _grow(self, kind: ItemKind, text: str) -> str:
        events = self._begin_item(kind)
        self._text += text
        return events + self._event(f"{kind.event}.delta", **self._at, delta=text, **kind.extra)

    def _end_items(self) -> str:
        events = "" if self._items or self._kind is not None else self._begin_item(TEXT)
        return events + self._end_item(self._status)

    def _end_item(self, status: str = "completed") -> str:
        kind, text = self._kind, self._text
        if kind is None:
            return ""
        at = self._at
        events = self._event(f"{kind.event}.done", **at, text=text, **kind.extra)
        events += self._event("response.content_part.done", **at, part=kind.part(text))
        self._kind = None
        return events + self._done(kind.item(at["item_id"], text, status))

    def _call(self, call: dict[str, Any]) -> str:
        events, item = self._end_item(), call_item(call)
        at = {"item_id": item["id"], "output_index": len(self._items)}
        begun, arguments = {**item, "arguments": "", "status": "in_progress"}, item["arguments"]
        events += self._event("response.output_item.added", output_index=len(self._items), item=begun)
        events += self._event("response.function_call_arguments.delta", **at, delta=arguments)
        done = {**at, "arguments": arguments, "name": item["name"]}
        return events + self._event("response.function_call_arguments.done", **done) + self._done(item)

    def _done(self, item: dict[str, Any]) -> str:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _event(self, kind: str, **values: Any) -> str:
        return event_of({"type": kind, "sequence_number": next(self._numbers), **values}, kind)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _response(self) -> dict[str, Any]:
        usage, is_cut = self._generation.usage, self._status == "incomplete"
        return {
            **self._head,
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }


RESPONSES = Endpoint(_read, "resp_", "input", _Writer)
