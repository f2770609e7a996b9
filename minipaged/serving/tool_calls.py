"""Tool calls in a text, as written by Hermes, Qwen and models trained like them:

    I will look. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>

A call is reported as a whole, once its end tag has arrived. Text that only looks like a call stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from minipaged.text_io import lone_surrogate

TAG, END = "<tool_call>", "</tool_call>"
CALL = re.compile(rf"(?<!\s)\s*+{TAG}(.*?){END}", re.DOTALL)
_beginnings = "|".join(re.escape(TAG[:length]) for length in range(len(TAG) - 1, 0, -1))
UNDECIDED = re.compile(rf"(?<!\s)\s*+(?:{TAG}.*|{_beginnings}|)\Z", re.DOTALL)
"""The end of a text that may become a call, the space before it included."""


class ToolCallReader:
    """Divides a text into content and calls, as its pieces come."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""

    def read(self, piece: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """One more piece: what is content for certain now, and the calls that are complete."""
        rest, content, calls = self._held + piece, "", []
        while found := CALL.search(rest):
            call = _call(found[1])
            content += rest[: found.end() if call is None else found.start()]
            calls += [] if call is None else [call]
            rest = rest[found.end() :]
        self.num_calls += len(calls)
        undecided = UNDECIDED.search(rest)
        start = len(rest) if is_last or undecided is None else undecided.start()
        self._held = rest[start:]
        if not (is_last and self.num_calls and rest.isspace()):
            content += rest[:start]
        return content, calls


def _call(text: str) -> dict[str, Any] | None:
    """OpenAI's object; None if the text is no call."""
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if lone_surrogate(call["name"] + arguments):
        return None
    function = {"name": call["name"], "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
