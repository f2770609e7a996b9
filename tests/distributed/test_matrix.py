"""Models x features x grids of ranks: the tokens are those of one process.

Each grid starts its ranks once; they run every scenario on every model (see `matrix.py`).
"""

import json
import subprocess
import sys
from functools import cache
from itertools import product

import pytest

from tests.distributed.matrix import SCENARIOS
from tests.distributed.models import MODELS, SIZES, save_models

GRIDS = [(2, 1), (4, 1), (1, 2), (2, 2)]
FUSED = {"llama", "qwen3", "mistral_sliding", "gemma2"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Grid -> what its ranks computed."""
    folder = tmp_path_factory.mktemp("matrix")
    save_models(folder)
    return cache(lambda grid: run_ranks(folder, *grid))


def run_ranks(folder, tensor_size, pipeline_size):
    command = [sys.executable, "-m", "tests.distributed.matrix", str(folder)]
    sizes = [str(tensor_size), str(pipeline_size)]
    ranks = []
    for rank in range(tensor_size * pipeline_size):
        with (folder / f"rank{rank}.log").open("wb") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
            ranks.append(subprocess.Popen([*command, str(rank), *sizes], **pipes))
    try:
        codes = [rank.wait(timeout=280) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdin.close()
    assert not any(codes), "\n".join(
        log.read_text()[-2000:] for log, code in zip(sorted(folder.glob("*.log")), codes) if code
    )
    return json.loads((folder / f"result-{tensor_size}x{pipeline_size}.json").read_text())


@pytest.mark.parametrize(("grid", "model"), list(product(GRIDS, MODELS)))
def test_the_tokens_of_every_scenario_are_those_of_one_process(results, grid, model):
    """Catches a wrong split, sum, stage or message: it changes tokens, as the weights are large."""
    scenarios = results(grid)[model]["scenarios"]
    assert set(scenarios) == set(SCENARIOS)
    for name, (alone, preempted_alone, together, preempted) in scenarios.items():
        assert together == alone, name
        assert preempted == preempted_alone == (name in ("swap", "recompute")), name


@pytest.mark.parametrize("grid", GRIDS)
def test_a_pool_holds_its_ranks_share_of_the_heads_and_layers(results, grid):
    """Catches ranks that keep the K/V of all heads: no memory would be won."""
    tensor_size, pipeline_size = grid
    own = [SIZES["num_key_value_heads"] // tensor_size] * (SIZES["num_hidden_layers"] // pipeline_size)
    assert [results(grid)[model]["kv_heads"] for model in MODELS] == [own] * len(MODELS)


@pytest.mark.parametrize("grid", GRIDS)
def test_fused_layers_are_used_on_ranks_too(results, grid):
    """Catches layers whose fused form is refused, or drops the sum over the ranks, once they are split."""
    assert {model for model, found in results(grid).items() if found["layer"] == "FusedLayer"} == FUSED
