"""Batch invariance, model by model: a token has the same logits, bit for bit, in any step."""

from __future__ import annotations

import pytest
import torch

from minipaged.execution.accel.packed_linear import is_left_to_onednn
from minipaged.kernels.dispatch import why_not_cpp
from tests.models.driver import CUTS, Driver, logits_in_cuts
from tests.models.survey import build_small
from tests.models.zoo import SUPPORTED, build

LONG_CUTS = [*CUTS, (0, [40, 1, 1, 30]), (1, [1] * 5 + [66]), (2, [75])]

# Their routers are no linear layers, and Llama 4 multiplies all experts at once.
MIXTURES = {"mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*(name for name in SUPPORTED if name not in MIXTURES), "lfm2"])
def test_a_token_has_the_same_logits_in_any_step(name, dtype):
    """Catches sums that depend on the number of rows, and the tiles of a window that begin with a chunk."""
    if (reason := why_not_cpp(torch.device("cpu"))) or is_left_to_onednn(dtype):
        pytest.skip(reason or f"oneDNN multiplies many rows in {dtype} here")

    def driver(block_size):
        model = (build if name in SUPPORTED else build_small)(name).to(dtype)
        own = Driver(model, block_size=block_size, num_blocks=256)
        own.runner.optimize()
        own.runner.use_decode_runner()
        return own

    together, alone = logits_in_cuts(driver(4), LONG_CUTS), driver(8)
    for token_ids, logits in together:
        assert torch.equal(logits, alone.logits([(alone.add(token_ids), len(token_ids))])[0])
