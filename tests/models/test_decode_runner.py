"""Decodes in one call: the same numbers as layer by layer; every other step goes the long way."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from minipaged.kernels.cpp.build import DTYPES
from minipaged.kernels.dispatch import why_not_cpp

if missing := why_not_cpp(torch.device("cpu")):
    pytest.skip(missing, allow_module_level=True)

from minipaged import LLM, SamplingParams
from minipaged.execution.accel.decode_runner import FEWEST_POSITIONS
from minipaged.execution.accel.packed_linear import is_left_to_onednn
from minipaged.kernels.reference.attention import paged_attention
from tests.models.driver import Driver, random_tokens
from tests.models.zoo import FUSED, VOCAB_SIZE, build
from tests.slow import slow_but

LENGTHS = (9, 1, 4, 30)
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


def driver_of(model: torch.nn.Module, in_one_call: bool, **settings) -> Driver:
    driver = Driver(model, attention_backend="cpp", **{"num_blocks": 128, **settings})
    driver.runner.optimize()
    if in_one_call:
        driver.runner.use_decode_runner()
        assert driver.runner.decode_runner is not None
    return driver


def make_driver(
    name: str, in_one_call: bool, dtype=torch.float32, vocab_size: int = VOCAB_SIZE, **settings
) -> Driver:
    torch.manual_seed(1)
    model = build(name, **SHAPE, vocab_size=vocab_size).to(dtype)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            parameter.data.normal_()
    return driver_of(model, in_one_call, **settings)


def decode_logits(driver: Driver, num_steps: int = 3) -> list[torch.Tensor]:
    """Of steps with one token of each sequence, prompts of `LENGTHS`."""
    sequences = [driver.add(random_tokens(length, 101, seed=length)) for length in LENGTHS]
    driver.execute([(sequence, sequence.num_uncomputed_tokens) for sequence in sequences])
    found = []
    for _ in range(num_steps):
        found.append(torch.cat(driver.logits([(sequence, 1) for sequence in sequences])))
        for sequence, row in zip(sequences, found[-1]):
            sequence.token_ids.append(int(row.argmax()))
    return found


needs_panels = pytest.mark.skipif(is_left_to_onednn(torch.float32), reason="oneDNN multiplies float32 here")
FORMATS = ["int8", "int4", "w8a8", pytest.param("none", marks=needs_panels)]


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("dtype", slow_but(DTYPES[:2], DTYPES))
@pytest.mark.parametrize("name", FUSED)
def test_one_call_computes_what_its_layers_do(name, dtype, quantization):
    """Catches another order of kernels, other rounding, a bias or a norm left out, K/V of the wrong heads."""
    one, many = (make_driver(name, switch, dtype, quantization=quantization) for switch in (True, False))
    for actual, expected in zip(decode_logits(one), decode_logits(many), strict=True):
        assert torch.equal(actual, expected)
    pools = zip(one.runner.cache.pools.values(), many.runner.cache.pools.values(), strict=True)
    for (_, *actual_pools), (_, *expected_pools) in pools:
        for actual, expected in zip(actual_pools, expected_pools):
            assert torch.equal(actual.nan_to_num(9), expected.nan_to_num(9))


def test_the_text_part_of_a_model_that_takes_images_decodes_in_one_call():
    """Catches Gemma 3 from 4 billion weights on left behind: its decoder lies one level deeper."""
    text = {**SHAPE, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {
        "vocab_size": VOCAB_SIZE,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    found = []
    for in_one_call in (True, False):
        torch.manual_seed(1)
        model = Gemma3ForConditionalGeneration(config).eval()
        driver = driver_of(model, in_one_call, quantization="int8")
        found.append(torch.cat(decode_logits(driver)))
    assert torch.equal(*found)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
}


@pytest.mark.parametrize("rope", ROPES)
def test_positions_up_to_the_longest_and_beyond_the_first_table(rope):
    """Catches angles of other positions: at the end of the table, beyond it, of another sequence, or of
    a longer sequence than there can be, for which this kind of rotation changes."""
    longest = {"dynamic": 64}.get(rope, 4096)
    found = []
    for in_one_call in (True, False):
        model = build("llama", **SHAPE, rope_parameters=ROPES[rope], max_position_embeddings=longest)
        driver = driver_of(model, in_one_call, num_blocks=512, quantization="int8", max_model_len=longest)
        lengths = min(FEWEST_POSITIONS - 1, longest - 3), 40
        sequences = [driver.add(random_tokens(n, 101, seed=n)) for n in lengths]
        for sequence in sequences:
            driver.execute([(sequence, sequence.num_uncomputed_tokens)])
            sequence.token_ids.append(7)
        for _ in range(3):
            found.append(torch.cat(driver.logits([(sequence, 1) for sequence in sequences])))
            for sequence in sequences:
                sequence.token_ids.append(8)
    for actual, expected in zip(found[:3], found[3:], strict=True):
        assert torch.equal(actual, expected)


@pytest.fixture
def noted(monkeypatch) -> list[int]:
    """The numbers of rows that went through one call."""
    from minipaged.execution.accel.decode_runner import DecodeRunner

    run, found = DecodeRunner.__call__, []

    def note(self, batch):
        found.append(batch.metadata.num_sequences)
        return run(self, batch)

    monkeypatch.setattr(DecodeRunner, "__call__", note)
    return found


@pytest.mark.parametrize("quantization", FORMATS)
def test_decodes_go_in_one_call_and_nothing_else(noted, quantization):
    """Catches a prompt taken for decodes: not every token has a row of logits."""
    driver = make_driver("llama", True, quantization=quantization, num_blocks=512)
    sequences = [driver.add(random_tokens(5, 101, seed=seed)) for seed in range(66)]
    driver.execute([(sequence, 4) for sequence in sequences])
    driver.execute([(sequence, 1) for sequence in sequences[:3]])
    driver.execute([(sequence, 1) for sequence in sequences[3:]])
    other = driver.add(random_tokens(5, 101, seed=100))
    driver.execute([(sequences[0], 1), (other, 2)])
    driver.execute([(sequences[0], 1), (other, 1)])  # a chunk of a prompt, whose logits nobody wants
    driver.execute([(sequence, 1) for sequence in sequences[1:]])
    driver.execute([(sequence, 1) for sequence in sequences])
    assert noted == [3, 63, 65, 66]


def test_an_attention_of_ones_own_is_called_again(noted):
    """Catches a student's kernel that is called for prompts alone."""
    driver, calls = make_driver("llama", True), []
    driver.runner.use_attention(lambda *args, **kwargs: calls.append(1) or paged_attention(*args, **kwargs))
    sequence = driver.add([5, 6, 7])
    driver.execute([(sequence, 3)])
    driver.execute([(sequence, 1)])
    assert len(calls) == 2 * driver.runner.model.config.num_hidden_layers
    assert noted == []


