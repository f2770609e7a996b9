"""How figures depend on the values fitted to them: each value 20 % lower and 20 % higher, one at a time.

A figure's agreement with the paper is weak evidence if it depends on a value that was fitted to it.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

from minipaged.simulation.experiments import fig14, fig16, growth
from minipaged.simulation.experiments.common import capacity
from minipaged.simulation.hardware import CONSTANTS, Constants
from minipaged.simulation.measure import on_trace, saturate
from minipaged.simulation.reproduce import run_cases
from minipaged.simulation.run import MethodOf, Simulation
from minipaged.simulation.scripts import BEAM_SWITCH
from minipaged.simulation.systems import LLAMA_13B, OPT_13B, OPT_175B, Setup, system
from minipaged.simulation.workloads import ALPACA, CHAT, SHAREGPT, TRANSLATION, Independent

FITTED_TO = {
    "step_seconds": "Fig. 12 a",
    "sequence_seconds": "Fig. 14 and 16",
    "worker_seconds": "Fig. 12 c",
    "BEAM_SWITCH": "Fig. 15",
    "sigma, ShareGPT": "Fig. 2 and 13 a",
    "sigma, Alpaca": "Fig. 15",
}
"""The fitted values, and the figures that they were fitted to."""

MOVES = (0.8, 1.2)


@dataclass(frozen=True)
class World:
    """The simulation with one of the fitted values times a factor."""

    moved: str = ""
    factor: float = 1.0

    def _of(self, name: str) -> float:
        return self.factor if name == self.moved else 1.0

    def on(self, setup: Setup) -> Setup:
        """A set-up with these constants."""
        constants = {c.name: self._of(c.name) * getattr(CONSTANTS, c.name) for c in fields(Constants)}
        return replace(setup, deployment=replace(setup.deployment, constants=Constants(**constants)))

    def spread(self, lengths: Independent, name: str) -> Independent:
        """Lengths with another spread of prompts and outputs and the same means."""
        factor = self._of(f"sigma, {name}")
        prompt, output = (replace(d, sigma=factor * d.sigma) for d in (lengths.prompt, lengths.output))
        return replace(lengths, prompt=prompt, output=output)

    @property
    def sharegpt(self) -> Independent:
        """Lengths of ShareGPT."""
        return self.spread(SHAREGPT, "ShareGPT")

    @property
    def alpaca(self) -> Independent:
        """Lengths of Alpaca."""
        return self.spread(ALPACA, "Alpaca")

    def beams(self, width: int) -> MethodOf:
        """Beam search."""
        return fig14.beams(width, self._of("BEAM_SWITCH") * BEAM_SWITCH)


def token_states(world: World) -> float:
    """Fig. 2."""
    simulation = system("orca-oracle", world.on(OPT_13B), usage_every=5)
    return 100 * saturate(simulation, world.sharegpt, 1000, 4000).usage.tokens


def rate(name: str, world: World) -> float:
    """Fig. 12 a."""
    return capacity(system(name, world.on(OPT_13B)), world.sharegpt, 1000, 4000)


def gain(setup: Setup, world: World) -> float:
    """Fig. 12 a and c."""
    return _over_oracle(lambda name: system(name, world.on(setup)), world.sharegpt, 1000, 3000)


def batched(world: World) -> float:
    """Fig. 13 a."""
    simulation = system("paged", world.on(OPT_13B), usage_every=5)
    return on_trace(simulation, world.sharegpt, 2.0, 600).usage.requests


def beams(world: World) -> float:
    """Fig. 14."""
    method = world.beams(6)
    return _over_oracle(
        lambda name: fig14.build(name, method, 6, world.on(OPT_13B)), world.alpaca, 1000, 5000
    )


def shared(method: str, world: World) -> float:
    """Fig. 15."""
    method_of = world.beams(4) if method == "beams" else fig14.sampling(4)
    simulation = fig14.build("paged", method_of, 4, world.on(OPT_13B), usage_every=10)
    return 100 * saturate(simulation, world.alpaca, 300, 1000).usage.shared


def prefix(world: World) -> float:
    """Fig. 16."""
    setup, workload = world.on(LLAMA_13B), replace(TRANSLATION, prefix_tokens=341)
    return _over_oracle(lambda name: fig16.build(name, setup), workload, 400, 1600, "shared")


def chat(world: World) -> float:
    """Fig. 17."""
    workload = replace(CHAT, turn=world.sharegpt)
    return _over_oracle(lambda name: system(name, world.on(OPT_13B)), workload, 1000, 5000)


def finished(world: World) -> float:
    """The table of dynamic page growth."""
    prompts = replace(growth.WORKLOAD, prompt=world.sharegpt.prompt)
    grow, reserve = (
        growth.load(name, world.on(growth.CHIPS), prompts)["finished"]
        for name in ("grow by 16", "reserve all")
    )
    return grow / reserve


def _over_oracle(
    build: Callable[[str], Simulation], workload: Any, warm_up: int, steps: int, name: str = "paged"
) -> float:
    ours, theirs = (capacity(build(which), workload, warm_up, steps) for which in (name, "orca-oracle"))
    return ours / theirs


class Row(NamedTuple):
    """A figure, how it is measured (shorter than for its claim), and which fitted values cannot change it."""

    figure: str
    source: str
    measure: Callable[[World], float]
    without: frozenset[str]

    @property
    def names(self) -> list[str]:
        """The fitted values that may change it."""
        return [name for name in FITTED_TO if name not in self.without]


_SHAREGPT = frozenset({"worker_seconds", "BEAM_SWITCH", "sigma, Alpaca"})
_SEVERAL = _SHAREGPT - {"worker_seconds"}
_ALPACA = frozenset({"worker_seconds", "sigma, ShareGPT"})
_SAMPLES = _ALPACA | {"BEAM_SWITCH"}
ROWS = (
    Row("token states, Orca (Oracle) [%]", "Fig. 2", token_states, _SHAREGPT),
    Row("sustained rate, Orca (Max) [req/s]", "Fig. 12 a", partial(rate, "orca-max"), _SHAREGPT),
    Row("sustained rate, paged [req/s]", "Fig. 12 a", partial(rate, "paged"), _SHAREGPT),
    Row("paged over Orca (Oracle), OPT-13B", "Fig. 12 a", partial(gain, OPT_13B), _SHAREGPT),
    Row("paged over Orca (Oracle), OPT-175B", "Fig. 12 c", partial(gain, OPT_175B), _SEVERAL),
    Row("batched requests, paged", "Fig. 13 a", batched, _SHAREGPT),
    Row("paged over Orca (Oracle), beam width 6", "Fig. 14", beams, _ALPACA),
    Row("blocks saved, 4 samples [%]", "Fig. 15", partial(shared, "sampling"), _SAMPLES),
    Row("blocks saved, beam width 4 [%]", "Fig. 15", partial(shared, "beams"), _ALPACA),
    Row("prefix of 341 tokens, over Orca (Oracle)", "Fig. 16", prefix, _ALPACA | _SHAREGPT),
    Row("chatbot, paged over Orca (Oracle)", "Fig. 17", chat, _SHAREGPT),
    Row("requests finished, growing over reserving", growth.SOURCE, finished, _SHAREGPT),
)  # fmt: skip


def sensitivity(progress: Callable[[int, int], None] = lambda done, total: None) -> list[dict[str, Any]]:
    """A JSON-able dict for each row: its value, and by fitted value the changes in percent."""
    keys = [(row, World()) for row in ROWS]
    keys += [(row, World(name, factor)) for row in ROWS for name in row.names for factor in MOVES]
    answers = run_cases([partial(row.measure, world) for row, world in keys], progress)
    value = dict(zip(keys, answers))

    def change(row: Row, world: World) -> float:
        return round(100 * (value[row, world] / value[row, World()] - 1), 1)

    return [
        {
            "figure": row.figure,
            "source": row.source,
            "value": value[row, World()],
            "change": {name: [change(row, World(name, factor)) for factor in MOVES] for name in row.names},
        }
        for row in ROWS
    ]
