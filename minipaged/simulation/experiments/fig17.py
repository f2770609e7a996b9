"""Fig. 17: a chatbot whose prompt is the whole conversation so far."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from minipaged.simulation.experiments.common import LABELS, ORCAS
from minipaged.simulation.measure import on_trace, saturate
from minipaged.simulation.results import Case, Claim, Curve, Experiment, Outcome, Panel
from minipaged.simulation.systems import OPT_13B, system
from minipaged.simulation.workloads import CHAT

SYSTEMS = (*ORCAS, "paged")


def measure(name: str) -> tuple[float, list[tuple[float, float]]]:
    """Sustained rate, and latencies at fractions of it."""
    rate = saturate(system(name, OPT_13B), CHAT, 1000, 5000).token_rate / CHAT.turn.output.mean
    rates = [f * rate for f in (0.4, 0.7, 0.9, 1.0, 1.1)]
    return rate, [(r, on_trace(system(name, OPT_13B), CHAT, r, 400).normalized_latency) for r in rates]


def cases() -> dict[str, Case]:
    """One a system."""
    return {name: partial(measure, name) for name in SYSTEMS}


def conclude(results: Mapping[str, tuple[float, list[tuple[float, float]]]]) -> Outcome:
    """Ratios and one panel."""
    note = "reading 700 prompt tokens a round costs all systems alike; the paper's rounds are not published"
    claims = [
        Claim(
            f"sustained rate of paged over {LABELS[name]}",
            "Fig. 17",
            2.0,
            results["paged"][0] / results[name][0],
            "x",
            note,
        )
        for name in ORCAS
    ]
    curves = [Curve(LABELS[n], [x for x, _ in results[n][1]], [y for _, y in results[n][1]]) for n in SYSTEMS]
    axes = ("request rate [req/s]", "normalized latency [s/token]")
    return Outcome(claims, [Panel("chatbot, OPT-13B", *axes, curves, y_limit=0.12)])


EXPERIMENT = Experiment(
    "fig17",
    "A chatbot",
    "PagedAttention paper, Fig. 17",
    "OPT-13B on an A100 40 GB; a prompt is the last 1024 tokens of the conversation, an output ends at 1024; "
    "conversations of 4 rounds on average with ShareGPT-like turns; nothing is kept between rounds.",
    cases,
    conclude,
)
