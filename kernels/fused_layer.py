"""The common decoder layer with fewer products and fewer trips to memory, on a CPU.

    x -> norm -> [Q K V] -> rotate Q, K where they lie -> attend -> product, + x  = y
    y -> norm -> [gate up] -> silu(gate) * up                    -> product, + y

Products of the same rows are one product of stacked weights; what lies between two products is one pass
(`cpp/elementwise.py`). Who uses a layer in place of another's makes sure that both compute the same.
Does NOT know: how attention is computed, paging, models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from minipaged.kernels.cpp import elementwise
from minipaged.kernels.packed_linear import PackedLinear, stack_linears


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
        attend: asked for attention: (this layer, query [T, Hq, Dk], key [T, Hkv, Dk], value [T, Hkv, Dv]) ->
            [T, Hq, Dv].
    """

    def __init__(self, layer: Any, attend: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx = attention.layer_idx
        self._attend = attend
        self._head_dim = attention.head_dim
        sizes = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._num_heads = [linear.out_features // attention.head_dim for linear in sizes]
        self.attention_norm = FusedNorm(layer.input_layernorm)
        self.query_key_value = PackedLinear(stack_linears(*sizes))
        self.query_norm = FusedNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = FusedNorm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.attention_output = PackedLinear(attention.o_proj)
        self.mlp_norm = FusedNorm(layer.post_attention_layernorm)
        self.gate_up = PackedLinear(stack_linears(mlp.gate_proj, mlp.up_proj))
        self.mlp_output = PackedLinear(mlp.down_proj)

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **others: Any
    ) -> Tensor:
        """Rows [1, T, D] -> [1, T, D]; position_embeddings: cosines and sines [1, T, head_dim]."""
        rows = hidden_states[0]
        product = self.query_key_value(self.attention_norm(rows)).unflatten(1, (-1, self._head_dim))
        query, key, value = product.split(self._num_heads, dim=1)
        for heads, norm in ((query, self.query_norm), (key, self.key_norm)):
            if norm is not None:
                elementwise.rms_norm_heads_(heads, norm.weight, norm.epsilon)
        cosines, sines = position_embeddings
        elementwise.rotate_heads_(product[:, : -self._num_heads[2]], cosines[0], sines[0])
        attended = self._attend(self, query, key, value)
        rows = self.attention_output(attended.flatten(1)).add_(rows)
        gated = elementwise.silu_gate(self.gate_up(self.mlp_norm(rows)))
        return self.mlp_output(gated).add_(rows)[None]
