"""PyTorch's threads, divided among the ranks of a machine."""

from __future__ import annotations

from typing import ClassVar
from weakref import finalize

import torch


class SharedThreads:
    """This rank's share, until `give_back` is called or the object is dropped.

    PyTorch keeps the number for each thread of the process: call `give_back` in the one that made this.
    """

    last: ClassVar[finalize | None] = None

    def __init__(self, local_size: int) -> None:
        if SharedThreads.last is not None:
            SharedThreads.last()  # of ranks that were lost, perhaps in another thread
        before = torch.get_num_threads()
        self.count = max(1, before // local_size)
        torch.set_num_threads(self.count)
        self.give_back = SharedThreads.last = finalize(self, torch.set_num_threads, before)
