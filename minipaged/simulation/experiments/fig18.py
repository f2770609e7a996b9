"""Fig. 18 b: how the block size affects the latency."""

from minipaged.simulation.experiments.common import DATA, grid
from minipaged.simulation.measure import on_trace
from minipaged.simulation.results import Claim, Curve, Experiment, Outcome, Panel
from minipaged.simulation.systems import OPT_13B, paged

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LOADS = {"sharegpt": ("ShareGPT, 1.9 req/s", 1.9, 300.0), "alpaca": ("Alpaca, 33 req/s", 33.0, 60.0)}


def latency(data: str, block_size: int) -> float:
    """Normalized latency on a trace, s/token."""
    _, rate, seconds = LOADS[data]
    return on_trace(paged(OPT_13B, block_size=block_size), DATA[data], rate, seconds).normalized_latency


def conclude(results: dict[tuple[str, int], float]) -> Outcome:
    """Curves, and how far the published best sizes are from the best."""

    def worst(data: str, sizes: tuple[int, ...]) -> float:
        best = min(results[data, size] for size in BLOCK_SIZES)
        return max(results[data, size] for size in sizes) / best

    good, bad = (1.0, 1.25), (1.25, None)
    rows = {
        "ShareGPT: worst of block sizes 16 to 128": (good, worst("sharegpt", (16, 32, 64, 128))),
        "ShareGPT: block size 1": (bad, worst("sharegpt", (1,))),
        "Alpaca: worst of block sizes 16 and 32": (good, worst("alpaca", (16, 32))),
        "Alpaca: block size 256": (bad, worst("alpaca", (256,))),
    }
    claims = [
        Claim(f"{text} over the best of all", "Fig. 18 b", *row, reading="words")
        for text, row in rows.items()
    ]
    curves = [
        Curve(title, list(BLOCK_SIZES), [results[data, size] for size in BLOCK_SIZES])
        for data, (title, *_) in LOADS.items()
    ]
    axes = ("block size [tokens]", "normalized latency [s/token]")
    panel = Panel("OPT-13B", *axes, curves, x_scale="log2", y_scale="log")
    return claims, [panel]


EXPERIMENT = Experiment(
    "fig18",
    "Block size",
    "PagedAttention paper, Fig. 18 b",
    "We simulate OPT-13B on an A100 40 GB at a rate near the sustained one. For ShareGPT, the paper finds "
    "block sizes of 16 to 128 good. For Alpaca, it finds 16 and 32 good, and larger sizes bad. We take good "
    "to mean within 25 % of the best.",
    grid(latency, LOADS, BLOCK_SIZES),
    conclude,
)
