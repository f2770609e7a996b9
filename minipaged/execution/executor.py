"""What the engine asks of whatever computes a step: a model on a device, or a simulation of one.

The plan is the only message down, the result the only message up. No torch here.
"""

from __future__ import annotations

from typing import Protocol

from minipaged.scheduling import StepPlan, StepResult
from minipaged.scheduling.preemption import PreemptionCosts


class Executor(Protocol):
    """Computes steps.

    Attributes, fixed before the first step:
        block_size: tokens per block.
        num_blocks: blocks in the device pool.
        num_host_blocks: blocks in the host pool, never more than `num_blocks`.
        block_bytes: bytes of one block, keys and values of all layers.
        max_model_len: longest sequence, in tokens.
        vocab_size: token ids are below it.
        eos_token_ids: tokens that end a text; may be empty.
        preemption_costs: estimates for choosing between swapping and recomputing.
    """

    block_size: int
    num_blocks: int
    num_host_blocks: int
    block_bytes: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    preemption_costs: PreemptionCosts

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the moves, compute what is scheduled, sample: one `Sample` for each that has candidates."""
        ...
