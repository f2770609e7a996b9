"""Does a recurrent layer compute the same in pieces as at once? Checked when a model is loaded.

    rows     0 1 2 | 3 4 | 5 | 6 | 7 | 8        the same outputs, whether cut or not
    states   must be read where a piece starts: others give other outputs

A float32 copy of the layer is checked: half precision rounds as much as an omission may change. That states
are read is checked separately, because with small weights it would hardly show.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from minipaged.execution.attention import UnsupportedModelError
from minipaged.execution.recurrent import Piece, Place, Recurrent, States, set_pieces

TOLERANCE = 1e-3
"""Of the largest output: some kernels of GPUs round to 10 bits even in float32."""

UNBOUNDED = (0.0, float("inf"))
"""Bounds of a Mamba 2 layer's time steps that have no effect: they are positive."""


def differ(actual: Tensor, expected: Tensor) -> bool:
    """Whether the two differ by more than rounding; NaN is a difference, too."""
    return not (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()


def continue_in_chunks(layers: list[Recurrent], run: Callable[[], object]) -> bool:
    """Whether all layers can continue a sequence by several tokens at once, not only one by one.

    Args:
        layers: of a model.
        run: runs it once, on nine rows of one sequence.

    Raises:
        UnsupportedModelError: one of them cannot even continue by single tokens.
    """
    calls: dict[Any, tuple[Any, Any]] = {}

    def record(layer: Any, arguments: Any, keywords: Any) -> None:
        calls[layer] = arguments, keywords

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(record, with_kwargs=True).remove)  # type: ignore[attr-defined]
        run()
    in_chunks = True
    for layer, (arguments, keywords) in calls.items():
        copied = LayerCopy(layer, dict(zip(layer.names, arguments)) | keywords)
        in_chunks = in_chunks and copied.continues_by([2, 1, 1, 1, 1])
        # (transformers keeps time steps within bounds in a chunk, but not in a single token; nine rows may
        # reach none of them.)
        is_bounded = tuple(getattr(layer, "time_step_limit", None) or UNBOUNDED) != UNBOUNDED
        if is_bounded or (not in_chunks and not copied.continues_by([1, 1, 1, 1])):
            raise UnsupportedModelError("its recurrent layers give other results in pieces than all at once")
    return in_chunks


class LayerCopy:
    """A copy of a layer in float32; `given` are arguments that it was called with."""

    def __init__(self, layer: Any, given: dict[str, Any]) -> None:
        self._layer, self._given = deepcopy(layer).float(), given
        self._rows: Tensor = given[layer.names[0]].float()

    @torch.inference_mode()
    def compute(self, first: int, length: int, states: States) -> Tensor:
        """The outputs of rows from `first` on, after the states of those before."""
        rows = self._rows[:, first : first + length]
        with set_pieces([Piece(torch.arange(length, device=rows.device)[None], [], states)]):
            outputs = self._layer(**{**self._given, self._layer.names[0]: rows})
        parts = [outputs] if isinstance(outputs, Tensor) else outputs
        return torch.cat([part.flatten(2) for part in parts], dim=-1)

    def continues_by(self, lengths: list[int]) -> bool:
        """Whether pieces of these lengths, after a first one, give the same as all rows at once."""
        row = self._rows.shape[1] - sum(lengths)
        states = States(1)
        parts = [self.compute(0, row, states)]
        for length in lengths:
            if not self._reads(Place(states, 0, row), length):
                return False
            parts.append(self.compute(row, length, states))
            row += length
        return not differ(torch.cat(parts, dim=1), self.compute(0, row, States(1)))

    def _reads(self, place: Place, length: int) -> bool:
        """Whether the next rows depend on each kind of state."""
        expected = self.compute(place.num_tokens, length, place.take_out().states)
        for kind in ("conv_states", "recurrent_states"):
            other = place.take_out().states
            of_layer: dict[int, Tensor | None] = getattr(other.layers[self._layer.layer_idx], kind)
            kept = [state for state in of_layer.values() if state is not None]
            for state in kept:
                state.fill_(torch.nan)  # (shows even if it decays to nothing at once)
            if kept and torch.equal(self.compute(place.num_tokens, length, other), expected):
                return False
        return True
