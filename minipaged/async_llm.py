"""Many users of one engine in an event loop: a thread of its own steps, outputs come as they are made.

    event loop                            engine's thread
    generate(): check, build   --inbox-->  submit, abort
                                           step
    async for output in ...    <--loop---  what each request has got

The event loop never waits for a step, and only the thread touches scheduler and memory.
"""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from minipaged.conversations import Message
from minipaged.decoding.params import DecodingParams
from minipaged.engine import Engine, RequestError
from minipaged.engine_thread import EngineThread, QueuedEngine, Reader
from minipaged.llm import LLM
from minipaged.outputs import RequestOutput
from minipaged.prompts import Prompt, TokensPrompt, check_params, split_prompt
from minipaged.scheduling import Request

LONG_TEXT = 4096
"""Characters of a prompt above which it is tokenized in another thread: some milliseconds."""


class AsyncLLM:
    """A model for many concurrent requests of an event loop (of several, too).

    Args:
        model: model directory or hub id; None: the embedded pocket model.
        max_waiting: requests that may wait at the same time; None: any number.
        options: as for `LLM`: fields of `EngineConfig`, `executor`, `tokenizer`, `use`, `components`.

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError, OverrideError, ContractError: one clear line each.
    """

    def __init__(
        self, model: str | Path | None = None, *, max_waiting: int | None = None, **options: Any
    ) -> None:
        if max_waiting is not None and (type(max_waiting) is not int or max_waiting < 1):
            raise RequestError(f"max_waiting is {max_waiting!r}; give at least 1, or None for no limit")
        self.max_waiting = max_waiting
        self._llm = _LLM(model, **options)
        self._thread = EngineThread(self._llm.engine)
        # (Also when the object is dropped and when the interpreter ends.)
        self._shutdown = weakref.finalize(self, self._thread.stop)

    @property
    def engine(self) -> Engine:
        """The engine, for its metrics and config; its thread alone may change it."""
        return self._llm.engine

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._thread.stopped is None

    @property
    def stopped(self) -> str | None:
        """Why no requests are taken; None while they are."""
        return self._thread.stopped

    def between_steps(self, action: Callable[[], None]) -> None:
        """Let the engine's thread call `action` when no step is computed; after the end it is not called.

        It must be short, as it holds up every request, and must not raise: that ends the thread.
        """
        self._thread.between_steps(action)

    def chat_prompt(self, messages: Sequence[Message], **options: Any) -> TokensPrompt:
        """See `LLM.chat_prompt`."""
        return self._llm.chat_prompt(messages, **options)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer; None if it has none."""
        return self._llm.tokenizer

    def generate(
        self,
        prompt: Prompt,
        sampling_params: DecodingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncOutputs:
        """Complete a prompt; called in a running event loop.

        `SamplingParams.output_kind` says what an output tells; the last one has `finished` set. Who falls
        behind finds cumulative outputs replaced by newer ones. Beam search tells its end only.
        Leaving the iterator, by `break` or because its task is cancelled, aborts the request.

        Args:
            prompt: see `Prompt`.
            sampling_params: the decoding method and its settings; default: what
                `get_default_sampling_params` of `LLM` says.
            request_id: unique among unfinished requests; default: one is made.

        Raises:
            ValueError: at the call: a prompt or a parameter that cannot work. (What depends on the number of
                tokens of a text of more than 4,096 characters: at the first output.)
            QueueFullError: `max_waiting` requests wait.
            EngineStoppedError: after `shutdown`; also from an iterator that is still open then.
        """
        if sampling_params is None:
            sampling_params = self._llm.get_default_sampling_params()
        params = check_params(sampling_params)
        if not isinstance(request_id, str | None):
            raise RequestError(f"request_id is {request_id!r}; give a string")
        text, token_ids, _ = split_prompt(prompt)
        reader = Reader(request_id or uuid.uuid4().hex, text)
        is_long = text is not None and token_ids is None and len(text) > LONG_TEXT
        self._thread.register(reader, self.max_waiting)
        try:
            # Of a long text the beginning, which shows at once whether the parameters work.
            request = self._build(reader.request_id, str(text)[:64] if is_long else prompt, params)
        except BaseException:
            self._thread.close(reader)
            raise
        if is_long:
            start = partial(self._build, reader.request_id, prompt, params)
            return AsyncOutputs(self, reader, start)
        self._thread.submit(reader, request)
        return AsyncOutputs(self, reader)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator gets what there is, with reason "abort". Unknown ids are ignored."""
        self._thread.abort(request_id)

    def shutdown(self) -> None:
        """End the thread, after the step that it computes. Open iterators raise EngineStoppedError."""
        self._shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.shutdown)

    def _build(self, request_id: str, prompt: Any, params: DecodingParams) -> Request:
        return self._llm.engine.add_request(request_id, *self._llm.tokenize(prompt, params))


class AsyncOutputs:
    """The iterator of a request's outputs. Dropping it aborts the request."""

    def __init__(self, llm: AsyncLLM, reader: Reader, build: Callable[[], Request] | None = None) -> None:
        self._llm = llm  # (kept alive by its readers)
        self._reader = reader
        self._build = build  # what is left to do in another thread

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        reader = self._reader
        try:
            await self._hand_over()
            while not reader.pending and not reader.done:
                reader.news.clear()
                await reader.news.wait()
        except BaseException:
            await self.aclose()
            raise
        if not reader.pending:
            raise StopAsyncIteration
        return reader.take()

    async def _hand_over(self) -> None:
        build, self._build = self._build, None
        if build is not None:
            self._llm._thread.submit(self._reader, await asyncio.to_thread(build))

    async def aclose(self) -> None:
        """Abort the request, unless it has ended; there are no more outputs."""
        self._reader.pending.clear()
        self._reader.done = True
        self._llm._thread.close(self._reader)

    def __del__(self) -> None:
        self._llm._thread.close(self._reader)


async def together(streams: Sequence[AsyncOutputs]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """What several requests get, as it comes: (position of the stream, output).

    Raises what any of them raises. Closing it leaves the streams open.
    """
    readers, news = [stream._reader for stream in streams], asyncio.Event()
    for reader in readers:
        reader.news = news
    for stream in streams:
        await stream._hand_over()
    while True:
        news.clear()
        for position, reader in enumerate(readers):
            while reader.pending:
                yield position, reader.take()
        if all(reader.done and not reader.pending for reader in readers):
            return
        await news.wait()


class _LLM(LLM):
    engine_class = QueuedEngine
    engine: QueuedEngine
