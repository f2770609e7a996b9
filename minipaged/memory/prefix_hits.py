"""What a group of sequences need not compute when it is admitted (paper, section 4.4).

cached        the longest prefix whose full blocks the prefix cache has
fully cached  all of it: only the last token is computed, in a copy of the last block
leader        blocks that an earlier sequence of the same group computes in the same step, which is how a
              preempted group of samples or beams gets its sharing back
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from typing import NamedTuple, Protocol

from minipaged.memory.block_table import BlockTable
from minipaged.memory.prefix_cache import CachedBlock, PrefixCache


class KVSequence(Protocol):
    """What the manager reads and writes of a sequence."""

    token_ids: array[int]
    num_computed_tokens: int
    table: BlockTable
    block_hashes: list[int]  # of its full blocks, computed on demand
    num_registered_blocks: int
    last_registered: CachedBlock | None  # what the last of them contains

    @property
    def max_num_tokens(self) -> int: ...  # noqa: D102
    @property
    def cache_salt(self) -> str: ...  # noqa: D102


class Hit(NamedTuple):
    """What one sequence need not compute at admission.

    `num_shared` blocks are shared: cached `blocks`, or the first ones of `leader`, an earlier sequence of the
    same group. `copy_from` is the cached last block of a sequence that is cached to its last token.
    """

    num_shared: int
    blocks: list[int]
    leader: int | None = None
    copy_from: int | None = None

    def num_tokens(self, sequence: KVSequence) -> int:
        """Tokens that need not be computed."""
        if self.copy_from is not None:
            return len(sequence.token_ids) - 1
        return self.num_shared * sequence.table.block_size


class Admission(NamedTuple):
    """Answer of `can_admit`; lists have an entry per sequence of the group."""

    fits: bool  # whether `admit` may be called
    hits: list[Hit]  # what need not be computed
    grants: list[int]  # blocks to take from the pool
    num_cached_tokens: int
    num_charged_tokens: int  # what the step's budget is charged with if all are computed at once


def find_hits(
    sequences: Sequence[KVSequence],
    cache: PrefixCache | None,
    block_size: int,
    kept_states: Container[int] | None = None,
) -> list[Hit]:
    """What each sequence of a group need not compute. Changes nothing; `KVManager.admit` acts.

    kept_states: of a hybrid model, the chain hashes of the prefixes after which its recurrent state is known.
    """
    hits = [_find_cached(sequence, cache, kept_states) for sequence in sequences]
    if len(hits) == 1:
        return hits
    # What two sequences have in common is computed by the first and shared by the second, cached or not. A
    # trie over full blocks, (parent node, tokens) -> (node, the sequence that came first). The last token of
    # a sequence is always computed, so its block is not shared.
    nodes: dict[tuple[int, bytes], tuple[int, int]] = {}
    for i, sequence in enumerate(sequences):
        node = num_shared = leader = 0
        for start in range(0, len(sequence.token_ids) - block_size, block_size):
            tokens = sequence.token_ids[start : start + block_size].tobytes()
            node, owner = nodes.setdefault((node, tokens), (len(nodes) + 1, i))
            if owner < i:
                num_shared, leader = num_shared + 1, owner
        # (A leader that starts later does not compute these blocks. They are cached, so this sequence has
        # found them, too, unless no recurrent state is kept at their end.)
        if num_shared > hits[i].num_shared and num_shared >= hits[leader].num_shared:
            hits[i] = Hit(num_shared, [], leader)
    return hits


def _find_cached(sequence: KVSequence, cache: PrefixCache | None, kept_states: Container[int] | None) -> Hit:
    if cache is None:
        return Hit(0, [])
    cache.extend_hashes(sequence.block_hashes, sequence.token_ids, sequence.cache_salt)
    hashes = sequence.block_hashes
    blocks = cache.match(hashes, sequence.token_ids, sequence.cache_salt)
    if kept_states is not None:  # a sequence starts where the state is known, with a token to compute
        del blocks[(len(sequence.token_ids) - 1) // cache.block_size :]
        while blocks and hashes[len(blocks) - 1] not in kept_states:
            blocks.pop()
    if len(blocks) * cache.block_size < len(sequence.token_ids):
        return Hit(len(blocks), blocks)
    # Every token is cached, but the last must be computed for its logits. Its K/V goes to a copy of the last
    # block; a block that this very step computes has nothing to copy yet.
    last = blocks.pop()
    return Hit(len(blocks), blocks, copy_from=None if cache.is_pending(last) else last)
