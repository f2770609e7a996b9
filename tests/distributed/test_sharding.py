"""Which part of each weight a rank keeps: what all ranks compute together is what one computes alone."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from threading import Barrier

import pytest
import torch

from minipaged.execution.distributed.sharding import fingerprint, split_weights, sum_over_ranks
from tests.models.zoo import build

SIZE = 2


@pytest.mark.parametrize(
    ("name", "changes"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("mixtral", {})],
    ids=["biases", "experts"],
)
def test_the_logits_of_all_ranks_are_those_of_one(name, changes):
    """Catches a rank with its neighbour's heads, halves in the wrong order, a bias added by every rank."""
    model, prompt = build(name, **changes), torch.arange(3, 12)[None]
    partial, barrier = [torch.empty(0)] * SIZE, Barrier(SIZE, timeout=60)

    def logits_of(rank):
        shard = deepcopy(model)
        split = split_weights(shard, rank, SIZE)

        def add_up(output):
            partial[rank] = output.clone()
            barrier.wait()
            output.copy_(sum(partial))
            barrier.wait()

        sum_over_ranks(shard, split.partial, add_up)
        first, end = split.logits[rank]
        return shard(prompt).logits[..., : end - first]

    with torch.no_grad(), ThreadPoolExecutor(SIZE) as pool:
        logits = torch.cat(list(pool.map(logits_of, range(SIZE))), dim=-1)
    torch.testing.assert_close(logits, model(prompt).logits, atol=1e-4, rtol=1e-4)


def test_a_fingerprint_tells_any_weight():
    """Catches ranks that compute with other weights: one sign, or the same numbers under another name."""
    model, other = build("llama"), build("llama")
    assert fingerprint(model) == fingerprint(other)
    weight = other.model.layers[1].mlp.up_proj.weight
    weight.data[0, 0] *= -1
    assert fingerprint(model) != fingerprint(other)
