"""What a user gets back for a request: plain data, without tensors or blocks.

Three of these objects are made for each token of a stream. They are not frozen: that would take four times as
long (5 us instead of 1.3).
"""

from __future__ import annotations

from dataclasses import dataclass, field


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


@dataclass(slots=True)
class RequestMetrics:
    """The times of a request's events, in seconds on the engine's clock; None: not yet.

    Attributes:
        arrival_time: it was added.
        first_scheduled_time: it left the queue for the first time.
        first_token_time: it got its first token.
        last_token_time: it got its newest token.
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
        """Generated tokens per second since it left the queue."""
        seconds = _between(self.first_scheduled_time, self.last_token_time)
        return self.num_generation_tokens / seconds if seconds else None


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: number of the sample, or rank of the beam.
        text: the generated text; empty without a tokenizer.
        token_ids: the generated tokens, a final EOS or stop token included.
        cumulative_logprob: sum of their log-probabilities.
        finish_reason: "stop", "length", "abort" or "error"; None while it is being generated.
        logprobs: per token {token id: Logprob}, if asked for: the token itself, then the likeliest.
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

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All completions of a prompt.

    Attributes:
        request_id: the engine's name for the request.
        prompt: its text; None if it was given as token ids.
        prompt_token_ids: its tokens.
        outputs: the completions, in the order the decoding method ranks them.
        finished: whether nothing more will come.
        num_cached_tokens: prompt tokens that the prefix cache had.
        prompt_logprobs: the logprobs of each prompt token (None for the first), if asked for.
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
