"""The common decoder layer with fewer matrix multiplications, memory accesses and (on a GPU) kernel launches.

    x -> norm -> [Q K V] -> rotate Q, K in place -> attend -> project, + x  = y
    y -> norm -> [gate up] -> silu(gate) * up              -> project, + y

Gemma has GELU instead of SiLU; Gemma 2 and 3 also have a norm after each projection, Granite a factor.
Phi-3's weights are stacked already; Phi-4 mini rotates only part of each head, SmolLM3 only in some layers.
Linear layers with the same input are one matrix multiplication with stacked weights; the elementwise
operations between two multiplications are fused (`LayerOperations`: in C++ for CPUs, in Triton for GPUs).
The last layer computes keys and values of all rows, and everything else only for the output rows: for a
prompt, its last row, or none if the prompt continues in the next step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minipaged.execution.accel.plain_linears import stack_linears
from minipaged.execution.attention import get_forward_context
from minipaged.kernels.dispatch import LayerOperations
from minipaged.kernels.metadata import AttentionParameters


class FusedNorm(nn.Module):
    """Root mean square normalization: x / rms(x) * weight, or 1 + weight, in float32, as in Gemma."""

    def __init__(self, norm: Any, operations: LayerOperations) -> None:
        super().__init__()
        self.epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        self._operations = operations
        weight = norm.weight.detach().clone()
        row = torch.linspace(-1, 1, len(weight)).to(weight)[None, None]
        expected = norm(row)

        def error(factor: Tensor) -> float:
            return float((operations.rms_norm(row, factor, self.epsilon) - expected).abs().max())

        self.weight = min(weight, 1 + weight.float(), key=error)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [..., D] -> [..., D]."""
        return self._operations.rms_norm(rows, self.weight, self.epsilon)

    def add_(self, rows: Tensor, residual: Tensor) -> Tensor:
        """Add residual [T, D] to rows [T, D] in place, and normalize the sum."""
        return self._operations.add_rms_norm_(rows, residual, self.weight, self.epsilon)

    def heads_(self, heads: Tensor) -> None:
        """Normalize each head of heads [T, H, D] in place."""
        self._operations.rms_norm_heads_(heads, self.weight, self.epsilon)


class FusedLayer(nn.Module):
    """A decoder layer as drawn above; the weights of transformers' `layer` can be freed afterwards."""

    def __init__(self, layer: Any, parameters: AttentionParameters, operations: LayerOperations) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._operations = operations
        self.layer_idx = attention.layer_idx
        self._is_last = self.layer_idx == attention.config.num_hidden_layers - 1
        self.attention_parameters = parameters
        self._head_dim = attention.head_dim
        self.is_rotated = bool(getattr(attention, "use_rope", True))
        self.attention_norm = FusedNorm(layer.input_layernorm, operations)
        self.query_key_value = _stacked(attention, "qkv_proj", "q_proj", "k_proj", "v_proj")
        self.query_norm, self.key_norm = (
            FusedNorm(getattr(attention, name), operations) if hasattr(attention, name) else None
            for name in ("q_norm", "k_norm")
        )
        self.attention_output = attention.o_proj
        num_heads = attention.o_proj.in_features // attention.head_dim
        num_others = self.query_key_value.out_features // attention.head_dim - num_heads
        self.num_heads = [num_heads, num_others // 2, num_others // 2]
        before_mlp, *after = _later_norms(layer)
        self.mlp_norm = FusedNorm(before_mlp, operations)
        self.attention_output_norm, self.mlp_output_norm = (
            None if norm is None else FusedNorm(norm, operations) for norm in after
        )
        self.is_gelu = has_gelu(mlp) is True
        self._gate = operations.gelu_gate if self.is_gelu else operations.silu_gate
        self.gate_up = _stacked(mlp, "gate_up_proj", "gate_proj", "up_proj")
        self.mlp_output = mlp.down_proj
        self.output_factor: float = getattr(layer, "residual_multiplier", 1.0)

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **others: Any
    ) -> Tensor:
        """Rows [1, T, D] -> [1, T, D], in the last layer zero but for the output rows.

        position_embeddings: cosines and sines [1, T, at most head_dim].
        """
        rows = hidden_states[0]
        stacked = self.query_key_value(self.attention_norm(rows)).unflatten(1, (-1, self._head_dim))
        query, key, value = stacked.split(self.num_heads, dim=1)
        for heads, norm in ((query, self.query_norm), (key, self.key_norm)):
            if norm is not None:
                norm.heads_(heads)
        if self.is_rotated:
            cosines, sines = position_embeddings
            self._operations.rotate_heads_(stacked[:, : -self.num_heads[2]], cosines[0], sines[0])
        context = get_forward_context()
        indices = context.output_indices if self._is_last else None
        if indices is not None:
            query, rows = query[indices], rows[indices]
        attended = context.attend(self, query, key, value, self.attention_parameters)
        total = self.attention_output(attended.flatten(1))
        if self.attention_output_norm is not None:
            total = self.attention_output_norm(total)
        normed = self.mlp_norm.add_(self._scaled(total), rows)
        rows = self.mlp_output(self._gate(self.gate_up(normed)))
        if self.mlp_output_norm is not None:
            rows = self.mlp_output_norm(rows)
        rows = self._scaled(rows).add_(total)
        if indices is None:
            return rows[None]
        output = torch.zeros_like(hidden_states)
        output[0, indices] = rows
        return output

    def _scaled(self, rows: Tensor) -> Tensor:
        return rows if self.output_factor == 1 else rows.mul_(self.output_factor)


def has_gelu(mlp: Any) -> bool | None:
    """Whether an MLP applies GELU (tanh approximation) to its gate, or SiLU (False); None: neither.

    The layer's output hardly shows it if the MLP adds little to large rows.
    """
    activation = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
    if any(True for _ in activation.parameters()):  # (PReLU's, which perhaps are on a GPU, or of 16 bits)
        return None
    numbers = torch.linspace(-16, 16, 321)
    silu, gelu = nn.functional.silu(numbers), nn.functional.gelu(numbers, approximate="tanh")
    is_silu, is_gelu = (torch.allclose(activation(numbers), y, rtol=1e-5, atol=1e-6) for y in (silu, gelu))
    return is_gelu if is_silu or is_gelu else None


def _stacked(module: Any, whole: str, *parts: str) -> nn.Linear:
    """The linear layer of that name, or the others stacked."""
    linear: nn.Linear | None = getattr(module, whole, None)
    return stack_linears(*(getattr(module, name) for name in parts)) if linear is None else linear


def _later_norms(layer: Any) -> tuple[nn.Module, nn.Module | None, nn.Module | None]:
    """The norms before the MLP, after the attention's projection and after the MLP's."""
    if not hasattr(layer, "pre_feedforward_layernorm"):
        return layer.post_attention_layernorm, None, None
    return layer.pre_feedforward_layernorm, layer.post_attention_layernorm, layer.post_feedforward_layernorm
