"""The block allocator: equal blocks, handed out one by one and counted (paper, sections 4.2 and 4.4).

state        on the free list    references    what may be done with it
free         yes                 0             allocate
used         no                  1, 2, ...     share, release, free
evictable    no                  0             share, reclaim
"""

import random

import pytest

from minipaged.memory import BlockAllocator, OutOfBlocksError

# -- handing out (section 4.2) -----------------------------------------------------------------------------


def test_a_pool_hands_out_each_block_once():
    """Catches a block given to two holders at the same time."""
    pool = BlockAllocator(8)
    assert sorted(pool.allocate(3) + pool.allocate() + pool.allocate(4)) == list(range(8))
    assert pool.num_free == 0


def test_a_freed_block_can_be_handed_out_again():
    """Catches a pool that shrinks with every request until the engine stalls."""
    pool = BlockAllocator(2)
    for _ in range(10):
        for block in pool.allocate(2):
            pool.free(block)
    assert pool.num_free == 2


def test_blocks_are_handed_out_in_the_order_given():
    """Catches blocks from the wrong end of the free list, or in another order; ids not listed come last."""
    assert BlockAllocator(8, order=[7, 1, 3]).allocate(5) == [7, 1, 3, 0, 2]


def test_the_order_given_may_be_any_iterable_and_is_left_as_it_is():
    """Catches a pool that adds the ids not listed to the caller's list: the next pool would refuse them."""
    order = [7, 1, 3]
    BlockAllocator(8, order)
    assert order == [7, 1, 3]
    assert BlockAllocator(8, iter(order)).allocate(4) == [7, 1, 3, 0]


def test_the_block_freed_last_is_handed_out_first():
    """Catches a queue: what was freed last is in the processor's caches, and a pool that uses few blocks
    should keep to these few."""
    pool = BlockAllocator(4)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.free(block)
    assert [pool.allocate() for _ in blocks] == [[block] for block in reversed(blocks)]


def test_an_allocation_that_cannot_be_met_takes_nothing():
    """Catches blocks lost when only some of those requested are free; the error is OutOfBlocksError."""
    pool = BlockAllocator(4)
    held = pool.allocate(3)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_invariants(held)


def test_a_refused_allocation_leaves_the_order():
    """Catches blocks that are taken and put back in reverse: an error must leave everything unchanged."""
    pool = BlockAllocator(4, order=[3, 1, 2, 0])
    with pytest.raises(OutOfBlocksError):
        pool.allocate(5)
    assert pool.allocate(4) == [3, 1, 2, 0]


def test_allocating_no_block_takes_none():
    """Catches `self._free[-count:]`, which is the whole list when count is 0."""
    pool = BlockAllocator(3)
    assert (pool.allocate(0), pool.num_free) == ([], 3)


def test_allocating_no_block_is_possible_on_an_empty_pool():
    """Catches an off-by-one that refuses a sequence that needs nothing."""
    pool = BlockAllocator(1)
    pool.allocate()
    assert list(pool.allocate(0)) == []


@pytest.mark.parametrize(("num_blocks", "order"), [(0, None), (-1, None), (4, [1, 1]), (4, [4])])
def test_an_impossible_pool_is_refused(num_blocks, order):
    """Catches a pool without blocks, or with a block twice, that fails much later."""
    with pytest.raises(ValueError):
        BlockAllocator(num_blocks, order)


# -- counting references (section 4.4) ---------------------------------------------------------------------


def test_an_allocated_block_has_one_reference():
    """Catches counts that start at 0, so that the first free would be a double free."""
    pool = BlockAllocator(4)
    assert [pool.ref_count(block) for block in pool.allocate(3)] == [1, 1, 1]


def test_a_shared_block_is_free_only_after_its_last_holder():
    """Catches a block taken from sample 2 because sample 1 ended."""
    pool = BlockAllocator(1)
    (block,) = pool.allocate()
    pool.share(block)
    pool.share(block)
    assert pool.ref_count(block) == 3
    for left in (2, 1):
        pool.free(block)
        assert (pool.ref_count(block), pool.num_free) == (left, 0)
    pool.free(block)
    assert pool.num_free == 1


def test_a_double_free_raises_and_changes_nothing():
    """Catches an abort whose blocks are freed twice: the second time they are somebody else's."""
    pool = BlockAllocator(3)
    first, second = pool.allocate(2)
    pool.free(first)
    with pytest.raises(ValueError):
        pool.free(first)
    assert pool.num_free == 2
    pool.check_invariants([second])


