"""Tokens that would complete an n-gram that the text already contains.

    size 3      ... the cat sat ... the cat        "sat" is forbidden here

The rule is that of transformers' `no_repeat_ngram_size`.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def repeating_tokens(token_ids: array[int], size: int) -> list[int]:
    """The last tokens of all n-grams of `size` in prompt and output that begin as they end."""
    ids = np.frombuffer(token_ids, np.int32)
    if len(ids) < size:
        return []
    ngrams = sliding_window_view(ids, size)
    begins_so = (ngrams[:, :-1] == ids[len(ids) - size + 1 :]).all(1)
    return np.unique(ngrams[begins_so, -1]).tolist()
