"""The parts of an answer: reasoning first, then content and tool calls in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from minipaged.decoding.params import DecodingParams, SamplingParams
from minipaged.decoding.reasoning import BEGIN, END, ReasoningTags
from minipaged.outputs import CompletionOutput
from minipaged.serving.generation import Generation
from minipaged.serving.reasoning import ReasoningReader
from minipaged.serving.response_schemas import ResponsesBody
from minipaged.serving.schemas import ChatBody, Tool
from minipaged.serving.service import Service
from minipaged.serving.tool_calls import TAG, ToolCallReader

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate


def keep_tags(service: Service, body: ChatBody | ResponsesBody) -> None:
    """Where tags of reasoning or calls are special tokens, texts keep those, unless the body decides it."""
    if body.skip_special_tokens is None and not body.use_beam_search:
        has_calls = body.tools and body.tool_choice != "none"
        tags = (BEGIN, END, *([TAG] if has_calls else []))
        if service.response_template or any(_is_hidden(tag, service.tokenizer) for tag in tags):
            body.skip_special_tokens = False


def _is_hidden(tag: str, tokenizer: Any) -> bool:
    token = tokenizer.convert_tokens_to_ids(tag)
    if token is None:
        return False
    shown, left = (tag in tokenizer.decode([token], skip_special_tokens=skip) for skip in (False, True))
    return shown and not left


def with_reasoning(service: Service, params: DecodingParams, begun: str = "") -> DecodingParams:
    """The same, but a structured answer may have thoughts before it, if they can be told from it.

    What continues the text `begun` does not begin a thought, but may end one.
    """
    wanted = params.structured_outputs
    if not isinstance(params, SamplingParams) or wanted is None:
        return params
    if ReasoningTags.of(service.tokenizer, params.skip_special_tokens) is None:
        return params
    where: bool | Literal["inside"] = "inside" if _is_inside(begun) else not begun
    return params.clone(structured_outputs=replace(wanted, after_reasoning=where))


def _is_inside(begun: str) -> bool:
    return begun.rfind(BEGIN) > begun.rfind(END)


class Division:
    """How the answers to one body are divided, with these `tools` to call; they continue the text `begun`.
    Unless it `is_answer`, the prompt ends before an answer.

    With `has_format`, they are calls or JSON, whose strings may quote a call.
    """

    def __init__(
        self,
        service: Service,
        generation: Generation,
        tools: Sequence[Tool],
        has_format: bool,
        begun: str = "",
        is_answer: bool = True,
    ) -> None:
        [self._prompt], params, tokenizer = generation.prompts, generation.params, service.tokenizer
        self._tokenizer = tokenizer
        self._tools = tools
        self._begun = None if is_answer else ""
        # (A structured text has the format that its grammar says.)
        is_declared = params.structured_outputs is None and not params.skip_special_tokens
        self._template = service.response_template if is_declared else None
        self.usage = generation.usage
        self.schemas = {tool.function.name: tool.function.parameters for tool in tools}
        self.tags = ReasoningTags.of(tokenizer, params.skip_special_tokens)
        self.has_format = has_format and params.structured_outputs is not None
        # (A structured text cannot end in its thoughts, so a call there is only mentioned.)
        self.calls_end_thoughts = bool(self.schemas) and params.structured_outputs is None
        self.begins_inside = self.tags is not None and (
            self.tags.last(tokenizer, self._prompt) == self.tags.begin or _is_inside(begun)
        )

    @property
    def is_needed(self) -> bool:
        """Whether there may be more than content."""
        return bool(self.schemas) or self.tags is not None or self._template is not None

    def reader(self) -> AnswerReader:
        """For one answer."""
        return _TaggedReader(self) if self._template is None else self._declared(self._template)

    def _declared(self, template: ResponseTemplate) -> AnswerReader:
        from minipaged.serving.response_templates import TemplateReader, begun_answer  # loads transformers

        def count(reasoning: str) -> None:
            tokens = self._tokenizer.encode(reasoning, add_special_tokens=False)
            self.usage.reasoning_tokens += len(tokens)

        if self._begun is None:  # (the same for each of several answers)
            self._begun = begun_answer(template, self._tokenizer, self._prompt)
        return TemplateReader(template, self._begun, [tool.model_dump() for tool in self._tools], count)


class AnswerReader(Protocol):
    """Divides one answer, as its pieces come."""

    @property
    def num_calls(self) -> int:
        """So far."""

    def read(self, completion: CompletionOutput) -> tuple[str, list[str | dict[str, Any]]]:
        """One more piece: its reasoning, and what follows that."""


class _TaggedReader:
    """By the tags of `ReasoningReader` and `ToolCallReader`."""

    def __init__(self, division: Division) -> None:
        tags, schemas = division.tags, division.schemas
        self._usage = division.usage
        self._reasoning = tags and ReasoningReader(tags, division.begins_inside, division.calls_end_thoughts)
        self._calls = ToolCallReader(schemas) if schemas else None
        self._may_be_json = division.has_format

    @property
    def num_calls(self) -> int:
        """See `AnswerReader`."""
        return 0 if self._calls is None else self._calls.num_calls

    def read(self, completion: CompletionOutput) -> tuple[str, list[str | dict[str, Any]]]:
        """See `AnswerReader`."""
        reasoning, text, is_last = "", completion.text, completion.finish_reason is not None
        if self._reasoning is not None:
            self._usage.reasoning_tokens += self._reasoning.count(completion.token_ids)
            reasoning, text = self._reasoning.read(text, is_last)
        if self._may_be_json and (start := text.lstrip()):
            self._may_be_json = False
            if not start.startswith("<"):
                self._calls = None
        if self._calls is not None:
            return reasoning, self._calls.read(text, is_last)
        return reasoning, [text] if text else []
