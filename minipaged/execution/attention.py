"""The Hugging Face attention hook: every layer of the model lands here, and nowhere else is it known.

    model(...)  ->  layer i: q, k, v  ->  paged_attention_hook  ->  the step in force: write k, v; attend

A model prepared with `prepare` calls the hook in place of its own attention, without any mask. What the hook
does is decided by the step in force, a context variable, for some models drop what is handed to `forward`:
a `LayerProbe` looks at the layers once, a `PagedStep` attends through the block tables.
Paper: section 5.1. Does NOT know: requests, plans, sampling.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from minipaged.execution.accel.chunked_attention import split_at_chunks
from minipaged.kernels.dispatch import Backend
from minipaged.kernels.metadata import AttentionMetadata

NAME = "minipaged"


class UnsupportedModelError(ValueError):
    """A model that would compute something else than its own attention; the message says why."""


class Options(NamedTuple):
    """How one layer attends. `sinks` [Hq]; see `paged_attention` of the kernels."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class Temperature(NamedTuple):
    """Llama 4 scales queries by 1 + scale * log(1 + floor((position + 1) / floor))."""

    floor: float
    scale: float

    def of(self, positions: Tensor) -> Tensor:
        """The factor of each position, float32."""
        return torch.log1p(torch.floor((positions.float() + 1) / self.floor)) * self.scale + 1


class LayerSpec(NamedTuple):
    """What a layer's pool looks like, and what only its configuration tells.

    `chunk_size`: tokens see their own chunk of that many positions alone.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    chunk_size: int | None = None
    temperature: Temperature | None = None


class AttentionStep(Protocol):
    """Whoever answers for the attention of a forward pass."""

    rows_wanted: Tensor | None
    """Rows whose hidden state is used after the last layer, ascending; None: all."""

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Query [T, Hq, Dk], key [T, Hkv, Dk], value [T, Hkv, Dv] of one layer -> [T, Hq, Dv]."""
        ...


class LayerProbe:
    """Records a `LayerSpec` per layer and refuses what a `PagedStep` could not honour."""

    rows_wanted: Tensor | None = None

    def __init__(self, text_config: Any) -> None:
        self._config = text_config
        self.specs: dict[int, LayerSpec] = {}

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Note the shapes; attend to nothing."""
        layer = module.layer_idx
        if layer in self.specs:
            raise UnsupportedModelError(f"layer {layer} attends twice (cross-attention?)")
        if not getattr(module, "is_causal", True):
            raise UnsupportedModelError(f"layer {layer} attends to later tokens, too (no causal decoder)")
        kind = self._kind_of(layer)
        if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
            raise UnsupportedModelError(f"layer {layer} is of type {kind!r}")
        if kind == "sliding_attention" and options.sliding_window is None:
            raise UnsupportedModelError(f"layer {layer} does not say how long its sliding window is")
        chunk_size = self._config.attention_chunk_size if kind == "chunked_attention" else None
        temperature = None
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            temperature = Temperature(module.floor_scale, module.attn_scale)
        self.specs[layer] = LayerSpec(
            key.shape[1], key.shape[2], value.shape[2], key.dtype, key.device, chunk_size, temperature
        )
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])

    def _kind_of(self, layer: int) -> str:
        layer_types = getattr(self._config, "layer_types", None)
        if layer_types is not None:
            return layer_types[layer]
        has_window = getattr(self._config, "sliding_window", None) is not None
        return "sliding_attention" if has_window else "full_attention"


class PagedStep:
    """Attention of one step: write the new K/V to their slots, then attend through the block tables.

    Args:
        pools: per layer its spec, key pool and value pool.
        metadata: the step's batch.
        positions: [T] position of each row in its sequence.
        rows_wanted: see `AttentionStep`; of each sequence its last row or none.
    """

    def __init__(
        self,
        pools: dict[int, tuple[LayerSpec, Tensor, Tensor]],
        metadata: AttentionMetadata,
        positions: Tensor,
        backend: Backend,
        rows_wanted: Tensor | None = None,
    ) -> None:
        self._pools = pools
        self._metadata = metadata
        self._positions = positions
        self._backend = backend
        self.rows_wanted = rows_wanted
        self._split: dict[int, AttentionMetadata] = {}  # chunk size -> metadata cut at chunk boundaries

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Write, then attend: rows of this very step see each other through the pool, too."""
        spec, key_cache, value_cache = self._pools[module.layer_idx]
        metadata = self._metadata
        self._backend.write_kv(key, value, key_cache, value_cache, metadata.slot_mapping)
        if self.rows_wanted is not None and query.shape[0] < key.shape[0]:
            metadata = metadata.of_rows(self.rows_wanted)
        if spec.temperature is not None:
            query = self._retune(query, spec.temperature)
        if spec.chunk_size is not None:
            metadata = self._split_metadata(spec.chunk_size, key_cache)
        return self._backend.paged_attention(
            query,
            key_cache,
            value_cache,
            metadata,
            scale=options.scale,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
            sinks=options.sinks,
        )

    def _retune(self, query: Tensor, temperature: Temperature) -> Tensor:
        # Without a cache object of its own the model takes the row number for the position.
        rows = torch.arange(query.shape[0], device=query.device)
        factor = temperature.of(self._positions) / temperature.of(rows)
        return (query * factor[:, None, None]).to(query.dtype)

    def _split_metadata(self, chunk_size: int, key_cache: Tensor) -> AttentionMetadata:
        if chunk_size not in self._split:
            self._split[chunk_size] = split_at_chunks(self._metadata, chunk_size, key_cache)
        return self._split[chunk_size]


