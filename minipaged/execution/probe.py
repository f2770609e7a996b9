"""The properties of a model, found before there is a pool: forward passes in which attention returns zeros.

    tokens 0, 0        which layers attend, and the shapes of their K/V; how many logits there are
    tokens V - 1, 0    other logits of the last token: the first reached it other than by attention
    without positions  other logits: positions do not start at 0

A model that would compute something other than its own attention is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from minipaged.execution.alibi import MAX_POSITIONS, MORE
from minipaged.execution.attention import (
    LayerSpec,
    QueryScaling,
    UnsupportedModelError,
    call_model,
    set_forward_context,
)
from minipaged.execution.load_errors import why_forward_failed
from minipaged.execution.recurrent import Piece, States, find_recurrent, set_pieces
from minipaged.execution.recurrent_check import continue_in_chunks, differ
from minipaged.kernels.metadata import AttentionParameters

KINDS = {"full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding"}
"""Layers that attend in a way we can compute; hybrid ones are recurrent, too."""

NO_MIXING = {"mlp", "moe"}
"""Layers in which no token sees another."""


class Probe:
    """Forward passes without a pool.

    Args:
        model: prepared, so that its layers call the hook.
        text_config: of its decoder.
        max_model_len: tokens of the longest sequence; positions stay below it.

    After `inspect`, `state_bytes` is the size of one sequence's recurrent states, and `in_chunks` says
    whether recurrent layers can continue a sequence by several tokens at once, not only one by one.
    """

    def __init__(self, model: PreTrainedModel, text_config: Any, max_model_len: int) -> None:
        self.model, self.text_config, self.max_model_len = model, text_config, max_model_len
        self.device = next(model.parameters()).device
        self.recurrent_layers = find_recurrent(model)
        self.state_bytes, self.in_chunks = 0, True

    @torch.inference_mode()
    def run(
        self, token_ids: list[int], num_outputs: int, from_zero: bool = True, apart: bool = False
    ) -> tuple[dict[int, LayerSpec], Tensor]:
        """The specs of the layers, and the logits [num_outputs, V] of the last rows.

        `from_zero`: positions are given, from 0 on; else the model counts them itself. `apart`: to recurrent
        layers, each token is a sequence of its own.
        """
        context = ProbeContext(self.text_config, self.max_model_len)
        rows = torch.arange(len(token_ids), device=self.device)
        piece = Piece(rows[:, None] if apart else rows[None], [], States(len(rows) if apart else 1))
        with set_forward_context(context), set_pieces([piece]):
            positions = (rows % self.max_model_len)[None] if from_zero else None
            input_ids = torch.tensor([token_ids], device=self.device)
            logits = call_model(self.model, input_ids, positions, rows[len(rows) - num_outputs :])
        self.state_bytes = piece.states.num_bytes // piece.states.num_sequences
        return context.specs, logits[0]

    def inspect(self, block_size: int, layers: range | None = None) -> tuple[dict[int, LayerSpec], int]:
        """The specs of the layers that attend, and the size of the vocabulary.

        Args:
            block_size: tokens of a block.
            layers: those that this model has to compute; None: all.

        Raises:
            UnsupportedModelError: the model would compute something other than its own attention.
        """
        num_layers = getattr(self.text_config, "num_hidden_layers", 1)
        if num_layers < 1:
            raise UnsupportedModelError(f"num_hidden_layers is {num_layers}; give at least 1")
        try:
            specs, logits = self.run([0, 0], num_outputs=1, apart=True)
            if logits.shape[0] != 1:
                raise UnsupportedModelError("it cannot compute the logits of chosen rows only")
            if not logits.isfinite().all():
                raise UnsupportedModelError(
                    "its logits are not finite: float16 overflows (choose another dtype), or weights are "
                    "damaged"
                )
            vocab_size = logits.shape[1]
            # (The first stage of several has no head: these are rows, perhaps wider than the vocabulary.)
            num_tokens = min(vocab_size, getattr(self.text_config, "vocab_size", vocab_size))
            _, after_another = self.run([num_tokens - 1, 0], num_outputs=1, apart=True)
            _, own_positions = self.run([0, 0], num_outputs=1, from_zero=False, apart=True)
            tokens = [token % num_tokens for token in range(1, 10)]
            self.in_chunks = continue_in_chunks(self.recurrent_layers, lambda: self.run(tokens, 1))
        except (UnsupportedModelError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # third-party code, which may rely on a mask or a cache
            raise UnsupportedModelError(why_forward_failed(error, self.text_config)) from error
        if differ(logits, after_another):
            what = "a recurrent state" if getattr(self.model, "_is_stateful", False) else "other token mixing"
            raise UnsupportedModelError(f"it has {what} besides the attention that can be replaced")
        if differ(logits, own_positions):
            raise UnsupportedModelError("its positions do not start at 0")
        if not specs:
            raise UnsupportedModelError("it keeps a state instead of a KV cache")
        recurrent = {layer.layer_idx for layer in self.recurrent_layers}
        silent = set(layers or range(num_layers)) - specs.keys() - recurrent
        silent -= {
            layer for layer in silent if _kind_of(layer, self.text_config, self.max_model_len) in NO_MIXING
        }
        if silent:
            raise UnsupportedModelError(f"layers {sorted(silent)} keep no K/V in the cache")
        for layer, spec in specs.items():
            self._check_settings(layer, spec, block_size)
        return specs, vocab_size

    def _check_settings(self, layer: int, spec: LayerSpec, block_size: int) -> None:
        """Raise UnsupportedModelError: the layer cannot have such blocks, or sequences of that length."""
        if spec.chunk_size is not None and spec.chunk_size % block_size:
            fits = max(size for size in range(1, block_size) if spec.chunk_size % size == 0)
            raise UnsupportedModelError(
                f"block_size {block_size} does not divide the attention chunk of {spec.chunk_size} "
                f"tokens of layer {layer}; choose one that does, for example {fits}"
            )
        if spec.alibi is not None and self.max_model_len > MAX_POSITIONS:
            raise UnsupportedModelError(
                f"max_model_len is {self.max_model_len}, and its bias by distance (ALiBi) is exact up to "
                f"{MAX_POSITIONS} positions; set max_model_len to {MAX_POSITIONS} or less"
            )


class ProbeContext:
    """Records a `LayerSpec` per layer and refuses what a `PagedContext` cannot compute."""

    output_indices: Tensor | None = None

    def __init__(self, text_config: Any, max_model_len: int) -> None:
        self._config, self._max_model_len = text_config, max_model_len
        self.specs: dict[int, LayerSpec] = {}

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, parameters: AttentionParameters
    ) -> Tensor:
        """Record the shapes; return zeros."""
        layer = module.layer_idx
        if layer in self.specs:
            raise UnsupportedModelError(
                f"layer {layer} attends twice in one pass, but has one place in the KV cache"
            )
        if not getattr(module, "is_causal", True):
            raise UnsupportedModelError(f"layer {layer} also attends to later tokens (not a causal decoder)")
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(
                f"layer {layer} has {num_heads} query heads, not a multiple of its {num_kv_heads} KV heads"
            )
        kind = _kind_of(layer, self._config, self._max_model_len)
        if kind not in KINDS:
            raise UnsupportedModelError(f"layer {layer} is of type {kind!r}")
        window = parameters.sliding_window
        if kind in ("sliding_attention", "hybrid_sliding") and window is None:
            raise UnsupportedModelError(f"layer {layer} does not say how long its sliding window is")
        if window is not None and window < 1:
            raise UnsupportedModelError(
                f"layer {layer} has sliding_window {window}; give at least 1, or null"
            )
        chunk_size = self._config.attention_chunk_size if kind == "chunked_attention" else None
        scaling = None
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            scaling = QueryScaling(module.floor_scale, module.attn_scale)
        find_alibi = getattr(module, "find_alibi", None)  # see `older_attention.py`
        alibi = find_alibi() if find_alibi else None
        key_dim = key.shape[2] + (MORE if alibi else 0)
        self.specs[layer] = LayerSpec(
            num_kv_heads, key_dim, value.shape[2], key.dtype, key.device, chunk_size, scaling, alibi
        )
        return query.new_zeros(*query.shape[:2], value.shape[2])


def _kind_of(layer: int, config: Any, max_model_len: int) -> str:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return layer_types[layer]
    window = getattr(config, "sliding_window", None)
    # (Of transformers' classes, some do not know the key, which then has no effect. The class of a model with
    # its own code need not declare what it reads.)
    is_own = type(config).__module__.startswith("transformers.")
    if is_own and "sliding_window" not in type(config).__dataclass_fields__:
        window = None
    return "full_attention" if window is None or window >= max_model_len else "sliding_attention"
