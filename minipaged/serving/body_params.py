"""A request's body as decoding parameters: `SamplingParams` or `BeamSearchParams`."""

from __future__ import annotations

from typing import Any

from minipaged.decoding.checks import ParamsError
from minipaged.decoding.params import BeamSearchParams, DecodingParams, RequestOutputKind, SamplingParams
from minipaged.decoding.structured import StructuredOutputsParams
from minipaged.serving.errors import ApiError, api_error
from minipaged.serving.schemas import MOST_LOGPROBS, OF_BEAMS, ChatBody, GenerationBody, ResponseFormat
from minipaged.serving.service import Service

COMMON = (
    *("temperature", "max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids"),
    "include_stop_str_in_output",
)
OF_SAMPLES = (
    *("best_of", "top_p", "top_k", "min_p", "seed", "bad_words", "allowed_token_ids"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("prompt_logprobs", "typical_p", "no_repeat_ngram_size", "truncate_prompt_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
)
MOST = {"stop": 64, "bad_words": 512, "logit_bias": 1024, "stop_token_ids": 1024, "allowed_token_ids": 65536}
"""Entries of fields that every step reads: more would delay everyone's next token."""

MOST_CHARACTERS = 16384
"""Of all bad words: they are tokenized while everyone waits."""


async def read_params(
    service: Service, body: GenerationBody, logprobs: int | None, **defaults: Any
) -> DecodingParams:
    """A body's decoding parameters; `defaults` fill the fields that it leaves out.

    Raises:
        ApiError: an invalid value, or two that contradict each other.
    """
    for name, most in MOST.items():
        value = getattr(body, name)
        if isinstance(value, list | dict) and len(value) > most:
            raise ApiError(400, f"{name} has {len(value)} entries; give at most {most}", name)
    if (size := sum(map(len, body.bad_words or ()))) > MOST_CHARACTERS:
        message = f"bad_words has {size:,} characters; give at most {MOST_CHARACTERS:,}"
        raise ApiError(400, message, "bad_words")
    try:
        params = _params(body, logprobs, defaults)
    except ParamsError as error:
        raise api_error(error, type(body).model_fields) from error
    if params.min_tokens >= service.max_model_len:
        message = f"min_tokens is {params.min_tokens}; the model's length is {service.max_model_len}"
        raise ApiError(400, message, "min_tokens")
    width = params.num_samples if isinstance(params, SamplingParams) else params.beam_width
    config = service.llm.engine.config
    most = min(config.max_num_seqs, config.max_num_batched_tokens)
    if width > most:
        name = next(name for name in ("beam_width", "best_of", "n") if getattr(body, name) == width)
        message = f"{name} is {width}; the server computes {most} sequences at once, so give at most {most}"
        raise ApiError(400, message, name)
    if params.structured_outputs is not None:
        try:
            await service.compile_structured(params.structured_outputs)
        except ValueError as error:
            raise _structured_error(body, error) from error
    return params


def _params(body: GenerationBody, logprobs: int | None, defaults: dict[str, Any]) -> DecodingParams:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is given without stream; set stream to true", "stream_options")
    _check_count("logprobs", logprobs)
    _check_count("prompt_logprobs", body.prompt_logprobs)
    if body.use_beam_search:
        return _beam_params(body, logprobs, defaults)
    for name in OF_BEAMS:
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} is given without use_beam_search; set it to true", name)
    values = defaults | _given(body, ("n", *COMMON, *OF_SAMPLES))
    if body.logit_bias is not None:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    is_known = values.get("best_of", 0) <= values.get("n", 1)  # which samples are returned
    kind = RequestOutputKind.DELTA if body.stream and is_known else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**values, logprobs=logprobs, structured_outputs=_structured(body), output_kind=kind)


def _beam_params(body: GenerationBody, logprobs: int | None, defaults: dict[str, Any]) -> BeamSearchParams:
    for name in (*OF_SAMPLES, "logit_bias", "structured_outputs", "response_format"):
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} is given, but beam search does not support it; leave it out", name)
    num_returned = 1 if body.n is None else body.n
    width = num_returned if body.beam_width is None else body.beam_width
    if not 1 <= num_returned <= max(1, width):
        raise ApiError(400, f"n is {num_returned}; give a number from 1 to beam_width, which is {width}", "n")
    values = defaults | _given(body, (*COMMON, "length_penalty", "early_stopping"))
    return BeamSearchParams(beam_width=width, num_return_sequences=num_returned, logprobs=logprobs, **values)


def num_chat_logprobs(body: ChatBody) -> int | None:
    """How many likeliest tokens a chat reports; None: none, not even the chosen one."""
    count = body.top_logprobs or 0
    if body.logprobs:
        _check_count("top_logprobs", count)
        return count
    if count:
        raise ApiError(400, "top_logprobs is given without logprobs; set logprobs to true", "top_logprobs")
    return None


def _check_count(name: str, count: int | None) -> None:
    """Raise ApiError unless so many of the likeliest tokens can be reported."""
    if count is not None and not 0 <= count <= MOST_LOGPROBS:
        raise ApiError(400, f"{name} is {count}; give a number from 0 to {MOST_LOGPROBS}", name)


def _given(body: GenerationBody, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) < 20):
            raise ApiError(400, f"logit_bias has {token[:40]!r}; give token ids as keys", "logit_bias")
    return {int(token): bias for token, bias in biases.items()}


def _structured(body: GenerationBody) -> StructuredOutputsParams | None:
    if body.structured_outputs is not None and body.response_format is not None:
        message = "structured_outputs and response_format are both given; give one"
        raise ApiError(400, message, "structured_outputs")
    try:
        if body.structured_outputs is not None:
            return StructuredOutputsParams(**body.structured_outputs.model_dump(by_alias=True))
        schema = None if body.response_format is None else _schema(body.response_format)
        return None if schema is None else StructuredOutputsParams(json=schema)
    except ParamsError as error:
        raise _structured_error(body, error) from error


def _structured_error(body: GenerationBody, error: Exception) -> ApiError:
    """An error in a schema or grammar, under its field's name."""
    message = str(error)
    if body.response_format is not None:
        message = message.replace("json of structured_outputs", "schema")
        return ApiError(400, f"response_format: {message}", "response_format")
    if "structured_outputs" not in message:
        message = f"structured_outputs.{message}"
    return ApiError(400, message, "structured_outputs")


def _schema(wanted: ResponseFormat) -> dict[str, Any] | None:
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise ApiError(400, "response_format.json_schema is missing; give it", "response_format")
        return wanted.json_schema.schema_
    return {"type": "object"} if wanted.type == "json_object" else None
