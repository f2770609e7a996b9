"""Layers that keep a state besides the KV cache: Mamba, gated delta nets, short convolutions.

Qwen 3.5, Granite 4, LFM2, Falcon-H1 and others have some among their attention layers. Such a layer reads a
sequence into a state of fixed size, which each step replaces (see `state_table.py`). transformers' layers
compute rows of equal length, not our ragged rows, so each is called piece by piece:

    rows     a a a a a | b | c | d d      a and d: chunks; b and c: decodes
    pieces   [a a a a a] [d d] [b, c]     each a call, with the states of its sequences
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from minipaged.execution.attention import UnsupportedModelError

CACHE_ARGUMENTS = {"cache_params", "past_key_values"}
"""In which of its arguments such a layer gets transformers' cache."""

UPDATES = {"update_conv_state", "update_recurrent_state"}
"""What it calls of that cache."""


class States(Cache):
    """The states of some sequences, as a cache of transformers; empty before their first tokens.

    layers[i]: those of layer i, tensors [sequences, ...] that the layer may write into.
    """

    def __init__(self, num_sequences: int) -> None:
        super().__init__(layers=[])
        self.num_sequences = num_sequences

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        layers: Any = self.layers
        kinds = [kind for layer in layers for kind in (layer.conv_states, layer.recurrent_states)]
        return sum(state.nbytes for kind in kinds for state in kind.values() if state is not None)


class Place(NamedTuple):
    """Where to find a sequence's state after `num_tokens` tokens."""

    states: States
    row: int
    num_tokens: int

    def take_out(self) -> Place:
        """A copy of this state alone."""
        alone = States(1)
        alone.layers = [_gather([self], layer) for layer in range(len(self.states.layers))]
        return Place(alone, 0, self.num_tokens)


def _gather(places: list[Place], layer: int) -> LinearAttentionLayer:
    """A copy of what a layer keeps at these places, in their order."""
    gathered = LinearAttentionLayer()
    updates: dict[str, Callable[..., Any]] = {
        "conv_states": gathered.update_conv_state,
        "recurrent_states": gathered.update_recurrent_state,
    }
    for kind, update in updates.items():
        kept = [getattr(place.states.layers[layer], kind) for place in places]
        for number in [number for number, state in kept[0].items() if state is not None]:
            rows = [states[number][place.row, None] for states, place in zip(kept, places)]
            update(torch.cat(rows), number)
    return gathered


class Piece(NamedTuple):
    """What a layer computes in one call: T rows of one sequence, or one row of each of B."""

    rows: Tensor  # [1, T] or [B, 1], indices into the batch
    before: list[Place]  # what is copied before a layer's first call; none if `states` go on, or begin
    states: States

    def cache(self, layer: int) -> States:
        """What the layer may read and write."""
        layers = self.states.layers
        while len(layers) <= layer:
            layers.append(_gather(self.before, len(layers)) if self.before else LinearAttentionLayer())
        return self.states


_pieces: ContextVar[list[Piece] | None] = ContextVar("minipaged_pieces", default=None)


@contextmanager
def set_pieces(pieces: list[Piece]) -> Iterator[None]:
    """Recurrent layers inside the `with` compute these; elsewhere all rows are one sequence."""
    token = _pieces.set(pieces)
    try:
        yield
    finally:
        _pieces.reset(token)


def find_recurrent(model: nn.Module) -> list[Any]:
    """The recurrent layers of a model: those that update states in transformers' cache."""
    return [module for module in model.modules() if _is_recurrent(module)]


def _is_recurrent(module: nn.Module) -> bool:
    layer = type(module)
    accepted = inspect.signature(layer.forward).parameters
    if not hasattr(module, "layer_idx") or CACHE_ARGUMENTS.isdisjoint(accepted):
        return False
    functions = (function for cls in layer.__mro__ for function in vars(cls).values() if callable(function))
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in functions]
    return any(code is not None and not UPDATES.isdisjoint(code.co_names) for code in codes)


class PiecewiseLayer:
    """Takes the place of a recurrent layer's `forward`: calls it piece by piece."""

    def __init__(self, module: Any) -> None:
        self.forward: Callable[..., Any] = module.forward
        self._layer: int = module.layer_idx
        self._names = list(inspect.signature(self.forward).parameters)
        (self._cache_argument,) = CACHE_ARGUMENTS.intersection(self._names)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Rows [1, T, ...] in, the same out, as one tensor or several."""
        given = dict(zip(self._names, arguments)) | keywords
        rows = given[self._names[0]][0]
        for name in self._names[1:]:
            if isinstance(given.get(name), Tensor):
                raise UnsupportedModelError(f"layer {self._layer} asks for {name!r} besides its rows")
        everything = torch.arange(len(rows), device=rows.device)[None]
        pieces = _pieces.get() or [Piece(everything, [], States(1))]
        outputs: list[Any] = []
        for piece in pieces:
            given[self._names[0]] = rows[piece.rows]
            given[self._cache_argument] = piece.cache(self._layer)
            outputs.append(self.forward(**given))
        order = torch.cat([piece.rows.flatten() for piece in pieces])
        if isinstance(outputs[0], Tensor):
            return _in_order(outputs, order)
        return tuple(_in_order(parts, order) for parts in zip(*outputs))


def _in_order(parts: Iterable[Tensor], order: Tensor) -> Tensor:
    """The rows of all pieces, where the batch has them: [1, T, ...]."""
    rows = torch.cat([part.flatten(0, 1) for part in parts])
    return torch.empty_like(rows).index_copy_(0, order, rows)[None]


def compute_piecewise(model: nn.Module) -> None:
    """From now on the model's recurrent layers compute piece by piece."""
    for module in find_recurrent(model):
        module.forward = PiecewiseLayer(module)


def compute_as_before(model: nn.Module) -> None:
    """Undo `compute_piecewise`."""
    for module in find_recurrent(model):
        module.forward = module.forward.forward
