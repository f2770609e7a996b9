"""Overlap scheduling: a GPU begins the next decode step while the host handles the tokens of the last one.

Between two steps the host appends tokens, ends sequences and plans, and the GPU waits for it. But the plan
after a step of decodes is nearly always a step of the same decodes, and the GPU has their tokens before the
host has read them. So their forward pass begins before there is a plan:

    host   | read tokens N | commit N, plan N+1 | read tokens N+1 | commit N+1, plan N+2 |
    GPU    | forward N+1 ..................| sample N+1 | forward N+2 .................| sample N+2

If all rows of the plan were begun, only their samples are missing; else the step runs as always. The
rest of the engine knows nothing of it. A row writes K/V where only the sequence's own next step would: after
its last token, in a block that no other table holds. Where the blocks are full, only the plan allocates
another, so the row borrows a spare one, to be copied once there is a plan:

    begun     7  1  3  spare    blocks 7, 1 and 3 are full: the new token is the first of a spare block
    planned   7  1  3  5        block 5 becomes a copy of the spare one

Source: K. Zhu et al., NanoFlow, arXiv 2408.12757 (asynchronous scheduling).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from minipaged.decoding.params import SamplingParams
from minipaged.decoding.sampling import Sampler, find_errors, take_rows
from minipaged.execution.batch import Batch
from minipaged.execution.model_runner import ModelRunner
from minipaged.memory import BlockCopy
from minipaged.scheduling import Sample, ScheduledSequence
from minipaged.scheduling.request import Sequence

SPARE_TOKENS = 1024
"""What the spare blocks hold together: 64 blocks of 16. If more sequences than there are spare blocks need
another block at once, their step is not begun before its plan."""


class Row(NamedTuple):
    """A decode of a step that was begun."""

    number: int  # in the step
    position: int  # of the token that it computes
    block: int  # where its K/V is; from `num_blocks` on, a spare one


@dataclass
class BegunStep:
    """A step without a plan yet."""

    rows: dict[Sequence, Row]
    batch: Batch
    logits: Tensor  # [rows, V]
    tokens: dict[Sequence, int] = field(default_factory=dict)  # that it computes, once the host knows them


class OverlapRunner(ModelRunner):
    """A `ModelRunner` that begins decodes before their plan, where they are replayed as CUDA graphs."""

    _begun: BegunStep | None = None
    _logits: Tensor | None = None  # of the step that is to be computed, if they are there

    @property
    def _can_begin(self) -> bool:
        return self._can_capture and not self._config.num_speculative_tokens

    @property
    def num_spare_blocks(self) -> int:  # type: ignore[override]
        """See `ModelRunner`."""
        most = SPARE_TOKENS // self.block_size
        return min(self._config.max_sampling_rows, most) if self._can_begin else 0

    def build(self, scheduled: list[ScheduledSequence]) -> Batch:
        """As `ModelRunner.build`; if just these rows were begun, the tensors are there already."""
        begun, self._begun = self._begun, None
        self._logits = None if begun is None else self._take(begun, scheduled)
        if begun is None or self._logits is not begun.logits:
            return super().build(scheduled)
        return begun.batch._replace(scheduled=scheduled, sampling=scheduled)

    def forward(self, batch: Batch) -> Tensor:
        """As `ModelRunner.forward`; the logits may be there already."""
        logits, self._logits = self._logits, None
        return super().forward(batch) if logits is None else logits

    def sample(self, batch: Batch, logits: Tensor) -> tuple[list[Sample], dict[str, str]]:
        """As `ModelRunner.sample`; the next step begins when the device knows the tokens."""
        if not self._can_go_on(batch):
            return super().sample(batch, logits)
        begin = partial(self._begin, batch.scheduled)
        samples = self.sampler(logits, batch.sampling, begin)  # type: ignore[call-arg]
        if any(math.isnan(sample.logprobs[0]) for sample in samples):
            # The next step's may lie in their place, and its K/V in the spare blocks of `batch`.
            logits = self.compute(super().build(batch.scheduled))
        if self._begun is not None:
            for item, sample in zip(batch.sampling, samples):
                self._begun.tokens[item.sequence] = sample.token_ids[0]
        return samples, find_errors(samples, batch.sampling, logits)

    def _can_go_on(self, batch: Batch) -> bool:
        """Whether the device finds this step's tokens without the host, which then reads nothing else."""
        return (
            self._can_begin
            and type(self.sampler) is Sampler
            and self.decode_runner is not None
            and self.decode_runner.accepts(batch)
            and all(
                item.num_candidates == 1
                and isinstance(params := item.sequence.request.params, SamplingParams)
                and params.logprobs is None
                for item in batch.scheduled
            )
        )

    def _begin(self, scheduled: list[ScheduledSequence], order: SequenceOf[int], tokens: Tensor) -> None:
        """Begin the step after these decodes; tokens[i] follows scheduled[order[i]]."""
        place = {row: i for i, row in enumerate(order)}
        spare = iter(range(self.num_blocks, self.num_blocks + self.num_spare_blocks))
        rows: dict[Sequence, Row] = {}
        tables, index = [], []
        for number, (sequence, start, _, _) in enumerate(scheduled):
            position, blocks = start + 1, sequence.table.blocks
            if position + 1 >= sequence.max_num_tokens:
                continue  # its last token
            if position == len(blocks) * self.block_size:
                if (borrowed := next(spare, None)) is None:
                    return
                blocks = [*blocks, borrowed]
            rows[sequence] = Row(len(rows), position, blocks[position // self.block_size])
            tables.append(blocks)
            index.append(place[number])
        if rows:
            batch = self._decodes(list(rows.values()), tables, tokens, index)
            if self.decode_runner is not None and self.decode_runner.accepts(batch):
                self._begun = BegunStep(rows, batch, super().forward(batch))

    def _decodes(self, rows: list[Row], tables: list[list[int]], tokens: Tensor, index: list[int]) -> Batch:
        """The tensors of decodes whose token ids, `tokens[index]`, are only on the device."""
        positions = [row.position for row in rows]
        slots = [row.block * self.block_size + row.position % self.block_size for row in rows]
        lengths = [position + 1 for position in positions]
        starts = list(range(len(rows) + 1))
        batch = self.builder.assemble((index, positions, slots), starts, lengths, tables, starts[:-1])
        return batch._replace(input_ids=tokens[batch.input_ids])

    def _take(self, begun: BegunStep, scheduled: list[ScheduledSequence]) -> Tensor | None:
        """The logits of a step, if all its rows were begun; None: it must be computed."""
        index, copies = [], []
        for sequence, start, _, _ in scheduled:
            if (row := begun.rows.get(sequence)) is None:
                return None
            if start != row.position or sequence.token_ids[start] != begun.tokens.get(sequence):
                return None
            # (The blocks before it may be others by now: the same tokens have the same K/V.)
            block = sequence.table.blocks[start // self.block_size]
            if row.block >= self.num_blocks:
                copies.append(BlockCopy(row.block, block))
            elif row.block != block:
                return None
            index.append(row.number)
        self.cache.copy(copies)
        return take_rows(begun.logits, index)
