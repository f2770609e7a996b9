"""Tensor or pipeline parallel, by the link between the chips: both simulated under the same load.

    python -m minipaged.simulation.links        prints the table of docs/guides/distributed.md

A pipeline of p stages cuts a step into m micro-batches of whole sequences, at most p. Each stage has 1/p of
the layers; a step takes as long as m + p - 1 micro-batches on one stage, because stages wait at its start and
its end. Steps do not overlap, because the engine needs the tokens of one to plan the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from minipaged.components import build_scheduler
from minipaged.config import EngineConfig
from minipaged.scheduling import StepPlan
from minipaged.simulation.costs import CostModel, attended_pairs
from minipaged.simulation.executor import SimulatedExecutor, StepCosts
from minipaged.simulation.hardware import CHIPS, CONSTANTS, MODELS, Deployment
from minipaged.simulation.report import Report, report
from minipaged.simulation.reproduce import quiet
from minipaged.simulation.run import Simulation, simulate
from minipaged.simulation.workloads import SHAREGPT, poisson


@dataclass(frozen=True)
class Link:
    """A link between two chips; the latencies are assumptions for a small message."""

    name: str
    bandwidth: float  # bytes/s one way
    latency: float  # seconds


LINKS = (
    # What `minipaged simulate` assumes, for the 6 messages of an all-reduce among 4 chips.
    Link("NVLink: 300 GB/s, 4 µs", 300e9, CONSTANTS.all_reduce_seconds / 6),
    Link("PCIe 4: 25 GB/s, 10 µs", 25e9, 10e-6),
    Link("network: 12.5 GB/s, 20 µs", 12.5e9, 20e-6),
    Link("network: 1.25 GB/s, 50 µs", 1.25e9, 50e-6),
)

HOST = replace(CONSTANTS, step_seconds=0.002, worker_seconds=0.0)
"""Seconds of the host: a plan is broadcast once a step, where the constants are fitted to remote calls."""


def linked(link: Link, num_chips: int, model: str = "llama-3-70b") -> Deployment:
    """A model on A100s that are joined by a link; a ring all-reduce takes 2 (n - 1) messages."""
    constants = replace(HOST, all_reduce_seconds=2 * (num_chips - 1) * link.latency)
    chip = replace(CHIPS["a100-80gb"], peer_link=link.bandwidth)
    return Deployment(MODELS[model], chip, num_chips, constants)


class PipelineCosts:
    """Seconds of a step on as many stages as the deployment has chips."""

    def __init__(self, deployment: Deployment, link: Link) -> None:
        self.num_stages = deployment.num_chips
        # One chip with the memory of all: the time of a stage is 1/p of what it takes for all layers.
        chip = replace(deployment.chip, memory=deployment.memory)
        self.whole = CostModel(replace(deployment, chip=chip, num_chips=1))
        self._latency = link.latency
        self._seconds_per_token = 2 * deployment.model.hidden / link.bandwidth

    def step_seconds(self, plan: StepPlan) -> float:
        """The fastest cut into micro-batches; the weights of a stage are read for each of them."""
        most = min(self.num_stages, len(plan.scheduled)) or 1
        return min(self._cut(plan, micro_batches) for micro_batches in range(1, most + 1))

    def _cut(self, plan: StepPlan, micro_batches: int) -> float:
        host = self.whole.host_seconds + len(plan.scheduled) * self.whole.sequence_seconds
        stage = self._compute(plan, micro_batches) / self.num_stages
        hop = self._latency + plan.num_tokens / micro_batches * self._seconds_per_token
        return host + (micro_batches + self.num_stages - 1) * stage + (self.num_stages - 1) * hop

    def _compute(self, plan: StepPlan, micro_batches: int) -> float:
        """Seconds of one micro-batch in all layers, if all are of equal size."""
        read = sum(start + n for _, start, n, _ in plan.scheduled) / micro_batches
        pairs = attended_pairs(plan) / micro_batches
        return self.whole.compute_seconds(plan.num_tokens / micro_batches, read, pairs)


def compare(requests: int = 400, rate: float = float("inf")) -> Iterator[tuple[Link, Report, Report]]:
    """(link, tensor parallel, pipeline parallel) of 4 chips under ShareGPT's lengths."""
    quiet()
    for link in LINKS:
        deployment = linked(link, 4)
        both = (CostModel(deployment), PipelineCosts(deployment, link))
        tensor, pipeline = (_run(deployment, costs, requests, rate) for costs in both)
        yield link, tensor, pipeline


def _run(deployment: Deployment, costs: StepCosts, requests: int, rate: float) -> Report:
    longest = deployment.model.max_model_len
    num_blocks = deployment.num_kv_slots() // 16
    executor = SimulatedExecutor(costs, num_blocks, 0, longest, block_size=16)
    simulation = Simulation(build_scheduler(EngineConfig(), executor), executor)
    return report([simulate(simulation, poisson(SHAREGPT, rate, requests))])


def table() -> str:
    """What many concurrent requests and a single one get out of each, as Markdown."""
    lines = [
        "| link | tensor, tok/s | pipeline, tok/s | tensor, ms/token alone | pipeline, ms/token alone |",
        "|---|---:|---:|---:|---:|",
    ]
    many, few = list(compare()), list(compare(requests=20, rate=0.01))
    for (link, *busy), (_, *alone) in zip(many, few):
        figures = [f"{run.token_rate:,.0f}" for run in busy] + [f"{1e3 * run.itl_mean:.1f}" for run in alone]
        lines.append(f"| {' | '.join((link.name, *figures))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
