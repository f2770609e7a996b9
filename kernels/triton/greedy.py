"""Greedy sampling in Triton: the argmax of each row and its log-probability, in one launch.

    logits    | piece 0 | piece 1 | piece 2 |    one program per row; each lane keeps, of its tokens, the
    lane 0      x         x         x            largest logit, its first index, and the sum of exponentials
    lane 1        x         x         x          relative to it; a reduction over the lanes ends it

PyTorch takes a dozen launches, each with a trip to memory.
"""

# Kernel arguments are Triton's own: pointers, numbers, compile-time constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = tl.constexpr(4096)


def greedy_tokens(logits: Tensor) -> Tensor:
    """Logits [R, V] of a float type -> each row's argmax (the first) and its log-probability, [R, 2] float32.

    The log-probability is NaN if no logit of a row is finite, or one is NaN or +inf.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    found = torch.empty((num_rows, 2), dtype=torch.float32, device=logits.device)
    greedy_kernel[(num_rows,)](logits, found, logits.stride(0), SIZE=vocab_size, num_warps=8)
    return found


@triton.jit
def greedy_kernel(logits, found, stride, SIZE: tl.constexpr):
    """Token and log-probability of one row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PIECE)
    largest = tl.full([PIECE], float("-inf"), tl.float32)
    place = tl.zeros([PIECE], tl.int32)
    total = tl.zeros([PIECE], tl.float32)
    for first in range(0, SIZE, PIECE):
        column = first + lane
        x = tl.load(logits + row * stride + column, mask=column < SIZE, other=float("-inf")).to(tl.float32)
        place = tl.where(x > largest, column, place)
        larger = tl.maximum(largest, x)
        # A lane that has seen nothing yet has a maximum of -inf, and -inf - -inf would be NaN.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.exp(x - base)
        largest = larger
    best = tl.max(largest, 0)
    token = tl.min(tl.where(largest == best, place, SIZE - 1), 0)
    logprob = 0.0 - tl.log(tl.sum(total * tl.exp(largest - best), 0))  # (no minus zero)
    tl.store(found + 2 * row, token.to(tl.float32))
    tl.store(found + 2 * row + 1, logprob)
