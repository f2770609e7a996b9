"""Text in, text out: a model, its tokenizer and the engine behind three methods.

`generate` runs a batch to its end, `stream` yields one request's text as it comes, `chat` applies the
tokenizer's chat template first. Everything below this module works with token ids.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minipaged import pocket_model
from minipaged.components import Components
from minipaged.config import config_from
from minipaged.decoding.params import BeamSearchParams, DecodingParams, SamplingParams
from minipaged.decoding.stopping import OutputText
from minipaged.engine import Engine
from minipaged.execution.executor import Executor
from minipaged.learn.overrides import components_from
from minipaged.outputs import RequestOutput
from minipaged.prompts import FailedRequestError, RequestError, check_prompt, shortened
from minipaged.text_io import lone_surrogate
from minipaged.viewer.displays import register_displays

Prompt = str | Mapping[str, Any]
"""A text, or `{"prompt_token_ids": [...]}`, optionally with "cache_salt"."""


class LLM:
    """A model ready to generate.

    Several threads may call its methods: they take turns, a step at a time, and each step serves them all.

    Args:
        model: model directory or hub id; None: the embedded pocket model.
        executor: computes the steps instead of the model's own runner (an already built model, say).
        tokenizer: a transformers tokenizer; default: the model's own, if it has one.
        use: concept -> class or "FILE.py:Class" that plays it, e.g. `{"allocator": MyAllocator}`; it is
            watched, and a breach of its contract is told in one line (see `minipaged.learn.contracts`).
        components: the same as one object, unwatched (see `minipaged.components`).
        options: fields of `EngineConfig`.

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError, OverrideError, ContractError: one clear line each.
    """

    engine_class: type[Engine] = Engine

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        executor: Executor | None = None,
        tokenizer: Any = None,
        use: Mapping[str, Any] | None = None,
        components: Components | None = None,
        **options: Any,
    ) -> None:
        register_displays()
        self.config = config_from(options)
        components = components_from(use) if use else components or Components()
        name = str(model if model is not None else pocket_model.PATH)
        if executor is None:
            from minipaged.execution.model_runner import ModelRunner

            executor = ModelRunner.load(name, self.config)
            if tokenizer is None:
                from minipaged.execution.loading import load_tokenizer

                tokenizer = load_tokenizer(name, self.config.trust_remote_code)
        if components.paged_attention is not None:
            # Only an executor with kernels has one; the simulation's has no attention to replace.
            runner: Any = executor
            runner.use_attention(components.paged_attention)
        self.tokenizer = tokenizer
        self.engine = self.engine_class(executor, self.config, tokenizer, components)
        self._num_requests = 0
        self._lock = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: DecodingParams | Sequence[DecodingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete all prompts in one continuous batch.

        Args:
            prompts: one or several; see `Prompt`.
            params: one for all, or one per prompt (methods may differ); default `SamplingParams()`.
            progress: show a progress bar on standard error.

        Returns:
            One output per prompt, in their order.

        Raises:
            ValueError: a prompt or a parameter that cannot work; then nothing was started.
        """
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
            raise RequestError(f"prompts is {shortened(prompts)}; give a string or a list of prompts")
        prompts = list(prompts)
        if params is None:
            params = SamplingParams()
        if isinstance(params, str) or not isinstance(params, Sequence):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(params)} params for {len(prompts)} prompts; give one, or as many")
        requests = []
        try:
            for prompt, own in zip(prompts, params):
                requests.append(self._add(prompt, own))
            with progress_bar(len(requests), enabled=progress) as show:
                while not all(request.is_finished for request in requests):
                    self._step()
                    show(sum(request.is_finished for request in requests))
        except BaseException:
            with self._lock:
                for request in requests:
                    self.engine.abort(request.request_id)
            raise
        return [
            self.engine.output(request, prompt if isinstance(prompt, str) else None)
            for request, prompt in zip(requests, prompts)
        ]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text of one completion as it becomes certain: never half a character, never a part of
        a stop string. The pieces join to the text that `generate` returns.

        Raises:
            ValueError: as `generate`; also more than one completion, or a model without a tokenizer.
        """
        params = params or SamplingParams()
        if not isinstance(params, SamplingParams) or params.num_samples != 1:
            raise RequestError("stream yields one completion; use SamplingParams with n = 1, or generate")
        rules = self.engine.text_rules(params)
        if rules is None:
            raise RequestError("the model has no tokenizer, so there is no text to stream; use generate")
        request = self._add(prompt, params)
        text = OutputText(rules)
        try:
            is_last = False
            while not is_last:
                is_last = request.is_finished  # (read before the tokens: others may step meanwhile)
                sequence = (request.completions or request.sequences)[0]
                for token_id in sequence.output_token_ids[text.num_tokens :]:
                    text = text.after(token_id)
                    if text.delta:
                        yield text.delta
                    if text.stopped:
                        break
                if not is_last:
                    self._step()
            if request.error is not None:
                raise FailedRequestError(request.error)
            if rest := text.rest():
                yield rest
        finally:
            with self._lock:
                self.engine.abort(request.request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: DecodingParams | None = None,
    ) -> RequestOutput:
        """Complete a conversation: messages like `{"role": "user", "content": "..."}`.

        Raises:
            RequestError: the tokenizer has no chat template.
        """
        return self.generate(self.chat_prompt(messages), params)[0]

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Prompt:
        """The tokens of a conversation up to where the assistant answers.

        `tools` are functions that the model may call, as the template wants them described.

        Raises:
            RequestError: there is no chat template, it has no place for tools, or it refuses the messages.
        """
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise RequestError("the model's tokenizer has no chat template; use generate with a plain prompt")
        if not isinstance(messages, list | tuple) or not messages:
            raise RequestError(f"messages is {shortened(messages)}; give a list of at least one message")
        for message in messages:
            keys = ("role", "content")
            if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in keys):
                raise RequestError(
                    f'messages has {shortened(message)}; give {{"role": TEXT, "content": TEXT}}'
                )
            if wrong := lone_surrogate(message["role"] + message["content"]):
                raise RequestError(f"a message {wrong}")
        if tools and "tools" not in self.tokenizer.get_chat_template(tools=list(tools)):
            raise RequestError("tools are given, but the model's chat template has no place for them")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools or ()) or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template raises what its author and Jinja like
            raise RequestError(f"the chat template refuses the messages: {error}; give others") from error
        return {"prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def _step(self) -> None:
        """A step for whoever has requests: what it yields is at the requests, where each caller finds his."""
        with self._lock:
            if self.engine.has_unfinished:
                self.engine.step()

    def _add(self, prompt: Prompt, params: DecodingParams) -> Any:
        request = self.tokenize(prompt, params)
        with self._lock:
            self._num_requests += 1
            return self.engine.add_request(str(self._num_requests - 1), *request)

    def tokenize(self, prompt: Prompt, params: DecodingParams) -> tuple[list[int], DecodingParams, str]:
        """A prompt's token ids, the parameters with their words as token ids, and the cache salt."""
        check_prompt(prompt)
        cache_salt = ""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError('the model has no tokenizer; give {"prompt_token_ids": [...]}')
            token_ids = self.tokenizer.encode(prompt)
        else:
            token_ids, cache_salt = prompt["prompt_token_ids"], prompt.get("cache_salt", "")
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise RequestError(f"params is {shortened(params)}; give SamplingParams or BeamSearchParams")
        if isinstance(params, SamplingParams) and self.tokenizer is not None:
            params = params.resolve(lambda text: self.tokenizer.encode(text, add_special_tokens=False))
            params = params.compile(self.tokenizer, self.engine.executor.eos_token_ids)
        return token_ids, params, cache_salt


@contextmanager
def progress_bar(total: int, enabled: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar over requests on standard error, or nothing."""
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not enabled, transient=True) as progress:
        task = progress.add_task("generating", total=total)
        yield lambda count: progress.update(task, completed=count)
