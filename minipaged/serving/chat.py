"""`/v1/chat/completions`: a conversation, turned into a prompt by the model's chat template."""

from __future__ import annotations

import json
import time
from typing import Any

from minipaged.conversations import with_objects
from minipaged.outputs import CompletionOutput, RequestOutput
from minipaged.prompts import RequestError
from minipaged.serving.answer_parts import AnswerReader, Division, keep_tags, with_reasoning
from minipaged.serving.body_params import num_chat_logprobs, read_params
from minipaged.serving.errors import ApiError, api_error
from minipaged.serving.forced_calls import tools_of, with_calls
from minipaged.serving.generation import Asked, Endpoint, Generation, Writer
from minipaged.serving.logprobs import chat_logprobs, prompt_logprobs
from minipaged.serving.schemas import ChatBody, Message, TemplateOptions
from minipaged.serving.service import Service
from minipaged.serving.streaming import Chunks, is_plain
from minipaged.text_io import lone_surrogate

TEXTS = ("text", "input_text", "output_text", "reasoning_text")
"""Types of parts that are texts."""


async def _read(service: Service, body: ChatBody) -> Asked:
    service.check_model(body.model)
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise ApiError(400, "max_tokens and max_completion_tokens are both given; give one", "max_tokens")
        body.max_tokens = body.max_completion_tokens
    options = body.template_options | {"tools": await tools_of(service, body, body.tools or ())}
    keep_tags(service, body)
    # (An answer ends by itself, or at the model's maximum length.)
    params = await read_params(service, body, num_chat_logprobs(body), max_tokens=None)
    params = await with_calls(service, body, params, options["tools"])
    try:
        prompt = await service.encode_chat(plain_messages(body.messages), **options)
    except ValueError as error:
        raise api_error(error, TemplateOptions.model_fields, "messages") from error
    return Asked([prompt], with_reasoning(service, params, _begun(body)))


def _begun(body: ChatBody) -> str:
    """The text that the answer continues."""
    return str(body.messages[-1].content) if body.continue_final_message else ""


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """A conversation as chat templates expect it."""
    return [plain_message(message, f"messages.{i}") for i, message in enumerate(messages)]


def plain_message(message: Message, place: str, parts: str = "content") -> dict[str, Any]:
    """A message as chat templates expect it: null fields left out, OpenAI's newer role "developer" as
    "system", its reasoning also as most templates call it; `as_prompt` joins its parts. An error names
    `place`, or the field `parts` in it."""
    values = {key: value for key, value in message.model_dump().items() if value is not None}
    calls, name = values.get("tool_calls"), f"{place}.{parts}"
    if "reasoning" in values:
        values.setdefault("reasoning_content", values["reasoning"])
    match message.content:
        case None if values.get("reasoning_content"):
            values["content"] = ""  # a thought that was cut off
        case None | [] as nothing if not calls:
            raise ApiError(400, f"{name} is {json.dumps(nothing)}; give a text", name)
        case str() as text:
            check_text(text, name)
        case list() as several:
            check_parts(several, name)
    if calls:
        try:
            values["tool_calls"] = with_objects(calls)
        except RequestError as error:
            raise ApiError(400, f"{place}.{error}", f"{place}.tool_calls") from error
    if message.role == "developer":
        values["role"] = "system"
    return {"content": None, **values}


def check_parts(parts: list[dict[str, Any]], field: str) -> None:
    """Raises ApiError: one of them is not a text."""
    for i, part in enumerate(parts):
        kind, name = part.get("type"), f"{field}.{i}"
        if kind not in TEXTS or not isinstance(part.get("text"), str):
            raise ApiError(
                400, f'{name} has type {str(kind)[:40]!r}; give {{"type": "text", "text": TEXT}}', name
            )
        check_text(part["text"], name)


def check_text(text: str, name: str) -> None:
    """Raises ApiError: it cannot be written as UTF-8."""
    if wrong := lone_surrogate(text):
        raise ApiError(400, f"{name} {wrong}", name)


PLAIN = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": None, "stop_reason": None}


