"""Attention modules that are older than transformers' attention interface, made to call the hook, too.

    CodeGen, GPT, GPT-J, GPT-Neo, GPT-NeoX Japanese    replaced: `_attn`, between projections and output
    BLOOM, Falcon, MPT, XGLM                           replaced: `forward`; they have no such method

Variants for flash attention do everything in `forward`, and are left alone. Where scores fall with the
distance (BLOOM, MPT, some Falcons), `find_alibi` finds the slopes; see `alibi.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from minipaged.execution import subclassing
from minipaged.execution.alibi import ALiBi, RoundedALiBi
from minipaged.execution.attention import NAME, paged_attention_hook


class Replaced(subclassing.Adopted):
    """A module whose method `replaced` is ours."""

    replaced = "forward"


class OlderAttention(Replaced):
    """An attention module whose method `_attn` calls the hook."""

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

    def _attn(self: Any, *heads: Any, **options: Any) -> tuple[Tensor, None]:
        window = self.config.window_size if self.attention_type == "local" else None
        return super()._attn(*heads, scaling=1.0, sliding_window=window, **options)


class GPT(OlderAttention):
    """The first one: keys are transposed for the matrix multiplication."""

    def _attn(self: Any, *arguments: Any, **options: Any) -> Any:
        query, key, value, attention_mask, _ = arguments
        scaling = None if self.scale else 1.0
        return [super()._attn(query, key.transpose(2, 3), value, attention_mask, scaling=scaling)[0]]


class XGLM(Replaced):
    """May attend to an encoder, too, if it is given one."""

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None, **others: Any
    ) -> tuple[Tensor, None]:
        """Rows [1, T, D] -> [1, T, D], and no weights."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        size = (self.num_heads, -1)
        heads = (project(hidden_states).unflatten(2, size).transpose(1, 2) for project in projections)
        return self.out_proj(_attend(self, heads, attention_mask)), None


class Falcon(Replaced):
    """One K/V head for each group of query heads, which the pool keeps once, unless heads are biased."""

    def find_alibi(self: Any) -> ALiBi | None:
        """The bias that some Falcons have instead of rotary embeddings."""
        from transformers.models.falcon.modeling_falcon import build_alibi_tensor

        return RoundedALiBi(_slopes(self, build_alibi_tensor)) if self.config.alibi else None

    def forward(
        self: Any,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Any,
        position_embeddings: Any,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Rows [1, T, D] -> [1, T, D], and no weights."""
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        heads = self.query_key_value(hidden_states).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        # Each group: its query heads, its key head, its value head.
        groups = heads.unflatten(1, ((heads.shape[1] - self.num_heads) // 2, -1))
        query, key, value = groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]
        if alibi is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        else:
            repeats = self.num_heads // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        return self.dense(_attend(self, (query, key, value), attention_mask)), None


class Biased(Replaced):
    """Of a model in which only a bias by distance encodes a token's position."""


class Bloom(Biased):
    """Also adds the layer's residual."""

    def find_alibi(self) -> ALiBi:
        """As the model builds it."""
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        return ALiBi(_slopes(self, build_alibi_tensor))

    def forward(
        self: Any, hidden_states: Tensor, residual: Tensor, attention_mask: Any, **others: Any
    ) -> tuple[Tensor, None]:
        """Rows [1, T, D] and those to add -> [1, T, D], and no weights."""
        heads = self._reshape(self.query_key_value(hidden_states))
        return self.dense(_attend(self, heads, attention_mask)) + residual, None


class Mpt(Biased):
    """Its configuration may give a scale, and a limit of all elements of queries, keys and values."""

    def find_alibi(self: Any) -> ALiBi:
        """As the model builds it: whatever `attn_config` says, it is biased, and with the same slopes."""
        from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

        return ALiBi(-build_mpt_alibi_tensor(self.n_heads, 2, device=self.Wqkv.weight.device)[:, 0, 0])

    def forward(self: Any, hidden_states: Tensor, attention_mask: Any, **others: Any) -> tuple[Tensor, None]:
        """Rows [1, T, D] -> [1, T, D], and no weights."""
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
        heads = mixed.unflatten(2, (3, self.n_heads, -1)).transpose(1, 3).unbind(2)
        return self.out_proj(_attend(self, heads, attention_mask, scaling=self.softmax_scale)), None


class MptDecoder(Replaced):
    """The layers one after another; its own `forward` expects a mask, and biases as long as `max_seq_len`."""

    def forward(self: Any, input_ids: Tensor, **others: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        """Token ids [1, T] -> rows [1, T, D]."""
        rows = self.wte(input_ids)
        for block in self.blocks:
            rows, _ = block(rows, position_bias=None, attention_mask=None)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.norm_f(rows))


KINDS: dict[str, type[Replaced]] = {
    **dict.fromkeys(("CodeGenAttention", "GPTJAttention", "GPTNeoXJapaneseAttention"), OlderAttention),
    **{"Attention": GPT, "GPTNeoSelfAttention": GPTNeo, "FalconAttention": Falcon, "XGLMAttention": XGLM},
    **{"BloomAttention": Bloom, "MptAttention": Mpt, "MptModel": MptDecoder},
}


def adopt(model: PreTrainedModel) -> None:
    """Make such modules call the hook; the configuration names it, so that the model builds no mask."""
    config = model.config
    if model._can_set_attn_implementation() or config._attn_implementation == NAME:
        return
    numbers = count()
    for module in model.modules():
        own: Any = type(module)
        kind = KINDS.get(own.__name__)
        # (Some releases of transformers have no such method.)
        if kind and subclassing.is_of_transformers(module) and hasattr(own, kind.replaced):
            # (Some do not know their layer's number, which the hook needs.)
            subclassing.adopt(module, kind, layer_idx=next(numbers))
            config._attn_implementation = NAME


def is_biased(model: PreTrainedModel) -> bool:
    """Whether only a bias by distance encodes a token's position: the model itself takes none."""
    return any(isinstance(module, Biased) for module in model.modules())


def _attend(
    module: Any, heads: Iterable[Tensor], attention_mask: Any, scaling: float | None = None
) -> Tensor:
    """Query, key and value [1, H, T, D] -> the outputs of all heads side by side, [1, T, H * D]."""
    query, key, value = heads
    output, _ = paged_attention_hook(module, query, key, value, attention_mask, scaling)
    return output.flatten(2)


def _slopes(module: Any, build_alibi_tensor: Any) -> Tensor:
    """What a head adds to the score of the key at position 1: [Hq]."""
    two_tokens = torch.ones(1, 2, dtype=torch.int64, device=module.dense.weight.device)
    return build_alibi_tensor(two_tokens, module.num_heads, torch.float32)[:, 0, 1]
