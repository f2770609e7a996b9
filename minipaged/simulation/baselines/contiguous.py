"""Orca's memory: one contiguous region a sequence, reserved at admission (paper, sections 3.1 and 6.1).

    Max      the model's longest sequence         | 2048 slots, whatever is asked
    Pow2     prompt + next power of two of output | knows the output to a factor of 2
    Oracle   prompt + output                      | knows the output, which nobody can

As a diff against the paged manager: regions come from a buddy allocator, which rounds them up to powers
of two; nothing ever grows; nothing is shared, so a request with n sequences reserves n regions, and a
fork copies. A slot is a block of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from minipaged.memory import Admission, BlockAllocator, BlockCopy, BlockTable, KVManager, OnDemand
from minipaged.memory.kv_manager import Hit, KVSequence
from minipaged.simulation.baselines.buddy import BuddyAllocator

Reservation = Callable[[int, int, int], int]
"""(prompt tokens, output tokens, longest sequence) -> slots to reserve."""


def reserve_max(prompt: int, output: int, longest: int) -> int:
    """The longest sequence there can be."""
    return longest


def reserve_pow2(prompt: int, output: int, longest: int) -> int:
    """The output is known to a factor of 2: 25 tokens reserve 32."""
    return min(longest, prompt + (1 << (output - 1).bit_length()))


def reserve_oracle(prompt: int, output: int, longest: int) -> int:
    """The output is known."""
    return prompt + output
