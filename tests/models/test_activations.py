"""Activations on a CPU: an element's result depends on nothing but the element."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from minipaged.execution.accel.activations import pad_activations

NAMES = ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "sigmoid", "relu2"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_an_element_has_the_same_bits_in_any_tensor(name, dtype):
    """Catches elements that are computed one by one: the last of a tensor, of a row, of a thread's share."""
    model, own = torch.nn.ModuleList([ACT2FN[name]]), torch.get_num_threads()
    wide = 4 * torch.randn(190, 1400, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = model[0](wide)
    pad_activations(model)
    (activation,) = model
    torch.testing.assert_close(activation(wide), expected)
    together = activation(wide[:, :683])
    try:
        for num_threads in (1, 2, 3, 4):
            torch.set_num_threads(num_threads)
            for num_rows in (1, 2, 5, 49, 97, 190):
                assert torch.equal(activation(wide[:num_rows, :683]), together[:num_rows])
    finally:
        torch.set_num_threads(own)


def test_a_second_runner_of_a_model_pads_nothing_again():
    """Catches activations that are wrapped once more for each runner."""
    model = torch.nn.ModuleList([ACT2FN["silu"]])
    pad_activations(model)
    (padded,) = model
    pad_activations(model)
    assert model[0] is padded
    assert type(padded.activation) is type(ACT2FN["silu"])
