"""Answers divided as their tokenizer declares, by the `response_template` in tokenizer_config.json:

    <|channel|>analysis<|message|>They greet me.<|end|><|channel|>final<|message|>Hello!
    |--------------------- thinking -----------------||----------- content ------------|

So a model may write its thoughts and calls in any format. A call that does not have it stays text.
Source: https://huggingface.co/docs/transformers/chat_response_parsing
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)

from minipaged.outputs import CompletionOutput
from minipaged.serving.tool_calls import call_object
from minipaged.text_io import lone_surrogate

logger = logging.getLogger(__name__)

CONTENT, CALLS = "content", "tool_calls"
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that templates give to it."""

SLICE = 256
"""Characters that are read at once: for each delimiter that it finds, the parser looks for all others up to
the end of what it has."""

LONGEST = 4 * SLICE
"""Characters that are held back as the beginning of a delimiter: with each piece, they are read again."""


def template_of(tokenizer: Any) -> ResponseTemplate | None:
    """What a tokenizer declares; None, after a warning, if transformers cannot use it."""
    declared = tokenizer.response_template
    try:
        template = load_response_template(declared)
        if template.implicit is None and CONTENT not in template.fields:
            template = load_response_template({**declared, "fields": {**declared["fields"], CONTENT: {}}})
        for name, field in template.fields.items():
            if not isinstance(field.content_args, dict):
                raise TypeError(f"Field '{name}': content_args must be a dict, got {field.content_args!r}")
    except Exception as error:  # it comes with a model: anything may be wrong with it
        logger.warning("the tokenizer's response_template is left out: %s", error)
        return None
    fields = {name: replace(field, optional=True) for name, field in template.fields.items()}
    return replace(template, defaults={}, fields=fields)


def begun_answer(template: ResponseTemplate, tokenizer: Any, prompt: Sequence[int]) -> str:
    """What a prompt has of the answer already, such as the tag that begins a thought."""
    size = 64
    while True:
        text = tokenizer.decode(prompt[-size:], skip_special_tokens=False)
        if template.start_anchor_re.search(text):
            return template.truncate_past_last_anchor(text)
        if size >= len(prompt):
            return ""
        size *= 8


