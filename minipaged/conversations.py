"""Conversations as prompts: messages are checked, then turned into text by the tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

from jinja2 import TemplateSyntaxError

from minipaged.prompts import RequestError, TokensPrompt, shortened
from minipaged.text_io import lone_surrogate

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`: a text or a list of `{"type": "text", "text": ...}`; and whatever else the
chat template reads: "name", "tool_calls" (then the content may be missing), "tool_call_id"."""

Tool = Mapping[str, Any] | Callable[..., Any]
"""A JSON schema of a function, or a Python function with types and a docstring."""

RESERVED = frozenset(
    {
        *("conversation", "messages", "tokenize", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tools", "return_tensors", "return_dict", "tokenizer_kwargs"),
    }
)
"""What `apply_chat_template` is passed, or would take as an option."""

SHAPE = 'give {"role": TEXT, "content": TEXT}'


def conversations_of(messages: Any) -> list[Any]:
    """One conversation or several, as a list."""
    several = isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple)
    return list(messages) if several else [messages]


def as_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: Sequence[Tool] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> TokensPrompt:
    """The text and tokens of a conversation, up to the assistant's next answer; see `LLM.chat`.

    Raises:
        RequestError: no template, a message without content, tools that the template does not support, or a
            template that refuses the messages.
    """
    if tokenizer is None:
        raise RequestError("the model has no tokenizer and so no chat template; use generate with token ids")
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "the model's tokenizer has no chat template; give chat_template, or call generate with plain text"
        )
    if not isinstance(chat_template, str | None):
        raise RequestError(f"chat_template is {shortened(chat_template)}; give the text of a Jinja template")
    if chat_template is not None and "{" not in chat_template:  # (a path would itself become the prompt)
        raise RequestError(
            f"chat_template is {shortened(chat_template)}, which reads no message; give the text of a Jinja "
            "template, not its path"
        )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both True; drop one: an answer is either "
            "continued or begun"
        )
    if not isinstance(tools, list | tuple | None):
        raise RequestError(f"tools is {shortened(tools)}; give a list of JSON schemas or functions")
    if tools and not supports_tools(tokenizer, tools, chat_template):
        raise RequestError("tools are given, but the chat template does not support them; leave them out")
    check_variables(chat_template_kwargs)
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError(f"messages is {shortened(messages)}; give a list of at least one message")
    conversation = [_checked(message) for message in messages]
    render = partial(
        tokenizer.apply_chat_template,
        tokenize=False,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=None if tools is None else list(tools),
        **(chat_template_kwargs or {}),
    )
    try:
        text = render(_with_parts(messages, conversation) if _reads_parts(render) else conversation)
    except TemplateSyntaxError as error:
        raise RequestError(
            f"the chat template is wrong in line {error.lineno}: {str(error).rstrip('.')}; correct it"
        ) from error
    except Exception as error:  # a template may raise anything
        reason = " ".join(str(error).split())
        raise RequestError(f"the chat template rejects the messages: {reason}; change them") from error
    if wrong := lone_surrogate(text):
        raise RequestError(f"the text of the messages {wrong}")
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def _reads_parts(render: Callable[..., str]) -> bool:
    """Whether a template shows the text of a part, but no text in its place, as some for images do."""
    word = uuid4().hex

    def shows(content: Any) -> bool:
        with suppress(Exception):  # a template may raise anything
            return word in render([{"role": "user", "content": content}], continue_final_message=False)
        return False

    return not shows(word) and shows([{"type": "text", "text": word}])


def _with_parts(messages: Sequence[Message], conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, with lists of parts in place of texts."""
    return [
        {**message, "content": _parts(given.get("content") or message["content"])}
        for given, message in zip(messages, conversation)
    ]


def _parts(content: Any) -> list[dict[str, Any]]:
    parts = [{"text": content}] if isinstance(content, str) else content
    return [{**part, "type": "text"} for part in parts]


def check_variables(chat_template_kwargs: Mapping[str, Any] | None) -> None:
    """Raise RequestError for what cannot be further variables of a template."""
    if not isinstance(chat_template_kwargs, Mapping | None):
        raise RequestError(f"chat_template_kwargs is {shortened(chat_template_kwargs)}; give a mapping")
    for name in RESERVED & {*(chat_template_kwargs or ())}:
        raise RequestError(
            f"chat_template_kwargs has {name}, which is not the template's; leave it out, or give it as an "
            "option of its own"
        )


def supports_tools(tokenizer: Any, tools: Any, chat_template: str | None = None) -> bool:
    """Whether the given chat template, or else the model's, has a place for tools."""
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        return False
    return "tools" in tokenizer.get_chat_template(chat_template, tools)


def _checked(message: Any) -> dict[str, Any]:
    """A message with its content as a text. Raises RequestError."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages has {shortened(message)}; {SHAPE}")
    content = message.get("content")
    if isinstance(content, list | tuple) and content:
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise RequestError(
                f'messages has {shortened(message)}; give parts {{"type": "text", "text": TEXT}}'
            )
        content = "\n".join(part["text"] for part in content)
    if content in (None, []) and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"messages has {shortened(message)}; {SHAPE}")
    if wrong := lone_surrogate(message["role"] + content):
        raise RequestError(f"a message {wrong}")
    calls = message.get("tool_calls")
    return {**message, "content": content} | ({"tool_calls": with_objects(calls)} if calls else {})


def with_objects(calls: Any) -> list[dict[str, Any]]:
    """Tool calls whose arguments are objects, as templates expect them; OpenAI's are JSON in a string, and
    some clients' an empty string if there are none. Calls without "function" are left as they are.

    Raises RequestError.
    """
    try:
        return [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
            if "function" in call
            else {**call}
            for call in calls
        ]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(
            'tool_calls has a call whose arguments are not JSON; give {"function": {"arguments": JSON}}'
        ) from error


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments")
    return json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
