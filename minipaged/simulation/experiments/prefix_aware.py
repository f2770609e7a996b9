"""Prefix-caching-aware scheduling: what is cached is charged neither to the pool nor to the budget."""

from minipaged.simulation.experiments.common import capacity, grid
from minipaged.simulation.results import Claim, Curve, Experiment, Outcome, Panel
from minipaged.simulation.run import simulate
from minipaged.simulation.systems import paged, prefix_unaware, setup
from minipaged.simulation.workloads import Independent, Lognormal, poisson

OUTPUTS = (32, 64, 128)
REQUESTS = 800
CHIPS = setup("llama-3-8b", "a100-40gb")


def workload(prefix: bool, output: int) -> Independent:
    """Prompts of 1024 tokens on average: 960 of one of 8 prefixes and 64 of their own, or all their own."""
    lengths = Lognormal(output, 0.8, 1024)
    if prefix:
        return Independent(Lognormal(64, 0.5, 1024), lengths, prefix_tokens=960, num_prefixes=8)
    return Independent(Lognormal(1024, 0.5, 4096), lengths)


def throughput(kind: str, prefix: bool, output: int, aware: bool) -> float:
    """Requests a second: "batch", when all are there at the start, or "online", what can be sustained."""
    simulation = paged(CHIPS, enable_prefix_caching=True) if aware else prefix_unaware(CHIPS)
    lengths = workload(prefix, output)
    if kind == "online":
        return capacity(simulation, lengths, 300, 1200)
    return simulate(simulation, poisson(lengths, float("inf"), REQUESTS)).throughput


PUBLISHED = {"batch": (None, 1.5), "online": (None, 1.25)}
BOTH = (False, True)


def conclude(results: dict[tuple[str, bool, int, bool], float]) -> Outcome:
    """Gains by output length."""

    def gain(kind: str, prefix: bool, output: int) -> float:
        return results[kind, prefix, output, True] / results[kind, prefix, output, False]

    claims = []
    source = "prefix-aware scheduling"
    for kind, published in PUBLISHED.items():
        for output in OUTPUTS:
            text = f"throughput, aware over unaware, {kind}, 94 % of the prompt cached, {output} tokens out"
            claims.append(Claim(text, source, published, gain(kind, True, output)))
        text = f"throughput, aware over unaware, {kind}, nothing shared"
        claims.append(Claim(text, source, 1.0, gain(kind, False, OUTPUTS[0])))
    curves = [
        Curve(kind, list(OUTPUTS), [gain(kind, True, output) for output in OUTPUTS]) for kind in PUBLISHED
    ]
    axes = ("mean output [tokens]", "throughput, aware over unaware")
    panel = Panel("94 % of the prompt cached", *axes, curves)
    return claims, [panel]


EXPERIMENT = Experiment(
    "prefix_aware",
    "Prefix-caching-aware scheduling",
    "vLLM, prefix-caching-aware scheduling",
    "We simulate Llama-3-8B on an A100 40 GB with prefills first and a budget of 2048 tokens. Each prompt "
    "begins with one of 8 shared prefixes of 960 tokens and ends with about 64 tokens of its own. In the "
    "batch case, all 800 requests arrive at once; in the online case, we measure the sustained rate. The "
    "source names no workload and gives only upper bounds.",
    grid(throughput, PUBLISHED, [True], OUTPUTS, BOTH)
    | grid(throughput, PUBLISHED, [False], OUTPUTS[:1], BOTH),
    conclude,
)
