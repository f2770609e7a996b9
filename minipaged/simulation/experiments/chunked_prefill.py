"""Chunked prefill: the token budget trades time to first token against time between tokens."""

from typing import Any, NamedTuple

from minipaged.simulation.experiments.common import capacity, grid
from minipaged.simulation.measure import on_trace
from minipaged.simulation.records import time_to_first_token
from minipaged.simulation.results import Claim, Curve, Experiment, Outcome, Panel
from minipaged.simulation.systems import paged, setup
from minipaged.simulation.workloads import Independent, Lognormal

BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
RATE, SECONDS = 5.0, 120.0
WORKLOAD = Independent(Lognormal(1000, 0.8, 6000), Lognormal(200, 0.8, 1024))
CHIPS = setup("llama-3-8b", "a100-80gb")
SUSTAINED = "sustained"
ENOUGH = (
    "a larger budget can only save host time (checked: a step of 2,048 tokens takes 150 ms to compute and "
    "11 ms on the host)"
)


class Latency(NamedTuple):
    """Seconds."""

    ttft: float
    itl: float


def measure(chunked: bool | str, budget: int) -> Latency | float:
    """A trace of long prompts; or requests a second with chunked prefill when the queue never empties."""
    options: dict[str, Any] = {"enable_chunked_prefill": bool(chunked), "max_num_batched_tokens": budget}
    if chunked == SUSTAINED:
        return capacity(paged(CHIPS, **options), WORKLOAD, 400, 800)
    run = on_trace(paged(CHIPS, max_num_seqs=min(256, budget), **options), WORKLOAD, RATE, SECONDS)
    return Latency(run.quantile(time_to_first_token, 0.5), run.gap_quantile(0.99))


def conclude(results: dict[tuple[bool | str, int], Any]) -> Outcome:
    """The statements of the source as ratios, and both latencies along the budget."""
    small, default, large = (results[True, budget] for budget in (512, 2048, 8192))
    first = results[False, 8192]
    rate = {budget: results[SUSTAINED, budget] for budget in (512, 2048, 8192)}
    more, less, same = (1.0, None), (None, 1.0), (0.8, 1.25)
    rows = [
        ("ITL p99, budget 2048 over 512 (smaller is better for ITL)", more, default.itl, small.itl),
        ("TTFT median, budget 8192 over 512 (larger is better for TTFT)", less, large.ttft, small.ttft),
        ("sustained rate, budget 2048 over 512", more, rate[2048], rate[512]),
        ("sustained rate, budget 8192 over 2048 (above 2048 for throughput)", more, rate[8192], rate[2048]),
        ("ITL p99, prefills first over chunked with 2048", more, first.itl, default.itl),
        ("TTFT median, prefills first over chunked with 2048", less, first.ttft, default.ttft),
        (
            "TTFT median, budget = max_model_len over prefills first (almost the same)",
            same,
            large.ttft,
            first.ttft,
        ),
    ]
    claims, panels = [], []
    for text, paper, ours, base in rows:
        note = ENOUGH if "8192 over 2048" in text else ""
        claims.append(Claim(text, "optimization and tuning", paper, ours / base, "x", note, "words"))
    fields = {"ttft": "time to first token, median", "itl": "inter-token latency, 99th percentile"}
    for field, title in fields.items():
        along = [1e3 * getattr(results[True, budget], field) for budget in BUDGETS]
        flat = [1e3 * getattr(first, field)] * len(BUDGETS)
        curves = [Curve("chunked", list(BUDGETS), along), Curve("prefills first", list(BUDGETS), flat)]
        axes = ("max_num_batched_tokens", f"{title.split(',')[0]} [ms]")
        panels.append(Panel(title, *axes, curves, x_scale="log2", y_scale="log"))
    return claims, panels


EXPERIMENT = Experiment(
    "chunked_prefill",
    "Chunked prefill",
    "vLLM, optimization and tuning (of the V0 engine, early 2025)",
    "We simulate Llama-3-8B on an A100 80 GB with 5 requests per second for 2 min. Prompts have 1,000 "
    "tokens and outputs 200 on average. The source gives no numbers, so we read its statements as ratios "
    "above or below 1.",
    grid(measure, [False], [8192])
    | grid(measure, [True], BUDGETS)
    | grid(measure, [SUSTAINED], [512, 2048, 8192]),
    conclude,
)
