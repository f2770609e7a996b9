"""The plan of a step as numbers, which rank 0 sends to all other ranks once per step.

    head     sequences, swaps out, swaps in, copies, tables that changed, prompts
    columns  of every scheduled sequence: place, start, 2 * tokens + (whether it samples)
    tokens   the ids to compute, sequence by sequence
    moves    pairs of blocks, in the order of the plan
    tables   of every table that changed: which sequence, blocks kept, how many are new, and these
    prompts  of every sequence whose prompt's log-probabilities are wanted: which, and of how many rows

Sender and receivers remember the block table of each *place*. A sequence keeps its place as long as it is
scheduled; a new one gets the least recently used place. So a block id is sent once, when the table
gets it, and a decode takes 16 bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple

from minipaged.execution.batch import num_predicted_prompt_tokens
from minipaged.memory import BlockCopy
from minipaged.scheduling import ScheduledSequence, StepPlan

HEAD = 6


class PlanEncoder:
    """Plans -> messages. There are `num_places`, or as many as the largest step has sequences."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._place_of: dict[int, int] = {}  # id(sequence) -> place, least recently used first
        self._tables: list[list[int]] = []  # place -> the blocks that the receivers know

    def encode(self, plan: StepPlan) -> array[int]:
        """The message of the next plan, int32."""
        columns, tokens, tables, prompts = (array("i") for _ in range(4))
        num_tables = 0
        self._num_places = max(self._num_places, len(plan.scheduled))
        for number, item in enumerate(plan.scheduled):
            sequence, start, num_tokens, num_candidates = item
            place = self._place(id(sequence))
            columns.extend((place, start, 2 * num_tokens + (num_candidates > 0)))
            if num_tokens == 1:
                tokens.append(sequence.token_ids[start])
            else:
                tokens += sequence.token_ids[start : start + num_tokens]
            known, blocks = self._tables[place], sequence.table.blocks
            if known != blocks:
                kept = _common_prefix(known, blocks)
                tables.extend((number, kept, len(blocks) - kept, *blocks[kept:]))
                num_tables += 1
                self._tables[place] = blocks[:]
            if num_predicted := num_predicted_prompt_tokens(item):
                prompts.extend((number, num_predicted))
        moves = plan.swap_out, plan.swap_in, plan.copies
        counts = len(plan.scheduled), *map(len, moves), num_tables, len(prompts) // 2
        pairs = array("i", (block for kind in moves for move in kind for block in move))
        return array("i", counts) + columns + tokens + pairs + tables + prompts

    def _place(self, key: int) -> int:
        # (Tables are compared, not keys: a new sequence at the address of a dead one does no harm.)
        place = self._place_of.pop(key, None)
        if place is None:
            if len(self._tables) < self._num_places:
                place = len(self._tables)
                self._tables.append([])
            else:
                place = self._place_of.pop(next(iter(self._place_of)))
        self._place_of[key] = place
        return place


class _Tokens(NamedTuple):
    """The token ids of one chunk, found by their positions in the sequence."""

    start: int
    ids: array[int]

    def __getitem__(self, where: Any) -> Any:
        if isinstance(where, slice):
            return self.ids[where.start - self.start : where.stop - self.start]
        return self.ids[where - self.start]


class _Table:
    """A block table as the receivers know it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[int] = []


class Mirror:
    """As much of a scheduled `Sequence` as a `BatchBuilder` reads."""

    def __init__(self, table: _Table, start: int, token_ids: array[int], num_predicted: int) -> None:
        self.table = table
        self.token_ids = _Tokens(start, token_ids)
        self.num_prompt_tokens = start + 1 + num_predicted
        params = SimpleNamespace(prompt_logprobs=1 if num_predicted else None)
        self.request = SimpleNamespace(sequences=[self], params=params)


class PlanDecoder:
    """Messages -> plans that give the same batch and the same moves as those of rank 0."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: dict[int, _Table] = {}

    def decode(self, message: SequenceOf[int]) -> StepPlan:
        """The plan of the next message."""
        words = iter(message)
        num_sequences, *num_moves, num_tables, num_prompts = islice(words, HEAD)
        columns = _groups(words, num_sequences, 3)
        tokens = [array("i", islice(words, length >> 1)) for _, _, length in columns]
        swap_out, swap_in, copies = (
            [BlockCopy(*pair) for pair in _groups(words, count, 2)] for count in num_moves
        )
        for _ in range(num_tables):
            number, kept, num_new = islice(words, 3)
            table = self._tables.setdefault(columns[number][0], _Table(self._block_size))
            table.blocks[kept:] = islice(words, num_new)
        num_predicted = dict(_groups(words, num_prompts, 2))
        scheduled: list[Any] = [
            ScheduledSequence(
                Mirror(self._tables[place], start, ids, num_predicted.get(number, 0)),  # type: ignore[arg-type]
                *(start, len(ids), length & 1),
            )
            for number, ((place, start, length), ids) in enumerate(zip(columns, tokens))
        ]
        return StepPlan(0, scheduled, [], swap_out, swap_in, copies)


def _groups(words: Iterator[int], count: int, size: int) -> list[Any]:
    """The next `count` groups of `size` numbers."""
    numbers = list(islice(words, count * size))
    return list(zip(*(numbers[i::size] for i in range(size))))


def _common_prefix(known: list[int], blocks: list[int]) -> int:
    for place, (old, new) in enumerate(zip(known, blocks)):
        if old != new:
            return place
    return min(len(known), len(blocks))
