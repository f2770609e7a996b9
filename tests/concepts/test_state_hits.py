"""Prefix hits of hybrid models: a request starts only where the state of its recurrent layers is known.

cached blocks    b0 b1 b2 b3        of a prompt of 4 full blocks and one token more
states kept         b1    b3        at whose ends
"""

from array import array
from types import SimpleNamespace

import pytest

from minipaged.memory import BlockAllocator, PrefixCache
from minipaged.memory.prefix_hits import Hit, find_hits

SIZE = 4
TOKENS = array("i", range(100, 117))


class Case:
    """A cache that knows the blocks of `TOKENS`, and the prefixes with a state."""

    def __init__(self) -> None:
        self.cache = PrefixCache(BlockAllocator(8), SIZE)
        self.hashes: list[int] = []
        self.cache.extend_hashes(self.hashes, TOKENS)
        self.blocks = self.cache.allocate(4)
        self.kept: set[int] = set()
        parent = ""
        for i, (block, chain_hash) in enumerate(zip(self.blocks, self.hashes)):
            parent = self.cache.register(block, chain_hash, TOKENS[i * SIZE : (i + 1) * SIZE], parent)
        self.cache.commit()

    def found(self, num_tokens: int = len(TOKENS)) -> int:
        """Blocks of the hit of a prompt of so many tokens."""
        (hit,) = self.hits(TOKENS[:num_tokens])
        assert hit.blocks == self.blocks[: hit.num_shared]
        assert hit.copy_from is None
        return hit.num_shared

    def hits(self, *group: array) -> list[Hit]:
        """The hits of a group of prompts."""
        sequences = [SimpleNamespace(token_ids=ids, block_hashes=[], cache_salt="") for ids in group]
        return find_hits(sequences, self.cache, SIZE, self.kept)


@pytest.mark.parametrize(("with_state", "found"), [([], 0), ([1], 2), ([1, 3], 4), ([0, 1], 2), ([3], 4)])
def test_a_hit_ends_at_the_last_block_with_a_state(with_state: list[int], found: int) -> None:
    """Catches hits that end where keys and values are known, but no state."""
    case = Case()
    case.kept.update(case.hashes[i] for i in with_state)
    assert case.found() == found


def test_a_hit_leaves_a_token_to_compute() -> None:
    """The state after the whole prompt has no logits: catches a prompt of which nothing is left."""
    case = Case()
    case.kept.update(case.hashes)
    assert case.found(16) == 3
    assert case.found(17) == 4


def test_states_come_and_go_between_steps() -> None:
    """Catches a copy of the prefixes with a state, made when the cache was."""
    case = Case()
    assert case.found() == 0
    case.kept.add(case.hashes[2])
    assert case.found() == 3
    case.kept.clear()
    assert case.found() == 0


def test_nobody_starts_inside_what_the_leader_of_its_group_skips() -> None:
    """The leader's state is known further on; where the two part, nobody computes one."""
    case = Case()
    case.kept.add(case.hashes[3])
    other = array("i", [*TOKENS[:12], *range(200, 205)])  # three blocks in common
    assert [hit.num_shared for hit in case.hits(TOKENS, other)] == [4, 0]
    case.kept.clear()
    assert [hit.num_shared for hit in case.hits(TOKENS, other)] == [0, 3]