class TemplateReader:
    """Divides one answer, as its pieces come; see `answer_parts.AnswerReader`.

    Args:
        template: of the tokenizer.
        begun: see `begun_answer`.
        tools: to call, as chats have them; without any, calls are text.
        count: called once, with all of the reasoning.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        begun: str,
        tools: Sequence[dict[str, Any]],
        count: Callable[[str], None],
    ) -> None:
        self.num_calls = 0
        self._fields = template.fields
        self._parser = _Parser(template, begun, tools)
        self._reasoning, self._content = _Text(), _Text()
        self._count = count
        self._whole_reasoning = ""
        self._parts_of(self._parser.events_of_prompt)

    def read(self, completion: CompletionOutput) -> tuple[str, list[str | dict[str, Any]]]:
        """One more piece: its reasoning, and what follows that."""
        events = self._parser.feed(completion.text)
        if completion.finish_reason is not None:
            events += self._parser.finalize()[1]
        reasoning, parts = self._parts_of(events)
        self._whole_reasoning += reasoning
        if completion.finish_reason is not None:
            self._count(self._whole_reasoning)
        return reasoning, parts

    def _parts_of(self, events: list[dict[str, Any]]) -> tuple[str, list[str | dict[str, Any]]]:
        reasoning = ""
        parts: list[str | dict[str, Any]] = []
        for event in events:
            name = event["field"]
            is_reasoning = name in REASONING
            if event["type"] == "begun":
                reasoning, parts, self.num_calls = "", [], 0
                self._reasoning.forget()
                self._content.forget()
            elif name == CALLS and event["type"] == "region_close":
                parts += event["calls"]
                self.num_calls += len(event["calls"])
            elif is_reasoning or name == CONTENT:
                text, piece = self._reasoning if is_reasoning else self._content, ""
                if event["type"] == "region_open":
                    text.begin(self._fields[name])
                elif event["type"] in ("region_chunk", "malformed"):
                    piece = text.add(event["text"])
                if is_reasoning:
                    reasoning += piece
                elif piece:
                    parts.append(piece)
        return reasoning, parts


class _Parser(ResponseParser):  # type: ignore[misc]
    """Transformers' own, but it reads every text to its end, whatever the template.

    Calls that are not in their format, or that have no tools, are events of the type "malformed". One of the
    type "begun" follows what the prompt has.
    """

    def __init__(self, template: ResponseTemplate, begun: str, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(template, prefix="", tools=list(tools))
        self._has_tools = bool(tools)
        self._last_open: tuple[int, int] | None = None
        self._start = self._begun = 0
        self.events_of_prompt = [*self.feed(begun), {"type": "begun", "field": None}]
        self._begun = len(begun)

    def feed(self, text: str) -> list[dict[str, Any]]:
        events = []
        for start in range(0, len(text), SLICE):
            events += super().feed(text[start : start + SLICE])
        return events

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        message, events = super().finalize()
        if rest := self._buffer[self._pos :]:  # behind a delimiter without characters, where it stops
            events.append({"type": "malformed", "field": CONTENT, "text": rest})
        return message, events

    def _scan(self, watch: Any, eos: bool) -> tuple[Any, int]:
        best, hold_start = super()._scan(watch, eos)
        return best, max(hold_start, len(self._buffer) - LONGEST)

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        if not self._opened:
            self._start = self._pos
        num_known = max(0, self._begun - self._pos)  # it might have begun a delimiter
        super()._accumulate(events, text[:num_known])
        if num_known:
            events.append({"type": "begun", "field": self._current})
        super()._accumulate(events, text[num_known:])

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, match: Any) -> None:
        if match.span() == self._last_open:  # it opens and closes without a character, and would for ever
            fields = {name: other for name, other in self._spec.fields.items() if name != field.name}
            self._spec = replace(self._spec, fields=fields)
            return
        super()._open_explicit(events, field, match)
        self._start, self._last_open = match.start(), match.span()

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        is_call, num_events = self._current == CALLS and self._opened, len(events)
        try:
            super()._close_current(events)
            if is_call:
                events[-1]["calls"] = _calls_of(events[-1]["value"] if self._has_tools else None)
        except Exception:  # of any kind: parsers and patterns come with a model
            del events[num_events:]
            if is_call:  # (the text of other fields has been reported as it came)
                written = self._buffer[max(self._start, self._begun) : self._pos]
                events.append({"type": "malformed", "field": CONTENT, "text": written})
            self._reset_to_implicit()


class _Text:
    """A part of an answer, as its pieces come: without space at its ends, unless a field keeps it."""

    def __init__(self) -> None:
        self._is_stripped = self._is_at_start = True
        self._has_begun = False
        self._held = ""  # space, which may be its end

    def begin(self, field: ResponseTemplateField) -> None:
        """It goes on elsewhere; what is outside of all delimiters is one text."""
        self._is_stripped = field.content_args.get("strip", True)
        self._is_at_start |= field.open_re is not None
        if self._has_begun and field.open_re is not None:
            separator = "\n" if field.join is None else field.join
            self._held = separator if self._is_stripped else self._held + separator

    def add(self, piece: str) -> str:
        """What is certain to be a part of it."""
        if self._is_stripped and self._is_at_start:
            piece = piece.lstrip()
        if not piece:
            return ""
        self._is_at_start = False
        text = self._held + piece
        certain = text.rstrip() if self._is_stripped else text
        self._held = text[len(certain) :]
        self._has_begun |= bool(certain)
        return certain

    def forget(self) -> None:
        """The text so far is known."""
        self._held = ""


def _calls_of(value: Any) -> list[dict[str, Any]]:
    """OpenAI's objects for one or several calls as a template shapes them; any exception: they have no such
    shape."""
    calls = []
    for each in value if isinstance(value, list) else [value]:
        name, arguments = each["function"]["name"], each["function"].get("arguments", {})
        if not isinstance(arguments, dict):
            raise TypeError(f"arguments are {arguments!r}")
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        if lone_surrogate(name + written):
            raise ValueError("a lone surrogate")
        calls.append(call_object(name, written))
    return calls