_step_in_force: ContextVar[AttentionStep] = ContextVar("minipaged_attention_step")


@contextmanager
def attention_step(step: AttentionStep) -> Iterator[None]:
    """Let `step` answer for all attention of the forward passes inside the `with`."""
    token = _step_in_force.set(step)
    try:
        yield
    finally:
        _step_in_force.reset(token)


def step_in_force() -> AttentionStep:
    """Whoever answers for the attention of the forward pass that is going on.

    Raises:
        RuntimeError: the model is run by somebody else than this package.
    """
    step = _step_in_force.get(None)
    if step is None:
        raise RuntimeError(f"attn_implementation {NAME!r} runs inside `attention_step` only")
    return step


# What models hand over besides, which changes nothing here: it says again what the step knows better, or it
# is addressed to other parts of the model and passes by.
IGNORED_KEYWORDS = {
    "cache_position",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_ids",
    "use_cache",
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
        UnsupportedModelError: a mask or an argument that paged attention does not know.
        RuntimeError: see `step_in_force`.
    """
    step = step_in_force()
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} brings a mask of its own")
    for name, argument in others.items():
        if argument is not None and name not in IGNORED_KEYWORDS:
            raise UnsupportedModelError(f"{type(module).__name__} asks for {name!r} in its attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = step.attend(
        module,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        Options(scale, sliding_window, softcap, s_aux),
    )
    return output[None], None


def prepare(model: PreTrainedModel) -> None:
    """Make every attention layer of the model call the hook.

    No mask is registered under the name, so transformers builds none.

    Raises:
        UnsupportedModelError: the architecture cannot swap its attention.
    """
    if not model._can_set_attn_implementation():
        # transformers itself would log a warning and quietly keep its own, cache-less attention
        raise UnsupportedModelError("its attention does not use transformers' attention interface")
    accepted = inspect.signature(model.forward).parameters
    for parameter in ("position_ids", "logits_to_keep"):
        if parameter not in accepted:
            raise UnsupportedModelError(f"its forward pass takes no {parameter}")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError("it keeps a recurrent state besides the KV cache")
    AttentionInterface.register(NAME, paged_attention_hook)
    model.set_attn_implementation(NAME)
