"""Which sequence has which state of recurrent layers, and the pieces that a step computes from it.

A state is not paged: it has a fixed size, and a sequence needs only the one after its last computed token.

    a fork                continues with the state of the sequence that it was forked from
    swapped out           the state stays where it is
    recomputed            begins without a state; in a group, a later sequence may begin behind blocks that an
                          earlier one computes: there the earlier one's piece is cut, and both keep its state
    cached prefix         its blocks have no state, so with such a model the prefix cache is off
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch

from minipaged.execution.batch import Batch
from minipaged.execution.recurrent import Piece, Place, States, set_pieces
from minipaged.scheduling.request import Sequence


class StateTable:
    """The state of each sequence that has computed tokens.

    `in_chunks`: the layers compute several tokens at once behind others, too, not only single ones.
    """

    def __init__(self, in_chunks: bool) -> None:
        self._in_chunks = in_chunks
        self._places: WeakKeyDictionary[Sequence, Place] = WeakKeyDictionary()

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Compute the batch inside the `with`; if that fails, its sequences must begin again.

        Raises:
            RuntimeError: there is no state where a sequence goes on.
        """
        self._tidy({item.sequence for item in batch.scheduled})
        with set_pieces(self._cut(batch)):
            yield

    def _tidy(self, scheduled: set[Sequence]) -> None:
        for sequence, place in list(self._places.items()):
            if sequence in scheduled:
                continue
            if place.num_tokens != sequence.num_computed_tokens:  # preempted, and will begin again
                del self._places[sequence]
            elif place.states.num_sequences > 1:  # it pauses, and must not keep the others' states alive
                self._places[sequence] = place.take_out()

    def _cut(self, batch: Batch) -> list[Piece]:
        pieces: list[Piece] = []
        decodes: list[tuple[Sequence, int, Place]] = []
        behind: dict[Sequence, Place] = {}
        reached: dict[Sequence, Place] = {}
        for (sequence, start, num_tokens, _), row in zip(batch.scheduled, batch.metadata.query_start_list):
            before = [self._find(sequence, start, behind)] if start else []
            if num_tokens == 1 and before:
                decodes.append((sequence, row, before[0]))
                continue
            end = start + num_tokens
            waiting = self._waiting_for(sequence, start, end)
            stops = {end, *waiting.values()}
            if not self._in_chunks:
                stops |= set(range((start or min(stops)) + 1, end))
            states = States(1)
            for stop in sorted(stops):
                pieces.append(Piece(torch.arange(row, row + stop - start)[None], before, states))
                row, start, place = row + stop - start, stop, Place(states, 0, stop)
                if taken := [other for other, position in waiting.items() if position == stop]:
                    behind |= dict.fromkeys(taken, place)
                    before, states = [place], States(1)
            reached[sequence] = place
        if decodes:  # last, because they may begin behind a chunk
            sequences, rows, places = zip(*decodes)
            before, states = list(places), States(len(places))
            if self._are_all(places):
                before, states = [], places[0].states
            pieces.append(Piece(torch.tensor(rows)[:, None], before, states))
            for i, (sequence, place) in enumerate(zip(sequences, places)):
                reached[sequence] = Place(states, i, place.num_tokens + 1)
        self._places.update(behind | reached)
        device = batch.input_ids.device
        return [piece._replace(rows=piece.rows.to(device)) for piece in pieces]

    def _are_all(self, places: SequenceOf[Place]) -> bool:
        """Whether these are all rows of the same states, in order, and nobody else's: no copy is needed."""
        states = places[0].states
        holders = sum(place.states is states for place in self._places.values())
        is_whole = [place.row for place in places if place.states is states] == list(
            range(states.num_sequences)
        )
        return is_whole and len(places) == holders == states.num_sequences

    def _find(self, sequence: Sequence, start: int, behind: dict[Sequence, Place]) -> Place:
        for other in (sequence, *sequence.request.sequences):
            place = self._places.get(other)
            if place is None or place.num_tokens != start:
                continue
            if other is sequence or other.token_ids[:start] == sequence.token_ids[:start]:
                return place
        if sequence in behind:
            return behind[sequence]
        raise RuntimeError(f"no layer has a state after {start} tokens of {sequence}")

    def _waiting_for(self, sequence: Sequence, start: int, end: int) -> dict[Sequence, int]:
        """Who begins behind the tokens start < position <= end of a sequence, and where."""
        return {
            other: position
            for other in sequence.request.sequences
            if start < (position := other.num_computed_tokens) <= end
            and other is not sequence
            and (other not in self._places or self._places[other].num_tokens != position)
            and other.token_ids[:position] == sequence.token_ids[:position]
        }
