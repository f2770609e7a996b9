"""Swapping: all blocks of a request move to host memory, and back before it goes on (paper, section 4.5).

The engine's tests use the example of test_preemption.py: 8 blocks of 2 tokens, two requests of 5 + 8 tokens.
"""

import pytest

from minipaged.memory import BlockAllocator, BlockTable, OutOfBlocksError, SwapSpace
from minipaged.scheduling import Swap
from tests.toy import ToyEngine, beams, samples, toy_scheduler


def device_tables(*lengths, num_blocks=8, block_size=2):
    pool = BlockAllocator(num_blocks)
    tables = [BlockTable(pool, block_size) for _ in lengths]
    for table, length in zip(tables, lengths):
        table.append(length)
    return pool, tables


def host_free(space):
    return space.allocator.num_free


# -- tables ------------------------------------------------------------------------------------------------


def test_a_table_moves_to_the_host_and_its_device_blocks_are_free():
    """Catches device blocks that stay held: nothing would be gained."""
    pool, (table,) = device_tables(5)
    space = SwapSpace(4, 8)
    before = list(table.blocks)
    moves = space.swap_out([table])
    assert [source for source, _ in moves] == before
    assert [destination for _, destination in moves] == table.blocks
    assert (table.num_tokens, pool.num_free, host_free(space)) == (5, 8, 1)


def test_a_table_comes_back_with_its_tokens():
    """Catches a table whose slots do not follow its blocks."""
    pool, (table,) = device_tables(5)
    space = SwapSpace(4, 8)
    space.swap_out([table])
    on_host = list(table.blocks)
    pool.allocate(2)  # somebody else took room in between
    moves = space.swap_in([table], pool)
    assert [source for source, _ in moves] == on_host
    assert [destination for _, destination in moves] == table.blocks
    first, second, third = table.blocks
    assert table.slots(0, 5) == [2 * first, 2 * first + 1, 2 * second, 2 * second + 1, 2 * third]
    assert (pool.num_free, host_free(space)) == (3, 4)


def test_a_shared_block_moves_once_and_is_shared_on_the_other_side():
    """Catches a group of samples that takes its prompt to the host once per sample."""
    pool, (first,) = device_tables(5)
    second = first.fork()
    second.append()
    space = SwapSpace(8, 8)
    assert len(space.swap_out([first, second])) == 4
    assert first.blocks[:2] == second.blocks[:2]
    assert [space.allocator.ref_count(block) for block in first.blocks] == [2, 2, 1]
    space.swap_in([first, second], pool)
    assert first.blocks[:2] == second.blocks[:2]
    assert [pool.ref_count(block) for block in first.blocks] == [2, 2, 1]
    assert (pool.num_free, host_free(space)) == (4, 8)


def test_a_block_that_others_still_hold_stays_on_the_device_for_them():
    """Catches a prefix pulled away from a running request because another one is swapped out."""
    pool, (first,) = device_tables(5)
    stays = first.fork()
    before = list(stays.blocks)
    SwapSpace(8, 8).swap_out([first])
    assert stays.blocks == before
    assert pool.num_free == 5


def test_a_host_that_is_too_full_changes_nothing():
    """Catches a group that is half on the host when the engine dies."""
    pool, tables = device_tables(5, 3)
    space = SwapSpace(4, 8)
    before = [list(table.blocks) for table in tables]
    with pytest.raises(OutOfBlocksError):
        space.swap_out(tables)
    assert [table.blocks for table in tables] == before
    assert (pool.num_free, host_free(space)) == (3, 4)


def test_a_swapped_out_table_can_be_freed():
    """Catches an abort while swapped out that gives host ids to the device pool."""
    pool, (table,) = device_tables(5)
    space = SwapSpace(4, 8)
    space.swap_out([table])
    table.free()
    assert (pool.num_free, host_free(space)) == (8, 4)


def test_the_host_pool_is_bounded_by_the_device_pool():
    """Catches memory for blocks that can never be swapped out."""
    with pytest.raises(ValueError, match="9 blocks exceeds the 8 device blocks"):
        SwapSpace(9, 8)


def test_the_check_finds_a_host_block_that_no_table_holds():
    """Catches a check that looks at the device alone: a leak would fill the swap space."""
    space = SwapSpace(4, 4)
    blocks = space.allocator.allocate(1)
    space.check_invariants(blocks)
    with pytest.raises(AssertionError):
        space.check_invariants([])


