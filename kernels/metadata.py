"""The arguments of one attention call: the ragged batch of the step, and how the layer attends.

The step's query tokens form one flat ragged batch: sequence s has the rows from `query_start[s]` up to
`query_start[s + 1]`. The same description covers a decode (one row), a prompt, and a chunk of a prompt.
Paper: sections 4.1 (Figure 5) and 5.1.

    rows    | a a a a a | b | c c |      T = 8, S = 3, query_start = [0, 5, 6, 8]
    context   5           9   7          a: a whole prompt; b: a decode; c: the last chunk of a prompt
"""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class AttentionParameters(NamedTuple):
    """How a layer attends: a row at position q sees the keys at k with 0 <= q - k (< sliding_window)."""

    scale: float
    """Factor of the scores."""
    sliding_window: int | None = None
    softcap: float | None = None
    """A score x becomes softcap * tanh(x / softcap)."""
    sinks: Tensor | None = None
    """[Hq]: one more logit per head in the softmax's denominator, without a value."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where each new token goes and what each query row may see; S sequences, T query tokens.

    Raises ValueError if the host lists do not describe the same number of sequences.
    """

    slot_mapping: Tensor
    """[T] int64: the slot each new token's K/V is written to; -1 = write nothing."""
    query_start: Tensor
    """[S + 1] int32: prefix sums of the query lengths."""
    context_len: Tensor
    """[S] int32: tokens in the cache once this step has written; the query tokens are the last of them."""
    block_tables: Tensor
    """[S, B] int32: physical block ids in logical order; entries past the context are never read."""
    query_start_list: list[int]
    """`query_start` on the host, so that a CPU path neither waits nor converts."""
    context_len_list: list[int]
    """`context_len` on the host."""
    max_query_len: int
    """The longest query of the step, in tokens."""
    max_context_len: int
    """The longest context of the step, in tokens."""
    max_decode_len: int = field(init=False)
    """The longest context of a sequence with one query row; 0: there is none."""

    def __post_init__(self) -> None:
        if len(self.query_start_list) != len(self.context_len_list) + 1:
            raise ValueError(
                f"query_start_list has {len(self.query_start_list)} entries for {len(self.context_len_list)} "
                "sequences: it needs one more than there are sequences"
            )
        longest = self.max_context_len  # (of a padded step more than the list says)
        if not self.is_decode_only:
            lengths = (end - start for start, end in pairwise(self.query_start_list))
            longest = max((c for c, length in zip(self.context_len_list, lengths) if length == 1), default=0)
        object.__setattr__(self, "max_decode_len", longest)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.context_len_list)

    @property
    def is_decode_only(self) -> bool:
        """True if every sequence has exactly one query token."""
        return self.max_query_len == 1 and self.query_start_list[-1] == self.num_sequences

    def select_queries(self, rows: Tensor, on_host: list[int]) -> "AttentionMetadata":
        """The same step with only the queries `rows` [R] int64: for each sequence, its last row or none."""
        query_start = torch.searchsorted(rows, self.query_start.long(), out_int32=True)
        starts = [bisect_left(on_host, start) for start in self.query_start_list]
        return replace(self, query_start=query_start, query_start_list=starts, max_query_len=1)
