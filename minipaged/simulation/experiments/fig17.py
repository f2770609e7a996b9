"""Fig. 17: a chatbot whose prompt is the whole conversation so far."""

from dataclasses import replace
from itertools import islice
from typing import Any

from minipaged.simulation.baselines.contiguous import RESERVATIONS
from minipaged.simulation.experiments.common import (
    LABELS,
    LoadCurve,
    capacity,
    grid,
    latency_panel,
    load_curve,
)
from minipaged.simulation.results import Claim, Experiment, Outcome
from minipaged.simulation.systems import OPT_13B, system
from minipaged.simulation.workloads import CHAT

ROUNDS = (1, 2)
SYSTEMS = (*RESERVATIONS, "paged")


def measure(name: str) -> LoadCurve:
    """Sustained rate, and latencies at fractions of it."""
    return load_curve(lambda: system(name, OPT_13B), CHAT, 1000, 5000, 400)


def sustained(name: str, mean_rounds: int) -> float:
    """Requests a second, with other conversations."""
    return capacity(system(name, OPT_13B), replace(CHAT, mean_rounds=mean_rounds), 500, 2500)


def full_prompts(mean_rounds: float) -> float:
    """Share of the prompts that are cut."""
    drawn = list(islice(replace(CHAT, mean_rounds=mean_rounds).lengths(0), 10_000))
    return sum(lengths.prompt == CHAT.most_prompt for lengths in drawn) / len(drawn)


def _gains(results: dict[Any, Any], rounds: int) -> str:
    gains = [results["paged", rounds] / results[name, rounds] for name in RESERVATIONS]
    return f"{min(gains):.2f} to {max(gains):.2f}"


def conclude(results: dict[Any, Any]) -> Outcome:
    """Ratios and one panel."""
    others = [f"{_gains(results, rounds)} if the average is {rounds}" for rounds in ROUNDS]
    full = [f"{100 * full_prompts(rounds):.0f} % with {rounds}" for rounds in (*ROUNDS, CHAT.mean_rounds)]
    note = (
        f"unexplained; fewer rounds give a higher ratio (checked: {', and '.join(others)}), but the paper "
        f"says that most prompts have 1024 tokens, and fewer rounds have fewer of those ({', '.join(full)} "
        "on average)"
    )
    claims = []
    for name in RESERVATIONS:
        text = f"sustained rate of paged over {LABELS[name]}"
        claims.append(Claim(text, "Fig. 17", 2.0, results["paged"][0] / results[name][0], note=note))
    curves = {LABELS[name]: results[name] for name in SYSTEMS}
    return claims, [latency_panel("chatbot, OPT-13B", curves, 0.12)]


EXPERIMENT = Experiment(
    "fig17",
    "A chatbot",
    "PagedAttention paper, Fig. 17",
    "We simulate OPT-13B on an A100 40 GB. A prompt is the last 1024 tokens of the conversation, and an "
    "output has at most 1024 tokens. Conversations have 4 rounds on average, with ShareGPT-like turns, and "
    "nothing is kept between rounds.",
    grid(measure, SYSTEMS) | grid(sustained, SYSTEMS, ROUNDS),
    conclude,
)