class _Writer(Writer):
    """Outputs in OpenAI's format."""

    def __init__(self, service: Service, body: ChatBody, generation: Generation) -> None:
        self._body = body
        self._tokenizer = service.tokenizer
        self._generation = generation
        tools = [] if body.tool_choice == "none" else body.tools or []
        has_format = body.response_format is not None
        is_answer = body.add_generation_prompt is not False or bool(body.continue_final_message)
        self._division = Division(service, generation, tools, has_format, _begun(body), is_answer)
        self._is_plain = not self._division.is_needed and not body.return_token_ids
        self._head = {"id": generation.request_id, "created": int(time.time()), "model": service.model_name}
        head = {**self._head, "object": "chat.completion.chunk"}
        self._chunks = Chunks(head, PLAIN, generation.usage.fields, body.stream_options)
        self._readers: dict[int, AnswerReader] = {}  # by choice

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response."""
        (output,) = outputs
        choices = []
        for completion in output.outputs:
            message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
            choice = self._choice(completion)
            if self._division.is_needed:
                content, others = _divide(self._division.reader(), completion)
                message |= {"content": content or (None if others else ""), **others}
                choice["finish_reason"] = _reason(completion, len(others.get("tool_calls", ())))
            choices.append({"message": message, **choice})
        response = {**self._head, "object": "chat.completion", "choices": choices, **self._of_prompt(output)}
        return {**response, **self._generation.usage.fields()}

    def events(self, position: int, output: RequestOutput) -> str:
        """Each choice's role, then pieces of its text."""
        events = []
        for completion in output.outputs:
            if completion.index not in self._readers:
                extra = {} if self._readers else self._of_prompt(output)
                self._readers[completion.index] = self._division.reader()
                delta = {"role": "assistant", "content": ""}
                choice = {"index": completion.index, "delta": delta, "finish_reason": None}
                events.append(self._chunks.event(choice, **extra))
            if self._is_plain and is_plain(completion):
                events.append(self._chunks.piece(completion.index, completion.text))
                continue
            choice = {"delta": {"content": completion.text}, **self._choice(completion)}
            reader = self._readers[completion.index]
            if self._division.is_needed and not _add_parts(choice, reader, completion):
                continue  # what the piece is depends on the next
            events.append(self._chunks.event(choice))
        return "".join(events)

    def end(self) -> str:
        """The usage, if requested."""
        return self._chunks.last()

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What is reported about the prompt, if requested."""
        fields = prompt_logprobs(output, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        return fields

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        return {
            "index": completion.index,
            "logprobs": chat_logprobs(self._tokenizer, completion, self._body.top_logprobs or 0),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            **({"token_ids": completion.token_ids} if self._body.return_token_ids else {}),
        }


def _add_parts(choice: dict[str, Any], reader: AnswerReader, completion: CompletionOutput) -> bool:
    """Add the parts of a streamed piece to its choice; returns whether there is anything to send."""
    first = reader.num_calls
    content, others = _divide(reader, completion)
    choice["delta"] = {**({"content": content} if content else {}), **others}
    if calls := others.get("tool_calls"):
        choice["delta"]["tool_calls"] = [{"index": first + i, **call} for i, call in enumerate(calls)]
    choice["finish_reason"] = _reason(completion, reader.num_calls)
    return bool(content or others or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids"))


def _divide(reader: AnswerReader, completion: CompletionOutput) -> tuple[str, dict[str, Any]]:
    """Content and, under their names in a message, the other parts that there are."""
    reasoning, parts = reader.read(completion)
    content = "".join(part for part in parts if isinstance(part, str))
    calls = [part for part in parts if isinstance(part, dict)]
    return content, {
        **({"reasoning": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _reason(completion: CompletionOutput, num_calls: int) -> str | None:
    """The finish reason: "tool_calls" if the answer has some and is complete."""
    return "tool_calls" if num_calls and completion.finish_reason == "stop" else completion.finish_reason


CHAT = Endpoint(_read, "chatcmpl-", "messages", _Writer)
