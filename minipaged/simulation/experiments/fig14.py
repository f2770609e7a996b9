"""Fig. 14: parallel sampling and beam search, where sharing is what counts."""

from collections.abc import Callable
from functools import partial

from minipaged.simulation.experiments.common import DATA, capacity
from minipaged.simulation.measure import saturate
from minipaged.simulation.results import NOT_READ, Claim, Curve, Experiment, Outcome, Panel
from minipaged.simulation.run import MethodOf, Simulation
from minipaged.simulation.scripts import BEAM_SWITCH, ScriptedBeams, ScriptedSampling
from minipaged.simulation.systems import OPT_13B, PAPER, Setup, paged, system
from minipaged.simulation.workloads import ALPACA

WIDTHS = (2, 4, 6)
PUBLISHED = {("sampling", 1): 1.3, ("beams", 6): 2.3}
TEXT = {("sampling", 1): "one sample"} | {("sampling", n): f"{n} samples" for n in WIDTHS}
TEXT |= {("beams", n): f"beam width {n}" for n in WIDTHS}
SATURATED = (
    "the paper compares the systems at equal latency, but here both are saturated (checked: on 60 s traces, "
    "the ratio is 1.39 where both have 0.15 s/token, and 2.75 for beam width 6 where both have 0.1 s/token)"
)
FEWER = (
    "the paper compares the systems at equal latency, where the gain does grow (checked: on 60 s traces, "
    "the ratio is 1.44, 1.81 and 2.31 for 2, 4 and 6 samples where both have 0.1 s/token); at saturation, "
    "it does not"
)


def sampling(n: int) -> MethodOf:
    """n samples a request."""
    return lambda arrival: ScriptedSampling(arrival.lengths.output, n)


def beams(width: int, switch: float = BEAM_SWITCH) -> MethodOf:
    """Beam search; the ancestry of a request depends on its number alone."""
    return lambda arrival: ScriptedBeams(arrival.lengths.output, width, arrival.number, switch)


METHODS: dict[str, Callable[[int], MethodOf]] = {"sampling": sampling, "beams": beams}


def build(name: str, method_of: MethodOf, n: int, setup: Setup = OPT_13B, usage_every: int = 0) -> Simulation:
    """A system for requests of n sequences.

    vLLM's code of the time counted requests, not sequences, against its limit (issue #257), so that memory
    limited wide beams; and it could not recompute several sequences, so it swapped them.
    """
    if name != "paged":
        return system(name, setup, method_of=method_of, usage_every=usage_every)
    options = {"max_num_seqs": n * PAPER["max_num_seqs"]} | ({"preemption_mode": "swap"} if n > 1 else {})
    return paged(setup, method_of=method_of, usage_every=usage_every, **options)


def sustained(name: str, method: str, n: int) -> float:
    """Requests a second."""
    return capacity(build(name, METHODS[method](n), n), ALPACA, 1000, 5000)


def shared(data: str, method: str, n: int) -> float:
    """Share of block-table entries that need no block of their own (Fig. 15)."""
    simulation = build("paged", METHODS[method](n), n, usage_every=10)
    warm_up, steps = (300, 1000) if data == "alpaca" else (600, 1500)
    return saturate(simulation, DATA[data], warm_up, steps).usage.shared


def conclude(results: dict[tuple[str, str, int], float]) -> Outcome:
    """Ratios by width."""
    ratio = {key: results["paged", *key] / results["orca-oracle", *key] for key in TEXT}
    claims = []
    for key, text in TEXT.items():
        claim = f"sustained rate of paged over Orca (Oracle), {text}"
        note, reading = (SATURATED, "") if key in PUBLISHED else ("", NOT_READ)
        claims.append(Claim(claim, "Fig. 14", PUBLISHED.get(key), ratio[key], "x", note, reading))
    for method in METHODS:
        gain = ratio[method, 6] / ratio[method, 2]
        text = f"sustained rate of paged over Orca (Oracle), {TEXT[method, 6]} over {TEXT[method, 2]}"
        note = FEWER if method == "sampling" else ""
        claims.append(Claim(text, "Fig. 14", (1, None), gain, "x", note, "words"))
    curves = [
        Curve("parallel sampling", [1, *WIDTHS], [ratio["sampling", n] for n in (1, *WIDTHS)]),
        Curve("beam search", list(WIDTHS), [ratio["beams", n] for n in WIDTHS]),
        *(
            Curve(f"published, {TEXT[key]}", [key[1]], [paper], published=True)
            for key, paper in PUBLISHED.items()
        ),
    ]
    panel = Panel("paged over Orca (Oracle)", "samples or beam width", "ratio of sustained rates", curves)
    return claims, [panel]


EXPERIMENT = Experiment(
    "fig14",
    "Parallel sampling and beam search",
    "PagedAttention paper, Fig. 14",
    "We simulate OPT-13B on an A100 40 GB with Alpaca-like lengths and a queue that never empties. Forks "
    "and copy-on-write are real, but beams continue at random: each one draws a random parent with "
    "probability 0.08. As in vLLM's code of the time, requests of several sequences are swapped when they "
    "are preempted, and the limit of 256 counts requests, not sequences (its issue #257).",
    {(name, *key): partial(sustained, name, *key) for name in ("paged", "orca-oracle") for key in TEXT},
    conclude,
)
