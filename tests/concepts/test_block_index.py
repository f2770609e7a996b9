"""The index of the prefix cache: hash -> block, in integer arrays."""

import random

import pytest

from minipaged.memory.block_index import BlockIndex


def index_of(size, **blocks):
    """An index whose block n has the hash given as `bn`; equal remainders by `size` share a bucket."""
    index = BlockIndex(size)
    for name, chain_hash in blocks.items():
        index.add(chain_hash, int(name[1:]))
    return index


def test_a_block_is_found_by_its_hash():
    """Catches a bucket taken for a hash: 1 and 5 share one in an index of 4."""
    index = index_of(4, b0=1, b2=5)
    assert (index.find(1), index.find(5), index.find(9), index.find(2)) == (0, 2, None, None)


def test_a_hash_may_be_negative_and_have_64_bits():
    """Catches a table of 32-bit hashes, or one that takes the sign for a marker."""
    hashes = [-1, 0, -(2**63), 2**63 - 1]
    index = BlockIndex(4)
    for block, chain_hash in enumerate(hashes):
        index.add(chain_hash, block)
    assert [index.find(chain_hash) for chain_hash in hashes] == [0, 1, 2, 3]


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_the_others_of_a_bucket_stay(removed):
    """Catches a chain that is cut at the block taken out: first, middle and last of three."""
    index = index_of(4, b0=3, b1=7, b2=11)
    index.remove(removed)
    found = [index.find(3), index.find(7), index.find(11)]
    assert found == [None if block == removed else block for block in range(3)]
    assert [block in index for block in range(3)] == [block != removed for block in range(3)]
    index.check_invariants()


def test_a_block_has_one_hash():
    """Catches a block linked into two buckets: a ring that no search ever leaves."""
    index = index_of(4, b0=3)
    assert not index.add(2, 0)
    assert (index.find(2), index.find(3), len(index)) == (None, 0, 1)
    index.check_invariants()


def test_the_first_block_of_a_hash_keeps_it():
    """Catches two blocks under one hash: which of them is found depends on who was taken out before."""
    index = index_of(4, b0=3, b1=7)
    assert not index.add(3, 2)
    assert (index.find(3), 2 in index, len(index)) == (0, False, 2)


def test_a_block_without_a_hash_cannot_be_taken_out():
    """Catches a search for a predecessor that does not exist: it would never end."""
    index = index_of(4, b0=3)
    index.remove(0)
    with pytest.raises(ValueError, match="block 0 has no hash"):
        index.remove(0)


@pytest.mark.parametrize("size", [1, 2, 7, 32])
def test_it_agrees_with_a_dict(size):
    """Catches a link lost in any order of adding and taking out; few hashes, so that buckets fill up."""
    rng = random.Random(size)
    index, oracle = BlockIndex(size), {}
    for _ in range(2000):
        chain_hash, block = rng.randrange(-2 * size, 2 * size), rng.randrange(size)
        if block in index:
            index.remove(block)
            oracle = {h: b for h, b in oracle.items() if b != block}
        elif index.add(chain_hash, block):
            oracle[chain_hash] = block
        else:
            assert chain_hash in oracle
        assert [index.find(h) for h in range(-2 * size, 2 * size)] == [
            oracle.get(h) for h in range(-2 * size, 2 * size)
        ]
        assert len(index) == len(oracle)
        index.check_invariants()
