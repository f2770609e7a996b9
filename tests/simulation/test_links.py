"""Tensor and pipeline parallel by the link: the cost of a pipeline, and the table of the documentation."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minipaged.simulation.costs import CostModel
from minipaged.simulation.links import LINKS, PipelineCosts, linked, table
from tests.simulation.test_costs import plan_of

FAST, SLOW = LINKS[0], LINKS[-1]
PAGE = Path(__file__).parents[2] / "docs/guides/distributed.md"


def pipeline(link, num_chips):
    return PipelineCosts(linked(link, num_chips, "llama-3-8b"), link)


def test_a_link_has_its_own_bandwidth_and_latency():
    """Catches NVLink under the name of a network: an all-reduce among 4 takes 6 messages in turn."""
    deployment = linked(SLOW, 4, "llama-3-8b")
    assert deployment.chip.peer_link == 1.25e9
    assert deployment.constants.all_reduce_seconds == pytest.approx(6 * 50e-6)


@pytest.mark.parametrize(
    "plan", [plan_of(*[(100, 1)] * 8), plan_of(*[(0, 500)]), plan_of(*[(0, 64), (900, 1)])]
)
def test_a_pipeline_of_one_stage_is_one_chip(plan):
    """Catches a cost that is counted twice, or another roofline than everywhere else."""
    seconds = pipeline(FAST, 1).step_seconds(plan)
    assert seconds == pytest.approx(CostModel(linked(FAST, 1, "llama-3-8b")).step_seconds(plan), rel=0.01)


def test_a_sequence_alone_passes_all_stages_one_after_the_other():
    """Catches a pipeline that speeds up a single request."""
    plan = plan_of(*[(1000, 1)])
    one, four = (pipeline(FAST, stages).step_seconds(plan) for stages in (1, 4))
    assert one < four < 1.01 * one


def test_micro_batches_fill_the_stages_of_a_prefill():
    """Catches stages that wait for each other: 4 micro-batches on 4 stages take 7/16 of the time."""
    plan = plan_of(*[(0, 2048)] * 4)
    one, four = (pipeline(FAST, stages) for stages in (1, 4))
    host = one.whole.host_seconds + 4 * one.whole.sequence_seconds
    ratio = (four.step_seconds(plan) - host) / (one.step_seconds(plan) - host)
    assert ratio == pytest.approx(7 / 16, rel=0.05)


def test_a_decode_is_not_cut_where_reading_the_weights_again_costs_more():
    """Catches weights that are read once for all micro-batches of a stage."""
    plan = plan_of(*[(10, 1)] * 4)
    two = pipeline(FAST, 2)
    assert two.step_seconds(plan) == two._cut(plan, 1) < two._cut(plan, 2)


def test_a_slow_link_costs_tensor_parallel_more_than_a_pipeline():
    """Catches a link that is forgotten on one of the two sides."""
    plan = plan_of(*[(1000, 1)] * 32)
    tensor = [CostModel(linked(link, 4, "llama-3-8b")).step_seconds(plan) for link in (FAST, SLOW)]
    staged = [pipeline(link, 4).step_seconds(plan) for link in (FAST, SLOW)]
    assert 0 < staged[1] - staged[0] < 0.1 * (tensor[1] - tensor[0])
    slower = replace(FAST, latency=1.0)
    assert pipeline(slower, 4).step_seconds(plan) - staged[0] == pytest.approx(3, rel=0.01)


def test_the_command_of_the_documentation_gives_the_first_number_of_its_table():
    """Catches a table with other constants than the command that is recommended for other loads."""
    text = PAGE.read_text()
    command = re.search(r"^minipaged simulate .*", text, re.MULTILINE)[0]
    ran = subprocess.run([sys.executable, "-m", *command.split(), "--json"], capture_output=True, check=True)
    assert f"| {LINKS[0].name} | {json.loads(ran.stdout)['token_rate']:,.0f} |" in text


@pytest.mark.slow
def test_the_table_of_the_documentation_is_what_the_command_prints():
    """Catches figures from before a change of the cost model."""
    assert PAGE.read_text().partition("<!-- links -->\n\n")[2].partition("\n\n<!--")[0] == table()
