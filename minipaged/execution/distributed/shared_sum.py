"""Sums over the ranks on one machine, through shared memory.

Each rank writes its partial result into its slot, waits until all have, and adds all slots up:

    turn 0   | rank 0 | rank 1 |        Two turns: a rank that writes to turn 0 again has met the others
    turn 1   | rank 0 | rank 1 |        at turn 1, so they have read turn 0. One wait a sum is enough.

Only the wait goes through a socket; gloo's sum sends all rows through one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minipaged.execution.distributed.place import Place

SLOT = 4 << 20
"""Bytes that a rank can write at a time; larger results are summed piece by piece."""


def make_shared_file(path: Path, place: Place) -> None:
    """Make the file that all ranks map; bytes are written, so a full disk is noticed here (OSError)."""
    path.write_bytes(bytes(place.size * 2 * SLOT))


class SharedSum:
    """Sums a tensor over the ranks of a stage, in place."""

    def __init__(self, path: Path, place: Place, group: Any) -> None:
        memory = torch.from_file(str(path), shared=True, size=place.size * 2 * SLOT, dtype=torch.uint8)
        self._turns = memory.view(place.pipeline_size, 2, place.tensor_size, SLOT)[place.stage]
        self._shard, self._group = place.shard, group
        self._turn = 0
        self._here = torch.zeros(1)

    def __call__(self, partial: Tensor) -> None:
        """Replace a rank's partial result, contiguous, by the sum of all: the same bits on every rank."""
        for piece in partial.view(-1).split(SLOT // partial.itemsize):
            slots = self._turns[self._turn, :, : piece.nbytes].view(partial.dtype)
            slots[self._shard].copy_(piece)
            dist.all_reduce(self._here, group=self._group)
            torch.sum(slots, 0, out=piece)
            self._turn = 1 - self._turn
