"""The attention function that transformers calls in every layer: `paged_attention_hook`.

    model(...)  ->  layer i: q, k, v  ->  paged_attention_hook  ->  forward context: write k, v; attend

`prepare` makes a model call the hook instead of its own attention, without a mask. What the hook does depends
on the forward context: a `ProbeContext` (`probe.py`) inspects the layers once, a `PagedContext` attends
through the block tables. The context is a context variable because some models drop extra arguments of
`forward`. Paper: section 5.1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from minipaged.execution.alibi import ALiBi
from minipaged.execution.chunked_attention import split_at_chunks
from minipaged.kernels.dispatch import Backend
from minipaged.kernels.metadata import AttentionMetadata, AttentionParameters

NAME = "minipaged"


class UnsupportedModelError(ValueError):
    """Paged attention would differ from the model's own attention; the message says why."""


class QueryScaling(NamedTuple):
    """Llama 4 scales queries by 1 + scale * log(1 + floor((position + 1) / floor))."""

    floor: float
    scale: float

    def at(self, positions: Tensor) -> Tensor:
        """The factor of each position, float32."""
        return torch.log1p(torch.floor((positions.float() + 1) / self.floor)) * self.scale + 1


class LayerSpec(NamedTuple):
    """Shape and type of a layer's pools, and whatever else only its configuration contains.

    `chunk_size`: a token sees only its own chunk of that many positions. `alibi`: extends queries and keys;
    `key_dim` is their size afterwards.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    chunk_size: int | None = None
    query_scaling: QueryScaling | None = None
    alibi: ALiBi | None = None


LayerPools = dict[int, tuple[LayerSpec, Tensor, Tensor]]
"""layer -> spec, key pool [num_blocks, Hkv, block_size, Dk], value pool [num_blocks, Hkv, block_size, Dv]."""


class ForwardContext(Protocol):
    """Computes the attention of a forward pass."""

    output_indices: Tensor | None
    """[R] int64, ascending: the only rows whose hidden state is used after the last layer; None: all."""

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, parameters: AttentionParameters
    ) -> Tensor:
        """Query [T, Hq, Dk], key [T, Hkv, Dk], value [T, Hkv, Dv] of one layer -> [T, Hq, Dv]."""
        ...


@dataclass
class PagedContext:
    """Attention of one step: write the new K/V to their slots, then attend through the block tables."""

    pools: LayerPools
    metadata: AttentionMetadata
    positions: Tensor  # [T], each row's in its sequence
    backend: Backend
    output_indices: Tensor | None  # of each sequence its last row or none
    output_rows: list[int]  # the same on the host
    end_stage: Callable[[str], None]  # see `ModelRunner.stage_hooks`
    # Cut at the boundaries of chunks, by their size and the number of rows.
    _split: dict[tuple[int, int], AttentionMetadata] = field(default_factory=dict)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, parameters: AttentionParameters
    ) -> Tensor:
        """Write, then attend: tokens of the same step see each other through the pool, too."""
        self.end_stage("forward")
        spec, key_cache, value_cache = self.pools[module.layer_idx]
        metadata = self.metadata
        if spec.alibi is not None:
            query, key = spec.alibi.extend(query, key, self.positions, parameters.scale)
        self.backend.write_kv(key, value, key_cache, value_cache, metadata.slot_mapping)
        self.end_stage("write_kv")
        if self.output_indices is not None and query.shape[0] < key.shape[0]:
            metadata = metadata.select_queries(self.output_indices, self.output_rows)
        if spec.query_scaling is not None:
            query = self._scale_queries(query, spec.query_scaling)
        if spec.chunk_size is not None:
            kind = spec.chunk_size, query.shape[0]
            if kind not in self._split:
                self._split[kind] = split_at_chunks(metadata, spec.chunk_size, key_cache)
            metadata = self._split[kind]
        output = self.backend.paged_attention(query, key_cache, value_cache, metadata, **parameters._asdict())
        self.end_stage("attention")
        return output

    def _scale_queries(self, query: Tensor, scaling: QueryScaling) -> Tensor:
        # Without its own cache object, the model would take the row number for the position.
        rows = torch.arange(query.shape[0], device=query.device)
        factor = scaling.at(self.positions) / scaling.at(rows)
        return (query * factor[:, None, None]).to(query.dtype)


_forward_context: ContextVar[ForwardContext | None] = ContextVar("minipaged_forward_context", default=None)


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[None]:
    """Forward passes inside the `with` compute their attention through `context`."""
    before = _forward_context.get()
    try:
        _forward_context.set(context)  # (inside, because a Ctrl-C may follow at once)
        yield
    finally:
        _forward_context.set(before)


def get_forward_context() -> ForwardContext:
    """The context of the current forward pass.

    Raises:
        RuntimeError: the model was called outside `set_forward_context`.
    """
    if (context := _forward_context.get()) is None:
        raise RuntimeError(f"attn_implementation {NAME!r} runs only inside `set_forward_context`")
    return context


# Further arguments that models pass and that do not change attention here.
IGNORED_KEYWORDS = {
    *("cache_position", "is_causal", "output_attentions", "output_hidden_states"),
    *("output_router_logits", "past_key_values", "position_ids", "use_cache"),
}


def paged_attention_hook(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers: query [1, Hq, T, Dk] -> ([1, T, Hq, Dv], None).

    key [1, Hkv, T, Dk], value [1, Hkv, T, Dv], s_aux [Hq]: attention sinks.

    Raises:
        UnsupportedModelError: a mask or an argument that paged attention does not support.
        RuntimeError: see `get_forward_context`.
    """
    context = get_forward_context()
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} builds its own mask")
    for name, argument in others.items():
        if argument is not None and name not in IGNORED_KEYWORDS:
            raise UnsupportedModelError(f"{type(module).__name__} asks for {name!r} in its attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parameters = AttentionParameters(scale, sliding_window, softcap, s_aux)
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return context.attend(module, query, key, value, parameters)[None], None


def prepare(model: PreTrainedModel, needs_positions: bool = True) -> None:
    """Make every attention layer of the model call the hook; transformers builds no mask for its name.

    `needs_positions`: the model is given each row's position, or it would count rows.

    Raises:
        UnsupportedModelError: the architecture cannot swap its attention.
    """
    accepted = inspect.signature(model.forward).parameters
    has_positions = "position_ids" in accepted
    if not has_positions and getattr(model, "_is_stateful", False):
        raise UnsupportedModelError("it is recurrent: it keeps a state instead of a KV cache")
    is_adopted = model.config._attn_implementation == NAME  # see `older_attention.py`
    if not is_adopted and not model._can_set_attn_implementation():
        # transformers itself would only log a warning and keep its own attention, which has no cache
        raise UnsupportedModelError("its attention does not use transformers' attention interface")
    if not has_positions and any(name.startswith("encoder_") for name in accepted):
        raise UnsupportedModelError("it is the decoder of an encoder-decoder model")
    if needs_positions and not has_positions:
        raise UnsupportedModelError("its forward pass takes no position_ids")
    if "logits_to_keep" not in accepted:
        raise UnsupportedModelError("its forward pass takes no logits_to_keep")
    AttentionInterface.register(NAME, paged_attention_hook)
    model.set_attn_implementation(NAME)


def call_model(
    model: PreTrainedModel, input_ids: Tensor, positions: Tensor | None, output_indices: Tensor
) -> Tensor:
    """Logits [1, R, V] of rows `output_indices` [R], inside `set_forward_context`.

    input_ids, positions: [1, T] int64; without positions the model counts them itself.
    """
    return model(
        input_ids=input_ids, position_ids=positions, use_cache=False, logits_to_keep=output_indices
    ).logits
