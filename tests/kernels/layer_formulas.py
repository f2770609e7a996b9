"""What the operations between a layer's matrix multiplications must compute, in float64; needs only torch."""

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Half precision rounds to 11 or 8 bits, a norm twice."""


def assert_near(actual: Tensor, exact: Tensor) -> None:
    """Equal to the rounding of the actual values' type."""
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), exact, atol=tolerance, rtol=tolerance)


def exact_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Rows [..., D] / their root mean square * weight [D]."""
    rows = rows.double()
    return rows / (rows.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


def random_angles(
    num_tokens: int, size: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D], each angle at both places of its pair."""
    angles = torch.randn(num_tokens, size // 2, device=device).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def exact_rotation(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Heads [T, H, D], element d turned with element d + D/2."""
    heads, half = heads.double(), heads.shape[-1] // 2
    turned = torch.cat([-heads[..., half:], heads[..., :half]], -1)
    return heads * cosines.double()[:, None] + turned * sines.double()[:, None]


def exact_gate(rows: Tensor) -> Tensor:
    """silu(gate) * up of rows [T, 2 * D]."""
    gate, up = rows.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def exact_gelu_gate(rows: Tensor) -> Tensor:
    """The same with GELU (tanh approximation)."""
    gate, up = rows.double().chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def exact_delta_rule(
    states: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [R, H, Dv] and states [R, H, Dk, Dv] after one token; see `kernels/cpp/recurrent.py`."""
    query, key = (torch.nn.functional.normalize(part.double(), dim=-1) for part in (query, key))
    query, key = (part.repeat_interleave(value.shape[1] // part.shape[1], dim=1) for part in (query, key))
    states = states.double() * decay.double().exp()[..., None, None]
    known = torch.einsum("rhkv,rhk->rhv", states, key)
    update = (value.double() - known) * beta.double()[..., None]
    states = states + key[..., None] * update[:, :, None]
    return torch.einsum("rhkv,rhk->rhv", states, query) / query.shape[-1] ** 0.5, states


def exact_mamba2(
    states: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [R, H, P] and states [R, H, P, N] after one token; see `kernels/cpp/recurrent.py`."""
    x, dt, A, D = (part.double() for part in (x, dt, A, D))
    B, C = (part.double().repeat_interleave(x.shape[1] // part.shape[1], dim=1) for part in (B, C))
    added = torch.einsum("rh,rhp,rhn->rhpn", dt, x, B)
    states = states.double() * (dt * A).exp()[..., None, None] + added
    return torch.einsum("rhpn,rhn->rhp", states, C) + D[:, None] * x, states
