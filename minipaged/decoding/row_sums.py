"""Sums over the vocabulary, whose bits do not depend on how many rows there are.

PyTorch gives each of several threads whole rows. A single row, though, is cut into parts, whose sums are then
added: in another order, so they are rounded differently.
"""

from __future__ import annotations

import torch


def two_or_more(rows: torch.Tensor) -> torch.Tensor:
    """Rows [rows, vocab_size] as they are, or a single one twice, without a copy."""
    return rows.expand(2, -1) if rows.shape[0] == 1 else rows


def log_of_sums(logits: torch.Tensor) -> torch.Tensor:
    """Of each row of logits [rows, vocab_size] the log of the sum of its exponentials, [rows, 1]."""
    return two_or_more(logits).logsumexp(-1, keepdim=True)[: logits.shape[0]]
