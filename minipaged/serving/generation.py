"""From a body's prompts to outputs, and from outputs to a response, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from time import monotonic
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from minipaged.async_llm import AsyncOutputs, together
from minipaged.decoding.params import DecodingParams, RequestOutputKind
from minipaged.outputs import CompletionOutput, RequestOutput
from minipaged.serving.errors import ApiError, api_error
from minipaged.serving.schemas import GenerationBody
from minipaged.serving.service import Service, shutting_down
from minipaged.serving.streaming import DONE, EventStream, event_of, unless_gone

logger = logging.getLogger(__name__)


class Generation:
    """The answers to the prompts of one body.

    Args:
        service: where.
        request_id: of the response; the engine's requests have it and a number.
        prompts: token ids of each.
        params: for all of them.
        salt: who may share cached prefixes with it.
        prompt_field: the field of the body that the prompts are from.
        drops_tokens: what is generated is neither told nor counted; the prompts alone are wanted.
    """

    def __init__(
        self,
        service: Service,
        request_id: str,
        prompts: list[list[int]],
        params: DecodingParams,
        salt: str,
        prompt_field: str,
        drops_tokens: bool = False,
    ) -> None:
        self.service = service
        self.request_id = request_id
        self.prompts = prompts
        self.params = params
        self.prompt_field = prompt_field
        self.ids = [f"{request_id}-{i}" for i in range(len(prompts))]
        self.usage = Usage()
        self.end = "the client has gone"  # how it ended, for the log
        self._salt = salt
        self._drops_tokens = drops_tokens
        self._start = monotonic()
        self._streams: list[AsyncOutputs] = []

    async def start(self) -> None:
        """Hand all prompts to the engine, or none; then `close` must be called.

        Raises:
            ValueError, QueueFullError, EngineStoppedError: as `AsyncLLM.generate`.
            ApiError: the server shuts down.
        """
        self.service.enter(self.ids)
        for request_id, token_ids in zip(self.ids, self.prompts):
            self.service.check_length(len(token_ids))
            prompt = {"prompt_token_ids": token_ids, "cache_salt": self._salt}
            self._streams.append(self.service.llm.generate(prompt, self.params, request_id))

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """(position of the prompt, output), as they come; completions are numbered in their order.

        Raises:
            ApiError: a request failed, or the server shuts down.
        """
        async for position, output in together(self._streams):
            if self._drops_tokens:
                output = replace(output, outputs=[_without_tokens(each) for each in output.outputs])
            self.usage.count(position, output)
            if output.error is not None:
                status = 400 if "forbid every token" in output.error else 500
                raise ApiError(status, output.error, code="request_failed")
            if output.finished and any(each.finish_reason == "abort" for each in output.outputs):
                raise shutting_down()
            if self.params.output_kind == RequestOutputKind.FINAL_ONLY:
                ranked = [replace(completion, index=rank) for rank, completion in enumerate(output.outputs)]
                output = replace(output, outputs=ranked)
            yield position, output

    async def close(self) -> None:
        """End what is still running of it, and log one line, without any of its text."""
        self.service.leave(self.ids)
        for stream in self._streams:
            await stream.aclose()
        logger.info(
            "%s: %d prompts of %d tokens (%d cached), %d tokens generated in %.3f s, %s",
            self.request_id,
            len(self.prompts),
            sum(map(len, self.prompts)),
            self.usage.cached_tokens,
            self.usage.completion_tokens,
            monotonic() - self._start,
            self.end,
        )


def _without_tokens(completion: CompletionOutput) -> CompletionOutput:
    reason = "length" if completion.finish_reason == "stop" else completion.finish_reason
    logprobs = completion.logprobs and completion.logprobs[:0]
    return replace(
        completion, text="", token_ids=[], logprobs=logprobs, finish_reason=reason, stop_reason=None
    )


class Usage:
    """Tokens of a body, counted as outputs come."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # position -> tokens, cached ones
        self._timing: dict[str, float] | None = None
        self.completion_tokens = 0

    def count(self, position: int, output: RequestOutput) -> None:
        """Take an output into account; each token comes once."""
        self._prompts[position] = len(output.prompt_token_ids), output.num_cached_tokens
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)
        times = output.metrics
        if output.finished and times is not None and times.finished_time is not None:
            total, queue = times.finished_time - times.arrival_time, times.time_in_queue or 0.0
            self._timing = {"queue_seconds": queue, "inference_seconds": total - queue}

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(tokens for tokens, _ in self._prompts.values())

    @property
    def cached_tokens(self) -> int:
        """Those of them that the prefix cache had."""
        return sum(cached for _, cached in self._prompts.values())

    def fields(self) -> dict[str, Any]:
        """OpenAI's object, and how long it took, if there is one prompt."""
        return {"usage": self._tokens(), **({} if self._timing is None else {"timing": self._timing})}

    def _tokens(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def collect(generation: Generation, timeout: float) -> list[RequestOutput]:
    """All outputs, complete, in the order of the prompts; TimeoutError after `timeout` seconds."""
    async with asyncio.timeout(timeout):
        found = {position: output async for position, output in generation.outputs() if output.finished}
    return [found[position] for position in range(len(generation.prompts))]


class Writer(Protocol):
    """Writes outputs in an endpoint's format."""

    def __init__(self, service: Service, body: Any, generation: Generation) -> None: ...

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response."""

    def begin(self) -> str:
        """The events of a stream before its first output, possibly none."""

    def events(self, position: int, output: RequestOutput) -> str:
        """Those of an output."""

    def end(self) -> str:
        """Those after the last one."""


async def respond(
    service: Service,
    request: Request,
    body: GenerationBody,
    prompts: list[list[int]],
    params: DecodingParams,
    kind: str,
    prompt_field: str,
    make_writer: type[Writer],
    drops_tokens: bool = False,
) -> Response:
    """Generate, and answer as `make_writer` writes; the response's id begins with `kind`.

    Raises:
        ApiError: it could not start, or failed before anything was sent.
    """
    salt = request.state.tenant + (body.cache_salt or "")
    request_id = kind + request.state.request_id
    generation = Generation(service, request_id, prompts, params, salt, prompt_field, drops_tokens)
    request.state.is_logged = True  # when it is closed
    writer = make_writer(service, body, generation)
    timeout = service.settings.request_timeout
    is_handed_on = False
    try:
        await generation.start()
        if body.stream:
            is_handed_on = True
            return EventStream(_guarded(generation, writer, timeout), generation.close)
        outputs = await unless_gone(request.receive, collect(generation, timeout))
        if outputs is None:
            return Response(status_code=499)
        generation.end = "done"
        return Response(json.dumps(writer.whole(outputs)), media_type="application/json")
    except Exception as error:
        told = api_error(error, type(body).model_fields, generation.prompt_field)
        generation.end = told.message
        raise told from error
    finally:
        if not is_handed_on:
            await generation.close()


async def _guarded(generation: Generation, writer: Writer, timeout: float) -> AsyncGenerator[str]:
    """A stream that ends with [DONE]; an error is its last event before that."""
    try:
        async with asyncio.timeout(timeout):
            yield writer.begin()
            async for position, output in generation.outputs():
                yield writer.events(position, output)
            yield writer.end()
        generation.end = "done"
    except Exception as error:
        told = api_error(error)
        generation.end = told.message
        yield event_of(told.body())
    yield DONE
