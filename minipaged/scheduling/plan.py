"""What one step computes and moves: the only message from the scheduler to the executor.

    swap_out, then swap_in, then copies, then compute what is scheduled in one forward pass

The order matters: a block that is swapped out may be given to another request in the same step. All reads of
`copies` happen before all their writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minipaged.memory import BlockCopy
from minipaged.scheduling.request import Request, Sample, Sequence, TopLogprobs


class ScheduledSequence(NamedTuple):
    """Compute tokens start <= position < start + num_tokens of a sequence.

    `num_candidates` > 0: the last token's logits are needed, and that many candidate tokens from them.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_candidates: int


class Event(NamedTuple):
    """A decision about a request, for the trace: admitted, preempted, resumed, outgrown, drafted."""

    kind: str
    request_id: str
    detail: dict[str, Any]


@dataclass(slots=True)
class StepPlan:
    """One step. `scheduled` and `sampling` keep a request's sequences together and in order."""

    step: int  # its number, a logical clock
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    sampling: list[Request] = field(default_factory=list)  # all their sequences get candidates
    swap_out: list[BlockCopy] = field(default_factory=list)  # (device block, host block)
    swap_in: list[BlockCopy] = field(default_factory=list)  # (host block, device block)
    copies: list[BlockCopy] = field(default_factory=list)  # copy-on-write, (device block, device block)
    changed: list[Request] = field(default_factory=list)  # whose tables change; listed first, for a rollback
    finished: list[Request] = field(default_factory=list)  # ended while planning: aborted or outgrew the pool
    events: list[Event] = field(default_factory=list)  # what was decided, and why
    num_preempted: int = 0  # nobody is admitted or resumed in a step that preempts
    has_failed: bool = False  # its rollback has begun (and has failed, if the plan is still in flight)

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum(scheduled.num_tokens for scheduled in self.scheduled)

    @property
    def touched(self) -> list[Request]:
        """Requests whose blocks the step changes, or whose tokens it computes."""
        return list(dict.fromkeys((*self.changed, *(s.sequence.request for s in self.scheduled))))

    @property
    def has_work(self) -> bool:
        """Whether the executor has anything to do."""
        return bool(self.scheduled or self.swap_out or self.swap_in or self.copies)


class StepResult(NamedTuple):
    """What the executor returns: one `Sample` per scheduled sequence with candidates, in the same order.

    `prompt_logprobs`: request id -> [(position, likeliest tokens)] of the prompt tokens computed
    in this step, for requests that asked. `errors`: request id -> why a request has no valid token and fails.
    """

    samples: list[Sample]
    prompt_logprobs: Mapping[str, list[tuple[int, TopLogprobs]]] = {}
    errors: Mapping[str, str] = {}
