"""What a user gets back for a request: plain data, without tensors or blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from minipaged.decoding.stopping import StopChecker, final_text
from minipaged.scheduling import Request


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: number of the sample, or rank of the beam.
        text: the generated text; empty without a tokenizer.
        token_ids: the generated tokens, a final EOS or stop token included.
        cumulative_logprob: sum of their log-probabilities.
        finish_reason: "stop", "length" or "abort"; None while it is being generated.
        logprobs: per token {token id: log-probability}, if asked for.
        score: what beam search ranks by; None for samples.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    finish_reason: str | None
    logprobs: list[dict[int, float]] | None = None
    score: float | None = None


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
        prompt_logprobs: per prompt token {token id: log-probability} (None for the first), if asked for.
        error: why it failed (finish reason "error"); None if it did not.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, float] | None] | None = None
    error: str | None = None


def make_output(request: Request, prompt: str | None, rules: StopChecker | None) -> RequestOutput:
    """What the user gets for a request, finished or not; without `rules` texts are empty."""
    ended = request.method.rank(request)
    ranked = ended if request.is_finished else sorted((*ended, *request.sequences), key=attrgetter("index"))
    outputs = []
    for rank, sequence in enumerate(ranked):
        token_ids, score = sequence.output_token_ids, request.method.score(sequence)
        outputs.append(
            CompletionOutput(
                sequence.index if score is None else rank,
                "" if rules is None or not token_ids else final_text(rules, token_ids),
                token_ids,
                sequence.cumulative_logprob,
                sequence.finish_reason,
                sequence.logprobs,
                score,
            )
        )
    prompt_logprobs = None
    if request.params.prompt_logprobs is not None:
        positions = range(len(request.prompt_token_ids))
        prompt_logprobs = [request.prompt_logprobs.get(position) for position in positions]
    return RequestOutput(
        request.request_id,
        prompt,
        request.prompt_token_ids,
        outputs,
        request.is_finished,
        request.num_cached_tokens,
        prompt_logprobs,
        request.error,
    )
