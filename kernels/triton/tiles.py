"""What the attention kernels share: gather a tile of K or V through the block table, score it, fold it in.

A tile is a run of consecutive tokens of one sequence and one KV head, lying in any blocks. Softmax is online
(Milakov & Gimelshein, 2018): each tile updates every row's maximum, sum and mixed values; exponents are base
2, `log2(e)` folded into the scores. Does NOT know: which program takes which tile.

    block table   [ 5 | 2 | 7 | ..]              block size 4, tile of 8 tokens
    positions      0 1 2 3 | 4 5 6 7             ids     5 5 5 5 2 2 2 2      one lookup a token (cached)
                                                 offsets 0 1 2 3 0 1 2 3
    rows of K      5.0 5.1 5.2 5.3 2.0 2.1 ..    [tile, head_dim], consecutive within a block
"""

# Kernel arguments are Triton's own: pointers, numbers, compile-time constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def gather_tile(
    cache,
    blocks,
    offsets,
    kv_head,
    readable,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Rows [tokens, DIM_PADDED] of a pool, one KV head's; zero where not readable."""
    # int64: a pool may hold more than 2^31 elements
    entry = (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + offsets
    dim = tl.arange(0, DIM_PADDED)
    return tl.load(
        cache + entry[:, None] * DIM + dim[None, :], mask=readable[:, None] & (dim[None, :] < DIM), other=0.0
    )


@triton.jit
def score_tile(query, key, scale, softcap):
    """Scores [rows, tokens] in base 2 of query [rows, D] and key [tokens, D]."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if softcap is not None:
        # tanh(x) = 1 - 2 / (1 + e^2x), which is exact at both infinities
        scores = softcap - 2.0 * softcap / (1.0 + tl.exp2(scores * (2.0 * LOG2_E / softcap)))
    return scores * LOG2_E


@triton.jit
def fold_tile(scores, value, maximum, total, mixed):
    """Online softmax: fold scores [rows, tokens] and value [tokens, D] into maximum, total and mixed."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    # A row that has seen nothing yet has a maximum of -inf, and -inf - -inf would be NaN.
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(maximum - base)
    total = total * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
    return new_maximum, total, mixed


@triton.jit
def fold_sink(sink, maximum, total, mixed):
    """Fold in a logit [rows] that takes part in the denominator and has no value."""
    new_maximum = tl.maximum(maximum, sink)
    shrink = tl.exp2(maximum - new_maximum)
    return total * shrink + tl.exp2(sink - new_maximum), mixed * shrink[:, None]
