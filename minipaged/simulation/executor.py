"""An executor without a model: it follows a plan by letting time pass.

Takes the place of the model runner under the same scheduler; the tokens it answers with mean nothing,
because the scripted decoding methods (`scripts.py`) know from the trace when a sequence ends. Knows
plans and costs; no tensors.
"""

from __future__ import annotations

from typing import Protocol

from minipaged.scheduling import Sample, StepPlan, StepResult

_SAMPLE = Sample([0], [0.0])


class StepCosts(Protocol):
    """A cost model: the roofline of `costs.py`, or a fit to a machine of `calibration.py`."""

    def step_seconds(self, plan: StepPlan) -> float:
        """Seconds that the step of this plan takes."""
        ...


class SimulatedExecutor:
    """Advances a clock by the cost of each plan.

    Attributes:
        now: seconds since the start of the simulation.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.now = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        """Let the step's time pass and answer with one sample per chunk (all of them the same object)."""
        self.now += self.costs.step_seconds(plan)
        return StepResult([_SAMPLE] * len(plan.scheduled))
