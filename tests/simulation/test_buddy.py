"""The buddy allocator: worked examples, then random operations against a bitmap."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.memory import OutOfBlocksError
from minipaged.simulation.baselines.buddy import BuddyAllocator, order_of


@pytest.mark.parametrize(("size", "order"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11)])
def test_a_region_is_the_next_power_of_two(size, order):
    """Catches rounding a power of two up once more, which would halve what Orca Pow2 can hold."""
    assert order_of(size) == order


def test_a_region_is_split_in_halves_down_to_the_size_asked_for():
    """16 slots, 3 wanted: 16 -> 8 + 8 -> 4 + 4 + 8. Catches halves that are lost while splitting."""
    pool = BuddyAllocator(16)
    assert pool.allocate(3) == 0
    assert pool.num_free == 12
    assert [pool.allocate(4), pool.allocate(8)] == [4, 8]
    assert pool.num_free == 0
    pool.check_invariants()


def test_the_smallest_region_that_fits_is_taken():
    """Catches cutting up a large region while a small one is free (worst fit)."""
    pool = BuddyAllocator(16)
    first, second, third = pool.allocate(4), pool.allocate(4), pool.allocate(8)
    pool.free(third)
    pool.free(first)
    assert pool.allocate(2) == first
    pool.check_invariants()
    assert second == 4


def test_buddies_merge_as_often_as_they_can():
    """Freed in any order, the pool is one region again. Catches a merge that stops after one level."""
    pool = BuddyAllocator(16)
    starts = [pool.allocate(1) for _ in range(16)]
    random.Random(0).shuffle(starts)
    for start in starts:
        pool.free(start)
        pool.check_invariants()
    assert pool.allocate(16) == 0


def test_neighbours_that_are_not_buddies_do_not_merge():
    """Slots 4..7 and 8..11 lie side by side but differ in two bits. Catches merging by adjacency, after
    which a region would not be aligned and its own buddy could not be found."""
    pool = BuddyAllocator(16)
    starts = [pool.allocate(4) for _ in range(4)]
    pool.free(starts[1])
    pool.free(starts[2])
    assert pool.num_free == 8
    with pytest.raises(OutOfBlocksError, match=r"no free region of 8 slots; 8 slots are free in all"):
        pool.allocate(8)


def test_free_slots_in_pieces_do_not_serve_a_large_request():
    """External fragmentation, the paper's Fig. 2: half of the pool is free and nothing of 4 slots fits."""
    pool = BuddyAllocator(16)
    starts = [pool.allocate(2) for _ in range(8)]
    for start in starts[::2]:
        pool.free(start)
    assert pool.num_free == 8
    assert not pool.can_allocate([4])
    assert pool.can_allocate([2, 2, 2, 2])


def test_a_pool_that_is_not_a_power_of_two_is_cut_into_aligned_regions():
    """15,700 slots hold seven sequences of 2,048 (Fig. 13 a: 7.00 for Orca Max), not eight."""
    pool = BuddyAllocator(15_700)
    for _ in range(7):
        pool.allocate(2048)
    assert not pool.can_allocate([2048])
    pool.check_invariants()


def test_a_double_free_raises():
    """Catches giving one region to two requests."""
    pool = BuddyAllocator(8)
    start = pool.allocate(2)
    pool.free(start)
    with pytest.raises(ValueError, match="no region is allocated at 0"):
        pool.free(start)


def test_an_allocation_that_fails_takes_nothing():
    pool = BuddyAllocator(8)
    pool.allocate(5)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)
    assert pool.regions() == [0]
    pool.check_invariants()


def test_an_empty_pool_and_an_empty_region_are_refused():
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BuddyAllocator(0)
    with pytest.raises(ValueError, match="size is 0"):
        BuddyAllocator(8).allocate(0)


@given(st.integers(1, 70), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_random_operations_agree_with_a_bitmap(num_slots, seed):
    """The oracle is a list of owners and a scan for aligned free runs. Catches overlapping regions, lost
    slots, missed merges, and a `can_allocate` that promises what `allocate` cannot keep."""
    rng = random.Random(seed)
    pool, owners, sizes = BuddyAllocator(num_slots), [None] * num_slots, {}
    for step in range(80):
        if sizes and rng.random() < 0.45:
            start = rng.choice(list(sizes))
            pool.free(start)
            owners[start : start + sizes.pop(start)] = [None] * sum(o == start for o in owners)
        else:
            size = 1 << order_of(rng.randint(1, 20))
            possible = any(
                all(owner is None for owner in owners[at : at + size]) and at + size <= num_slots
                for at in range(0, num_slots, size)
            )
            assert pool.can_allocate([size]) == possible, f"step {step}"
            if possible:
                start = pool.allocate(size)
                assert owners[start : start + size] == [None] * size
                owners[start : start + size] = [start] * size
                sizes[start] = size
        assert pool.num_free == owners.count(None)
        pool.check_invariants()


@given(st.integers(1, 64), st.lists(st.integers(1, 20), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_several_regions_can_be_had_exactly_if_taking_them_works(num_slots, sizes):
    """The largest first, as `can_allocate` assumes. Catches a group admitted with one region too few."""
    pool = BuddyAllocator(num_slots)
    answer = pool.can_allocate(sizes)
    try:
        for size in sorted(sizes, reverse=True):
            pool.allocate(size)
        assert answer
    except OutOfBlocksError:
        assert not answer
