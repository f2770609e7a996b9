"""How many blocks a sequence gets at admission, and how many later (dynamic page growth).

Reserving prompt + max_tokens at admission is pessimistic: most requests end early, so the queue waits for
memory that is never written. Growing while the request runs is optimistic: it admits more requests, but the
pool may run out, which preemption then handles (text-generation-inference's unmerged change "re-allocate
pages dynamically" ended the request instead).

A policy returns block counts to try, the preferred one first. If not even the last is available, the request
waits (admission) or a request is preempted (growth).
"""

from __future__ import annotations

from typing import Protocol


class PageGrowth(Protocol):
    """How many blocks to ask for. The sequence needs `needed` >= 1 blocks now, and at most
    `remaining` >= `needed` until its last token."""

    def at_admission(self, needed: int, remaining: int) -> tuple[int, ...]:
        """Block counts to try when the sequence is admitted, the preferred first; none below needed."""
        ...

    def while_running(self, needed: int, remaining: int) -> tuple[int, ...]:
        """Block counts to try when the sequence has filled its last block; none below needed."""
        ...


class OnDemand:
    """One block when the last is full: a sequence wastes less than one block (paper, section 4.3)."""

    def at_admission(self, needed: int, remaining: int) -> tuple[int, ...]:
        """Just the blocks of the tokens that exist."""
        return (needed,)

    def while_running(self, needed: int, remaining: int) -> tuple[int, ...]:
        """Just the block of the next token."""
        return (needed,)


class Chunked:
    """Grants of `grant` blocks, then of the bare minimum (text-generation-inference's change: 16, then 1)."""

    def __init__(self, grant: int = 16) -> None:
        self.grant = grant

    def at_admission(self, needed: int, remaining: int) -> tuple[int, ...]:
        """A whole grant if the pool has it, else what the tokens need."""
        return (max(needed, min(remaining, self.grant)), needed)

    def while_running(self, needed: int, remaining: int) -> tuple[int, ...]:
        """A whole grant if the pool has it, else what the next token needs."""
        return (max(needed, min(remaining, self.grant)), needed)


class Reserve:
    """Everything at admission, prompt + max_tokens: what text-generation-inference does."""

    def at_admission(self, needed: int, remaining: int) -> tuple[int, ...]:
        """All that the sequence could ever use, or it waits."""
        return (remaining,)

    def while_running(self, needed: int, remaining: int) -> tuple[int, ...]:
        """For a fork, which gets no preallocated blocks, and after a swap, which frees them."""
        return (remaining, needed)
