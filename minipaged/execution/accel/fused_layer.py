"""The common decoder layer with fewer matrix multiplications, memory accesses and (on a GPU) kernel launches.

    x -> norm -> [Q K V] -> rotate Q, K in place -> attend -> project, + x  = y
    y -> norm -> [gate up] -> silu(gate) * up              -> project, + y

Linear layers with the same input are one matrix multiplication with stacked weights; the elementwise
operations between two multiplications are fused (`LayerOperations`: in C++ for CPUs, in Triton for GPUs).
The last layer computes keys and values of all rows, and everything else only for the output rows: for a
prompt, its last row, or none if the prompt continues in the next step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minipaged.execution.accel.packed_linear import stack_linears
from minipaged.execution.attention import get_forward_context
from minipaged.kernels.dispatch import LayerOperations
from minipaged.kernels.metadata import AttentionParameters


class FusedNorm(nn.Module):
    """Root mean square normalization: x / rms(x) * weight."""

    def __init__(self, norm: Any, operations: LayerOperations) -> None:
        super().__init__()
        self.weight = norm.weight.detach()
        self.epsilon = norm.variance_epsilon
        self._operations = operations

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
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.num_heads = [linear.out_features // attention.head_dim for linear in projections]
        self.attention_norm = FusedNorm(layer.input_layernorm, operations)
        self.query_key_value = stack_linears(*projections)
        self.query_norm, self.key_norm = (
            FusedNorm(getattr(attention, name), operations) if hasattr(attention, name) else None
            for name in ("q_norm", "k_norm")
        )
        self.attention_output = attention.o_proj
        self.mlp_norm = FusedNorm(layer.post_attention_layernorm, operations)
        self.gate_up = stack_linears(mlp.gate_proj, mlp.up_proj)
        self.mlp_output = mlp.down_proj

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **others: Any
    ) -> Tensor:
        """Rows [1, T, D] -> [1, T, D], in the last layer zero but for the output rows.

        position_embeddings: cosines and sines [1, T, head_dim].
        """
        rows = hidden_states[0]
        stacked = self.query_key_value(self.attention_norm(rows)).unflatten(1, (-1, self._head_dim))
        query, key, value = stacked.split(self.num_heads, dim=1)
        for heads, norm in ((query, self.query_norm), (key, self.key_norm)):
            if norm is not None:
                norm.heads_(heads)
        cosines, sines = position_embeddings
        self._operations.rotate_heads_(stacked[:, : -self.num_heads[2]], cosines[0], sines[0])
        context = get_forward_context()
        indices = context.output_indices if self._is_last else None
        if indices is not None:
            query, rows = query[indices], rows[indices]
        attended = context.attend(self, query, key, value, self.attention_parameters)
        total = self.attention_output(attended.flatten(1))
        normed = self.mlp_norm.add_(total, rows)
        rows = self.mlp_output(self._operations.silu_gate(self.gate_up(normed))).add_(total)
        if indices is None:
            return rows[None]
        output = torch.zeros_like(hidden_states)
        output[0, indices] = rows
        return output
