"""From a body's prompts to outputs, and from outputs to a response, whole or streamed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from time import monotonic
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response

from minipaged.async_llm import AsyncOutputs, together
from minipaged.decoding.params import DecodingParams, RequestOutputKind, SamplingParams
from minipaged.outputs import CompletionOutput, RequestOutput
from minipaged.prompts import named
from minipaged.serving.errors import CLIENT_GONE, ApiError, api_error, json_response, shutting_down
from minipaged.serving.schemas import GenerationBody
from minipaged.serving.service import Service
from minipaged.serving.streaming import EventStream, failed, unless_gone
from minipaged.text_io import counted

logger = logging.getLogger(__name__)


class Asked(NamedTuple):
    """What a body asks for, as the engine takes it."""

    prompts: list[list[int]]
    """Token ids of each."""
    params: DecodingParams
    """For all of them."""
    drops_tokens: bool = False
    """The output is neither reported nor counted; only the prompts are wanted."""


class Generation:
    """The answers to the prompts of one body.

    Args:
        service: of the server.
        request_id: of the response; the engine's requests add a number.
        asked: the prompts, and what is wanted.
        salt: who may share cached prefixes with it.
    """

    def __init__(self, service: Service, request_id: str, asked: Asked, salt: str) -> None:
        self.service = service
        self.request_id = request_id
        self.prompts, self.params, self._drops_tokens = asked
        if isinstance(self.params, SamplingParams):
            self.prompts = [self.params.truncate(prompt, service.max_model_len) for prompt in self.prompts]
        self.ids = [f"{request_id}-{i}" for i in range(len(self.prompts))]
        self.usage = Usage()
        self.end = ""  # how it ended, for the log
        self._salt = salt
        self._start = monotonic()
        self._streams: list[AsyncOutputs] = []

    async def start(self) -> None:
        """Submit all prompts to the engine. Afterwards, even if one fails, `close` must be called.

        Raises:
            ValueError, QueueFullError, EngineStoppedError: as `AsyncLLM.generate`.
        """
        for index, token_ids in enumerate(self.prompts):
            with named(index, self.prompts, "prompt"):
                self.service.check_length(len(token_ids))
        self.service.enter(self.ids)
        for index, (request_id, token_ids) in enumerate(zip(self.ids, self.prompts)):
            if index:
                await asyncio.sleep(0)  # let others run: each prompt takes a while to check
            prompt = {"prompt_token_ids": token_ids, "cache_salt": self._salt}
            with named(index, self.prompts, "prompt"):
                self._streams.append(self.service.llm.generate(prompt, self.params, request_id))

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """(position of the prompt, output) as they come; completions are numbered in prompt order.

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
        """End what is still running, and log one line without any of its text."""
        self.service.leave(self.ids)
        for stream in self._streams:
            await stream.aclose()
        gone = "the client has gone" + (", or the server shut down" if self.service.is_draining else "")
        logger.info(
            "%s: %s of %s (%d cached), %s generated in %.3f s, %s",
            self.request_id,
            counted(len(self.prompts), "prompt"),
            counted(sum(map(len, self.prompts)), "token"),
            self.usage.cached_tokens,
            counted(self.usage.completion_tokens, "token"),
            monotonic() - self._start,
            self.end or gone,
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
        self._positions: set[int] = set()  # of the prompts that are counted
        self._timing: dict[str, float] | None = None
        self.prompt_tokens = self.completion_tokens = 0
        self.cached_tokens = 0  # prompt tokens that the prefix cache had
        self.reasoning_tokens = 0  # of the completions; counted by who divides them

    def count(self, position: int, output: RequestOutput) -> None:
        """Count an output; each token comes once."""
        if position not in self._positions:
            self._positions.add(position)
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)
        times = output.metrics
        if output.finished and times is not None and times.finished_time is not None:
            total, queue = times.finished_time - times.arrival_time, times.time_in_queue or 0.0
            self._timing = {"queue_seconds": queue, "inference_seconds": total - queue}

    def fields(self) -> dict[str, Any]:
        """OpenAI's object, and how long it took, if there is one prompt."""
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
        has_timing = self._timing is not None and len(self._positions) == 1
        return {"usage": usage, **({"timing": self._timing} if has_timing else {})}


