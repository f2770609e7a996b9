"""The interface of whatever computes a step: a model on a device, or a simulation of one.

The plan is the only input and the result the only output. No torch here.
"""

from __future__ import annotations

from collections.abc import Container
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
    kept_states: Container[int] | None
    """Chain hashes of prefixes after which the states of recurrent layers are kept; None: it has none."""
    vocab_size: int
    """Token ids are below it."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text; may be empty."""
    preemption_costs: PreemptionCosts
    """Estimates for choosing between swapping and recomputing."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the moves, compute what is scheduled, sample: one `Sample` for each that has candidates."""
        ...
