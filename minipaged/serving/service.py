"""What all endpoints share: the engine, the settings, the requests being served, and the shutdown."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Coroutine
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from starlette.requests import Request

from minipaged.async_llm import LONG_TEXT, AsyncLLM
from minipaged.decoding.structured import StructuredOutputsParams
from minipaged.prompts import RequestError, named, split_prompt
from minipaged.scheduling import RequestTooLongError, StepPlan
from minipaged.serving.errors import CLIENT_GONE, ApiError, shutting_down
from minipaged.serving.live import LiveTrace
from minipaged.serving.prometheus import PrometheusMetrics
from minipaged.serving.request_log import log_refusal
from minipaged.serving.settings import ServerSettings
from minipaged.serving.streaming import unless_gone
from minipaged.serving.threads import DaemonThreads
from minipaged.text_io import counted

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

VERY_LONG_TEXT = 1 << 16
"""Characters that take a noticeable part of a second to tokenize."""

LONGEST_COMPILATION = 20
"""Seconds: a few adversarial sources are never compiled, and nothing interrupts the library."""

UNHEALTHY_AFTER = 10
"""Failed steps in a row: more than one bad request can cause, as it is given up after three."""


class Service:
    """A model that is served.

    Args:
        llm: the engine.
        model_name: what clients call the model.
        settings: of the server.
    """

    def __init__(self, llm: AsyncLLM, model_name: str, settings: ServerSettings) -> None:
        self.llm = llm
        self.model_name = model_name
        self.settings = settings
        self.created = int(time.time())
        self.is_draining = False
        self._preparing: set[asyncio.Task[Any]] = set()  # of requests that the engine does not have yet
        self._active: set[str] = set()  # ids of the engine's requests
        num_cpus = os.cpu_count() or 1
        self._threads = DaemonThreads(min(32, num_cpus + 4))  # as many as asyncio's own pool
        self._threads_of_long_texts = DaemonThreads(max(1, num_cpus // 2))
        self._threads_of_grammars = DaemonThreads(4, patience=LONGEST_COMPILATION)
        self._keys = {hashlib.sha256(key.encode()).hexdigest() for key in settings.api_keys}
        self._failed_steps = 0  # in a row
        self.metrics = PrometheusMetrics(llm.engine, model_name)
        self.live = LiveTrace(llm, with_tokens=len(settings.api_keys) < 2)
        llm.engine.on_planned.insert(0, self._note_plan)
        llm.engine.on_committed.append(self._note_commit)

    @cached_property
    def response_template(self) -> ResponseTemplate | None:
        """How the tokenizer declares that answers are divided, if it does."""
        if getattr(self.tokenizer, "response_template", None) is None:
            return None
        from minipaged.serving.response_templates import template_of  # loads transformers

        return template_of(self.tokenizer)

    # -- keys and health ------------------------------------------------------------------------

    def tenant(self, key: str | None) -> str:
        """The name of a key's owner, which salts the cache; "" if the server needs no key.

        Raises:
            ApiError: it is none of the keys. Each comparison takes constant time.
        """
        if not self._keys:
            return ""
        given = hashlib.sha256((key or "").encode()).hexdigest()
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if key is None or not any(matches):
            problem = "no API key is given" if key is None else "the API key is not known"
            message = f"{problem}; send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return given

    @property
    def ailment(self) -> str | None:
        """Why the server cannot serve; None: it can."""
        if self.llm.stopped is not None:
            return self.llm.stopped
        if self._failed_steps >= UNHEALTHY_AFTER:
            return f"the last {self._failed_steps} steps failed; see the log"
        return "the server is shutting down" if self.is_draining else None

    def _note_plan(self, plan: StepPlan) -> None:
        self._failed_steps += 1  # until it is committed

    def _note_commit(self, *step: Any) -> None:
        self._failed_steps = 0

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a body asks for another model."""
        if name is not None and name != self.model_name:
            message = f"there is no model {name[:80]!r} here; ask for {self.model_name!r}, or leave model out"
            raise ApiError(404, message, "model", "model_not_found")

    # -- prompts --------------------------------------------------------------------------------

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Like `asyncio.to_thread`, in a thread that nothing waits for once this is cancelled."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *args, **kwargs))

    async def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """The tokens of each text; in another thread, unless it is a single short one."""
        encode = partial(self.tokenizer.encode, add_special_tokens=add_special_tokens)
        for index, text in enumerate(texts):
            with named(index, texts, "prompt"):
                split_prompt(text)  # (checks it)
        if len(texts) == 1 and len(texts[0]) <= LONG_TEXT:
            return [encode(texts[0])]
        size = sum(map(len, texts))
        return [await self._of_text(size, partial(encode, text)) for text in texts]

    async def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """The tokens of a conversation, in another thread: a template is a program.

        Args:
            messages: as `plain_messages` makes them.
            options: of `LLM.chat_prompt`.
        """
        given = options.get("chat_template_kwargs") or {}
        options["chat_template_kwargs"] = self.settings.default_chat_template_kwargs | given
        values = (*options.values(), *(value for message in messages for value in message.values()))
        size = sum(len(str(value)) for value in values)
        prompt = await self._of_text(size, partial(self.llm.chat_prompt, messages, **options))
        return list(prompt["prompt_token_ids"])

    async def _of_text(self, size: int, work: Callable[[], T]) -> T:
        """Like `in_thread`; long texts wait only for each other, and short ones not for them.

        Args:
            size: in characters.
            work: what is to be done with the text.
        """
        threads = self._threads if size <= VERY_LONG_TEXT else self._threads_of_long_texts
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def compile_structured(self, params: StructuredOutputsParams) -> None:
        """Compile a grammar in a thread that only grammars wait for, as it may take for ever; it is cached.

        Raises:
            ParamsError: it is wrong, or cannot be followed.
            ApiError: it takes too long.
        """
        threads = self._threads_of_grammars
        job = threads.submit(params.compile, self.tokenizer, self.llm.engine.executor.eos_token_ids)
        compiled = asyncio.wrap_future(job)
        try:
            while not compiled.done():
                await asyncio.wait({compiled}, timeout=1)
                if threads.is_overdue(job):
                    message = f"the schema or grammar takes more than {LONGEST_COMPILATION} s to compile"
                    raise ApiError(400, f"{message}; give a simpler one")
            await compiled
        finally:
            compiled.cancel()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises RequestError if it has none."""
        if (tokenizer := self.llm.get_tokenizer()) is None:
            raise RequestError("the model has no tokenizer; give the prompt as token ids")
        return tokenizer

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self.llm.engine.executor.max_model_len

    def check_length(self, num_tokens: int) -> None:
        """Raise RequestTooLongError for a prompt that leaves no room for a token."""
        if num_tokens >= self.max_model_len:
            raise RequestTooLongError(
                f"the prompt is too long: it has {num_tokens} tokens; give at most {self.max_model_len - 1}, "
                "to leave room for an answer"
            )

    # -- shutting down --------------------------------------------------------------------------

    async def prepare(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """The result of what is done for a request before the engine has it. The shutdown may cancel it.

        Args:
            request: `state.deadline` is when its time is up, on the event loop's clock.
            work: its result is not None.

        Raises:
            ApiError: the server is shutting down, or the client has gone; the work is cancelled.
            TimeoutError: its time is up.
        """
        task = asyncio.current_task()
        assert task is not None
        self._preparing.add(task)
        try:
            if self.is_draining:
                raise shutting_down()
            async with asyncio.timeout_at(request.state.deadline):
                result = await unless_gone(request.receive, work)
        finally:
            work.close()
            self._preparing.discard(task)
        if result is None:
            log_refusal(request.scope, CLIENT_GONE)
            raise ApiError(CLIENT_GONE, "the client has gone")
        return result

    def enter(self, request_ids: list[str]) -> None:
        """The engine has these requests, or soon will."""
        self._active.update(request_ids)

    def leave(self, request_ids: list[str]) -> None:
        """The engine is done with them."""
        self._active.difference_update(request_ids)

    async def drain(self) -> None:
        """Accept nothing new, and wait for what runs; what is not done in time is ended."""
        self.is_draining = self.live.is_closed = True
        timeout = self.settings.shutdown_timeout
        logger.info(
            "Shutting down: %s, with %g s to finish", counted(self._num_open, "open request"), timeout
        )
        if not await self._is_idle_within(timeout):
            logger.warning("Ending %s", counted(self._num_open, "unfinished request"))
            for task in self._preparing:
                task.cancel()
            for request_id in list(self._active):
                await self.llm.abort(request_id)
            # (uvicorn then gives their clients a few seconds to read why.)

    @property
    def _num_open(self) -> int:
        return len(self._preparing) + len(self._active)

    async def _is_idle_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._num_open
