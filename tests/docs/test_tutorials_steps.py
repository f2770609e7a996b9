"""First steps of the lessons: what a part must do before the concept tests can be run on it at all."""

from minipaged.memory import BlockAllocator, BlockTable


def table_over(pool, num_blocks, num_tokens, block_size=4):
    """A table that was given its blocks and tokens, without append."""
    table = BlockTable(pool, block_size)
    table.blocks, table.num_tokens = pool.allocate(num_blocks), num_tokens
    return table


# -- lesson 01, task 1 ---------------------------------------------------------------------------------------


def test_seven_tokens_fill_a_block_and_three_slots_of_the_next():
    """Catches a last block that counts as full, and spare blocks that count as filled."""
    table = table_over(BlockAllocator(9, order=[7, 1, 3]), 3, 7)
    assert [table.filled(i) for i in range(3)] == [4, 3, 0]
    assert (table.num_filled_blocks, table.capacity) == (2, 12)


def test_a_full_block_is_one_block():
    """Catches a division that rounds 8 / 4 up to 3, and one that rounds 9 / 4 down to 2."""
    pool = BlockAllocator(9)
    assert table_over(pool, 2, 8).num_filled_blocks == 2
    assert table_over(pool, 3, 9).num_filled_blocks == 3
    assert table_over(pool, 0, 0).num_filled_blocks == 0


def test_the_slot_of_a_token_is_found_through_the_table():
    """Catches slots counted through logical instead of physical blocks."""
    table = table_over(BlockAllocator(9, order=[7, 1, 3]), 3, 9)
    assert [table.slot(position) for position in (0, 3, 4, 8)] == [28, 31, 4, 12]
    assert table.slots(2, 6) == [30, 31, 4, 5]


# -- lesson 02, task 3 ---------------------------------------------------------------------------------------


def test_a_fork_holds_the_same_blocks_and_counts():
    """Catches a child that forgets to count itself in, or shares the list of its parent."""
    pool = BlockAllocator(9, order=[7, 1, 3])
    parent = table_over(pool, 2, 7)
    child = parent.fork()
    assert (child.blocks, child.num_tokens) == ([7, 1], 7)
    assert child.blocks is not parent.blocks
    assert [pool.ref_count(block) for block in (7, 1)] == [2, 2]


def test_spare_blocks_stay_with_the_parent():
    """Catches two tables that would both write into a block that is still empty."""
    pool = BlockAllocator(9, order=[7, 1, 3])
    parent = table_over(pool, 3, 7)
    assert parent.fork().blocks == [7, 1]
    assert pool.ref_count(3) == 1
