"""What a user gets back for a request: plain data, without tensors or blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter

from minipaged.decoding.detokenizer import Detokenizer
from minipaged.decoding.params import RequestOutputKind
from minipaged.decoding.stopping import OutputText, StopChecker, final_text
from minipaged.scheduling import Request, Sequence
from minipaged.scheduling.request import TopLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was, by the model's own distribution.

    Attributes:
        logprob: its log-probability.
        rank: 1 for the likeliest token of the vocabulary.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When what happened to a request, in seconds on the engine's clock; None: not yet.

    Attributes:
        arrival_time: it was added.
        first_scheduled_time: it left the queue for the first time.
        first_token_time: the first token was there.
        last_token_time: the newest token was there.
        finished_time: it ended.
        num_generation_tokens: generated tokens of all its completions.
    """

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float | None
    num_generation_tokens: int

    @property
    def time_in_queue(self) -> float | None:
        """Seconds it waited."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens a second since it left the queue."""
        seconds = _between(self.first_scheduled_time, self.last_token_time)
        return self.num_generation_tokens / seconds if seconds else None


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: number of the sample, or rank of the beam.
        text: the generated text; empty without a tokenizer.
        token_ids: the generated tokens, a final EOS or stop token included.
        cumulative_logprob: sum of their log-probabilities.
        finish_reason: "stop", "length", "abort" or "error"; None while it is being generated.
        logprobs: per token {token id: Logprob}, if asked for.
        score: what beam search ranks by; None for samples.
        stop_reason: the stop string or the id of the stop token that ended it, else None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    finish_reason: str | None
    logprobs: list[dict[int, Logprob]] | None = None
    score: float | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All completions of a prompt.

    Attributes:
        request_id: the engine's name for the request.
        prompt: its text; None if it was given as token ids.
        prompt_token_ids: its tokens.
        outputs: the completions, in the order the decoding method ranks them.
        finished: whether nothing more will come.
        num_cached_tokens: prompt tokens that the prefix cache had.
        prompt_logprobs: per prompt token {token id: Logprob} (None for the first), if asked for.
        error: why it failed (finish reason "error"); None if it did not.
        metrics: its times.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A hypothesis with its prompt.

    Attributes:
        tokens: prompt and generated tokens.
        text: their text; None without a tokenizer.
        cum_logprob: sum of the log-probabilities of the generated tokens.
        score: what hypotheses are ranked by.
        logprobs, finish_reason, stop_reason: as in `CompletionOutput`.
    """

    tokens: list[int]
    text: str | None
    cum_logprob: float
    score: float | None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The hypotheses of a prompt, the best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(output: RequestOutput, detokenizer: Detokenizer | None) -> BeamSearchOutput:
    """The output of a beam search as `LLM.beam_search` returns it."""
    prompt = output.prompt
    if prompt is None and detokenizer is not None:
        prompt = detokenizer.decode(output.prompt_token_ids)
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                output.prompt_token_ids + done.token_ids,
                None if prompt is None else prompt + done.text,
                done.cumulative_logprob,
                done.score,
                done.logprobs,
                done.finish_reason,
                done.stop_reason,
            )
            for done in output.outputs
        ]
    )


def make_output(request: Request, prompt: str | None, rules: StopChecker | None) -> RequestOutput:
    """What the user gets for a request, finished or not; without `rules` texts are empty."""
    ended = request.method.rank(request)
    ranked = ended if request.is_finished else sorted((*ended, *request.sequences), key=attrgetter("index"))
    outputs = []
    for rank, sequence in enumerate(ranked):
        token_ids, score = sequence.output_token_ids, request.method.score(sequence)
        text = "" if rules is None or not token_ids else final_text(rules, token_ids)
        completion = _completion(sequence, text, rules)
        outputs.append(completion if score is None else replace(completion, index=rank, score=score))
    return _around(request, prompt, outputs, _prompt_logprobs(request, rules))


class OutputProgress:
    """The outputs of a request while it is generated, each after the tokens of a step.

    Texts grow as `LLM.stream` yields them: never half a character, never a part of a stop string. With the
    tokens of a step, not of the whole text, is the work done.

    Args:
        request: not finished yet.
        prompt: its text, to be repeated.
        rules: see `make_output`.
    """

    def __init__(self, request: Request, prompt: str | None, rules: StopChecker | None) -> None:
        self._request = request
        self._prompt = prompt
        self._rules = rules
        self._kind: RequestOutputKind = request.params.output_kind
        self._told: dict[int, CompletionOutput] = {}  # index -> all of it so far
        self._texts: dict[int, OutputText] = {}
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def next(self) -> RequestOutput | None:
        """What is to be told now; None: nothing, as there is no new token, or the end is waited for."""
        request = self._request
        if request.is_finished and self._kind != RequestOutputKind.DELTA:
            return make_output(request, self._prompt, self._rules)
        if self._kind == RequestOutputKind.FINAL_ONLY:
            return None
        sequences = sorted((*request.completions, *request.sequences), key=attrgetter("index"))
        deltas = [delta for sequence in sequences if (delta := self._advance(sequence)) is not None]
        if not deltas and not request.is_finished:
            return None
        if self._prompt_logprobs is None:
            self._prompt_logprobs = _prompt_logprobs(request, self._rules)
        outputs = deltas if self._kind == RequestOutputKind.DELTA else list(self._told.values())
        return _around(request, self._prompt, outputs, self._prompt_logprobs)

    def _advance(self, sequence: Sequence) -> CompletionOutput | None:
        """What is new of a sequence; None: nothing."""
        told = self._told.get(sequence.index)
        num_told = 0 if told is None else len(told.token_ids)
        has_ended = sequence.finish_reason is not None and (told is None or told.finish_reason is None)
        if num_told == sequence.num_generated_tokens and not has_ended:
            return None
        new = _completion(sequence, self._new_text(sequence), self._rules, num_told)
        self._told[sequence.index] = new if told is None else _joined(told, new)
        return new

    def _new_text(self, sequence: Sequence) -> str:
        if self._rules is None:
            return ""
        text, pieces = self._texts.get(sequence.index) or OutputText(self._rules), []
        for token_id in sequence.token_ids[sequence.num_prompt_tokens + text.num_tokens :]:
            text = text.after(token_id)
            pieces.append(text.delta)
            if text.stopped:
                break
        self._texts[sequence.index] = text
        return "".join(pieces) + (text.rest() if sequence.finish_reason is not None else "")


def _joined(told: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    return replace(
        new,
        text=told.text + new.text,
        token_ids=told.token_ids + new.token_ids,
        logprobs=None if new.logprobs is None else (told.logprobs or []) + new.logprobs,
    )


def _completion(sequence: Sequence, text: str, rules: StopChecker | None, first: int = 0) -> CompletionOutput:
    """A sequence from its generated token number `first` on, with the text of these."""
    logprobs = sequence.logprobs
    return CompletionOutput(
        sequence.index,
        text,
        list(sequence.token_ids[sequence.num_prompt_tokens + first :]),
        sequence.cumulative_logprob,
        sequence.finish_reason,
        None if logprobs is None else [_with_tokens(top, rules) for top in logprobs[first:]],
        stop_reason=_stop_reason(sequence, rules) if sequence.finish_reason == "stop" else None,
    )


def _stop_reason(sequence: Sequence, rules: StopChecker | None) -> int | str | None:
    params, last = sequence.request.params, sequence.token_ids[-1]
    if last in params.stop_token_ids:
        return last
    return rules.text(sequence).stop_string if params.stop and rules is not None else None


def _with_tokens(top: TopLogprobs, rules: StopChecker | None) -> dict[int, Logprob]:
    detokenizer: Detokenizer | None = None if rules is None else rules.detokenizer
    return {
        token_id: Logprob(logprob, rank, None if detokenizer is None else detokenizer.token(token_id))
        for token_id, (logprob, rank) in top.items()
    }


def _prompt_logprobs(request: Request, rules: StopChecker | None) -> list[dict[int, Logprob] | None] | None:
    if request.params.prompt_logprobs is None:
        return None
    found = map(request.prompt_logprobs.get, range(len(request.prompt_token_ids)))
    return [None if top is None else _with_tokens(top, rules) for top in found]


def _around(
    request: Request,
    prompt: str | None,
    outputs: list[CompletionOutput],
    prompt_logprobs: list[dict[int, Logprob] | None] | None,
) -> RequestOutput:
    times = request.times
    return RequestOutput(
        request.request_id,
        prompt,
        request.prompt_token_ids,
        outputs,
        request.is_finished,
        request.num_cached_tokens,
        prompt_logprobs,
        request.error,
        RequestMetrics(
            request.arrival_time,
            times.get("scheduled"),
            times.get("first_token"),
            times.get("last_token"),
            times.get("finished"),
            sum(s.num_generated_tokens for s in (*request.completions, *request.sequences)),
        ),
    )
