"""Linear layers where transformers stores weights in other ways, so that they can be packed and quantized.

GPT-2's `Conv1D` has a transposed weight, and a mixture of experts has the matrices of all experts in one
tensor [E, N, K]. With packed weights, one request generates tokens 1.6 to 2.9 times as fast (Zen 5).
`fused_layer.py` stacks linear layers with the same input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from minipaged.execution.subclassing import Adopted, adopt


class SplitExperts(Adopted):
    """The experts of a layer as linear layers `up` (with the gate, if there is one) and `down`."""

    def forward(self: Any, rows: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each row's experts: rows [T, D], expert ids and weights [T, k] -> [T, D]."""
        num_chosen = expert_ids.shape[1]
        sorted_ids, order = expert_ids.flatten().sort(stable=True)
        counts = torch.bincount(sorted_ids, minlength=len(self.up)).tolist()
        gates = _multiply(self.up, rows[order // num_chosen], counts)
        gated = self._apply_gate(gates) if self.has_gate else self.act_fn(gates)
        outputs = rows.new_empty(len(order), rows.shape[1])
        outputs[order] = _multiply(self.down, gated, counts)
        if self.has_post_expert_norm:
            outputs = self.post_expert_norm(outputs)
        weighted = outputs.unflatten(0, (-1, num_chosen)) * weights[..., None]
        return weighted.sum(dim=1).to(rows.dtype)


def use_plain_linears(model: nn.Module) -> None:
    """Replace them all by linear layers with the same memory, in place."""
    for module in model.modules():
        is_experts = hasattr(module, "is_transposed") and hasattr(module, "has_gate")  # (transformers' names)
        if is_experts and not isinstance(module, SplitExperts):
            _split_experts(module)
        for name, child in list(module.named_children()):
            if type(child) is Conv1D:
                setattr(module, name, linear_of(child.weight.T, child.bias))


def _split_experts(experts: Any) -> None:
    for name, first in (("up", "gate_up_proj" if experts.has_gate else "up_proj"), ("down", "down_proj")):
        weights = getattr(experts, first)
        delattr(experts, first)
        if experts.is_transposed:
            weights = weights.transpose(1, 2)
        biases = getattr(experts, f"{first}_bias") if experts.has_bias else [None] * len(weights)
        setattr(experts, name, nn.ModuleList(map(linear_of, weights, biases)))
    adopt(experts, SplitExperts)


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer with this weight [out_features, in_features] and this bias, in the same memory."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def stack_linears(*linears: nn.Linear) -> nn.Linear:
    """One layer for all the given ones, which have the same input; their outputs are concatenated."""
    has_bias = linears[0].bias is not None
    bias = torch.cat([linear.bias for linear in linears]) if has_bias else None
    return linear_of(torch.cat([linear.weight for linear in linears]), bias)


def _multiply(linears: Any, rows: Tensor, counts: list[int]) -> Tensor:
    """Rows sorted by expert, of which the i-th multiplies the next counts[i]."""
    parts = rows.split([count for count in counts if count])
    chosen = [linear for linear, count in zip(linears, counts) if count]
    return torch.cat([linear(part) for linear, part in zip(chosen, parts)])
