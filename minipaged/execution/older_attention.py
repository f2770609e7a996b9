"""Attention modules that are older than transformers' attention interface, made to call the hook, too.

    CodeGen, GPT-J, GPT-Neo, GPT-NeoX Japanese    replaced: `_attn`, between the projections and the output
    Falcon                                        replaced: `forward`; it has no such method

Variants for flash attention do everything in `forward`, and are left alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from minipaged.execution import subclassing
from minipaged.execution.attention import NAME, UnsupportedModelError, paged_attention_hook


class OlderAttention(subclassing.Adopted):
    """An attention module whose method `replaced` calls the hook."""

    replaced = "_attn"

    def _attn(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        """Heads [1, H, T, D], rotated -> [1, H, T, D], and no weights."""
        query, key = query.to(value.dtype), key.to(value.dtype)  # CodeGen rotates in float32
        output, _ = paged_attention_hook(self, query, key, value, attention_mask, **options)
        return output.transpose(1, 2), None


class GPTNeo(OlderAttention):
    """Does not scale its scores; in a local layer, a token sees the last `window_size`, itself included."""

    @property
    def layer_idx(self: Any) -> int:
        """The name that the hook knows."""
        return self.layer_id

    def _attn(self: Any, *heads: Any, **options: Any) -> tuple[Tensor, None]:
        window = self.config.window_size if self.attention_type == "local" else None
        return super()._attn(*heads, scaling=1.0, sliding_window=window, **options)


class Falcon(OlderAttention):
    """Repeats grouped K/V heads for their query heads; the pool keeps each once."""

    replaced = "forward"

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Any, position_embeddings: Any, **others: Any
    ) -> tuple[Tensor, None]:
        """Rows [1, T, D] -> [1, T, D], and no weights."""
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        states = self._split_heads(self.query_key_value(hidden_states))
        query, key, value = (heads.transpose(1, 2) for heads in states)
        repeats = key.shape[1] // self.num_kv_heads
        query, key = apply_rotary_pos_emb(query, key[:, ::repeats], *position_embeddings)
        output, _ = self._attn(query, key, value[:, ::repeats], attention_mask)
        return self.dense(output.transpose(1, 2).flatten(2)), None


KINDS: dict[str, type[OlderAttention]] = {
    **dict.fromkeys(("CodeGenAttention", "GPTJAttention", "GPTNeoXJapaneseAttention"), OlderAttention),
    **{"GPTNeoSelfAttention": GPTNeo, "FalconAttention": Falcon},
}


def adopt(model: PreTrainedModel) -> None:
    """Make such modules call the hook; the configuration names it, so that the model builds no mask.

    Raises:
        UnsupportedModelError: its scores depend on something else that no kernel knows.
    """
    config = model.config
    if model._can_set_attn_implementation() or config._attn_implementation == NAME:
        return
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        raise UnsupportedModelError("it biases attention by distance (ALiBi)")
    for module in model.modules():
        own: Any = type(module)
        kind = KINDS.get(own.__name__)
        # (Not code that came with a model, nor a release of transformers that has no such method.)
        if kind and own.__module__.startswith("transformers.models.") and hasattr(own, kind.replaced):
            subclassing.adopt(module, kind)
            config._attn_implementation = NAME
