"""What the attention kernels share: gather a tile of K and V through the block table, score it, fold it in.

A tile is a run of consecutive tokens of one sequence and one KV head, lying in any blocks of the pools
`[num_blocks, Hkv, block_size, D]`. Softmax is online (Milakov & Gimelshein, 2018): each tile updates every
row's maximum m_i, sum of exponentials l_i and accumulator acc; earlier sums shrink by alpha. Exponents are
base 2, `log2(e)` folded into the scores.

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
def find_entries(table, position, readable, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where the positions lie in pools seen as [num_blocks * Hkv * block_size, D]; readable None: all are."""
    if readable is None:
        blocks = tl.load(table + position // BLOCK_SIZE)
    else:
        blocks = tl.load(table + position // BLOCK_SIZE, mask=readable, other=0)
    # int64: a pool may hold more than 2^31 elements
    return (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def gather_tile(cache, entry, readable, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Rows [tokens, DIM_PADDED] of a pool; zero where not readable."""
    dim = tl.arange(0, DIM_PADDED)
    inside = readable[:, None] & (dim[None, :] < DIM)
    return tl.load(cache + entry[:, None] * DIM + dim[None, :], mask=inside, other=0.0)


def in_base_2(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """Scale and softcap as `score_tile` takes them: log2(e) is folded in once, not for each score."""
    if softcap is None:
        return scale * LOG2_E.value, None
    return scale * 2 * LOG2_E.value / softcap, softcap * LOG2_E.value


@triton.jit
def score_tile(query, key, scale, softcap):
    """Scores [rows, tokens] in base 2 of query [rows, D] and key [tokens, D], scaled as `in_base_2` says."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if softcap is not None:
        # tanh(x) = 1 - 2 / (1 + e^2x), which is exact at both infinities
        scores = softcap - 2.0 * softcap / (1.0 + tl.exp2(scores))
    return scores


@triton.jit
def fold_tile(scores, value, m_i, l_i, acc):
    """Online softmax: fold scores [rows, tokens] and value [tokens, D] into m_i, l_i and acc."""
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    # A row that has seen nothing yet has a maximum of -inf, and -inf - -inf would be NaN.
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores - base[:, None])
    alpha = tl.exp2(m_i - base)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i, acc


@triton.jit
def fold_sink(sink, m_i, l_i, acc):
    """Fold in a logit [rows] that takes part in the denominator and has no value."""
    m_new = tl.maximum(m_i, sink)
    alpha = tl.exp2(m_i - m_new)
    return l_i * alpha + tl.exp2(sink - m_new), acc * alpha[:, None]
