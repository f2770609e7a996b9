"""Which models are cut into stages."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from minipaged.execution.attention import UnsupportedModelError
from minipaged.execution.distributed.place import Place
from minipaged.execution.distributed.stages import Link, StandIn, keep_stage, micro_batches
from minipaged.scheduling import ScheduledSequence
from tests.models.survey import build_small

SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def stage_of(model, size=2):
    """The layers that stay on the second of so many ranks."""
    place = Place(1, 1, size)
    return keep_stage(model, place, Link(place))


def model_of(model_type, **changes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**SMALL | changes))


def test_a_stage_has_its_share_of_the_layers():
    """Catches stages that all compute everything, and as many stages as layers refused."""
    assert stage_of(model_of("llama")) == range(2, 4)
    assert stage_of(model_of("llama"), size=4) == range(1, 2)


def test_ranks_are_numbered_stage_by_stage():
    """Catches a stage without a head that computes logits, or rows sent to another shard."""
    places = [Place(rank, 2, 3) for rank in range(6)]
    assert [(place.stage, place.shard) for place in places] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert [place.rank for place in places if place.is_last_stage] == list(places[0].last_stage) == [4, 5]


@pytest.mark.parametrize(
    ("counts", "most", "parts"),
    [
        ([1] * 8, 4, [[1, 1]] * 4),
        ([5, 1, 1, 1], 4, [[5], [1], [1], [1]]),
        ([3, 3, 6], 2, [[3, 3], [6]]),
        ([1, 1, 1, 9], 2, [[1, 1, 1, 9]]),
        ([2, 2], 4, [[2], [2]]),
        ([], 4, []),
    ],
)
def test_a_step_is_cut_into_runs_of_about_as_many_tokens(counts, most, parts):
    """Catches stages that wait for one long micro-batch, and a sequence that is computed twice or never."""
    scheduled = [ScheduledSequence(None, 0, count, 1) for count in counts]
    cut = micro_batches(scheduled, most)
    assert [[item.num_tokens for item in part] for part in cut] == parts
    assert [id(item) for part in cut for item in part] == [id(item) for item in scheduled]


def test_what_stands_in_for_the_embedding_moves_with_the_model():
    """Catches rows that stay on the CPU: on a GPU, no later stage could even be probed."""
    model = build_small("llama")
    stage_of(model)
    assert model.to("meta").get_input_embeddings().rows.is_meta


def test_of_a_multimodal_model_the_decoder_is_cut():
    """Catches an AttributeError: its layers are one level deeper."""
    model = build_small("qwen2_vl")
    count = len(model.get_decoder().layers)
    assert stage_of(model) == range(count // 2, count)
    kept = [not isinstance(layer, StandIn) for layer in model.get_decoder().layers]
    assert kept == [False] * (count // 2) + [True] * (count - count // 2)


def test_a_layer_that_attends_twice_counts_twice():
    """Catches a stage that is refused because it keeps no K/V of the second half of its own layers."""
    assert stage_of(build_small("longcat_flash")) == range(4, 8)


OR_HEADS = "; use tensor_parallel_size, or 1"


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gemma4_text", {"hidden_size_per_layer_input": 8}, f"has hidden_size_per_layer_input{OR_HEADS}"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, f"has num_kv_shared_layers{OR_HEADS}"),
        ("stablelm", {}, "transformers has no plan for stages of StableLmForCausalLM; give 1"),
        ("llama4_text", {}, "transformers has no plan for stages of Llama4ForCausalLM; give 1"),
    ],
)
def test_layers_that_need_more_than_rows_are_not_cut(model_type, changes, reason):
    """Catches other tokens, without an error: a second stage has no embeddings to give its layers."""
    if model_type == "gemma4_text":
        layers = ["sliding_attention", "full_attention"] * 2
        own = {"layer_types": layers, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
        changes = own | {"vocab_size_per_layer_input": 101, "global_head_dim": 8} | changes
    with pytest.raises(UnsupportedModelError, match=reason):
        stage_of(model_of(model_type, **changes))
