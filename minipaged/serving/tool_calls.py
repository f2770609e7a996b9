"""Tool calls in a text, as written by Hermes, Qwen and models trained like them:

    I will look. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>

A call is reported as a whole, once its end tag has arrived; an end tag in one of its strings does not count.
Text that only looks like a call stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from minipaged.text_io import lone_surrogate

TAG, END = "<tool_call>", "</tool_call>"
CALL = re.compile(rf'{TAG}((?:[^"<]++|"(?:[^"\\]++|\\.)*+"|<(?!/tool_call>))*+){END}', re.DOTALL)
BEGIN = re.compile(rf"(?<!\s)\s*+{TAG}")
_beginnings = "|".join(re.escape(TAG[:length]) for length in range(len(TAG) - 1, 0, -1))
UNDECIDED = re.compile(rf"(?<!\s)\s*+(?:{_beginnings}|)\Z")
"""The end of a text that may become the tag of a call, the space before it included."""

SPACE = re.compile(r"\s*")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")  # (Python reads NaN and Infinity)


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class ToolCallReader:
    """Divides a text into content and calls, as its pieces come."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""

    def read(self, piece: str, is_last: bool) -> list[str | dict[str, Any]]:
        """One more piece: what is content for certain now and calls that are complete, in their order."""
        rest, content = self._held + piece, ""
        parts: list[str | dict[str, Any]] = []
        while begin := BEGIN.search(rest):
            found = CALL.match(rest, begin.end() - len(TAG)) if END in rest[begin.end() :] else None
            if found is None and not is_last:
                break
            if found is None or (call := _call(found[1])) is None:  # the tag is text
                content, rest = content + rest[: begin.end()], rest[begin.end() :]
                continue
            content, rest = content + rest[: begin.start()], rest[found.end() :]
            parts += [content, call] if content else [call]
            content = ""
            self.num_calls += 1
        undecided = begin or UNDECIDED.search(rest)
        start = len(rest) if is_last or undecided is None else undecided.start()
        self._held = rest[start:]
        if not (is_last and self.num_calls and rest.isspace()):
            content += rest[:start]
        return [*parts, content] if content else parts


def _call(text: str) -> dict[str, Any] | None:
    """OpenAI's object, with the arguments as they are written; None if the text is no call."""
    try:
        call, places = _read_object(text.strip())
    except (ValueError, IndexError, RecursionError):
        return None
    if not isinstance(call.get("name"), str) or lone_surrogate(call["name"]):
        return None
    function = {"name": call["name"], "arguments": places.get("arguments", "{}")}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _read_object(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a JSON object, and how each is written."""
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    mark, at = text[0], 1
    if mark != "{":
        raise ValueError("no object")
    while mark != "}":
        key, at = DECODER.raw_decode(text, _after_space(text, at))
        colon = _after_space(text, at)
        begin = _after_space(text, colon + 1)
        if not isinstance(key, str) or text[colon] != ":":
            raise ValueError("no key")
        values[key], end = DECODER.raw_decode(text, begin)
        written[key] = text[begin:end]
        at = _after_space(text, end)
        mark, at = text[at], at + 1
        if mark not in ",}":
            raise ValueError("no object")
    if at != len(text):
        raise ValueError("more than an object")
    return values, written


def _after_space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    assert found is not None
    return found.end()
