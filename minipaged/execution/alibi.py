"""ALiBi: a penalty on scores that grows with the distance, computed by kernels without support for it.

Head h adds -slope_h * (i - j) to the score of the query at position i and the key at j. What all keys of a
row have in common cancels in its softmax, so slope_h * j will do. Like a score, it is a dot product of query
and key, so each gets two more elements:

    query    q_0 ... q_63    256 * slope / scale    slope / scale    0 ... 0
    key      k_0 ... k_63    j // 256               j % 256          0 ... 0

    scale * (query * key)  =  scale * (q * k)  +  slope * j

Both parts of a position are at most 255, which bfloat16 and float16 represent exactly. A slope is rounded,
but to the same number for all keys: the bias stays a straight line. (Were it rounded itself, as transformers
does for BLOOM, then in bfloat16 eight keys in a row would have the same bias at position 2,000.)

Zeros fill the elements up to 8, because a GPU loads 16 bytes at once. Values stay as they are, so with heads
of 64 elements a token takes 6 % more of the pool.

Source: O. Press, N. A. Smith, M. Lewis, Train Short, Test Long, arXiv 2108.12409.
"""

from __future__ import annotations

import torch
from torch import Tensor

MORE = 8
"""Extra elements of a head."""

PART = 256
MAX_POSITIONS = PART * PART


class ALiBi:
    """The bias of a layer with slopes [Hq]."""

    def __init__(self, slopes: Tensor) -> None:
        self.slopes = slopes.float()

    def extend(self, query: Tensor, key: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Query [T, Hq, D] and key [T, Hkv, D] at positions [T], with `MORE` elements each."""
        factors = torch.stack((PART * self.slopes, self.slopes), dim=-1) / scale
        parts = torch.stack((positions // PART, positions % PART), dim=-1)
        return _extend(query, factors), _extend(key, parts[:, None])


class RoundedALiBi(ALiBi):
    """Falcon's: each bias is rounded to bfloat16, whatever the model's type, and scaled as the scores are.

    A head's biases are not a straight line, so its keys hold them, and each query head needs keys of its own.
    """

    def extend(self, query: Tensor, key: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See `ALiBi`; Hkv is Hq."""
        biases = self.slopes.bfloat16() * positions[:, None]  # (positions are rounded, too)
        return _extend(query, torch.ones_like(self.slopes)[:, None]), _extend(key, biases[..., None])


def _extend(heads: Tensor, more: Tensor) -> Tensor:
    """Heads [T, H, D] and up to `MORE` elements [(T,) H or 1, n] -> [T, H, D + MORE], the rest zeros."""
    size = heads.shape[-1]
    extended = heads.new_zeros(*heads.shape[:-1], size + MORE)
    extended[..., :size] = heads
    extended[..., size : size + more.shape[-1]] = more
    return extended