async def collect(generation: Generation) -> list[RequestOutput]:
    """All outputs, complete, in the order of the prompts."""
    found = {position: output async for position, output in generation.outputs() if output.finished}
    return [found[position] for position in range(len(generation.prompts))]


class Writer(Protocol):
    """Writes outputs in an endpoint's format."""

    def __init__(self, service: Service, body: Any, generation: Generation) -> None: ...

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response."""

    def begin(self) -> str:
        """The events of a stream before its first output, possibly none."""
        return ""

    def events(self, position: int, output: RequestOutput) -> str:
        """Those of an output."""

    def end(self) -> str:
        """Those after the last one."""

    def failed(self, error: ApiError) -> str:
        """The last events of a stream that fails."""
        return failed(error)


class Endpoint(NamedTuple):
    """How an endpoint differs from the others."""

    read: Callable[[Service, Any], Coroutine[Any, Any, Asked]]
    """Raises ApiError, or another ValueError, for a body that cannot be served."""
    id_prefix: str
    """Of its responses' ids."""
    prompt_field: str
    """The field of a body that the prompts are from."""
    writer: type[Writer]


async def respond(service: Service, request: Request, body: GenerationBody, endpoint: Endpoint) -> Response:
    """Generate what a body asks for, and answer in the endpoint's format.

    `request.state.deadline` is when the client's time is up.

    Raises:
        ApiError: it could not start, or failed before anything was sent.
    """
    deadline = request.state.deadline
    generation: Generation | None = None
    is_handed_on = False

    async def begin() -> Writer:
        nonlocal generation
        asked = await endpoint.read(service, body)
        salt = request.state.tenant + (body.cache_salt or "")
        generation = Generation(service, endpoint.id_prefix + request.state.request_id, asked, salt)
        request.state.is_logged = True  # when it is closed
        writer = endpoint.writer(service, body, generation)
        await generation.start()
        return writer

    try:
        writer = await service.prepare(request, begin())
        assert generation is not None
        if body.stream:
            is_handed_on = True
            return EventStream(_guarded(generation, writer, deadline), generation.close, deadline)
        async with asyncio.timeout_at(deadline):
            outputs = await unless_gone(request.receive, collect(generation))
        if outputs is None:
            generation.end = "the client has gone"
            return Response(status_code=CLIENT_GONE)
        response = await _written(service, writer, outputs, generation.params)
        generation.end = "done"
        return response
    except (Exception, asyncio.CancelledError) as error:
        failure = api_error(error, type(body).model_fields, endpoint.prompt_field)
        if generation is not None:
            generation.end = f"{failure.message}, status {failure.status}"
        raise failure from error
    finally:
        if generation is not None and not is_handed_on:
            await generation.close()


async def _written(
    service: Service, writer: Writer, outputs: list[RequestOutput], params: DecodingParams
) -> Response:
    """The whole response; in another thread if it has log-probabilities, because many take seconds."""
    if params.logprobs is None and params.prompt_logprobs is None:
        return json_response(writer.whole(outputs))
    return await service.in_thread(lambda: json_response(writer.whole(outputs)))


async def _guarded(generation: Generation, writer: Writer, deadline: float) -> AsyncGenerator[str]:
    """A stream; an error is its last event."""
    try:
        yield writer.begin()
        outputs, now = generation.outputs(), asyncio.get_running_loop().time
        while now() < deadline:
            async with asyncio.timeout_at(deadline):  # (around a `yield`, it would cancel the sending)
                found = await anext(outputs, None)
            if found is None:
                break
            if generation.params.prompt_logprobs is None:
                yield writer.events(*found)
            else:  # (of a long prompt, they take as long as in `_written`)
                yield await generation.service.in_thread(writer.events, *found)
        else:
            raise TimeoutError  # there was always something to send
        yield writer.end()
        generation.end = "done"
    except Exception as error:
        failure = api_error(error)
        generation.end = failure.message
        yield writer.failed(failure)
