"""Fit the time of a step to this machine: run real workloads, watch every step, predict others.

    seconds of a step = a + b x sequences + c x tokens + d x tokens attended to      all of them >= 0

A fit is only as good as its predictions: `calibrate` reports the error on workloads that it was not fitted
to, simulated from start to end.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from minipaged.components import build_scheduler
from minipaged.decoding.params import SamplingParams
from minipaged.engine import Engine
from minipaged.scheduling import StepPlan
from minipaged.simulation.costs import attended_pairs
from minipaged.simulation.executor import SimulatedExecutor
from minipaged.simulation.run import Simulation
from minipaged.simulation.workloads import Arrival, Lengths

Clock = Callable[[], float]
Step = tuple[tuple[float, ...], float]
"""Features of a step's plan, and the seconds it took."""


class Mix(NamedTuple):
    """A workload to measure: the number of simultaneous requests, and the ranges of their lengths."""

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]


FITTED = (
    Mix(1, (8, 9), (150, 151)),
    Mix(4, (200, 600), (40, 80)),
    Mix(32, (8, 64), (32, 64)),
    Mix(16, (100, 400), (8, 24)),
)
HELD_OUT = (
    Mix(2, (50, 100), (80, 120)),
    Mix(8, (300, 500), (30, 60)),
    Mix(24, (16, 200), (16, 100)),
    Mix(12, (20, 40), (60, 90)),
    Mix(40, (30, 60), (10, 30)),
)


@dataclass(frozen=True)
class FittedCosts:
    """A cost model that replaces `CostModel`; each value in seconds."""

    per_step: float
    per_sequence: float
    per_token: float  # computed
    per_attended: float  # pair of a token and one it attends to

    def step_seconds(self, plan: StepPlan) -> float:
        """Seconds of the step of this plan."""
        return sum(map(float.__mul__, asdict(self).values(), _features(plan)))


def _features(plan: StepPlan) -> tuple[float, float, float, float]:
    return 1.0, float(len(plan.scheduled)), float(plan.num_tokens), float(attended_pairs(plan))


def fit(steps: Sequence[Step]) -> FittedCosts:
    """Least squares of relative errors, no coefficient below 0.

    Steps much slower than others like them are left out: something else used the machine.
    """
    features = np.array([f for f, _ in steps])
    seconds = np.array([s for _, s in steps])
    keep = np.ones(len(seconds), bool)
    for _ in range(3):
        answer = _nonnegative(features[keep] / seconds[keep, None], np.ones(int(keep.sum())))
        keep = seconds < 2 * (features @ answer)
    return FittedCosts(*map(float, answer))


def _nonnegative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Least squares over the columns that come out positive: drop the most negative one, and repeat."""
    columns = list(range(a.shape[1]))
    while True:
        solution = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
        if solution.min() >= 0:
            answer = np.zeros(a.shape[1])
            answer[columns] = solution
            return answer
        del columns[int(solution.argmin())]


class Check(NamedTuple):
    """A held-out workload: seconds measured and predicted."""

    mix: Mix
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative."""
        return abs(self.predicted / self.measured - 1)


@dataclass(frozen=True)
class Calibration:
    """A fit, and how well it predicts the workloads that it was not fitted to."""

    costs: FittedCosts
    checks: list[Check]

    @property
    def median_error(self) -> float:
        """Of the held-out workloads, relative."""
        return median(check.error for check in self.checks)


def calibrate(
    engine: Engine,
    seed: int = 0,
    rounds: int = 3,
    clock: Clock = time.process_time,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Measure each workload `rounds` times in turn, fit, predict; report (rounds done, rounds).

    The clock is CPU time by default, which other work on the machine disturbs least (use one thread).
    """
    rng = random.Random(seed)
    workloads = [
        [Lengths(rng.randrange(*mix.prompt), rng.randrange(*mix.output)) for _ in range(mix.requests)]
        for mix in (*FITTED, *HELD_OUT)
    ]
    _measure(engine, workloads[0], seed, clock)  # warm up
    runs = []
    for done in range(rounds):
        progress(done, rounds)
        runs.append([_measure(engine, lengths, seed, clock) for lengths in workloads])
    # Greedy runs of one workload take the same steps: what differs between them is the machine.
    fastest = [[min(same, key=itemgetter(1)) for same in zip(*repeated)] for repeated in zip(*runs)]
    costs = fit([step for steps in fastest[: len(FITTED)] for step in steps])
    checks = [
        Check(mix, sum(seconds for _, seconds in steps), predict(engine, lengths, costs))
        for mix, lengths, steps in zip(HELD_OUT, workloads[len(FITTED) :], fastest[len(FITTED) :])
    ]
    return Calibration(costs, checks)


def _measure(engine: Engine, lengths: Sequence[Lengths], seed: int, clock: Clock) -> list[Step]:
    """All steps of a run but the first, whose beginning cannot be seen."""
    rng = random.Random(seed)
    seen: list[Step] = []

    def watch(plan: StepPlan, *_: Any) -> None:
        seen.append((_features(plan), clock()))

    engine.reset_prefix_cache()
    engine.on_committed.append(watch)
    try:
        for number, pair in enumerate(lengths):
            prompt = rng.choices(range(engine.executor.vocab_size), k=pair.prompt)
            params = SamplingParams(temperature=0, max_tokens=pair.output, ignore_eos=True)
            engine.add_request(f"calibrate-{number}", prompt, params)
        while engine.has_unfinished:
            engine.step()
    finally:
        engine.on_committed.remove(watch)
    return [(features, after - before) for (_, before), (features, after) in pairwise(seen)]


def predict(engine: Engine, lengths: Sequence[Lengths], costs: FittedCosts) -> float:
    """Seconds from the end of the first step to the end, by simulation under the engine's own settings."""
    scheduler = build_scheduler(engine.config, engine.executor)
    simulation = Simulation(scheduler, SimulatedExecutor(costs))
    for number, pair in enumerate(lengths):
        simulation.add(Arrival(number, 0.0, pair))
    simulation.engine.step()
    first = simulation.executor.now
    simulation.advance()
    return simulation.executor.now - first
