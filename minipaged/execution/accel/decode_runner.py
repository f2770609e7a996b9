"""Decode steps on a CPU, each in one call of C++ (`kernels/cpp/decode.py`).

A layer is a dozen kernels. Called one by one from Python, within transformers' forward pass, they cost 3 ms
per step in a model of 12 layers: as much as reading 80 MB of weights. The calls, weights and pools stay the
same from step to step, so they are packed once; only token ids, angles, slots, block tables and lengths are
new. On a GPU, a CUDA graph does the same (`cuda_graph.py`).

For models whose layers and final norm are all fused, with weights in panels, and whose forward pass is just
embedding lookup (scaled in Gemma and Granite), layers, norm and head (with a cap on its logits in Gemma 2, a
divisor in Granite).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minipaged.execution.accel.fused_layer import FusedLayer, FusedNorm
from minipaged.execution.accel.layer_fusion import EquivalenceContext
from minipaged.execution.accel.panel_linear import panels_of
from minipaged.execution.attention import LayerPools, set_forward_context
from minipaged.execution.batch import Batch
from minipaged.kernels.cpp.decode import Decoder, DecoderLayer, Linear, Norm
from minipaged.kernels.cpp.panels import Panels

FEWEST_POSITIONS = 1024
"""Of the first table of angles, or `max_model_len` if that is less; it grows with longer sequences."""


class DecodeRunner:
    """Runs the decode steps that it accepts; see `make_decode_runner`."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: list[FusedLayer],
        pools: LayerPools,
        max_model_len: int,
        watchers: list[Any],
    ) -> None:
        base = _decoder_of(model)
        self._rotary, self._norm = base.rotary_emb, base.norm
        self._head: Any = model.get_output_embeddings()
        self._layers, self._watchers = layers, watchers
        kinds = getattr(self._rotary, "layer_types", None)  # (Gemma 3 has angles for each type of layers)
        self._rotations: list[tuple[str, ...]] = [()] if kinds is None else [(kind,) for kind in kinds]
        self._rotation_of = [
            0 if kinds is None else kinds.index(base.config.layer_types[i]) for i in range(len(layers))
        ]
        described = [
            _described(layer, rotation, *pools[layer.layer_idx][1:])
            for layer, rotation in zip(layers, self._rotation_of)
        ]
        self._embeddings: Tensor = base.embed_tokens.weight.detach().contiguous()
        self._scale: float = getattr(base, "embedding_multiplier", 1.0)
        if hasattr(base.embed_tokens, "embed_scale"):
            self._scale = float(base.embed_tokens.embed_scale.to(self._embeddings.dtype))
        self._softcap = getattr(base.config, "final_logit_softcapping", None)
        self._divisor = getattr(base.config, "logits_scaling", 1.0)
        norm, head = _norm_of(self._norm), _linear_of(self._head)
        self._decode = Decoder(self._embeddings, described, norm, head, self._scale)
        self._max_model_len = max_model_len
        self._angles = self._embeddings.new_empty(len(self._rotations), 2, 0, 0)
        # They own the panels, so they must live as long as this runner even if the model gets others.
        self._linears = [linear for layer in layers for linear in _linears_of(layer)] + [self._head]

    def accepts(self, batch: Batch) -> bool:
        """Whether it has only decodes, each with logits, and nobody watches the layers."""
        metadata = batch.metadata
        has_logits = len(batch.output_indices) == metadata.num_sequences
        return metadata.is_decode_only and has_logits and not self._watchers

    def __call__(self, batch: Batch) -> Tensor:
        """Logits [R, V] of a step that is accepted."""
        length = batch.metadata.max_context_len
        if length > self._angles.shape[2]:
            self._angles = self._angles_up_to(min(max(FEWEST_POSITIONS, 2 * length), self._max_model_len))
        return self._scaled(self._decode(batch.input_ids, batch.positions, self._angles, batch.metadata))

    def _angles_up_to(self, num_positions: int) -> Tensor:
        """Cosines and sines of positions 0, 1, ...: [rotations, 2, P, at most head_dim]."""
        positions = torch.arange(num_positions)[None]
        return torch.stack(
            [torch.cat(self._rotary(self._embeddings, positions, *k)) for k in self._rotations]
        )

    def _scaled(self, logits: Tensor) -> Tensor:
        logits = logits if self._divisor == 1 else logits / self._divisor
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def run_layer_by_layer(self, token_ids: Tensor) -> Tensor:
        """Logits [1, T, V] of tokens [1, T] at positions 0, 1, ..., under any `ForwardContext`."""
        rows = nn.functional.embedding(token_ids, self._embeddings)
        rows = rows if self._scale == 1 else rows * self._scale
        angles = self._angles_up_to(token_ids.shape[1])[:, :, None]
        for layer, rotation in zip(self._layers, self._rotation_of):
            rows = layer(rows, position_embeddings=tuple(angles[rotation]))
        return self._scaled(self._head(self._norm(rows)))