def test_who_watches_the_stages_sees_every_layer(noted):
    """Catches a profile of a single request in which attention takes no time."""
    driver, stages = make_driver("llama", True), []
    sequence = driver.add([5, 6, 7])
    driver.execute([(sequence, 3)])
    driver.runner.stage_hooks.append(stages.append)
    driver.execute([(sequence, 1)])
    driver.runner.stage_hooks.clear()
    driver.execute([(sequence, 1)])
    assert stages.count("attention") == driver.runner.model.config.num_hidden_layers
    assert noted == [1]


@pytest.mark.parametrize("name", ["olmo2", "llama4", "gpt2"])
def test_models_of_another_kind_run_layer_by_layer(name):
    """Catches layers of another kind run as if they were llamas'."""
    driver = Driver(build(name), attention_backend="cpp")
    driver.runner.optimize()
    driver.runner.use_decode_runner()
    assert driver.runner.decode_runner is None


def test_layers_that_attend_in_chunks_run_one_by_one():
    """Catches decodes that see what lies before their chunk."""
    chunks = {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 8}
    driver = Driver(build("llama", **SHAPE, **chunks), attention_backend="cpp", quantization="int8")
    driver.runner.optimize()
    driver.runner.use_decode_runner()
    assert driver.runner.decode_runner is None


def hooked(embedding):
    embedding.register_forward_hook(lambda module, arguments, output: output * 3)


def scaled(embedding):
    forward = lambda self, token_ids: 2 * torch.nn.Embedding.forward(self, token_ids)  # noqa: E731
    embedding.__class__ = type("Scaled", (torch.nn.Embedding,), {"forward": forward})


def strided(embedding):
    wide = torch.cat([embedding.weight.detach()] * 2, dim=1)
    embedding.weight = torch.nn.Parameter(wide[:, : embedding.embedding_dim])


@pytest.mark.parametrize("change", [hooked, scaled, strided])
def test_embeddings_are_looked_up_as_their_module_does(change):
    """Catches tokens looked up without what their module adds, or in rows of another length."""
    drivers = []
    for in_one_call in (True, False):
        torch.manual_seed(1)
        model = build("llama", **SHAPE)
        change(model.model.embed_tokens)
        drivers.append(Driver(model, attention_backend="cpp", num_blocks=128, quantization="int8"))
        drivers[-1].runner.optimize()
        if in_one_call:
            drivers[-1].runner.use_decode_runner()
    assert (drivers[0].runner.decode_runner is not None) == (change is strided)
    for actual, expected in zip(*map(decode_logits, drivers), strict=True):
        assert torch.equal(actual, expected)


def test_a_forward_pass_that_does_more_is_left_alone():
    """Catches logits without what a model does around its layers."""
    model = build("llama", **SHAPE)
    driver = Driver(model, attention_backend="cpp", quantization="int8")
    driver.runner.optimize()
    forward = model.model.forward

    def scaled(*arguments, **keywords):
        output = forward(*arguments, **keywords)
        output.last_hidden_state *= 2
        return output

    model.model.forward = scaled
    driver.runner.use_decode_runner()
    assert driver.runner.decode_runner is None


@pytest.mark.parametrize(
    "settings", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}, {"dtype": "float16"}], ids=str
)
def test_a_loaded_model_decodes_in_one_call(noted, settings):
    """Catches a speed-up that nobody gets: all of it is in the embedded model's reach."""
    llm = LLM(**settings, num_blocks=64)
    llm.generate(["The fox"], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert noted == [1] * 4


def test_a_vocabulary_of_one_token_decodes_in_one_call(noted):
    """Catches a trial with a token that the vocabulary does not have."""
    driver = make_driver("llama", True, quantization="int8", vocab_size=1)
    sequence = driver.add([0, 0])
    for count in (2, 1):
        driver.execute([(sequence, count)])
    assert noted == [1]


@pytest.mark.parametrize("quantization", FORMATS)
def test_weights_stay_where_they_are_read_as_long_as_the_runner_lives(quantization):
    """Catches a crash after somebody put another module in the place of a layer's product."""
    driver = make_driver("llama", True, quantization=quantization)
    layer = driver.runner.model.model.layers[0]
    replaced = weakref.ref(layer.mlp_output)
    layer.mlp_output = torch.nn.Linear(192, 128)
    gc.collect()
    assert replaced() is not None
    driver.runner.decode_runner = None
    gc.collect()
    assert replaced() is None
