"""Fig. 19: swapping against recomputing, by block size."""

from dataclasses import replace

from minipaged.simulation.costs import CostModel
from minipaged.simulation.experiments.common import grid
from minipaged.simulation.experiments.fig18 import BLOCK_SIZES
from minipaged.simulation.hardware import Deployment
from minipaged.simulation.measure import on_trace
from minipaged.simulation.results import Claim, Curve, Experiment, Outcome, Panel
from minipaged.simulation.systems import OPT_13B, paged
from minipaged.simulation.workloads import SHAREGPT

TOKENS = 256
RATE, SECONDS = 1.9, 300.0
MODES = ("recompute", "swap")


def overhead(block_size: int, deployment: Deployment = OPT_13B.deployment) -> tuple[float, float, float]:
    """Milliseconds to recompute, to swap out and to swap in a sequence of `TOKENS` tokens."""
    costs = CostModel(deployment, block_size)
    one_way = 1e3 * costs.swap_seconds(-(-TOKENS // block_size))
    return 1e3 * costs.prefill_seconds(TOKENS), one_way, one_way


def latency(mode: str, block_size: int) -> tuple[float, int]:
    """Normalized latency on a trace, s/token, and preemptions."""
    simulation = paged(OPT_13B, block_size=block_size, preemption_mode=mode)
    run = on_trace(simulation, SHAREGPT, RATE, SECONDS)
    return run.normalized_latency, run.num_preemptions


def conclude(results: dict[tuple[str, int], tuple[float, int]]) -> Outcome:
    """Micro-benchmark and end to end."""
    micro = {size: overhead(size) for size in BLOCK_SIZES}
    swap = {size: micro[size][1] + micro[size][2] for size in BLOCK_SIZES}
    end = {size: results["recompute", size][0] / results["swap", size][0] for size in (16, 32, 64)}
    flat = max(m[0] for m in micro.values()) / min(m[0] for m in micro.values())
    slow = swap[1] / swap[16]
    most = max(micro[size][0] / swap[size] for size in BLOCK_SIZES)
    slower = replace(OPT_13B.deployment, chip=replace(OPT_13B.deployment.chip, host_link=16e9))
    then = max(ms[0] / (ms[1] + ms[2]) for ms in (overhead(size, slower) for size in BLOCK_SIZES))
    note = "here, large blocks move at the 25 GB/s that PCIe 4.0 x16 reaches in practice"
    note += f"; at 16 GB/s, the ratio is {then:.2f}"
    small = "swap out and in at block size 1 over block size 16"
    claims = [
        Claim(small, "Fig. 19 a", (3.0, None), slow, reading="plot"),
        Claim("recompute, slowest over fastest block size", "Fig. 19 a", 1.0, flat),
        Claim("recompute over swap, highest of all block sizes", "Fig. 19 a", (None, 1.2), most, note=note),
    ]
    for word, ratio in (("highest", max(end.values())), ("lowest", min(end.values()))):
        text = f"recompute over swap end to end, {word} of block sizes 16 to 64"
        claims.append(Claim(text, "Fig. 19 b", (0.8, 1.25), ratio, reading="words"))
    sizes = list(BLOCK_SIZES)
    alone = [
        Curve("recompute", sizes, [micro[size][0] for size in sizes]),
        Curve("swap in", sizes, [micro[size][2] for size in sizes]),
        Curve("swap in + out", sizes, [swap[size] for size in sizes]),
    ]
    whole = [Curve(mode, sizes, [results[mode, size][0] for size in sizes]) for mode in MODES]
    x, y = "block size [tokens]", "normalized latency [s/token]"
    panels = [
        Panel(f"(a) one sequence of {TOKENS} tokens", x, "time [ms]", alone, x_scale="log2"),
        Panel(f"(b) ShareGPT at {RATE} req/s", x, y, whole, x_scale="log2", y_scale="log"),
    ]
    return claims, panels


EXPERIMENT = Experiment(
    "fig19",
    "Swap or recompute",
    "PagedAttention paper, Fig. 19",
    "We simulate OPT-13B on an A100 40 GB with PCIe 4. Part (a) uses the cost model alone; part (b) runs a "
    "trace at a rate near the sustained one.",
    grid(latency, MODES, BLOCK_SIZES),
    conclude,
    chooses=("preemption",),
)
