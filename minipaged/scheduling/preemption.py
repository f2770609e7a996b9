"""Which request is preempted when the blocks run out, and how it comes back (paper, section 4.5).

The latest arrival is preempted, so that the earliest requests are served first. It loses all blocks of all
its sequences (a sequence that lacks one of its blocks cannot run at all). It comes back in one of two ways:

* **recompute**: the blocks are freed; prompt and generated tokens become one new prompt;
* **swap**: the blocks move to host memory and back, if the host has room.

A policy decides; the scheduler acts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from minipaged.memory import KVManager
from minipaged.scheduling.request import Request
from minipaged.text_io import counted

Mode = Literal["recompute", "swap"]


class Decision(NamedTuple):
    """How a victim comes back, and why."""

    mode: Mode
    reason: str


class PreemptionPolicy(Protocol):
    """Victim and mode."""

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        """Pick one of the running requests that are not in the step's plan yet.

        Args:
            candidates: in order of arrival, at least one; the last may be the one that needs blocks.
        """
        ...

    def choose_mode(self, victim: Request, kv: KVManager) -> Decision:
        """Pick how it comes back; "swap" only if `kv.can_swap_out(victim.sequences)`."""
        ...


class Recompute:
    """The latest arrival is preempted and recomputed."""

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        """The latest arrival."""
        return candidates[-1]

    def choose_mode(self, victim: Request, kv: KVManager) -> Decision:
        """Always recompute."""
        return Decision("recompute", "preemption_mode is recompute")


class Swap(Recompute):
    """The latest arrival is preempted; its blocks move to the host, room permitting."""

    def choose_mode(self, victim: Request, kv: KVManager) -> Decision:
        """Swap, or recompute when the host pool is missing or too full, or the group is half recomputed."""
        if kv.can_swap_out(victim.sequences):
            return Decision("swap", "preemption_mode is swap")
        return Decision("recompute", "the swap space cannot take its blocks now")


class PreemptionCosts(NamedTuple):
    """What moving and computing cost, for `Auto`.

    Attributes:
        seconds_per_transfer: fixed overhead of copying a block between device and host.
        seconds_per_block: moving one block, one way.
        seconds_per_token: computing one token of a prompt.
    """

    seconds_per_transfer: float
    seconds_per_block: float
    seconds_per_token: float

    @staticmethod
    def estimate(device: str, block_bytes: int, num_weights: int) -> PreemptionCosts:
        """Rough rates: PCIe 4 x16 and a GPU's tensor cores, or one CPU core's memory and vector units.

        On a GPU, one kernel moves all blocks of a step, so a block has no overhead of its own.
        """
        bandwidth, flops, overhead = (2e10, 1e14, 0.0) if device == "cuda" else (5e9, 5e10, 1e-6)
        return PreemptionCosts(overhead, block_bytes / bandwidth, 2 * num_weights / flops)


class Auto(Swap):
    """Whichever is cheaper: moving the blocks out and in, or computing the tokens again.

    Where each block is a transfer of its own, small blocks make swapping slow (Fig. 19).
    """

    def __init__(self, costs: PreemptionCosts) -> None:
        self.costs = costs

    def choose_mode(self, victim: Request, kv: KVManager) -> Decision:
        """Compare both estimates, and state them in the reason."""
        decision = super().choose_mode(victim, kv)
        if decision.mode == "recompute":
            return decision
        blocks = kv.computed_blocks(victim.sequences)
        # A shared block is moved once, and computed once.
        num_tokens = min(sum(s.num_computed_tokens for s in victim.sequences), len(blocks) * kv.block_size)
        per_block = self.costs.seconds_per_transfer + self.costs.seconds_per_block
        swap = 2 * len(blocks) * per_block
        recompute = num_tokens * self.costs.seconds_per_token
        reason = (
            f"moving {counted(len(blocks), 'block')} out and in takes about {swap * 1e3:.3g} ms, computing "
            f"{counted(num_tokens, 'token')} again {recompute * 1e3:.3g} ms"
        )
        return Decision("swap" if swap < recompute else "recompute", reason)
