"""Mamba 2 for many tokens, against its formula token by token in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from minipaged.execution.accel.mamba_scan import CHUNK, mamba2_chunk_scan
from tests.kernels.layer_formulas import assert_near, exact_mamba2


def exact_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [R, T, H, P] and the states after them, [R, H, P, N]; dt as it is used."""
    outputs = []
    for token in range(x.shape[1]):
        output, states = exact_mamba2(states, x[:, token], dt[:, token], A, B[:, token], C[:, token], D)
        outputs.append(output)
    return torch.stack(outputs, 1), states


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (6, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("continued", [False, True])
def test_the_scan_is_the_formula(length: int, heads: int, groups: int, continued: bool) -> None:
    """Catches another group's keys, decays from the wrong token, states lost between chunks."""
    x, dt = torch.randn(2, length, heads, 5), torch.randn(2, length, heads)
    B, C = (torch.randn(2, length, groups, 7) / 7**0.5 for _ in range(2))
    A, D, bias = -torch.rand(heads) * 4, torch.randn(heads), torch.randn(heads)
    states = torch.randn(2, heads, 5, 7) if continued else None
    settings = {"dt_bias": bias, "dt_softplus": True, "dt_limit": (0.1, 1.5), "chunk_size": 256}
    output, after = mamba2_chunk_scan(
        *(x, dt, A, B, C), D=D, initial_states=states, return_final_states=True, **settings
    )
    used = functional.softplus(dt + bias).clamp(0.1, 1.5)
    before = torch.zeros(2, heads, 5, 7) if states is None else states
    exact, exact_after = exact_scan(*(part.double() for part in (x, used, A, B, C, D, before)))
    torch.testing.assert_close(output.double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after.double(), exact_after, atol=1e-5, rtol=1e-5)


def test_small_decays_behind_a_large_one_are_exact() -> None:
    """Catches differences of large sums in float32."""
    x, B, dt = torch.ones(1, CHUNK, 1, 1), torch.ones(1, CHUNK, 1, 1), torch.rand(1, CHUNK, 1) / 100
    dt[:, 0] = 100.0
    A, D = torch.tensor([-100.0]), torch.zeros(1)
    settings = {"dt_bias": D, "dt_softplus": False, "dt_limit": (0.0, torch.inf), "initial_states": None}
    output = mamba2_chunk_scan(x, dt, A, B, B, D=None, return_final_states=False, **settings)
    before = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    assert_near(output, exact_scan(*(part.double() for part in (x, dt, A, B, B, D)), before)[0])
