"""Lesson 06: who is preempted when blocks run out, and how. Write the methods that raise.

Check with    minipaged learn check 06
Stuck?        minipaged learn hint 06
"""

from collections.abc import Sequence

from minipaged.memory import KVManager
from minipaged.scheduling import Decision, PreemptionCosts, Request


class Recompute:
    """The latest arrival is preempted and recomputed."""

    # -- task 1 ---------------------------------------------------------------------------------

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        """Pick one of the running requests that are not yet scheduled in this step.

        Args:
            candidates: in order of arrival, at least one; the last may be the one that needs blocks.
        """
        raise NotImplementedError("Lesson 6, task 1: the latest arrival")

    def choose_mode(self, victim: Request, kv: KVManager) -> Decision:
        """Decision("recompute", reason): the reason, in your own words, goes to the log and the trace."""
        raise NotImplementedError("Lesson 6, task 1: always recompute, and say why")


class Swap(Recompute):
    """The latest arrival is preempted and keeps its blocks on the host, if there is room."""

    # -- task 2 ---------------------------------------------------------------------------------

    def choose_mode(self, victim: Request, kv: KVManager) -> Decision:
        """Decision("swap", reason) if `kv.can_swap_out(victim.sequences)`, else recompute."""
        raise NotImplementedError("Lesson 6, task 2: swap if the host has room")


class Auto(Swap):
    """Whichever is cheaper: moving the blocks out and in, or computing the tokens again."""

    def __init__(self, costs: PreemptionCosts) -> None:
        self.costs = costs

    # -- task 3 ---------------------------------------------------------------------------------

    def choose_mode(self, victim: Request, kv: KVManager) -> Decision:
        """Compare both estimates; recompute if they are equal or swapping is impossible.

        To move: the distinct blocks that hold computed tokens (`kv.num_blocks_of(num_computed_tokens)` of
        each sequence's `table.blocks`), out and in; each block costs `seconds_per_transfer +
        seconds_per_block` each way. To recompute: the computed tokens of all sequences, but a shared
        block only once, so never more than blocks x `kv.block_size`, at `seconds_per_token` each.
        The reason states both numbers: "moving 7 blocks ... computing 100 tokens".
        """
        raise NotImplementedError("Lesson 6, task 3: the cheaper of moving and computing again")
