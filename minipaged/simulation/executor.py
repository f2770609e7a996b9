"""An executor without a model: it only advances the clock.

It replaces the model runner under the same engine. The tokens it returns are meaningless, because the
scripted decoding methods (`scripts.py`) get the end of each sequence from the trace.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Protocol

from minipaged.scheduling import PreemptionCosts, Sample, StepPlan, StepResult

_SAMPLE = Sample([0], [0.0])


class StepCosts(Protocol):
    """A cost model: the roofline of `costs.py`, or a fit to a machine of `calibration.py`."""

    def step_seconds(self, plan: StepPlan) -> float:
        """Seconds that the step of this plan takes."""
        ...


@dataclass(eq=False)
class SimulatedExecutor:
    """Advances a clock by the cost of each plan."""

    costs: StepCosts
    # As in any `Executor`; read only where a scheduler is built from them.
    num_blocks: int = 0
    num_host_blocks: int = 0
    max_model_len: int = 0
    preemption_costs: PreemptionCosts = PreemptionCosts(0.0, 0.0, 0.0)
    block_size: int = 1
    block_bytes: int = 0
    kept_states: Container[int] | None = None
    vocab_size: int = 1
    eos_token_ids: tuple[int, ...] = ()
    now: float = 0.0  # seconds since the start of the simulation

    def execute(self, plan: StepPlan) -> StepResult:
        """Advance the clock; one sample per scheduled sequence, all of them the same object."""
        self.now += self.costs.step_seconds(plan)
        return StepResult([_SAMPLE] * len(plan.scheduled))
