"""How long a step takes: a roofline over the plan of the step.

    step = host time + max(weights / bandwidth, FLOPs / peak)        the matrix multiplications
                     + max(KV read / bandwidth, FLOPs / peak)        attention
                     + all-reduces + block copies + swaps

A decode step is memory-bound (the weights once, and the KV of all sequences), a prefill compute-bound.
Reading KV through a block table costs one lookup per block. Moving a block to the host costs 2 x layers
transfers, which makes small blocks slow to swap (paper, section 7.3).
"""

from operator import itemgetter

from minipaged.scheduling import PreemptionCosts, StepPlan
from minipaged.simulation.hardware import Deployment

_start = itemgetter(1)


def attended_pairs(plan: StepPlan) -> float:
    """Pairs of a computed token and one it attends to: itself, or one before it."""
    return sum(n * (start + (n + 1) / 2) for _, start, n, _ in plan.scheduled)


class CostModel:
    """Seconds of a step; `paged`: attention reads through a block table (contiguous memory: block size 1)."""

    def __init__(self, deployment: Deployment, block_size: int = 16, paged: bool = True) -> None:
        model, chip, chips = deployment.model, deployment.chip, deployment.num_chips
        constants = deployment.constants
        self.block_size = block_size
        self.sequence_seconds = constants.sequence_seconds
        self.host_seconds = constants.step_seconds + (chips - 1) * constants.worker_seconds
        bandwidth = chips * chip.bandwidth * constants.bandwidth_efficiency
        flops = chips * chip.flops * constants.flops_efficiency
        self.weight_seconds = model.weight_bytes / bandwidth
        self.token_seconds = 2 * model.num_parameters / flops
        lookup = 1 + constants.paged_read_tokens / block_size if paged else 1.0
        self.kv_read_seconds = model.kv_bytes * lookup / bandwidth
        self.pair_seconds = 4 * model.num_layers * model.num_heads * model.head_dim / flops
        self.block_copy_seconds = 2 * block_size * model.kv_bytes / bandwidth
        # K and V of every layer are separate tensors; each chip moves its own share over its own link.
        self.block_transfer_seconds = 2 * model.num_layers * constants.transfer_seconds
        self.block_move_seconds = block_size * model.kv_bytes / (chips * chip.host_link)
        self.reduce_seconds = self.reduce_token_seconds = 0.0
        if chips > 1:
            # Two all-reduces a layer; a ring moves 2 (n - 1) / n of the activations over each link.
            self.reduce_seconds = 2 * model.num_layers * constants.all_reduce_seconds
            ring = 2 * (chips - 1) / chips * 2 * model.hidden
            self.reduce_token_seconds = 2 * model.num_layers * ring / chip.peer_link

    def step_seconds(self, plan: StepPlan) -> float:
        """Seconds that the step of this plan takes."""
        scheduled, tokens = plan.scheduled, plan.num_tokens
        # Tokens attended to: a sequence's context is read once, each of its new tokens multiplies with it.
        read = sum(map(_start, scheduled)) + tokens
        pairs = attended_pairs(plan) if tokens > len(scheduled) else read  # (equal for decodes)
        seconds = self.host_seconds + len(scheduled) * self.sequence_seconds
        if scheduled:
            seconds += self.compute_seconds(tokens, read, pairs)
        seconds += len(plan.copies) * self.block_copy_seconds
        return seconds + self.swap_seconds(len(plan.swap_out) + len(plan.swap_in))

    def compute_seconds(self, tokens: float, read: float, pairs: float) -> float:
        """Seconds of all layers: matrix multiplications, attention, all-reduces."""
        seconds = max(self.weight_seconds, tokens * self.token_seconds)
        seconds += max(read * self.kv_read_seconds, pairs * self.pair_seconds)
        return seconds + self.reduce_seconds + tokens * self.reduce_token_seconds

    def prefill_seconds(self, num_tokens: int) -> float:
        """Seconds to compute a prompt of this many tokens alone, without the host time of a step."""
        return self.compute_seconds(num_tokens, num_tokens, num_tokens * (num_tokens + 1) / 2)

    def swap_seconds(self, num_blocks: int) -> float:
        """Seconds to move this many blocks one way."""
        return num_blocks * (self.block_transfer_seconds + self.block_move_seconds)

    def preemption_costs(self) -> PreemptionCosts:
        """What the `auto` preemption policy weighs."""
        return PreemptionCosts(self.block_transfer_seconds, self.block_move_seconds, self.token_seconds)
