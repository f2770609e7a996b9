"""Packed weights compute what `nn.Linear` computes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from minipaged.execution.accel.packed_linear import PackedLinear, can_pack, pack_linears, rounded_up
from minipaged.execution.accel.plain_linears import use_plain_linears
from tests.models.zoo import SUPPORTED, build

pytestmark = pytest.mark.skipif(not can_pack(), reason="this PyTorch cannot pack weights with oneDNN")


@pytest.mark.parametrize("rows", [1, 2, 31, 64, 77, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("features", "tolerance"), [((96, 40), 1e-5), ((1100, 1000), 1e-4)])
def test_a_packed_layer_equals_the_plain_one(rows, bias, features, tolerance):
    """A transposed weight, a lost bias, sums in less than float32."""
    linear = nn.Linear(*features, bias=bias)
    x = torch.randn(1, rows, features[0])
    with torch.inference_mode():
        exact = nn.functional.linear(
            x.double(), linear.weight.double(), linear.bias.double() if bias else None
        )
        torch.testing.assert_close(PackedLinear(linear)(x).double(), exact, atol=tolerance, rtol=tolerance)


def test_few_numbers_of_rows_are_multiplied():
    """Catches memory that grows with every new length of a step (a megabyte each, and more)."""
    rounded = [rounded_up(number) for number in range(1, 4097)]
    assert rounded[:64] == list(range(1, 65))
    assert all(number <= some <= 1.0625 * number for number, some in enumerate(rounded, 1))
    assert len(set(rounded)) <= 64 + 16 * 6


@pytest.mark.slow
def test_steps_of_every_length_leave_little_memory_behind():
    """Catches a kernel for each number of rows, which oneDNN compiles and keeps."""
    code = """
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from minipaged.execution.accel.packed_linear import PackedLinear
def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
layer, rows = PackedLinear(nn.Linear(256, 768)), torch.zeros(2048, 256)
with torch.inference_mode():
    layer(rows)
    before = resident()
    for number in range(9, 2049):
        layer(rows[:number])
print((resident() - before) >> 20)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 500  # MiB; 190 were measured, and 6,200 with a kernel for each number


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN does not multiply bfloat16 on this CPU")
def test_bfloat16_is_packed_too():
    """Weights reinterpreted in another type."""
    linear = nn.Linear(64, 48).bfloat16()
    x = torch.randn(5, 64).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(x), linear(x), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_packed_model_gives_the_same_logits(name):
    """An architecture that reads a layer's weight, or computes with a subclass of a linear layer."""
    model = build(name)
    ids = torch.arange(3, 40)[None] % model.config.get_text_config().vocab_size
    with torch.inference_mode():
        plain = model(input_ids=ids, use_cache=False).logits
        for _ in range(2):  # a second runner of the model does so, too
            use_plain_linears(model)
            pack_linears(model)
        assert any(isinstance(module, PackedLinear) for module in model.modules())
        packed = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(packed, plain, atol=1e-4, rtol=1e-4)


def test_another_model_of_the_same_configuration_stays_as_it_is():
    """Catches a switch in the configuration, which models may share."""
    model = build("mixtral")
    other = AutoModelForCausalLM.from_config(model.config).eval()
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        before = other(input_ids=ids, use_cache=False).logits
        use_plain_linears(model)
        assert other(input_ids=ids, use_cache=False).logits.equal(before)


def test_gpt2s_transposed_layers_are_packed_too():
    """Catches layers that stay as they are: a step of GPT-2 then takes twice as long."""
    model = build("gpt2")
    use_plain_linears(model)
    pack_linears(model)
    layers = [type(module).__name__ for module in model.modules() if hasattr(module, "bias")]
    assert "Conv1D" not in layers
    assert layers.count("PackedLinear") == 4 * model.config.n_layer + 1
