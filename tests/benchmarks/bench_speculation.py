"""One request, with and without drafts: a Llama of 134 million parameters, CPU time of one thread.

A large model with random weights says nothing that anybody could guess. This one says what the embedded
model says: its weights stand in one corner of larger, otherwise idle ones, and further layers add nothing.

    pytest tests/benchmarks/bench_speculation.py --benchmark-columns=min,median,rounds
"""

import random
import shutil
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minipaged import LLM, SamplingParams, StructuredOutputsParams, pocket_model
from minipaged.pocket_model import numbers, stories
from tests.benchmarks.conftest import is_asked_for
from tests.engine.drafters import SCHEMA, blurred_copy

cpu_time = {"timer": time.process_time, "warmup": False}
TEXTS = {"a story": stories.story, "questions about numbers": numbers.document}


@pytest.fixture(scope="module")
def large(tmp_path_factory, pytestconfig):
    """The embedded model's function, four times as wide: 134 million parameters. (A run of the whole suite
    measures nothing, so there it is no wider.)"""
    times = 4 if is_asked_for(pytestconfig) else 1
    small = LlamaForCausalLM.from_pretrained(pocket_model.PATH, dtype=torch.float32)
    own = small.config
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    wider = {name: times * getattr(own, name) for name in sizes}
    # (A norm divides by the mean square over all columns, most of which are 0.)
    config = own.to_dict() | wider | {"num_hidden_layers": 12, "rms_norm_eps": own.rms_norm_eps / times}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config))
    weights, given = model.state_dict(), small.state_dict()
    for name, weight in weights.items():
        corner = given.get(name)  # None in a further layer
        if weight.dim() == 1:
            if corner is not None:
                weight[: len(corner)] = corner / times**0.5
            continue
        if "layers" not in name or name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif corner is not None:
            weight[: len(corner)] = 0
        if corner is not None:
            weight[: corner.shape[0], : corner.shape[1]] = corner
    model.load_state_dict(weights)
    path = tmp_path_factory.mktemp("large")
    model.save_pretrained(path)
    for file in pocket_model.PATH.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """A model as small as the embedded one, which errs now and then."""
    return blurred_copy(tmp_path_factory.mktemp("draft"), 0.2)


@pytest.mark.benchmark(group="one request", **cpu_time)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("way", ["no drafts", "prompt lookup", "draft model"])
def bench_drafts(benchmark, large, draft, text, way):
    """192 tokens after the first quarter of a text. The tokens are the same every way."""
    options = {"no drafts": {}, "prompt lookup": {"num_speculative_tokens": 4}}.get(
        way, {"num_speculative_tokens": 4, "speculative_model": str(draft)}
    )
    llm = LLM(large, num_blocks=64, disable_log_stats=True, enable_prefix_caching=False, **options)
    whole = TEXTS[text](random.Random(3))
    params = SamplingParams(temperature=0, max_tokens=192, ignore_eos=True)

    def generate():
        llm.engine.reset_metrics()
        return llm.generate(whole[: len(whole) // 4], params)

    (output,) = benchmark.pedantic(generate, rounds=5, warmup_rounds=1)
    metrics = llm.engine.metrics
    benchmark.extra_info |= {"steps": metrics.steps, "drafted": metrics.draft_tokens}
    benchmark.extra_info["accepted"] = metrics.accepted_tokens
    assert len(output.outputs[0].token_ids) == 192


@pytest.mark.benchmark(group="one JSON object", **cpu_time)
@pytest.mark.parametrize("way", ["no drafts", "what the schema forces"])
def bench_forced(benchmark, large, way):
    """Keys of a JSON object are no choice: a step writes several tokens of them."""
    drafts = {"num_speculative_tokens": 8} if way != "no drafts" else {}
    llm = LLM(large, num_blocks=64, disable_log_stats=True, enable_prefix_caching=False, **drafts)
    params = SamplingParams(
        temperature=0, max_tokens=100, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )

    def generate():
        llm.engine.reset_metrics()
        return llm.generate("A friend of the robot: ", params)

    (output,) = benchmark.pedantic(generate, rounds=5, warmup_rounds=1)
    benchmark.extra_info |= {
        "steps": llm.engine.metrics.steps,
        "accepted": llm.engine.metrics.accepted_tokens,
    }
    assert output.outputs[0].finish_reason == "stop"
