"""Mamba 2 for one token, against transformers' function."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.falcon_h1.modeling_falcon_h1 import mamba2_selective_state_update

from minipaged.kernels.dispatch import why_not_cpp

if missing := why_not_cpp(torch.device("cpu")):
    pytest.skip(missing, allow_module_level=True)

from minipaged.execution.accel.recurrent_kernels import FASTER

ORIGINAL = inspect.unwrap(mamba2_selective_state_update)
HEADS, WIDTH, SIZE = 6, 5, 7


def make_inputs(num_rows: int, dtype: torch.dtype = torch.float32, groups: int = 2) -> dict[str, Any]:
    """What `forward` gives: parts of a row's projections; a head's values expanded."""
    parts = torch.randn(num_rows, HEADS * WIDTH + 2 * groups * SIZE + HEADS).to(dtype)
    x, B, C, dt = parts.split([HEADS * WIDTH, groups * SIZE, groups * SIZE, HEADS], 1)
    bias, D = torch.randn(2, HEADS, 1).to(dtype).expand(-1, -1, WIDTH)
    return {
        "state": torch.randn(num_rows, HEADS, WIDTH, SIZE),
        "hidden_states": x.view(num_rows, HEADS, WIDTH),
        "dt": dt[..., None].expand(-1, -1, WIDTH),
        "A": (-torch.rand(HEADS, 1, 1)).expand(-1, WIDTH, SIZE),
        **{"B": B.view(num_rows, groups, SIZE), "C": C.view(num_rows, groups, SIZE), "D": D},
        **{"z": torch.randn(num_rows, HEADS, WIDTH).to(dtype), "dt_bias": bias, "dt_softplus": True},
    }


def call(function: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Output and states."""
    positional = ("state", "hidden_states", "dt", "A", "B", "C", "D")
    inputs = inputs | {"state": inputs["state"].clone()}
    others = {name: value for name, value in inputs.items() if name not in positional}
    return function(*(inputs[name] for name in positional), **others), inputs["state"]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("num_rows", "groups"), [(1, 1), (3, 2), (2, 6)])
@pytest.mark.parametrize("changed", [{}, {"z": None}, {"dt_softplus": False}], ids=str)
def test_the_update_is_transformers(
    dtype: torch.dtype, tolerance: float, num_rows: int, groups: int, changed: dict[str, Any]
) -> None:
    """Catches a gate, bias or softplus left out, rows taken for contiguous."""
    inputs = make_inputs(num_rows, dtype, groups) | changed
    wide = {name: part.double() if isinstance(part, Tensor) else part for name, part in inputs.items()}
    ours = FASTER["mamba2_selective_state_update"](lambda *_, **__: pytest.fail("transformers' was called"))
    for actual, expected in zip(call(ours, inputs), call(ORIGINAL, wide)):
        assert (actual.double() - expected).norm() / expected.norm() < tolerance
    assert call(ours, inputs)[0].dtype == dtype


@pytest.mark.parametrize("name", ["state", "dt", "A", "D", "dt_bias", "B"])
def test_whatever_is_unusual_goes_to_transformers(name: str) -> None:
    """Catches a value for each element taken for its head's, other types read as floats."""
    inputs = make_inputs(2)
    if name in ("state", "B"):
        inputs[name] = inputs[name].double()
        inputs["C"] = inputs["C"].double()
    else:
        inputs[name] = -torch.rand(inputs[name].shape)
    ours = FASTER["mamba2_selective_state_update"](ORIGINAL)
    for actual, expected in zip(call(ours, inputs), call(ORIGINAL, inputs)):
        assert actual.equal(expected)
