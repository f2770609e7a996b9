"""What recurrent layers compute besides matrix multiplications, on a CPU, in one call each.

transformers' short convolution calls `conv1d`, which takes 58 us for one token (2,304 channels, one core of
Zen 5), and ours 9; its gated delta rule passes ten times over a state of a megabyte (16 heads of 128 x 128),
in 185 us, and ours twice, in 56. Its Mamba 2 passes several times over the states, in 1,430 us for eight rows
(48 heads of 32 x 128), and ours once, in 230. For a prompt of 64 tokens, its gated delta rule takes chunks of
64, in 5 ms, and ours token by token, while parts of the states stay in the L1 cache, in 0.6. Functions of
ours take their place in the `forward` of these layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from minipaged.execution.accel.mamba_scan import mamba2_chunk_scan
from minipaged.execution.recurrent import find_recurrent
from minipaged.kernels.cpp.build import DTYPES
from minipaged.kernels.cpp.recurrent import convolve, convolve_, delta_rule_, mamba2_


def use_recurrent_kernels(model: nn.Module) -> None:
    """Let the recurrent layers of a model, which compute piece by piece, call these functions."""
    for module in find_recurrent(model):
        forward: Any = inspect.unwrap(module.own_forward)
        names = {name: forward.__globals__[name] for name in FASTER if name in forward.__code__.co_names}
        if names:
            own = forward.__globals__ | {name: FASTER[name](original) for name, original in names.items()}
            type(module).own_forward = FunctionType(
                forward.__code__, own, forward.__name__, forward.__defaults__, forward.__closure__
            )


def _convolution(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def causal_conv1d_update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: Any = None,
    ) -> Tensor:
        """Rows [R, C, 1] and each channel's last elements, [R, C, K], which are updated -> [R, C, 1]."""
        rows = hidden_states[..., 0]
        is_usual = conv_state.is_contiguous() and conv_state.shape[2] == weight.shape[1]
        if not is_usual or len({rows.dtype, conv_state.dtype, weight.dtype}) > 1:
            return original(hidden_states, conv_state, weight, bias, activation)
        output = convolve_(conv_state, rows.contiguous(), weight.contiguous(), bias)
        return (output if activation is None else ACT2FN[activation](output))[..., None]

    return causal_conv1d_update


def _whole_convolution(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: Any = None,
        **others: Any,
    ) -> Tensor:
        """All tokens of some sequences, [R, C, T] -> [R, C, T]."""
        if hidden_states.dtype not in DTYPES or hidden_states.dtype != weight.dtype:
            return original(hidden_states, weight, bias, activation, **others)
        rows = hidden_states.transpose(1, 2).contiguous()  # (as they mostly are)
        output = convolve(rows, weight.contiguous(), bias)
        return (output if activation is None else ACT2FN[activation](output)).transpose(1, 2)

    return causal_conv1d_fn


def _delta_rule(original: Callable[..., Any]) -> Callable[..., Any]:
    def gated_delta_rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **others: Any
    ) -> tuple[Tensor, Tensor]:
        """Tokens [R, T, H, D], states [R, H, Dk, Dv] updated in place -> output [R, T, H, Dv], states."""
        state = others["initial_state"]
        if state is None:
            shape = len(value), value.shape[2], key.shape[3], value.shape[3]
            state = value.new_zeros(shape, dtype=torch.float32)
        is_usual = state.dtype == torch.float32 and state.is_contiguous() and query.dtype in DTYPES
        if not is_usual or not others["use_qk_l2norm_in_kernel"]:
            return original(query, key, value, g=g, beta=beta, **others)
        return delta_rule_(state, query, key, value, g, beta), state

    return gated_delta_rule


def _mamba_update(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mamba2_selective_state_update(
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """One token [R, H, P], states [R, H, P, N] updated in place -> output [R, H, P].

        dt is [R, H, P], its bias and D [H, P], A [H, P, N]: each a head's value, expanded.
        """
        bias, gate = others.get("dt_bias"), others.get("z")
        is_usual = state.dtype == torch.float32 and state.is_contiguous() and x.dtype in DTYPES
        if not is_usual or D is None or bias is None or len({x.dtype, B.dtype, C.dtype}) > 1:
            return original(state, x, dt, A, B, C, D, **others)
        if any((dt.stride(2), bias.stride(1), A.stride(1), A.stride(2), D.stride(1))):
            return original(state, x, dt, A, B, C, D, **others)
        steps = dt[..., 0] + bias[:, 0].to(dt.dtype)
        steps = functional.softplus(steps) if others.get("dt_softplus") else steps
        x, B, C, steps, A, D = (
            part.contiguous() for part in (x, B, C, steps.float(), A[:, 0, 0].float(), D[:, 0].float())
        )
        output = mamba2_(state, x, steps, A, B, C, D)
        return output if gate is None else output * functional.silu(gate)

    return mamba2_selective_state_update


FASTER: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "causal_conv1d_update": _convolution,
    "causal_conv1d_fn": _whole_convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "mamba2_selective_state_update": _mamba_update,
    "mamba2_chunk_scan": lambda original: mamba2_chunk_scan,
}
"""What transformers calls them in all these models; each function here makes ours from the original."""