# -- evictable: held by nobody, kept for the prefix cache --------------------------------------------------


def test_release_reports_the_last_holder():
    """Catches a prefix cache that never learns when nobody uses a block any more."""
    pool = BlockAllocator(1)
    (block,) = pool.allocate()
    pool.share(block)
    assert [pool.release(block), pool.release(block)] == [False, True]


def test_an_evictable_block_is_neither_free_nor_used():
    """Catches cached content that the next allocation overwrites although nobody evicted it."""
    pool = BlockAllocator(2)
    (block,) = pool.allocate()
    pool.release(block)
    assert (pool.num_free, pool.ref_count(block)) == (1, 0)
    assert pool.allocate() != [block]


def test_an_evictable_block_can_be_shared_or_reclaimed():
    """Catches a prefix hit on a block without holders that raises, or an eviction that loses it."""
    pool = BlockAllocator(1)
    (block,) = pool.allocate()
    pool.release(block)
    pool.share(block)
    assert pool.ref_count(block) == 1
    pool.release(block)
    pool.reclaim(block)
    assert pool.num_free == 1


# -- all three states --------------------------------------------------------------------------------------

FORBIDDEN = [
    ("share", "free"),
    ("release", "free"),
    ("reclaim", "free"),
    ("reclaim", "used"),
    ("release", "evictable"),
    ("free", "evictable"),
]


@pytest.mark.parametrize(("method", "state"), FORBIDDEN, ids=[" ".join(case) for case in FORBIDDEN])
def test_what_the_state_of_a_block_forbids_changes_nothing(method, state):
    """Catches a missing check, and one that comes too late: a count of -1, a block that is on the free list
    twice, or while a table holds it. The error is ValueError."""
    pool = BlockAllocator(2)
    (block,) = pool.allocate()
    if state != "used":
        {"free": pool.free, "evictable": pool.release}[state](block)
    before = pool.ref_count(block), pool.num_free
    with pytest.raises(ValueError):  # noqa: PT012
        getattr(pool, method)(block)
        pytest.fail(f"{method} of a block that is {state} must raise ValueError")
    after = pool.ref_count(block), pool.num_free
    assert after == before, f"references and free blocks: {before} before the refusal, {after} after it"
    pool.check_invariants([block] if state == "used" else [])


def test_random_operations_agree_with_a_dictionary():
    """Catches whatever the cases above miss: counts are compared with a plain dictionary throughout."""
    rng = random.Random(0)
    pool, counts = BlockAllocator(7), {}
    for _ in range(3000):
        action = rng.choice(["allocate", "share", "free"])
        if action == "allocate":
            wanted = rng.randint(0, 3)
            if wanted > 7 - len(counts):
                with pytest.raises(OutOfBlocksError):
                    pool.allocate(wanted)
            else:
                blocks = pool.allocate(wanted)
                assert len(set(blocks)) == wanted
                assert not set(blocks) & set(counts)
                counts |= dict.fromkeys(blocks, 1)
        elif counts:
            block = rng.choice(sorted(counts))
            getattr(pool, action)(block)
            counts[block] += 1 if action == "share" else -1
            if not counts[block]:
                del counts[block]
        assert pool.num_free == 7 - len(counts)
        assert all(pool.ref_count(block) == counts.get(block, 0) for block in range(7))


def test_check_invariants_sees_a_wrong_count():
    """Catches a check that checks nothing: all tests of the engine rely on it."""
    pool = BlockAllocator(3)
    first, second = pool.allocate(2)
    (free,) = {0, 1, 2} - {first, second}
    pool.check_invariants([first, second])
    for wrong in ([first], [first, first, second], [first, second, free]):
        with pytest.raises(AssertionError):
            pool.check_invariants(wrong)


def test_check_invariants_sees_a_wrong_free_list():
    """Catches a check of the counts alone: a block on the free list twice, or while a table holds it, gets
    two holders."""
    if not BlockAllocator.__module__.startswith("minipaged."):
        pytest.skip("another class keeps its free blocks in its own way")
    twice, held = BlockAllocator(3), BlockAllocator(3)
    twice._free.append(2)
    with pytest.raises(AssertionError, match="marked as free"):
        twice.check_invariants([])
    (block,) = held.allocate()
    held._free.append(block)
    held._is_free[block] = True
    with pytest.raises(AssertionError, match="held by a table"):
        held.check_invariants([block])
