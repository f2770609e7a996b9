"""Which sequence has which state of recurrent layers, and the pieces that a step computes from it.

A state is not paged: it has a fixed size, and a sequence needs only the one after its last computed token.

    a fork           continues with the state of the sequence that it was forked from
    swapped out      the state stays where it is
    recomputed       starts without a state; in a group, a later sequence may start after blocks that an
                     earlier one computes: the earlier one's piece is cut there, and both have its state
    cached prefix    continues with a state that was kept after it: after the last full block of each prompt,
                     and after the last full block of prompt and output
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minipaged.execution.batch import Batch
from minipaged.execution.recurrent import Piece, Place, States, set_pieces
from minipaged.kernels.on_device import on_device
from minipaged.scheduling import ScheduledSequence
from minipaged.scheduling.request import Request, Sequence


class Kept(NamedTuple):
    """The state after some full blocks, for whoever has the same tokens."""

    token_ids: array[int]  # of all these blocks
    place: Place


@dataclass
class Cut:
    """A step, cut into pieces."""

    rows: Tensor  # of the batch, 0 to T
    pieces: list[Piece] = field(default_factory=list)
    decodes: list[tuple[Sequence, int, Place]] = field(default_factory=list)  # row, and the state before
    after: dict[Sequence, Place] = field(default_factory=dict)  # of the sequences computed
    behind: dict[Sequence, Place] = field(default_factory=dict)  # of others, which start after their blocks
    kept: dict[int, Kept] = field(default_factory=dict)  # by chain hash


class StateTable:
    """The states of all sequences that have computed tokens, and those kept for cached prefixes.

    Args:
        in_chunks: the layers can continue a sequence by several tokens at once, not only one by one.
        num_kept: how many states are kept for cached prefixes; the least recently used are dropped.
    """

    def __init__(self, in_chunks: bool, num_kept: int) -> None:
        self._in_chunks = in_chunks
        self._num_kept = num_kept
        self._places: WeakKeyDictionary[Sequence, Place] = WeakKeyDictionary()
        self.kept: dict[int, Kept] = {}
        """Chain hash of a prefix, as in the prefix cache -> the state after it."""

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Compute the batch inside the `with`; if that fails, its sequences have no states any more.

        Raises:
            RuntimeError: the state that a sequence continues from is missing.
        """
        self._tidy({item.sequence for item in batch.scheduled})
        cut = self._cut(batch)
        places = cut.behind | cut.after
        try:
            self._places.update(places)
            with set_pieces(cut.pieces):
                yield
        except BaseException:  # only some layers have new states
            for sequence in places:
                self._places.pop(sequence, None)
            raise
        for chain_hash, kept in cut.kept.items():
            self.kept.pop(chain_hash, None)
            self.kept[chain_hash] = kept
        while len(self.kept) > self._num_kept:
            del self.kept[next(iter(self.kept))]

    def _tidy(self, scheduled: set[Sequence]) -> None:
        holders = Counter(place.states for place in self._places.values())
        for sequence, place in list(self._places.items()):
            if sequence in scheduled:
                continue
            if place.num_tokens != sequence.num_computed_tokens:  # preempted, to be recomputed
                del self._places[sequence]
            elif place.states.num_sequences > holders[place.states]:  # it keeps those of others alive
                self._places[sequence] = place.take_out()

    # -- where a sequence starts ----------------------------------------------------------------

    def _known(self, sequence: Sequence, position: int) -> Place | None:
        """Its state after `position` tokens, from an earlier step."""
        place = self._places.get(sequence)
        if place is not None and place.num_tokens == position:
            return place
        chain_hash = _hash_of(sequence, position)
        if chain_hash is None or chain_hash not in self.kept:
            return None
        if self.kept[chain_hash].token_ids != sequence.token_ids[:position]:
            return None
        kept = self.kept[chain_hash] = self.kept.pop(chain_hash)  # the last to be dropped
        return kept.place

    def _find(self, sequence: Sequence, start: int, behind: dict[Sequence, Place]) -> Place:
        if (place := self._known(sequence, start)) is not None:
            return place
        for other in sequence.request.sequences:
            place = self._places.get(other)
            if place is None or place.num_tokens != start:
                continue
            if other.token_ids[:start] == sequence.token_ids[:start]:  # forked from this one
                return place
        if sequence not in behind:
            raise RuntimeError(f"the recurrent state after {start} tokens of {sequence} is missing")
        return behind[sequence]

    def _waiting(self, scheduled: list[ScheduledSequence]) -> dict[Request, list[Sequence]]:
        """Of each group, those that start where no state is known yet."""
        waiting: dict[Request, list[Sequence]] = {}
        for request in dict.fromkeys(item.sequence.request for item in scheduled):
            for sequence in request.sequences if len(request.sequences) > 1 else ():
                position = sequence.num_computed_tokens
                if (place := self._known(sequence, position)) is not None:
                    self._places[sequence] = place  # a kept one must not be dropped before its turn comes
                else:
                    waiting.setdefault(request, []).append(sequence)
        return waiting

    # -- pieces ---------------------------------------------------------------------------------

    def _cut(self, batch: Batch) -> Cut:
        cut = Cut(torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device))
        waiting = self._waiting(batch.scheduled)
        for item, row in zip(batch.scheduled, batch.metadata.query_start_list):
            sequence, start, num_tokens, _ = item
            before = self._find(sequence, start, cut.behind) if start else None
            followers = {  # who starts after tokens of this item, and where
                other: position
                for other in waiting.get(sequence.request, ())
                if start < (position := other.num_computed_tokens) <= start + num_tokens
                and other.token_ids[:position] == sequence.token_ids[:position]
            }
            if before is not None and num_tokens == 1 and not followers:
                cut.decodes.append((sequence, row, before))
            else:
                self._cut_chunk(cut, item, row, before, followers)
        if cut.decodes:  # last, because they may start after a chunk
            self._cut_decodes(cut)
        return cut

    def _cut_chunk(
        self,
        cut: Cut,
        item: ScheduledSequence,
        row: int,
        before: Place | None,
        followers: dict[Sequence, int],
    ) -> None:
        sequence, start, num_tokens, _ = item
        end = start + num_tokens
        to_keep, chain_hash = _to_keep(sequence)
        stops = {end, *followers.values()}
        if chain_hash is not None and start < to_keep < end:
            stops.add(to_keep)
        if not self._in_chunks:
            stops |= set(range((start or min(stops)) + 1, end))
        states, places = States(1), [] if before is None else [before]
        for stop in sorted(stops):
            rows = cut.rows[row : row + stop - start]
            cut.pieces.append(Piece(rows[None], places, states))
            row, start, place = row + stop - start, stop, Place(states, 0, stop)
            here = [other for other, position in followers.items() if position == stop]
            cut.behind |= dict.fromkeys(here, place)
            kept_hash = chain_hash if stop == to_keep else None
            if kept_hash is not None:
                cut.kept[kept_hash] = Kept(sequence.token_ids[:stop], place)
            if here or kept_hash is not None:  # what follows must not write into it
                states, places = States(1), [place]
        cut.after[sequence] = place

    def _cut_decodes(self, cut: Cut) -> None:
        sequences, rows, places = zip(*cut.decodes)
        for sequence, place in zip(sequences, places):
            self._keep_at_block_end(cut, sequence, place)
        before, states = list(places), States(len(places))
        if self._owns_whole(places):
            before, states = [], places[0].states
        cut.pieces.append(Piece(on_device(rows, cut.rows.device)[:, None], before, states))
        for i, (sequence, place) in enumerate(zip(sequences, places)):
            cut.after[sequence] = Place(states, i, place.num_tokens + 1)

    def _keep_at_block_end(self, cut: Cut, sequence: Sequence, place: Place) -> None:
        """Keep the state before a decode if the last full block ends there; in the output, only that one."""
        position, chain_hash = _to_keep(sequence)
        if chain_hash is None or place.num_tokens != position:
            return
        # (What this very step computes cannot be copied yet; whoever computes it keeps it.)
        if place is not cut.behind.get(sequence):
            cut.kept[chain_hash] = Kept(sequence.token_ids[:position], place.take_out())
        size = sequence.table.block_size
        if position - size > sequence.num_prompt_tokens:
            self.kept.pop(sequence.block_hashes[position // size - 2], None)

    def _owns_whole(self, places: SequenceOf[Place]) -> bool:
        """Whether these are all rows of one `States`, in order, and nobody else's: no copy is needed."""
        states = places[0].states
        rows = [(place.states, place.row) for place in places]
        num_holders = sum(place.states is states for place in self._places.values())
        is_kept = any(kept.place.states is states for kept in self.kept.values())
        whole = [(states, row) for row in range(states.num_sequences)]
        return rows == whole and num_holders == len(rows) and not is_kept


def _to_keep(sequence: Sequence) -> tuple[int, int | None]:
    """Where the last full block ends that leaves a token to compute, and the chain hash there."""
    size = sequence.table.block_size
    position = (len(sequence.token_ids) - 1) // size * size
    return position, _hash_of(sequence, position)


def _hash_of(sequence: Sequence, position: int) -> int | None:
    """The prefix cache's chain hash of the blocks that end at a position; None: none does, or it is off."""
    num_blocks, rest = divmod(position, sequence.table.block_size)
    is_known = num_blocks and not rest and num_blocks <= len(sequence.block_hashes)
    return sequence.block_hashes[num_blocks - 1] if is_known else None
