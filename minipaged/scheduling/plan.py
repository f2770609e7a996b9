"""What one step computes and moves: the only message from the scheduler to the executor.

    swap_out, then swap_in, then copies, then compute all chunks in one forward pass

The order matters: a block that is swapped out may be given to somebody else in the same step. All reads
of `copies` happen before all their writes. A plan is data; it decides nothing and knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minipaged.memory import BlockCopy
from minipaged.scheduling.request import Request, Sequence


class Chunk(NamedTuple):
    """Compute tokens start <= position < start + num_tokens of a sequence.

    `num_candidates` > 0: the last token's logits are needed, and that many candidate tokens from them.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_candidates: int


class Event(NamedTuple):
    """Something that happened to a request, for the trace: admitted, preempted, resumed, ..."""

    kind: str
    request_id: str
    detail: dict[str, Any]


@dataclass(slots=True)
class StepPlan:
    """One step.

    Attributes:
        step: number of the step, a logical clock.
        chunks: what to compute; the chunks of a request stand together, in the order of its sequences.
        sampling: requests whose sequences all get candidates in this step, in the order of the chunks.
        swap_out: copies (device block, host block).
        swap_in: copies (host block, device block).
        copies: copy-on-write copies (device block, device block).
        events: what was decided, and why.
        finished: requests that ended while planning (they outgrew the pool).
        num_tokens: tokens computed, the sum over the chunks.
        num_preempted: requests that gave way; nobody is admitted or resumed in such a step.
    """

    step: int
    chunks: list[Chunk] = field(default_factory=list)
    sampling: list[Request] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    num_tokens: int = 0
    num_preempted: int = 0

    @property
    def has_work(self) -> bool:
        """Whether the executor has anything to do."""
        return bool(self.chunks or self.swap_out or self.swap_in or self.copies)

    def _repr_html_(self) -> str:
        from minipaged.observability.drawing_plan import plan_svg

        return plan_svg(self)


class Sample(NamedTuple):
    """Candidates for the next token of one sequence.

    Attributes:
        token_ids: as many as the chunk asked for; for beam search the best first.
        logprobs: their log-probabilities.
        top_logprobs: per candidate, {token id: log-probability} when the request asked for logprobs.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None = None


class StepResult(NamedTuple):
    """What the executor answers: one `Sample` per chunk with candidates, in the order of the chunks.

    `prompt_logprobs`: request id -> log-probabilities of the prompt tokens computed in this step, as
    (position, {token id: log-probability}) pairs; only for requests that asked.
    """

    samples: list[Sample]
    prompt_logprobs: dict[str, list[tuple[int, dict[int, float]]]] | None = None
