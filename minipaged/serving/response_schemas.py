"""The body of `/v1/responses`: OpenAI's fields for items, functions and formats."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, LiteralString

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from minipaged.serving.fields import Body, Length, List, Open, Table
from minipaged.serving.schemas import (
    MOST_MESSAGES,
    MOST_TOOLS,
    OF_BEAMS,
    GenerationBody,
    NamedFunction,
    Parts,
)

OF_CHOICES = ("n", "best_of", "use_beam_search", "prompt_logprobs", "return_token_ids")
"""Fields whose answer has no place in a response."""

NotReturned = Literal[
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Values of `include` about items that this server never returns."""


def _nothing(advice: LiteralString, asked: Any = None) -> BeforeValidator:
    """Refuses what asks for something, or only the value `asked`; the message says to "give" the advice."""

    def check(value: Any) -> Any:
        if value and asked in (None, value):
            raise PydanticCustomError("not_here", advice)
        return value

    return BeforeValidator(check)


NotKept = Annotated[None, _nothing("null, and the earlier items as input: the server keeps none")]
"""What a client refers to instead of sending it."""

NoTopLogprobs = _nothing("0, or ask for a chat completion, which can have log-probabilities")
NoLogprobsIncluded = _nothing(
    "another value, or ask for a chat completion, which can have log-probabilities",
    "message.output_text.logprobs",
)


class TextFormat(Body):
    """What the text of a response must be."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body):
    """Options for the text of a response."""

    format: TextFormat | None = None
    verbosity: str | None = None  # ignored


class ResponseStreamOptions(Body):
    """Options for the stream of a response."""

    include_obfuscation: bool | None = None  # ignored


class ResponseItem(Open):
    """A message, a call, or what a call returned; see `response_items.py`."""

    type: str | None = None
    role: str | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None


class ResponseTool(Open):
    """A function that a model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ResponseToolChoice(NamedFunction):
    """The function that must be called."""

    elsewhere: ClassVar[dict[str, str]] = {"function": "name"}  # (as in chats)
    type: Literal["function"] = "function"


class ResponseAllowedTools(Body):
    """A tool choice among some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: List[ResponseTool] = Field(max_length=MOST_TOOLS)

    @property
    def names(self) -> list[str]:
        """Of the functions."""
        return [tool.name for tool in self.tools]


class ResponsesBody(GenerationBody):
    """`/v1/responses`."""

    elsewhere = (
        dict.fromkeys((*OF_CHOICES, *OF_BEAMS), "")
        | dict.fromkeys((*GenerationBody.elsewhere, "response_format", "structured_outputs"), "text")
        | {"max_tokens": "max_output_tokens", "messages": "input"}
    )

    input: str | Annotated[List[ResponseItem], Field(max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Length | None = None
    text: TextOptions | None = None
    tools: List[ResponseTool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice | ResponseAllowedTools | None = None
    parallel_tool_calls: bool | None = None
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]
    chat_template_kwargs: Table[Any] | None = None
    # Only values that request nothing:
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: NotKept = None
    conversation: NotKept = None
    prompt: None = None
    top_logprobs: Annotated[Literal[0] | None, NoTopLogprobs] = None
    # Ignored:
    include: List[Annotated[NotReturned, NoLogprobsIncluded]] | None = None
    max_tool_calls: int | None = None
    reasoning: Table[Any] | None = None
