"""`/v1/completions`: prompts, as texts or token ids, and their continuations."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from minipaged.decoding.params import SamplingParams
from minipaged.outputs import CompletionOutput, RequestOutput
from minipaged.serving.body_params import read_params
from minipaged.serving.errors import ApiError, api_error
from minipaged.serving.generation import Asked, Endpoint, Generation, Writer
from minipaged.serving.logprobs import TextOffsets, TopLogprobs, completion_logprobs, prompt_logprobs
from minipaged.serving.schemas import MOST_PROMPTS, CompletionBody
from minipaged.serving.service import Service
from minipaged.serving.streaming import Chunks, is_plain

PLAIN = {"index": 0, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}


async def _read(service: Service, body: CompletionBody) -> Asked:
    service.check_model(body.model)
    if body.echo and service.llm.get_tokenizer() is None:
        raise ApiError(400, "echo needs a tokenizer, and the model has none; set echo to false", "echo")
    wants_prompt_alone = bool(body.echo) and body.max_tokens == 0 and not body.min_tokens
    if wants_prompt_alone:
        body.max_tokens = 1  # the engine always generates; the token is dropped
    params = await read_params(service, body, body.logprobs)
    try:
        prompts = await _prompts(service, body)
    except ValueError as error:
        raise api_error(error, (), "prompt") from error
    if body.echo and body.logprobs is not None:
        if not isinstance(params, SamplingParams):
            raise ApiError(400, "echo with logprobs is not for beam search; set echo to false", "echo")
        if body.stream:
            raise ApiError(400, "echo with logprobs does not stream; set stream to false", "echo")
        params = replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    return Asked(prompts, params, wants_prompt_alone)


async def _prompts(service: Service, body: CompletionBody) -> list[list[int]]:
    """Token ids of each prompt."""
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given or len(given) > MOST_PROMPTS:
        raise ApiError(400, f"prompt has {len(given)} prompts; give 1 to {MOST_PROMPTS}", "prompt")
    most = service.llm.max_waiting or MOST_PROMPTS
    if len(given) > most:
        problem = f"prompt has {len(given)} prompts, but only {most} requests may wait here"
        raise ApiError(400, f"{problem}; give at most {most}, or raise --max-waiting", "prompt")
    if not isinstance(given[0], str):
        return given
    return await service.encode(given, body.add_special_tokens is not False)


class _Writer(Writer):
    """Outputs in OpenAI's format."""

    def __init__(self, service: Service, body: CompletionBody, generation: Generation) -> None:
        self._service = service
        self._body = body
        self._generation = generation
        self._num_choices = body.n or 1
        self._head = {
            "id": generation.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }
        self._chunks = Chunks(self._head, PLAIN, generation.usage.fields, body.stream_options)
        self._begun: set[int] = set()  # choices
        self._offsets: dict[int, TextOffsets] = {}  # by choice, if log-probabilities are wanted
        own = service.llm.engine.detokenizer
        self._detokenizer = own and own.skipping(generation.params.skip_special_tokens)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response."""
        choices = [
            self._choice(position, output, completion)
            for position, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return {**self._head, "choices": choices, **self._generation.usage.fields()}

    def events(self, position: int, output: RequestOutput) -> str:
        """The new pieces of the choices' texts."""
        events = []
        for completion in output.outputs:
            index = position * self._num_choices + completion.index
            if is_plain(completion) and index in self._begun and not self._body.return_token_ids:
                events.append(self._chunks.piece(index, completion.text))
            else:
                events.append(self._chunks.event(self._choice(position, output, completion)))
        return "".join(events)

    def end(self) -> str:
        """The usage, if requested."""
        return self._chunks.last()

    def _choice(self, position: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        index = position * self._num_choices + completion.index
        is_first = index not in self._begun
        self._begun.add(index)
        text = self._echo(position) + completion.text if self._body.echo and is_first else completion.text
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(position, index, output, completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if is_first:
            choice |= prompt_logprobs(output, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _echo(self, position: int) -> str:
        """The prompt as text."""
        given: Any = self._body.prompt
        given = [given] if isinstance(given, str) else given
        if isinstance(given[position], str) and self._body.truncate_prompt_tokens is None:
            return given[position]
        return self._service.tokenizer.decode(self._generation.prompts[position], skip_special_tokens=True)

    def _logprobs(
        self, position: int, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any] | None:
        """OpenAI's object; echo puts the prompt's tokens first."""
        if completion.logprobs is None:
            return None
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(self._detokenizer, output.prompt_token_ids)
        tops: list[TopLogprobs | None] = [*completion.logprobs]
        ids, starts = completion.token_ids, self._offsets[index].of(completion.token_ids)
        if self._body.echo and output.prompt_logprobs is not None:
            tops, ids = output.prompt_logprobs + tops, output.prompt_token_ids + ids
            shift = len(self._echo(position))
            echoed = self._detokenizer and self._detokenizer.skipping(True)  # (as the echo does)
            starts = TextOffsets(echoed).of(output.prompt_token_ids) + [shift + i for i in starts]
        tokenizer = None if self._detokenizer is None else self._detokenizer.tokenizer
        return completion_logprobs(tokenizer, tops, ids, starts, self._body.logprobs or 0)


COMPLETIONS = Endpoint(_read, "cmpl-", "prompt", _Writer)
