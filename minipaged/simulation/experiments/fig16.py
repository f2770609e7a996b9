"""Fig. 16: translation behind a shared prefix of examples."""

from dataclasses import replace

from minipaged.simulation.experiments.common import LoadCurve, grid, latency_panel, load_curve
from minipaged.simulation.results import Claim, Experiment, Outcome
from minipaged.simulation.run import Simulation
from minipaged.simulation.systems import LLAMA_13B, Setup, paged, system
from minipaged.simulation.workloads import TRANSLATION

PUBLISHED = {80: 1.67, 341: 3.58}
SHOTS = {80: "1 example", 341: "5 examples"}
APART = (
    "unexplained, except that prompts get steps of their own here (checked: if they share a step with "
    "decodes in both systems, the ratios are 1.87 for 80 and 3.13 for 341 tokens)"
)
LABELS = {"shared": "paged, prefix shared", "paged": "paged, nothing shared", "orca-oracle": "Orca (Oracle)"}


def build(name: str, setup: Setup = LLAMA_13B) -> Simulation:
    """The paged system with its prefix cache, without it, or Orca Oracle."""
    if name == "orca-oracle":
        return system(name, setup)
    return paged(setup, enable_prefix_caching=name == "shared")


def measure(name: str, prefix: int) -> LoadCurve:
    """Sustained rate, and latencies at fractions of it."""
    return load_curve(lambda: build(name), replace(TRANSLATION, prefix_tokens=prefix), 400, 1600, 30)


def conclude(results: dict[tuple[str, int], LoadCurve]) -> Outcome:
    """Ratios and latency curves."""
    claims, panels = [], []
    for prefix, paper in PUBLISHED.items():
        base = results["orca-oracle", prefix][0]
        for name, known in (("shared", paper), ("paged", None)):
            text = f"sustained rate over Orca (Oracle), prefix of {prefix} tokens, {LABELS[name]}"
            note = APART if known else ""
            claims.append(Claim(text, "Fig. 16", known, results[name, prefix][0] / base, "x", note))
        curves = {label: results[name, prefix] for name, label in LABELS.items()}
        panels.append(latency_panel(f"{SHOTS[prefix]}, {prefix} tokens", curves, 0.2))
    return claims, panels


EXPERIMENT = Experiment(
    "fig16",
    "A shared prefix",
    "PagedAttention paper, Fig. 16",
    "We simulate LLaMA-13B on an A100 40 GB, with English sentences to translate into German after a prefix "
    "of 1 or 5 examples. The figure does not give sentence lengths; we assume 40 tokens in and 50 out on "
    "average. Only full blocks of the prefix are shared; the paper's system also shares the last, partly "
    "filled one, and copies it on write.",
    grid(measure, LABELS, PUBLISHED),
    conclude,
)
