"""Layers that keep a state besides the KV cache: Mamba, gated delta nets, short convolutions.

Qwen 3.5, Granite 4, LFM2, Falcon-H1 and others mix such layers with attention layers. Such a layer compresses
the sequence so far into a state of fixed size, which every step updates (see `state_table.py`). transformers'
layers expect a rectangular batch, not our ragged rows, so each is called once per piece:

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
from minipaged.execution.subclassing import Adopted, adopt

CACHE_ARGUMENTS = {"cache", "cache_params", "past_key_values"}
"""Names of the argument through which such a layer receives transformers' cache: the first since 5.24."""

UPDATES = {"update_conv_state", "update_recurrent_state"}
"""The cache's methods that such a layer calls."""


class States(Cache):
    """The states of some sequences, as a transformers cache; empty before their first tokens.

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
    before: list[Place]  # where `states` are copied from; none: they start empty, or are there already
    states: States

    def cache(self, layer: int) -> States:
        """The cache for a layer's call; the first one copies its states."""
        layers = self.states.layers
        while len(layers) <= layer:
            layers.append(_gather(self.before, len(layers)) if self.before else LinearAttentionLayer())
        return self.states


class Pieces(NamedTuple):
    """All pieces of a step, and `order` [T]: where each row of the batch is among theirs."""

    pieces: list[Piece]
    order: Tensor


_pieces: ContextVar[Pieces | None] = ContextVar("minipaged_pieces", default=None)


@contextmanager
def set_pieces(pieces: list[Piece]) -> Iterator[None]:
    """Recurrent layers inside the `with` compute these; elsewhere all rows are one sequence."""
    rows = torch.cat([piece.rows.flatten() for piece in pieces])
    before = _pieces.get()
    try:
        _pieces.set(Pieces(pieces, rows.argsort()))  # (inside, because a Ctrl-C may follow at once)
        yield
    finally:
        _pieces.set(before)


def one_sequence(num_rows: int, device: torch.device) -> Pieces:
    """All rows are one sequence from its first token on."""
    rows = torch.arange(num_rows, device=device)
    return Pieces([Piece(rows[None], [], States(1))], rows)


class Recurrent(Adopted):
    """A recurrent layer whose `forward` is called piece by piece."""

    layer_idx: int
    names: list[str]  # of the arguments; the first are the rows
    own_forward: Callable[..., Any]

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Rows [1, T, ...] in, the same out, as one tensor or several."""
        given = dict(zip(self.names, arguments)) | keywords
        (cache_argument,) = CACHE_ARGUMENTS.intersection(self.names)
        rows = given[self.names[0]][0]
        for name in self.names[1:]:
            if isinstance(given.get(name), Tensor):
                raise UnsupportedModelError(f"layer {self.layer_idx} asks for {name!r} besides its rows")
        pieces, order = _pieces.get() or one_sequence(len(rows), rows.device)
        outputs: list[Any] = []
        for piece in pieces:
            given[self.names[0]] = rows[piece.rows]
            given[cache_argument] = piece.cache(self.layer_idx)
            outputs.append(self.own_forward(**given))
        if isinstance(outputs[0], Tensor):
            return _in_order(outputs, order)
        return tuple(_in_order(parts, order) for parts in zip(*outputs))


def _in_order(parts: Iterable[Tensor], order: Tensor) -> Tensor:
    """The rows of all pieces in the batch's order: [1, T, ...]."""
    return torch.cat([part.flatten(0, 1) for part in parts])[order][None]


def find_recurrent(model: nn.Module) -> list[Any]:
    """The recurrent layers of a model: those that update states in transformers' cache."""
    return [module for module in model.modules() if hasattr(module, "layer_idx") and _is_recurrent(module)]


def _is_recurrent(module: nn.Module) -> bool:
    own = module.own_class if isinstance(module, Recurrent) else type(module)
    if CACHE_ARGUMENTS.isdisjoint(inspect.signature(own.forward).parameters):
        return False
    functions = (function for cls in own.__mro__ for function in vars(cls).values())
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in functions]
    return any(code is not None and not UPDATES.isdisjoint(code.co_names) for code in codes)


def compute_piecewise(model: nn.Module) -> None:
    """Make the model's recurrent layers compute piece by piece."""
    for module in find_recurrent(model):
        if not isinstance(module, Recurrent):
            own = type(module).forward
            names = list(inspect.signature(own).parameters)[1:]
            adopt(module, Recurrent, names=names, own_forward=own)
