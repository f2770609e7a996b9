"""Text in, text out: a model, its tokenizer and the engine behind four methods.

`generate` runs a batch to its end, `stream` yields one request's text as it is generated, `chat` applies the
tokenizer's chat template first, `beam_search` returns every beam. Names and arguments are vLLM's, so that
scripts carry over. Everything below this module works with token ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Self

from minipaged.assembly import assemble
from minipaged.components import Components
from minipaged.config import config_from
from minipaged.conversations import Message, Tool, as_prompt, conversations_of
from minipaged.decoding.params import BeamSearchParams, DecodingParams, SamplingParams
from minipaged.engine_turns import EngineTurns
from minipaged.execution.executor import Executor
from minipaged.interrupts import DeferredInterrupts
from minipaged.output_processor import beam_search_output
from minipaged.outputs import BeamSearchOutput, RequestOutput
from minipaged.progress import progress_bar
from minipaged.prompts import (
    FailedRequestError,
    Prompt,
    RequestError,
    TokensPrompt,
    check_params,
    check_token_ids,
    named,
    read_prompts,
    shortened,
    split_prompt,
)
from minipaged.scheduling import Request
from minipaged.viewer.displays import register_displays
from minipaged.vllm_names import NamesOfVllm, without_vllm_arguments
from minipaged.vllm_settings import own_settings


class LLM(NamesOfVllm):
    """A model ready to generate.

    Several threads may call its methods: they take turns, a step at a time, and each step serves them all.

    Args:
        model: model directory, GGUF file or hub id; None or "pocket": the embedded model.
        tokenizer: a transformers tokenizer, or the directory or hub id of one; default: the model's own, if
            it has one.
        executor: computes the steps instead of the model's own runner (for example, for a model that is
            already built).
        use: concept -> class or "FILE.py:Class" to use, e.g. `{"allocator": MyAllocator}`; it is checked
            as it runs, and one line names any rule it breaks (see `minipaged.learn.contracts`).
        components: the same as one object, unchecked (see `minipaged.components`); give one of the two.
        options: fields of `EngineConfig`, and vLLM's settings (see `minipaged.vllm_settings`).

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError, OverrideError, ContractError: one clear line each.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: Any = None,
        executor: Executor | None = None,
        use: Mapping[str, Any] | None = None,
        components: Components | None = None,
        **options: Any,
    ) -> None:
        register_displays()
        self.config = config_from(own_settings(options))
        parts = assemble(self.config, model, tokenizer, executor, use, components)
        self.engine, self.tokenizer, self._default_sampling_params = parts
        self._request_ids = map(str, count())
        self._turns = EngineTurns(self.engine)

    @without_vllm_arguments
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: DecodingParams | Sequence[DecodingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts in one continuous batch.

        Args:
            prompts: one or several; see `Prompt`. A list of integers is one.
            sampling_params: one for all, or one per prompt (methods may differ); default: what
                `get_default_sampling_params` returns.
            use_tqdm: show a progress bar on standard error, if that is a terminal.

        Returns:
            One output per prompt, in their order.

        Raises:
            ValueError: a prompt or a parameter that cannot work; then nothing was started.
        """
        prompts = read_prompts(prompts)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if isinstance(params, str) or not isinstance(params, Sequence):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                f"{len(params)} sampling_params for {len(prompts)} prompts; give one, or one per prompt"
            )
        if not isinstance(use_tqdm, bool):
            raise RequestError(f"use_tqdm is {shortened(use_tqdm)}; give True or False")
        requests = []
        try:
            for index, (prompt, prompt_params) in enumerate(zip(prompts, params)):
                with DeferredInterrupts(), named(index, prompts):
                    requests.append(self._add(prompt, prompt_params))
            left = OrderedDict.fromkeys(requests)
            with progress_bar("generating", len(requests), enabled=use_tqdm) as show:
                while left:
                    for request in self._step():
                        if request.is_finished:
                            left.pop(request, None)
                    while left and next(iter(left)).is_finished:  # (in another thread's step)
                        left.popitem(last=False)
                    show(len(requests) - len(left))
        except BaseException:
            self._turns.leave(requests)
            raise
        return [
            self.engine.output(request, split_prompt(prompt)[0]) for request, prompt in zip(requests, prompts)
        ]

    @without_vllm_arguments
    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """All `beam_width` hypotheses of each prompt, with the prompt; `generate` returns only the best.

        Raises:
            ValueError: as `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params is {shortened(params)}; give BeamSearchParams")
        params = replace(params, num_return_sequences=params.beam_width)
        outputs = self.generate(prompts, params, use_tqdm=use_tqdm)
        return [beam_search_output(output, self.engine.detokenizer) for output in outputs]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text of one completion as it becomes certain: never half a character, never a part of
        a stop string. The pieces join to the text that `generate` returns.

        Raises:
            ValueError: as `generate`; also more than one completion, or a model without a tokenizer.
        """
        params = sampling_params or self.get_default_sampling_params()
        if not isinstance(params, SamplingParams) or params.num_samples != 1:
            raise RequestError("stream yields one completion; use SamplingParams with n = 1, or generate")
        rules = self.engine.text_rules(params)
        if rules is None:
            reason = "detokenize is False" if not params.detokenize else "the model has no tokenizer"
            raise RequestError(f"{reason}, so there is no text to stream; use generate")
        added: list[Request] = []
        try:
            with DeferredInterrupts():
                added.append(request := self._add(prompt, params))
            text, is_last = rules.begin_text(request.prompt_token_ids), False
            while not is_last:
                is_last = request.is_finished  # (read before the tokens: others may step meanwhile)
                # (In this order: a commit fills `completions` before it empties `sequences`.)
                sequence = (request.sequences or request.completions)[0]
                new = sequence.token_ids[sequence.num_prompt_tokens + text.num_tokens :]
                text, certain = text.after_all(new)
                if certain:
                    yield certain
                if not is_last:
                    self._step()
            if request.error is not None:
                raise FailedRequestError(request.error)
            if rest := text.rest():
                yield rest
        finally:
            self._turns.leave(added)

    @without_vllm_arguments
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: DecodingParams | Sequence[DecodingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: messages like `{"role": "user", "content": "..."}`.

        Args:
            messages: a list of messages, or a list of such lists; see `Message`.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            chat_template: the text of a Jinja template, in place of the tokenizer's.
            add_generation_prompt: begin an answer; by default, unless a message is continued.
            continue_final_message: continue the last message, for example an answer that you have begun.
            tools: what the model may call, for the template: JSON schemas or Python functions.
            chat_template_kwargs: more variables for the template, such as `enable_thinking`.

        Returns:
            One output per conversation, in their order.

        Raises:
            RequestError: no chat template, a message without content, a template that refuses one, or tools
                that the template does not support.
            ValueError: as `generate`.
        """
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        prompts, conversations = [], conversations_of(messages)
        for index, conversation in enumerate(conversations):
            with named(index, conversations, "conversation"):
                prompts.append(self.chat_prompt(conversation, **options))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Message], **options: Any) -> TokensPrompt:
        """One conversation as text and tokens; `options` are the template options of `chat`."""
        return as_prompt(self.tokenizer, messages, **options)

    def get_tokenizer(self) -> Any:
        """The tokenizer; None if the model has none."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: `SamplingParams()` with what the model's
        generation_config.json recommends, unless `generation_config` is "none"."""
        return self._default_sampling_params

    @without_vllm_arguments
    def reset_prefix_cache(self) -> bool:
        """Forget the prefixes that no running request uses, so that a measurement starts cold. True: done."""
        self._turns.take(lambda engine: engine.reset_prefix_cache())
        return True

    def shutdown(self) -> None:
        """Stop its other ranks, if any, and free their memory; it cannot generate any more.

        Leaving `with LLM(...) as llm:` or dropping the last reference does the same. Without other ranks
        there is nothing to stop.
        """
        close: Callable[[], None] | None = getattr(self.engine.executor, "close", None)
        if close is not None and not self._turns.is_fork:
            self._turns.take(lambda engine: close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Any:
        raise TypeError("an LLM cannot be pickled or copied; build one per process")

    def _step(self) -> list[Request]:
        """One step for all callers; each finds the outputs in its own requests. Returns those it touched."""
        return self._turns.take(lambda engine: engine.step() if engine.has_unfinished else [])

    def _add(self, prompt: Prompt, params: DecodingParams) -> Request:
        given = self.tokenize(prompt, params)
        return self._turns.take(lambda engine: engine.add_request(next(self._request_ids), *given))

    def tokenize(self, prompt: Prompt, params: DecodingParams) -> tuple[list[int], DecodingParams, str]:
        """A prompt's token ids, the parameters (bad words as token ids), and the cache salt."""
        text, token_ids, cache_salt = split_prompt(prompt)
        executor = self.engine.executor
        if token_ids is None:
            if self.tokenizer is None:
                raise RequestError(
                    "the model has no tokenizer; put its files (tokenizer.json) beside the weights, or give "
                    '{"prompt_token_ids": [...]}'
                )
            token_ids = self.tokenizer.encode(text)
        params = check_params(params)
        if isinstance(params, SamplingParams):
            if self.tokenizer is not None:
                params = params.resolve(lambda text: self.tokenizer.encode(text, add_special_tokens=False))
                params = params.compile(self.tokenizer, executor.eos_token_ids)
            if params.truncate_prompt_tokens is not None:
                token_ids = check_token_ids(token_ids, executor.vocab_size)
                token_ids = params.truncate(token_ids, executor.max_model_len)
        return token_ids, params, cache_salt
