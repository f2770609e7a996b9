"""The common decoder layer with fewer products and fewer trips to memory, on a CPU.

    x -> norm -> [Q K V] -> rotate Q, K where they lie -> attend -> product, + x  = y
    y -> norm -> [gate up] -> silu(gate) * up                    -> product, + y

Products of the same rows are one product of stacked weights; what lies between two products is one pass
(`cpp/elementwise.py`). The last layer computes keys and values of all rows, and all else only of those that
somebody looks at afterwards: of a prompt one row, or none if the prompt goes on in the next step. Who uses a
layer in place of another's makes sure that both compute the same.
Does NOT know: how attention is computed, paging, models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minipaged.execution.accel.packed_linear import PackedLinear, stack_linears
from minipaged.kernels.cpp import elementwise


class FusedNorm(nn.Module):
    """Root mean square normalization: x / rms(x) * weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight.detach()
        self.epsilon = norm.variance_epsilon

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [..., D] -> [..., D]."""
        return elementwise.rms_norm(rows, self.weight, self.epsilon)


class FusedLayer(nn.Module):
    """A decoder layer as drawn above.

    Args:
        layer: transformers' layer; its weights can be freed afterwards.
        step_in_force: whoever answers for attention now. Its `attend(layer, query [R, Hq, Dk],
            key [T, Hkv, Dk], value [T, Hkv, Dv], options)` gives [R, Hq, Dv]; its `rows_wanted` are the rows
            [R] int64 that somebody looks at after the last layer, or None for all T.
        options: handed to `attend` as they are.
        is_last: whether this is the last layer.
    """

    def __init__(self, layer: Any, step_in_force: Callable[[], Any], options: Any, is_last: bool) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx = attention.layer_idx
        self._step_in_force = step_in_force
        self._options = options
        self._is_last = is_last
        self._head_dim = attention.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._num_heads = [linear.out_features // attention.head_dim for linear in projections]
        self.attention_norm = FusedNorm(layer.input_layernorm)
        self.query_key_value = PackedLinear(stack_linears(*projections))
        self.query_norm = FusedNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = FusedNorm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.attention_output = PackedLinear(attention.o_proj)
        self.mlp_norm = FusedNorm(layer.post_attention_layernorm)
        self.gate_up = PackedLinear(stack_linears(mlp.gate_proj, mlp.up_proj))
        self.mlp_output = PackedLinear(mlp.down_proj)

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **others: Any
    ) -> Tensor:
        """Rows [1, T, D] -> [1, T, D], zero where not wanted.

        position_embeddings: cosines and sines [1, T, head_dim].
        """
        rows = hidden_states[0]
        product = self.query_key_value(self.attention_norm(rows)).unflatten(1, (-1, self._head_dim))
        query, key, value = product.split(self._num_heads, dim=1)
        for heads, norm in ((query, self.query_norm), (key, self.key_norm)):
            if norm is not None:
                elementwise.rms_norm_heads_(heads, norm.weight, norm.epsilon)
        cosines, sines = position_embeddings
        elementwise.rotate_heads_(product[:, : -self._num_heads[2]], cosines[0], sines[0])
        step = self._step_in_force()
        wanted = step.rows_wanted if self._is_last else None
        if wanted is not None:
            query, rows = query[wanted], rows[wanted]
        attended = step.attend(self, query, key, value, self._options)
        rows = self.attention_output(attended.flatten(1)).add_(rows)
        gated = elementwise.silu_gate(self.gate_up(self.mlp_norm(rows)))
        rows = self.mlp_output(gated).add_(rows)
        if wanted is None:
            return rows[None]
        output = torch.zeros_like(hidden_states)
        output[0, wanted] = rows
        return output
