"""Tool calls in a text, as written by Hermes, Qwen and models trained like them:

    I will look. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>

Newer models of Qwen write tags between these tags instead of JSON (`tagged_calls`).
A call is reported as a whole, once its end tag has arrived; an end tag in one of its strings does not count.
Text that only looks like a call stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from minipaged.serving.tagged_calls import (
    TAGGED,
    TAGGED_BEGIN,
    TAGGED_END,
    TAGGED_NEXT,
    arguments_of,
    refuse_constant,
)
from minipaged.text_io import lone_surrogate

TAG, END = "<tool_call>", "</tool_call>"
BEGIN = re.compile(rf"(?<!\s)\s*+{TAG}")

SPACE = re.compile(r"\s*")


def undecided(*tags: str) -> re.Pattern[str]:
    """The end of a text that may become one of these tags, the space before it included."""
    beginnings = "|".join(re.escape(tag[:length]) for tag in tags for length in range(len(tag) - 1, 0, -1))
    return re.compile(rf"(?<!\s)\s*+(?:{beginnings}|)\Z")


UNDECIDED = undecided(TAG)


DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=str, parse_int=str)
"""Numbers stay strings: Python refuses to convert very long ones, which JSON allows."""


class ToolCallReader:
    """Splits a text into content and calls, as its pieces come.

    Args:
        schemas: of each function's parameters, by name.
    """

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self.num_calls = 0
        self._schemas = schemas
        self._held = ""
        self._is_after_call = False  # and only space has come since

    def read(self, piece: str, is_last: bool) -> list[str | dict[str, Any]]:
        """One more piece: what is now certain to be content, and complete calls, in order."""
        text, at, start = self._held + piece, 0, 0
        last_end = text.rfind(END)
        parts: list[str | dict[str, Any]] = []
        while begin := BEGIN.search(text, at):
            call, at = None, begin.end()  # the tag is text, unless a call follows
            try:
                if at > last_end:
                    raise _UnfinishedError
                read = _read_tagged if TAGGED.match(text, at) else _read_call
                call, at = read(text, at, self._schemas)
            except _UnfinishedError:
                if not is_last:
                    break
            if call is not None:
                parts += [text[start : begin.start()], call]
                start, self._is_after_call = at, True
                self.num_calls += 1
        undecided = begin or UNDECIDED.search(text, at)
        end = len(text) if is_last or undecided is None else undecided.start()
        content, self._held = text[start:end], text[end:]
        if not (is_last and self._is_after_call and content.isspace()):
            parts.append(content)
            self._is_after_call &= not content
        return [part for part in parts if part]


class _UnfinishedError(Exception):
    """The text ends in the middle of what may be a call."""


def _read_call(text: str, at: int, schemas: Mapping[str, Any]) -> tuple[dict[str, Any] | None, int]:
    """OpenAI's object, with the arguments as written, and where its end tag ends; None if the text
    from `at` on is not a call."""
    try:
        written, end = _read_object(text, at)
        end = _find(text, end, "<")
        if not text.startswith(END, end):
            raise json.JSONDecodeError("Expecting the end tag", text, end)
        name = json.loads(written.get("name", "null"))
    except json.JSONDecodeError as error:
        # (What is cut at the end is a string, or no longer than the end tag: an exponent, a word.)
        if error.msg.startswith("Unterminated") or error.pos > len(text) - len(END):
            raise _UnfinishedError from error
        return None, at
    except (ValueError, RecursionError):
        return None, at
    if not isinstance(name, str) or lone_surrogate(name):
        return None, at
    return call_object(name, written.get("arguments", "{}")), end + len(END)


def _read_tagged(text: str, at: int, schemas: Mapping[str, Any]) -> tuple[dict[str, Any] | None, int]:
    """The same for arguments in tags."""
    begin = TAGGED_BEGIN.match(text, at)
    end = TAGGED_END.search(text, begin.end()) if begin else None
    if begin is None or end is None:
        raise _UnfinishedError
    if TAGGED_NEXT.search(text, begin.end(), end.start()):
        return None, at  # the end is another call's
    name, arguments = begin[1].strip(), text[begin.end() : end.start()]
    return call_object(name, arguments_of(arguments, schemas.get(name))), end.end()


def call_object(name: str, arguments: str) -> dict[str, Any]:
    """A call with JSON arguments, as OpenAI's clients know it."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _read_object(text: str, at: int) -> tuple[dict[str, str], int]:
    """How each value of a JSON object is written, by its key, and where the object ends."""
    written = {}
    at = _find(text, at, "{")
    while text[at] != "}":
        key, end = DECODER.raw_decode(text, _find(text, at + 1, '"'))
        begin = _after_space(text, _find(text, end, ":") + 1)
        _, end = DECODER.raw_decode(text, begin)
        written[key] = text[begin:end]
        at = _find(text, end, ",}")
    return written, at + 1


def _find(text: str, at: int, marks: str) -> int:
    """Where one of these marks is, with nothing but space before it."""
    at = _after_space(text, at)
    if at == len(text) or text[at] not in marks:
        raise json.JSONDecodeError(f"Expecting one of {marks}", text, at)
    return at


def _after_space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    assert found is not None
    return found.end()
