"""A rank that runs every scenario on every model: `python -m tests.distributed.matrix FOLDER RANK TP PP`.

Rank 0 computes the same requests on one process first and writes `FOLDER/result-TPxPP.json`:
model -> scenario -> [tokens of one process, tokens of the ranks, whether something was preempted].
"""

import json
import random
import sys
import threading
from array import array
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from minipaged import pocket_model
from minipaged.config import EngineConfig
from minipaged.decoding.params import BeamSearchParams, SamplingParams
from minipaged.decoding.structured import StructuredOutputsParams
from minipaged.engine import Engine
from minipaged.execution.distributed.group import Group, one_machine
from minipaged.execution.distributed.message import PlanDecoder
from minipaged.execution.distributed.place import Place
from minipaged.execution.distributed.runner import RankRunner
from minipaged.execution.loading import load_tokenizer
from minipaged.execution.model_runner import ModelRunner
from tests.distributed.models import EOS, MODELS

POOL = {"block_size": 4, "num_blocks": 48, "disable_log_stats": True, "max_num_seqs": 12}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SCENARIOS = {
    "chunked prefill, prefix caching": ({"max_num_batched_tokens": 16}, [GREEDY] * 5),
    "prefill first, no prefix caching": (
        {"enable_chunked_prefill": False, "enable_prefix_caching": False},
        [GREEDY] * 5,
    ),
    "swap": ({"preemption_mode": "swap"}, [GREEDY] * 14),
    "recompute": ({"preemption_mode": "recompute"}, [GREEDY] * 14),
    "n": ({}, [SamplingParams(temperature=1, n=3, seed=5, max_tokens=10, ignore_eos=True)] * 3),
    "drafts": ({"num_speculative_tokens": 3}, [replace(GREEDY, max_tokens=40)] * 3),
    "beams": ({}, [BeamSearchParams(beam_width=3, max_tokens=8), GREEDY] * 2),
    "structured": (
        {},
        [
            SamplingParams(
                max_tokens=16, seed=3, structured_outputs=StructuredOutputsParams(regex="(ab|cd)+[0-9]{3}")
            )
        ],
    ),
    "log-probabilities": (
        {"max_num_batched_tokens": 16},
        [SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2)] * 2,
    ),
}


def requests(params, tokenizer):
    source = random.Random(1)
    shared = [source.randrange(3, 2000) for _ in range(11)]
    for number, own in enumerate(params):
        prompt = shared[: number * 3] + [source.randrange(3, 2000) for _ in range(3 + 2 * (number % 7))]
        if isinstance(own, SamplingParams):
            own = own.compile(tokenizer, (EOS,))
        yield str(number), prompt, own


def run(executor, tokenizer):
    """Scenario -> [what came out, whether something was preempted]."""
    results = {}
    for name, (options, params) in SCENARIOS.items():
        engine = Engine(executor, EngineConfig(**POOL, **options), tokenizer)
        added = [engine.add_request(*request) for request in requests(params, tokenizer)]
        while engine.has_unfinished:
            engine.step()
            engine.check_invariants()
        found = []
        for request in added:
            output = engine.output(request)
            assert output.error is None, output.error
            found += [list(completion.token_ids) for completion in output.outputs]
            if params[0].prompt_logprobs:
                found += rounded(output.prompt_logprobs), rounded(output.outputs[0].logprobs)
        results[name] = found, engine.metrics.num_preemptions > 0
    return results


def rounded(entries):
    return [
        entry and {str(token): round(found.logprob, 3) for token, found in entry.items()} for entry in entries
    ]


def main(folder, rank, tensor_size, pipeline_size):
    torch.set_num_threads(1)
    sizes = {"tensor_parallel_size": tensor_size, "pipeline_parallel_size": pipeline_size}
    config, alone = EngineConfig(**POOL, **sizes), EngineConfig(**POOL)
    place = Place.of(rank, config)
    store = dist.FileStore(str(folder / f"store-{tensor_size}x{pipeline_size}"), place.size)
    with one_machine():
        group = Group(place, store, torch.device("cpu"), folder / f"shared-{tensor_size}x{pipeline_size}")
    tokenizer = load_tokenizer(str(pocket_model.PATH), EngineConfig())
    results = {}
    for model in MODELS:
        runner = RankRunner(str(folder / model), config, place, torch.device("cpu"))
        runner.connect(group)
        if rank > 0:
            runner.follow(PlanDecoder(runner.block_size))
            continue
        many = run(runner, tokenizer)
        group.send(array("i"))
        one = run(ModelRunner.load(str(folder / model), alone), tokenizer)
        specs = [spec for spec, _, _ in runner.cache.pools.values()]
        results[model] = {
            "scenarios": {name: [*one[name], *many[name]] for name in SCENARIOS},
            "kv_heads": [spec.num_kv_heads for spec in specs],
            "layer": type(runner.model.model.layers[0]).__name__,
        }
    if rank == 0:
        (folder / f"result-{tensor_size}x{pipeline_size}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    threading.Thread(target=lambda: (sys.stdin.read(), sys.exit()), daemon=True).start()
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
