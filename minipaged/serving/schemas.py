"""The bodies of requests: OpenAI's fields, and the engine's own under vLLM's names.

Types are checked here; ranges and contradictions by `SamplingParams` and `BeamSearchParams`. A field that is
null or left out has the engine's default.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from minipaged.decoding.structured import OF_VLLM
from minipaged.serving.fields import Body, Length, List, Open, Table

MOST_LOGPROBS = 20
"""Likeliest tokens that are reported, as by OpenAI."""

MOST_PROMPTS = 256
"""Prompts in one body."""

MOST_MESSAGES = 10_000
"""In one body; also parts in one message."""

MOST_TOKENS = 1 << 18
"""That are turned into text."""

MOST_TOOLS = 128
"""In one body, as with OpenAI: a grammar for their calls takes a while to compile."""

OF_BEAMS = ("beam_width", "length_penalty", "early_stopping")
"""Fields of `BeamSearchParams` alone."""


class StreamOptions(Body):
    """What a stream contains besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # ignored


class JsonSchema(Body):
    """A named schema."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """See `StructuredOutputsParams`; exactly one field."""

    elsewhere = OF_VLLM | {"json_object": 'give "json": {"type": "object"}'}
    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: List[str] | None = Field(None, max_length=1024)
    grammar: str | None = None


class GenerationBody(Body):
    """The fields of all generating endpoints."""

    elsewhere = dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "structured_outputs"
    )
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # SamplingParams:
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Table[float] | None = None
    bad_words: List[str] | None = None
    allowed_token_ids: List[int] | None = None
    seed: int | None = None
    stop: str | List[str] | None = None
    stop_token_ids: List[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    typical_p: float | None = None
    no_repeat_ngram_size: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # BeamSearchParams:
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    # Of the server:
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    # Of OpenAI's, without effect here:
    user: str | None = None
    metadata: Table[str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


class CompletionBody(GenerationBody):
    """`/v1/completions`."""

    elsewhere = GenerationBody.elsewhere | {"messages": "/v1/chat/completions"}

    prompt: str | List[str] | List[int] | List[List[int]]
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: None = None


Parts = Annotated[List[dict[str, Any]], Field(max_length=MOST_MESSAGES)]
"""Of the content of a message."""


class Message(Open):
    """One message of a conversation."""

    role: str
    content: str | Parts | None = None


Messages = Annotated[List[Message], Field(max_length=MOST_MESSAGES)]


class Function(Open):
    """What a tool does."""

    name: str
    description: str | None = None  # (declared for its place in the prompt: models have learnt this order)
    parameters: dict[str, Any] | None = None


class Tool(Open):
    """One that a model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The function that a tool choice names."""

    name: str


class ToolChoice(Body):
    """The function that must be called."""

    elsewhere: ClassVar[dict[str, str]] = {"name": "function"}  # (as in responses)
    type: Literal["function"] = "function"
    function: NamedFunction

    @property
    def name(self) -> str:
        """Of the function."""
        return self.function.name


class AllowedTools(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: List[Tool] = Field(max_length=MOST_TOOLS)


class AllowedToolsChoice(Body):
    """A tool choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def mode(self) -> str:
        """Whether a call is forced."""
        return self.allowed_tools.mode

    @property
    def names(self) -> list[str]:
        """Of the tools."""
        return [tool.function.name for tool in self.allowed_tools.tools]


class TemplateOptions(Body):
    """How a conversation becomes a prompt; see `LLM.chat`."""

    tools: List[Tool] | None = Field(None, max_length=MOST_TOOLS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Table[Any] | None = None

    @property
    def template_options(self) -> dict[str, Any]:
        """Of `LLM.chat_prompt`."""
        return self.model_dump(include={*TemplateOptions.model_fields}, exclude_unset=True)


class ChatBody(TemplateOptions, GenerationBody):
    """`/v1/chat/completions`."""

    elsewhere = GenerationBody.elsewhere | {
        "functions": "tools",
        "function_call": "tool_choice",
        "prompt": "/v1/completions",
        "add_special_tokens": "",
    }

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: Length | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    # Of OpenAI's, without effect here:
    modalities: List[Literal["text"]] | None = None
    prediction: Table[Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


class TokenizeBody(TemplateOptions):
    """`/tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`/detokenize`."""

    model: str | None = None
    tokens: List[int] = Field(max_length=MOST_TOKENS)