def make_decode_runner(
    model: PreTrainedModel,
    pools: LayerPools,
    max_model_len: int,
    forward: Callable[[Tensor], Tensor],
    watchers: list[Any],
) -> DecodeRunner | None:
    """The runner of a model, or None if the model is of another kind.

    Args:
        model: rewritten by `optimize`; hooks and modules that it gets later are not seen by decodes.
        pools: of its layers; they stay where they are.
        max_model_len: tokens of the longest sequence; up to there a position always has the same angles.
        forward: the model's own forward pass, tokens [1, T] at positions 0, 1, ... -> logits [1, T, V].
        watchers: while there are any, layers run one by one.
    """
    layers = [module for module in model.modules() if isinstance(module, FusedLayer)]
    if [layer.layer_idx for layer in layers] != list(pools) or not all(map(_can_describe, layers)):
        return None
    if any(spec.chunk_size or spec.query_scaling for spec, _, _ in pools.values()):
        return None
    base = _decoder_of(model)
    if not all(hasattr(base, part) for part in ("embed_tokens", "rotary_emb", "norm")):
        return None
    if type(base.norm) is not FusedNorm:
        return None
    if panels_of(cast(nn.Module, model.get_output_embeddings())) is None:
        return None
    runner = DecodeRunner(model, layers, pools, max_model_len, watchers)
    embeddings: Any = model.get_input_embeddings()
    token_ids = torch.tensor([[embeddings.num_embeddings - 1, 0]])
    with torch.inference_mode(), set_forward_context(EquivalenceContext()):
        is_same = torch.equal(runner.run_layer_by_layer(token_ids), forward(token_ids))
    return runner if is_same else None


def _decoder_of(model: PreTrainedModel) -> Any:
    return getattr(model.base_model, "language_model", model.base_model)  # (the rest takes images)


def _linears_of(layer: FusedLayer) -> list[Any]:
    return [layer.query_key_value, layer.attention_output, layer.gate_up, layer.mlp_output]


def _can_describe(layer: FusedLayer) -> bool:
    return layer.attention_parameters.sinks is None and all(map(panels_of, _linears_of(layer)))


def _described(layer: FusedLayer, rotation: int, key_cache: Tensor, value_cache: Tensor) -> DecoderLayer:
    norms = [layer.attention_norm, layer.query_norm, layer.key_norm, layer.mlp_norm]
    norms += [layer.attention_output_norm, layer.mlp_output_norm]
    return DecoderLayer(
        [_linear_of(linear) for linear in _linears_of(layer)],
        [None if norm is None else _norm_of(norm) for norm in norms],
        layer.is_gelu,
        layer.output_factor,
        rotation if layer.is_rotated else None,
        *(layer.num_heads[0], key_cache, value_cache, layer.attention_parameters),
    )


def _linear_of(linear: Any) -> Linear:
    return Linear(cast(Panels, panels_of(linear)), linear.bias)


def _norm_of(norm: FusedNorm) -> Norm:
    return Norm(norm.weight, norm.epsilon)
