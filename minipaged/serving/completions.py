"""`/v1/completions`: prompts, as texts or token ids, and their continuations."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from minipaged.decoding.params import SamplingParams
from minipaged.outputs import CompletionOutput, Logprob, RequestOutput
from minipaged.serving.body_params import read_params
from minipaged.serving.errors import ApiError, api_error
from minipaged.serving.formats import finite, prompt_logprobs
from minipaged.serving.generation import Generation, respond
from minipaged.serving.schemas import MOST_PROMPTS, CompletionBody
from minipaged.serving.service import Service
from minipaged.serving.streaming import Chunks, is_plain

TopLogprobs = dict[int, Logprob]
PLAIN = {"index": 0, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}


async def complete(service: Service, request: Request, body: CompletionBody) -> Response:
    """Answer a body."""
    service.check_model(body.model)
    params = await read_params(service, body, body.logprobs)
    try:
        prompts = await _prompts(service, body)
    except ValueError as error:
        raise api_error(error, (), "prompt") from error
    if body.echo and body.logprobs is not None and isinstance(params, SamplingParams):
        if body.stream:
            raise ApiError(400, "echo with logprobs does not stream; set stream to false", "echo")
        params = replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    return await respond(service, request, body, prompts, params, "cmpl-", "prompt", _Writer)


async def _prompts(service: Service, body: CompletionBody) -> list[list[int]]:
    """Token ids of each prompt."""
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given or len(given) > MOST_PROMPTS:
        raise ApiError(400, f"prompt has {len(given)} prompts; give 1 to {MOST_PROMPTS}", "prompt")
    return [await service.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]


class _Writer:
    """Outputs in OpenAI's form."""

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
        self._chunks = Chunks(self._head, body.wants_usage, PLAIN)
        self._told: dict[int, int] = {}  # choice -> where its next token's text begins

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response."""
        choices = [
            self._choice(position, output, completion)
            for position, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return {**self._head, "choices": choices, **self._generation.usage.fields()}

    def begin(self) -> str:
        """A stream has nothing before its texts."""
        return ""

    def events(self, position: int, output: RequestOutput) -> str:
        """The new pieces of the choices' texts."""
        events = []
        for completion in output.outputs:
            index = position * self._num_choices + completion.index
            is_first, told = index not in self._told, self._told.get(index, 0)
            if is_plain(completion) and not is_first and output.prompt_logprobs is None:
                events.append(self._chunks.piece(index, completion.text))
                continue
            choice = self._choice(position, output, completion, is_first, told)
            events.append(self._chunks.event(choice))
        return "".join(events)

    def end(self) -> str:
        """The usage, if it is wanted."""
        return self._chunks.last(self._generation.usage.fields())

    def _choice(
        self,
        position: int,
        output: RequestOutput,
        completion: CompletionOutput,
        with_echo: bool = True,
        offset: int = 0,
    ) -> dict[str, Any]:
        text, tops = completion.text, completion.logprobs
        if self._body.echo and with_echo:
            text = self._echo(position) + text
            if tops is not None and output.prompt_logprobs is not None:
                first: TopLogprobs = {output.prompt_token_ids[0]: self._unknown(output.prompt_token_ids[0])}
                tops = [top or first for top in output.prompt_logprobs] + tops
        index = position * self._num_choices + completion.index
        found = None
        if tops is not None:
            found, offset = self._logprobs(output, completion, tops, offset)
        self._told[index] = offset
        choice = {
            "index": index,
            "text": text,
            "logprobs": found,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return choice

    def _echo(self, position: int) -> str:
        """The prompt as text."""
        given: Any = self._body.prompt
        given = [given] if isinstance(given, str) else given
        if isinstance(given[position], str):
            return given[position]
        return self._service.tokenizer.decode(self._generation.prompts[position], skip_special_tokens=True)

    def _unknown(self, token_id: int) -> Logprob:
        """Of a prompt's first token, which nothing predicts."""
        return Logprob(float("nan"), 0, self._service.tokenizer.decode([token_id]))

    def _logprobs(
        self, output: RequestOutput, completion: CompletionOutput, tops: list[TopLogprobs], offset: int
    ) -> tuple[dict[str, Any], int]:
        """OpenAI's object, and where the text of the next token begins."""
        ids = completion.token_ids
        if len(tops) > len(ids):  # (the prompt's come first)
            ids = output.prompt_token_ids + ids
        count = self._body.logprobs or 0
        special = set(self._service.tokenizer.all_special_ids)  # that are no text
        tokens, values, likeliest, offsets = [], [], [], []
        for token_id, top in zip(ids, tops):
            chosen = top[token_id]
            text = chosen.decoded_token or ""
            is_known = chosen.logprob == chosen.logprob
            tokens.append(text)
            values.append(finite(chosen.logprob) if is_known else None)
            best = {
                one.decoded_token or str(i): finite(one.logprob)
                for i, one in top.items()
                if one.rank <= count
            }
            likeliest.append((best or None) if is_known else None)
            offsets.append(offset)
            offset += 0 if token_id in special else len(text)
        columns = {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": likeliest,
            "text_offset": offsets,
        }
        return columns, offset
