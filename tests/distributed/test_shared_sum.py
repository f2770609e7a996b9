"""Sums through shared memory, with threads as ranks and a barrier as their connection."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minipaged.config import EngineConfig
from minipaged.execution.distributed import shared_sum
from minipaged.execution.distributed.place import Place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tensor_size", "pipeline_size"), [(2, 1), (3, 1), (2, 2)])
def test_every_rank_gets_the_sum_over_its_stage(tmp_path, monkeypatch, tensor_size, pipeline_size, dtype):
    """Catches a slot overwritten before all have read it, a piece left out, and stages that mix."""
    monkeypatch.setattr(shared_sum, "SLOT", 64)
    monkeypatch.setattr(shared_sum.dist, "all_reduce", lambda _, group: group.wait())
    config = EngineConfig(tensor_parallel_size=tensor_size, pipeline_parallel_size=pipeline_size)
    places = [Place.of(rank, config) for rank in range(tensor_size * pipeline_size)]
    shapes = [(1, 3), (5, 16), (1, 16), (2, 8), (7, 33)] * 6
    partials = [
        [torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(place.rank)) for shape in shapes]
        for place in places
    ]
    path = tmp_path / "shared"
    shared_sum.make_shared_file(path, places[0])
    barriers = [threading.Barrier(tensor_size, timeout=60) for _ in range(pipeline_size)]

    def rank_main(place):
        add_up = shared_sum.SharedSum(path, place, barriers[place.stage])
        source, sums = random.Random(place.rank), []
        for partial in partials[place.rank]:
            time.sleep(source.choice((0, 0, 0.002)))
            sums.append(partial.to(dtype))
            add_up(sums[-1])
        return sums

    with ThreadPoolExecutor(len(places)) as pool:
        results = list(pool.map(rank_main, places))
    for place, sums in zip(places, results):
        stage = [partials[other.rank] for other in places if other.stage == place.stage]
        for number, found in enumerate(sums):
            assert torch.equal(found, sum(parts[number] for parts in stage).to(dtype)), number
