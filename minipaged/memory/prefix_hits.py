"""What a group of sequences need not compute when it is admitted (paper, section 4.4).

    cached        the longest prefix whose full blocks the prefix cache has
    fully cached  all of it: only the last token is computed, in a copy of the last block
    leader        blocks that an earlier sequence of the same group computes in the same step, which is how a
                  preempted group of samples or beams gets its sharing back

Looks only; `KVManager.admit` acts. Knows tokens and block ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from minipaged.memory.block_table import BlockTable
from minipaged.memory.prefix_cache import PrefixCache


class KVSequence(Protocol):
    """What the manager reads and writes of a sequence."""

    token_ids: array[int]
    num_computed_tokens: int
    max_num_tokens: int
    table: BlockTable
    block_hashes: list[int]
    num_published_blocks: int
    cache_salt: str


class Hit(NamedTuple):
    """What one sequence need not compute at admission.

    `blocks` are cached; or the first `num_shared` blocks come from `leader`, an earlier sequence of the
    same group. `copy_from` is the cached last block of a sequence that is cached to its last token.
    """

    blocks: list[int]
    num_shared: int
    leader: int | None = None
    copy_from: int | None = None


class Admission(NamedTuple):
    """Answer of `can_admit`: whether the group fits, and how.

    Attributes:
        fits: whether `admit` may be called.
        hits: per sequence, what it need not compute.
        grants: per sequence, blocks it takes from the pool.
        num_cached_tokens: tokens that need not be computed.
        num_charged_tokens: tokens the step's budget is charged with if all are computed at once.
    """

    fits: bool
    hits: list[Hit]
    grants: list[int]
    num_cached_tokens: int
    num_charged_tokens: int


def num_hit_tokens(sequence: KVSequence, hit: Hit, block_size: int) -> int:
    """Tokens of the sequence that need not be computed."""
    if hit.copy_from is not None:
        return len(sequence.token_ids) - 1
    return hit.num_shared * block_size


def find_hits(sequences: Sequence[KVSequence], cache: PrefixCache | None, block_size: int) -> list[Hit]:
    """What each sequence of a group need not compute: cached blocks, or blocks of an earlier one."""
    hits: list[Hit] = []
    for i, sequence in enumerate(sequences):
        hit = _cached_prefix(sequence, cache)
        # A group that was preempted restores its sharing: what two sequences have in common is
        # computed by the first and shared by the second, cached or not.
        for j in range(i):
            shared = _common_blocks(sequences[j], sequence, block_size)
            if shared > hit.num_shared:
                hit = Hit([], shared, leader=j)
        hits.append(hit)
    return hits


def _cached_prefix(sequence: KVSequence, cache: PrefixCache | None) -> Hit:
    if cache is None:
        return Hit([], 0)
    cache.extend_hashes(sequence.block_hashes, sequence.token_ids, sequence.cache_salt)
    blocks = cache.match(sequence.block_hashes, sequence.token_ids)
    if len(blocks) * cache.block_size < len(sequence.token_ids):
        return Hit(blocks, len(blocks))
    # Every token is cached, but the last must be computed for its logits. Its K/V goes to a copy
    # of the last block; a block that this very step computes has nothing to copy yet.
    last = blocks.pop()
    return Hit(blocks, len(blocks), copy_from=None if cache.is_pending(last) else last)


def _common_blocks(first: KVSequence, second: KVSequence, size: int) -> int:
    limit = (min(len(first.token_ids), len(second.token_ids)) - 1) // size
    for i in range(limit):
        if first.token_ids[i * size : (i + 1) * size] != second.token_ids[i * size : (i + 1) * size]:
            return i
    return limit