# -- in the engine -----------------------------------------------------------------------------------------


def swapping(num_blocks=8, num_host_blocks=8, **options):
    return ToyEngine(
        toy_scheduler(num_blocks, 2, num_host_blocks=num_host_blocks, preemption=Swap(), **options)
    )


def swapping_two(**options):
    engine = swapping(**options)
    engine.add(range(5), 8)
    engine.add(range(20, 25), 8)
    return engine


def events(engine, kind):
    return [event for plan in engine.plans for event in plan.events if event.kind == kind]


def test_a_swapped_request_goes_on_where_it_was():
    """Catches a prefill after a swap, a lost token, moves in the wrong order."""
    engine = swapping_two()
    assert engine.run() == engine.alone()
    assert [event.detail["mode"] for event in events(engine, "preempted")] == ["swap"]
    assert engine.executor.num_tokens_computed == 2 * (5 + 8 - 1)


@pytest.mark.parametrize("method", [samples(3), beams(3)])
def test_a_swapped_group_keeps_its_sharing(method):
    """Catches a prompt that is moved once per sample, or comes back unshared and no longer fits."""
    engine = swapping(16, 16)
    engine.add(range(6), 8)
    group = engine.add(range(20, 26), 8, method)
    while not engine.scheduler.swapped:
        engine.step()
    moves = engine.plans[-1].swap_out
    held = [block for sequence in group.sequences for block in sequence.table.blocks]
    assert len(group.sequences) == 3
    assert sorted(move.destination for move in moves) == sorted(set(held))
    assert len(moves) <= len(held) - 2 * 3, "the prompt's three blocks moved once"
    assert engine.run() == engine.alone()
    assert [event.detail["mode"] for event in events(engine, "resumed")] == ["swap"]


def test_nothing_new_is_admitted_while_something_is_swapped_out():
    """Catches a newcomer that takes the blocks a swapped-out request waits for."""
    engine = swapping_two()
    while not engine.scheduler.swapped:
        engine.step()
    engine.add([1], 1)
    while engine.scheduler.swapped:
        assert engine.requests[2].state.value == "waiting"
        engine.step()
    assert engine.run() == engine.alone()


@pytest.mark.parametrize("num_host_blocks", [0, 1, 2])
def test_without_host_room_a_request_is_recomputed(num_host_blocks):
    """Catches an engine that stalls or dies with swap space 0, or smaller than the group."""
    engine = swapping_two(num_host_blocks=num_host_blocks)
    assert engine.run() == engine.alone()
    assert {event.detail["mode"] for event in events(engine, "preempted")} == {"recompute"}


def test_the_second_victim_is_recomputed_when_the_host_is_full():
    """Catches a wait for host room that only the waiting request could make."""
    engine = swapping(11, 3)
    for i in range(3):
        engine.add([i * 9 + j for j in range(5)], 10)
    assert engine.run() == engine.alone()
    assert {event.detail["mode"] for event in events(engine, "preempted")} == {"swap", "recompute"}


def test_an_abort_while_swapped_out_frees_the_host_blocks():
    """Catches host blocks that are never given back, until nothing can be swapped any more."""
    engine = swapping_two()
    while not engine.scheduler.swapped:
        engine.step()
    space = engine.scheduler.kv.swap_space
    assert host_free(space) < 8
    engine.scheduler.abort(engine.requests[1])
    assert host_free(space) == 8
    assert engine.run()[0] == engine.alone()[0]


@pytest.mark.parametrize("moment", ["out", "in"])
def test_a_step_that_fails_while_swapping_is_recomputed(moment):
    """Catches an engine that relies on moves that may not have happened."""
    engine = swapping_two()
    failed = False
    while engine.scheduler.has_unfinished:
        swapped = len(engine.scheduler.swapped)
        plan = engine.scheduler.schedule()  # (whether it swaps is not known before)
        if getattr(plan, f"swap_{moment}") and not failed:
            engine.executor.fail(plan)
            engine.scheduler.roll_back(plan)
            failed = True
            assert len(engine.scheduler.swapped) <= swapped
        else:
            engine.scheduler.commit(plan, engine.executor.execute(plan))
        engine.scheduler.check_invariants()
    assert failed
    assert engine.run() == engine.alone()
