"""The interface of whatever computes a step: a model on a device, or a simulation of one.

The plan is the only input and the result the only output. No torch here.
"""

from __future__ import annotations

from typing import Protocol

from minipaged.scheduling import StepPlan, StepResult
from minipaged.scheduling.preemption import PreemptionCosts


class Executor(Protocol):
    """Computes steps. Its attributes are fixed before the first one."""

    block_size: int
    """Tokens per block."""
    num_blocks: int
    """Blocks in the device pool."""
    num_host_blocks: int
    """Blocks in the host pool, never more than `num_blocks`."""
    block_bytes: int
    """Bytes of one block, keys and values of all layers."""
    max_model_len: int
    """Longest sequence, in tokens."""
    shares_prefixes: bool
    """Whether a request may begin behind cached blocks; not if layers keep states that blocks do not have."""
    vocab_size: int
    """Token ids are below it."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text; may be empty."""
    preemption_costs: PreemptionCosts
    """Estimates for choosing between swapping and recomputing."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the moves, compute what is scheduled, sample: one `Sample` for each that has candidates."""
        ...
