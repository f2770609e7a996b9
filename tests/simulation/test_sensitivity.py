"""How figures follow what was fitted: one value moves at a time, and only figures that it reaches change."""

import re
from pathlib import Path
from statistics import fmean

import pytest

from minipaged.simulation import sensitivity as module
from minipaged.simulation.costs import CostModel
from minipaged.simulation.hardware import CONSTANTS
from minipaged.simulation.reproduce import quiet
from minipaged.simulation.sensitivity import FITTED_TO, ROWS, World, sensitivity
from minipaged.simulation.systems import OPT_13B, OPT_175B
from minipaged.simulation.workloads import ALPACA, SHAREGPT

PAGE = Path(__file__).parents[2] / "docs/reproduce/index.md"


@pytest.mark.parametrize("name", ["step_seconds", "sequence_seconds", "worker_seconds"])
def test_a_constant_moves_alone_and_reaches_the_cost_model(name):
    """Catches a factor on two constants, and one that the cost model never sees."""
    constants = World(name, 1.2).on(OPT_175B).deployment.constants
    changed = {c: getattr(constants, c) / getattr(CONSTANTS, c) for c in vars(CONSTANTS)}
    assert changed == {c: pytest.approx(1.2 if c == name else 1.0) for c in vars(CONSTANTS)}
    moved, still = (CostModel(world.on(OPT_175B).deployment) for world in (World(name, 1.2), World()))
    assert moved.host_seconds + moved.sequence_seconds > still.host_seconds + still.sequence_seconds


def test_a_spread_moves_without_the_mean():
    """Catches longer requests in the place of more varied ones."""
    world = World("sigma, ShareGPT", 1.2)
    assert world.sharegpt.output.sigma == pytest.approx(1.2 * SHAREGPT.output.sigma)
    assert world.alpaca == ALPACA
    drawn = world.sharegpt.lengths(0)
    assert fmean(next(drawn).output for _ in range(20_000)) == pytest.approx(SHAREGPT.output.mean, rel=0.02)


def test_without_a_move_the_world_is_that_of_the_experiments():
    world = World()
    assert (world.on(OPT_13B), world.sharegpt, world.alpaca) == (OPT_13B, SHAREGPT, ALPACA)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            marks=[pytest.mark.slow] if row.source == "Fig. 13 a" else [],
            id=f"{row.source} {row.figure}",
        )
        for row in ROWS
    ],
)
def test_a_fitted_value_that_is_left_out_of_a_row_cannot_change_it(row, monkeypatch):
    """Catches a gap in the table where a change would stand. Shorter runs than the table's."""
    quiet()
    real = module.saturate
    short = lambda simulation, workload, *_: real(simulation, workload, 20, 60)  # noqa: E731
    monkeypatch.setattr(module, "saturate", short)
    monkeypatch.setattr(module, "capacity", lambda s, w, *_: short(s, w).token_rate / w.output.mean)
    monkeypatch.setattr(module.growth, "SECONDS", 10.0)
    still = row.measure(World())
    assert [row.measure(World(name, 1.2)) for name in sorted(row.without)] == [still] * len(row.without)


def test_the_table_has_a_change_for_each_value_that_reaches_a_row(monkeypatch):
    """Catches a percentage of the wrong run."""
    monkeypatch.setattr(module, "run_cases", lambda cases, progress: [case() for case in cases])
    row = module.Row("f", "s", lambda world: 2.0 * world.factor, frozenset(FITTED_TO) - {"step_seconds"})
    monkeypatch.setattr(module, "ROWS", (row,))
    assert sensitivity() == [
        {"figure": "f", "source": "s", "value": 2.0, "change": {"step_seconds": [-20.0, 20.0]}}
    ]


def test_the_page_names_what_was_fitted_and_shows_how_figures_follow():
    """Catches a page that was written without the table."""
    fitted = PAGE.read_text().split("## What is fitted")[1].split("\n## ")[0]
    for name in FITTED_TO:
        assert f"| `{name}` |" in fitted
    for row in ROWS:
        assert re.search(rf"\| {re.escape(row.figure)} \| {re.escape(row.source)} \| .* / ", fitted), (
            row.figure
        )
