"""Make the outputs of requests: everything at the end, or what is new after each step."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from minipaged.decoding.detokenizer import Detokenizer
from minipaged.decoding.params import RequestOutputKind, SamplingParams
from minipaged.decoding.stopping import OutputText, StopChecker, final_text
from minipaged.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from minipaged.scheduling import Request, Sequence
from minipaged.scheduling.request import TopLogprobs


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
        text = final_text(rules, token_ids, request.prompt_token_ids) if rules else ""
        # (Of `best_of` samples the n best are renumbered.)
        index = sequence.index if score is None and not request.is_finished else rank
        outputs.append(replace(_completion(sequence, text, rules), index=index, score=score))
    prompt_token_ids = list(request.prompt_token_ids)
    return _request_output(request, prompt, prompt_token_ids, outputs, _prompt_logprobs(request, rules))


class OutputProgress:
    """The outputs of a running request, one after each step that gives it tokens.

    Texts grow as `LLM.stream` yields them: never half a character, never a part of a stop string. The work of
    a step depends on its new tokens, not on the length of the text.

    Args:
        request: not finished yet.
        prompt: its text, for the outputs.
        rules: see `make_output`.
    """

    def __init__(self, request: Request, prompt: str | None, rules: StopChecker | None) -> None:
        self._request = request
        self._prompt = prompt
        self._rules = rules
        self._kind: RequestOutputKind = request.params.output_kind
        if isinstance(request.params, SamplingParams) and request.params.num_samples > request.params.n:
            self._kind = RequestOutputKind.FINAL_ONLY  # the n best are known only then
        self._sent: dict[int, tuple[int, bool]] = {}  # index -> tokens sent, and whether its end was
        self._whole: dict[int, CompletionOutput] = {}  # index -> all that was sent, if outputs are cumulative
        self._texts: dict[int, OutputText] = {}
        self._prompt_token_ids = list(request.prompt_token_ids)  # (the reader may change it)
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def next(self) -> RequestOutput | None:
        """The output to send now; None if there is no new token, or only the end is sent."""
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
        outputs = deltas if self._kind == RequestOutputKind.DELTA else self._cumulative(deltas)
        return _request_output(request, self._prompt, self._prompt_token_ids, outputs, self._prompt_logprobs)

    def _advance(self, sequence: Sequence) -> CompletionOutput | None:
        """What is new in a sequence; None if nothing is."""
        sent = self._sent.get(sequence.index, (0, False))
        now = (sequence.num_generated_tokens, sequence.finish_reason is not None)
        if sent == now:
            return None
        self._sent[sequence.index] = now
        return _completion(sequence, self._new_text(sequence), self._rules, sent[0])

    def _cumulative(self, deltas: list[CompletionOutput]) -> list[CompletionOutput]:
        """All text and tokens of every sequence so far, these included."""
        for delta in deltas:
            sent = self._whole.get(delta.index)
            self._whole[delta.index] = delta if sent is None else _joined(sent, delta)
        return list(self._whole.values())

    def _new_text(self, sequence: Sequence) -> str:
        if self._rules is None:
            return ""
        text = self._texts.get(sequence.index) or self._rules.begin_text(self._request.prompt_token_ids)
        text, certain = text.after_all(sequence.token_ids[sequence.num_prompt_tokens + text.num_tokens :])
        self._texts[sequence.index] = text
        return certain + (text.rest() if sequence.finish_reason is not None else "")


def _joined(sent: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    return replace(
        new,
        text=sent.text + new.text,
        token_ids=sent.token_ids + new.token_ids,
        logprobs=None if new.logprobs is None else (sent.logprobs or []) + new.logprobs,
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


def _request_output(
    request: Request,
    prompt: str | None,
    prompt_token_ids: list[int],
    outputs: list[CompletionOutput],
    prompt_logprobs: list[dict[int, Logprob] | None] | None,
) -> RequestOutput:
    times, sequences = request.times, (*request.completions, *request.sequences)
    return RequestOutput(
        request.request_id,
        prompt,
        prompt_token_ids,
        outputs,
        finished=request.is_finished,
        num_cached_tokens=request.num_cached_tokens,
        prompt_logprobs=prompt_logprobs,
        error=request.error,
        metrics=RequestMetrics(
            arrival_time=request.arrival_time,
            first_scheduled_time=times.get("scheduled"),
            first_token_time=times.get("first_token"),
            last_token_time=times.get("last_token"),
            finished_time=times.get("finished"),
            num_generation_tokens=sum(sequence.num_generated_tokens for sequence in sequences),
        ),
    )
