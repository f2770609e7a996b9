"""The decoding settings of a request: `SamplingParams` and `BeamSearchParams`, checked when built.

Names and defaults are vLLM's, so that scripts carry over. A bad value raises `ParamsError` with one line
that names the field, the value and the fix. What depends on the model (token ids, vocabulary size) is
checked by `check_vocabulary` before a request is admitted.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, Literal

import minipaged.decoding.checks as check
from minipaged.decoding.checks import ParamsError
from minipaged.decoding.field_names import named_fields
from minipaged.decoding.structured import StructuredOutputsParams

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy decoding: dividing by less would overflow float32."""

MOST_SAMPLES = 16384
"""The most samples of one prompt, as in vLLM: each is an object before the first token is computed."""

LogitsProcessor = Callable[..., Any]
"""See `SamplingParams.logits_processors`."""


class RequestOutputKind(Enum):
    """What each output of `AsyncLLM.generate` contains."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # everything, once, at the end


@named_fields(
    """extra_args flat_logprobs logprob_token_ids output_text_buffer_length prompt_logprob_start
    prompt_logprob_token_ids repetition_detection routed_experts_prompt_start skip_clone
    skip_reading_prefix_cache stream_interval thinking_token_budget trace_decode_token_ids watermarking""",
    {
        "do_sample": "give temperature, where 0 is greedy",
        "num_beams": "give BeamSearchParams",
        "num_return_sequences": "did you mean n?",
        "response_format": "give structured_outputs",
        **dict.fromkeys(("stop_strings", "stop_words"), "did you mean stop?"),
    },
    early_stopping="give BeamSearchParams",
    guided_decoding="give structured_outputs",
    length_penalty="give BeamSearchParams",
    use_beam_search="give BeamSearchParams",
)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Greedy decoding and random sampling, one or several samples of a prompt.

    Logits are edited in this order: `logits_processors`, masks (`structured_outputs`, `allowed_token_ids`,
    `bad_words`, `min_tokens`, `no_repeat_ngram_size`), `logit_bias`, `repetition_penalty` (prompt and
    output), `frequency_penalty` and `presence_penalty` (output only), `temperature`, `top_k`, `top_p`,
    `min_p`, `typical_p`.

    Attributes:
        n: samples to return; above 1 they need a temperature above 0.
        best_of: samples to draw, of which the n likeliest are returned; None: n.
        temperature: divides the logits; 0 is greedy.
        top_p: sample from the likeliest tokens that together have this share of the probability.
        top_k: sample from this many of the likeliest tokens; 0 or -1: all.
        min_p: drop tokens less likely than this share of the likeliest.
        typical_p: sample from the tokens whose information is nearest to the expected value and that together
            have this share of the probability.
        repetition_penalty: above 1 discourages tokens of prompt and output, below 1 encourages them.
        presence_penalty: subtracted from the logit of a token that is already in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: token id -> number added to its logit, from -100 to 100; -inf forbids it.
        bad_words: forbidden token id sequences, or strings, which `resolve` turns into ids.
        no_repeat_ngram_size: no n-gram of this many tokens occurs twice in prompt and output; 0: off.
        allowed_token_ids: if given, no other token can be sampled.
        logits_processors: functions (generated token ids, logits) -> logits, or (prompt token ids, generated
            token ids, logits) -> logits; the logits are a float32 tensor [vocabulary] that they may change.
        seed: sample i draws the random stream `seed + i`: the same seed gives the same text in any batch, and
            sample i of n equals a single sample with that seed. None or -1: a new stream. (Where matrix
            multiplications with few and with many rows round differently, as on a GPU, a text may change.)
        logprobs: report this many of the likeliest tokens and the sampled one, from the model's own
            distribution (before any of the above); -1: the whole vocabulary; None: none.
        prompt_logprobs: the same for the tokens of the prompt.
        truncate_prompt_tokens: keep this many tokens at the end of the prompt; -1: as many as leave room for
            `max_tokens` within the model's length.
        stop: strings that end the text, and are removed from it.
        stop_token_ids: tokens that end the text, like EOS.
        include_stop_str_in_output: keep the stop string (or token) in the text.
        ignore_eos: continue after EOS.
        min_tokens: generate at least this many tokens before one that ends the text.
        max_tokens: tokens after which the text ends; None: when the model's length is reached.
        detokenize: False: no texts, only token ids.
        skip_special_tokens: leave tokens like EOS out of the text.
        spaces_between_special_tokens: accepted for vLLM scripts; today's tokenizers never add such spaces.
        output_kind: what each output of `AsyncLLM.generate` contains; other methods return everything at the
            end. With `best_of` above n there is only a final output: until then the n best are not known.
        structured_outputs: what the text must follow. With ignore_eos, EOS is generated (and ends the text)
            only where nothing else may follow.

    Raises:
        ParamsError: a value out of its range, or two that contradict each other.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        _set(self, "bad_words", check.bad_words(self.bad_words))
        processors = check.items("logits_processors", self.logits_processors, callable, "functions")
        _set(self, "logits_processors", processors)
        if self.allowed_token_ids is not None:
            _set(self, "allowed_token_ids", check.token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ParamsError("allowed_token_ids is empty; give at least one token id, or leave it out")
        if self.logit_bias is not None:
            _set(self, "logit_bias", check.logit_bias(self.logit_bias))
        check.integer(self, "n", 1)
        check.integer(self, "best_of", 1, optional=True)
        if self.num_samples > MOST_SAMPLES:
            name = "n" if self.best_of is None else "best_of"
            raise ParamsError(f"{name} is {self.num_samples}; give at most {MOST_SAMPLES}")
        if self.num_samples < self.n:
            raise ParamsError(f"best_of is {self.best_of}, below n = {self.n}; draw at least n samples")
        check.number(self, "temperature", 0, 1000, "from 0 (greedy) to 1000")
        check.number(self, "top_p", math.ulp(0.0), 1, "above 0 and at most 1 (1 keeps every token)")
        check.integer(self, "top_k", -1, "an integer of at least 1, or 0 for every token")
        check.number(self, "min_p", 0, 1, "from 0 (off) to 1")
        check.number(self, "typical_p", math.ulp(0.0), 1, "above 0 and at most 1 (1 is off)")
        check.integer(self, "no_repeat_ngram_size", 0, "an integer of at least 1, or 0 (off)")
        check.number(self, "repetition_penalty", 0.01, 100, "from 0.01 to 100 (1 is off)")
        check.number(self, "presence_penalty", -2, 2, "from -2 to 2 (0 is off)")
        check.number(self, "frequency_penalty", -2, 2, "from -2 to 2 (0 is off)")
        check.integer(self, "seed", optional=True)
        if self.seed == -1:  # vLLM's other way to say so
            _set(self, "seed", None)
        check.integer(self, "prompt_logprobs", -1, "at least 0, or -1 for every token", optional=True)
        if self.truncate_prompt_tokens != -1:
            check.integer(self, "truncate_prompt_tokens", 1, "at least 1, or -1 for what fits", optional=True)
        for name in ("detokenize", "skip_special_tokens", "spaces_between_special_tokens"):
            check.boolean(self, name)
        if not isinstance(self.output_kind, RequestOutputKind):
            check.refuse("output_kind", self.output_kind, "a RequestOutputKind")
        if self.output_kind == RequestOutputKind.DELTA and self.num_samples > self.n:
            raise ParamsError(
                f"output_kind is DELTA with best_of {self.best_of}, but the best {self.n} are known only at "
                "the end; use FINAL_ONLY"
            )
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            check.refuse("structured_outputs", self.structured_outputs, "StructuredOutputsParams(...)")
        _common(self)
        if self.stop and not self.detokenize:
            raise ParamsError(f"stop is {self.stop!r}, but detokenize is False; set it to True, or drop stop")
        if self.is_greedy and self.num_samples > 1:
            raise ParamsError(
                f"temperature is {self.temperature} with {self.num_samples} samples; greedy samples are all "
                "the same: set temperature above 0, or n to 1"
            )

    @cached_property
    def num_samples(self) -> int:
        """Samples that are drawn."""
        return self.n if self.best_of is None else self.best_of

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    @cached_property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far through one of the three penalties."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @cached_property
    def is_plain_greedy(self) -> bool:
        """Greedy, and nothing edits the logits or reports more than the token."""
        edits = self.has_penalties or self.logit_bias or self.bad_words or self.min_tokens
        rules = self.no_repeat_ngram_size or self.logits_processors or self.structured_outputs is not None
        asks = self.allowed_token_ids is not None or self.logprobs is not None
        return self.is_greedy and not edits and not rules and not asks

    @cached_property
    def bias_columns(self) -> tuple[array[int], array[float]]:
        """The token ids and numbers of `logit_bias`, which every step reads for every sample."""
        bias = self.logit_bias or {}
        return array("q", bias), array("f", bias.values())

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with the given changes. May raise ParamsError."""
        return replace(self, **changes)

    def truncate(self, prompt_token_ids: list[int], max_model_len: int) -> list[int]:
        """The end of a prompt that `truncate_prompt_tokens` leaves."""
        count = self.truncate_prompt_tokens
        if count == -1:
            count = max(1, max_model_len - (self.max_tokens or 1))
        return prompt_token_ids if count is None else prompt_token_ids[-count:]

    def resolve(self, encode: Callable[[str], list[int]]) -> SamplingParams:
        """Turn strings in `bad_words` into token ids, both at the start of a line and after a space.

        `encode` adds no special tokens. Raises ParamsError for a word that has no tokens.
        """
        if not any(isinstance(word, str) for word in self.bad_words):
            return self
        words: dict[tuple[int, ...], None] = {}  # (a set, in order)
        for word in self.bad_words:
            if isinstance(word, str):
                spaced = word if word.startswith(" ") else " " + word
                words |= {tuple(encode(word)): None, tuple(encode(spaced)): None}
                if () in words:
                    raise ParamsError(f"bad_words has {word!r}, which encodes to no tokens; remove it")
            else:
                words[word] = None
        return replace(self, bad_words=tuple(words))

    def compile(self, tokenizer: Any, eos_token_ids: Collection[int]) -> SamplingParams:
        """With `structured_outputs` compiled for a tokenizer; may raise ParamsError."""
        if self.structured_outputs is None:
            return self
        return replace(self, structured_outputs=self.structured_outputs.compile(tokenizer, eos_token_ids))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ParamsError for a token id or a count past the vocabulary, or an unresolved bad word."""
        check.at_most_vocabulary(self, "logprobs", vocab_size)
        check.at_most_vocabulary(self, "prompt_logprobs", vocab_size)
        for word in self.bad_words:
            if isinstance(word, str):
                raise ParamsError(f"bad_words has the string {word!r}; give token ids, or use a tokenizer")
            check.in_vocabulary("bad_words", word, vocab_size)
        check.in_vocabulary("logit_bias", self.logit_bias, vocab_size)
        check.in_vocabulary("allowed_token_ids", self.allowed_token_ids, vocab_size)
        check.in_vocabulary("stop_token_ids", self.stop_token_ids, vocab_size)
        if self.structured_outputs is not None and self.structured_outputs.compiled is None:
            raise ParamsError(
                "structured_outputs is not compiled; LLM compiles it if the model has a tokenizer"
            )
        if all(token in self.forbidden for token in self.allowed_token_ids or range(vocab_size)):
            names = ("allowed_token_ids", "bad_words", "logit_bias")
            given = " with ".join(name for name in names if getattr(self, name))
            raise ParamsError(f"{given} leaves no token of the vocabulary; allow at least one")

    @cached_property
    def forbidden(self) -> frozenset[int]:
        """Tokens that `bad_words` or `logit_bias` forbids at every position."""
        words = frozenset(w[0] for w in self.bad_words if len(w) == 1 and not isinstance(w, str))
        return words.union(token for token, bias in (self.logit_bias or {}).items() if bias == -math.inf)


_ONLY_SAMPLES = dict.fromkeys(
    (own.name for own in fields(SamplingParams)), "only samples have it: drop it, or use SamplingParams"
)


@named_fields(
    elsewhere=_ONLY_SAMPLES
    | {"n": "give num_return_sequences", "best_of": "give beam_width", "num_beams": "give beam_width"}
)
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Beam search, with the semantics of transformers' `generate(num_beams=beam_width)`.

    Attributes:
        beam_width: the number of live beams, and of finished hypotheses that are kept.
        length_penalty: a hypothesis of n generated tokens scores sum(log p) / n ** length_penalty.
        early_stopping: True: stop at the beam_width-th hypothesis; False: when the best live beam, at its
            current length, beats none of them; "never": only when it could not do so at any length.
        num_return_sequences: hypotheses to return, the best first.
        temperature: divides the logits before beams are compared; scores and `cumulative_logprob` then refer
            to that distribution. 0, vLLM's default, means 1.
        logprobs: as in `SamplingParams`, for the tokens of the hypotheses.
        max_tokens, min_tokens, stop, stop_token_ids, include_stop_str_in_output, ignore_eos: as in
            `SamplingParams`.
        structured_outputs: None; anything else is refused.

    Raises:
        ParamsError: a value out of its range, or two that contradict each other.
    """

    beam_width: int
    max_tokens: int | None = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    temperature: float = 1.0
    logprobs: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    structured_outputs: None = None
    # For samples only:
    detokenize: ClassVar[bool] = True
    skip_special_tokens: ClassVar[bool] = True
    prompt_logprobs: ClassVar[None] = None
    output_kind: ClassVar[RequestOutputKind] = RequestOutputKind.FINAL_ONLY
    allowed_token_ids: ClassVar[None] = None
    forbidden: ClassVar[frozenset[int]] = frozenset()
    is_greedy: ClassVar[bool] = False
    is_plain_greedy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check.integer(self, "beam_width", 1)
        check.number(self, "length_penalty", -50, 50, "from -50 to 50 (0 is off)")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            check.refuse("early_stopping", self.early_stopping, 'True, False or "never"')
        check.integer(self, "num_return_sequences", 1)
        if self.num_return_sequences > self.beam_width:
            raise ParamsError(
                f"num_return_sequences is {self.num_return_sequences}, above beam_width = {self.beam_width}; "
                "widen the beam or return fewer"
            )
        fix = f"from {GREEDY_BELOW} to 1000, or 0 (which is 1)"
        check.number(self, "temperature", 0, 1000, fix)
        _set(self, "temperature", self.temperature or 1.0)
        check.number(self, "temperature", GREEDY_BELOW, 1000, fix)
        if self.structured_outputs is not None:
            raise ParamsError(
                "structured_outputs is given, but beam search does not support it; use SamplingParams"
            )
        _common(self)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ParamsError for a beam wider than the vocabulary, or a token id past it."""
        check.at_most_vocabulary(self, "beam_width", vocab_size)
        check.at_most_vocabulary(self, "logprobs", vocab_size)
        check.in_vocabulary("stop_token_ids", self.stop_token_ids, vocab_size)


DecodingParams = SamplingParams | BeamSearchParams


def _set(params: object, name: str, value: object) -> None:
    object.__setattr__(params, name, value)  # the dataclass is frozen; this is still its construction


def _common(params: DecodingParams) -> None:
    _set(params, "stop", check.stop_strings(params.stop))
    check.boolean(params, "include_stop_str_in_output")
    check.integer(params, "logprobs", -1, "at least 0, or -1 for every token", optional=True)
    _set(params, "stop_token_ids", check.token_ids("stop_token_ids", params.stop_token_ids))
    check.boolean(params, "ignore_eos")
    check.integer(params, "min_tokens", 0)
    check.integer(params, "max_tokens", 1, optional=True)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ParamsError(
            f"min_tokens is {params.min_tokens}, above max_tokens = {params.max_tokens}; lower min_tokens"
        )
