"""Fig. 17: a chatbot whose prompt is the whole conversation so far."""

from minipaged.simulation.baselines.contiguous import RESERVATIONS
from minipaged.simulation.experiments.common import LABELS, LoadCurve, grid, latency_panel, load_curve
from minipaged.simulation.results import Claim, Experiment, Outcome
from minipaged.simulation.systems import OPT_13B, system
from minipaged.simulation.workloads import CHAT

SYSTEMS = (*RESERVATIONS, "paged")


def measure(name: str) -> LoadCurve:
    """Sustained rate, and latencies at fractions of it."""
    return load_curve(lambda: system(name, OPT_13B), CHAT, 1000, 5000, 400)


def conclude(results: dict[str, LoadCurve]) -> Outcome:
    """Ratios and one panel."""
    note = "reading 700 prompt tokens a round costs all systems alike; the paper's rounds are not published"
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
    "OPT-13B on an A100 40 GB; a prompt is the last 1024 tokens of the conversation, an output ends at 1024; "
    "conversations of 4 rounds on average with ShareGPT-like turns; nothing is kept between rounds.",
    grid(measure, SYSTEMS),
    conclude,
)
