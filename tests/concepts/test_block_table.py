"""The block table: the paper's figures 6, 7, 8 and 9, number by number (sections 4.2 to 4.4).

    A (Fig. 6)                    physical   filled after the prompt, "fathers", "brought"
    0   Four score and seven      7          4   4   4
    1   years ago our fathers     1          3   4   4
    2   brought                   3                  1

    B (Fig. 7)                    physical   filled after the prompt, "times"
    0   It was the best           5          4   4
    1   of times                  2          1   2

Blocks of 4 tokens: position p is in logical block p // 4, in slot 4 * physical + p % 4 of the pool.
"""

from collections import Counter
from itertools import product

import pytest

from minipaged.memory import BlockTable, OutOfBlocksError


class FigurePool:
    """Hands out the physical blocks of a figure in the figure's order, and counts references."""

    def __init__(self, *blocks):
        self.free_blocks = list(blocks)
        self.counts = {}

    def allocate(self, count=1):
        if count > len(self.free_blocks):
            raise OutOfBlocksError(f"{count} wanted, {len(self.free_blocks)} free")
        blocks, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        self.counts |= dict.fromkeys(blocks, 1)
        return blocks

    def share(self, block):
        self.counts[block] += 1

    def free(self, block):
        self.counts[block] -= 1
        assert self.counts[block] >= 0, f"block {block} is freed twice"
        if not self.counts[block]:
            self.free_blocks.append(block)

    def ref_count(self, block):
        return self.counts.get(block, 0)

    @property
    def num_free(self):
        return len(self.free_blocks)


def rows(table):
    """(physical block, number of filled slots) of each logical block: the table as the paper draws it."""
    return [(block, table.filled(i)) for i, block in enumerate(table.blocks)]


def table_of(pool, num_tokens, block_size=4):
    table = BlockTable(pool, block_size)
    table.append(num_tokens)
    return table


# -- Fig. 6: one request -----------------------------------------------------------------------------------


def test_figure_6_the_prompt_takes_two_blocks_and_fills_seven_slots():
    """Catches reserving for the maximum length, and an order of filling other than left to right."""
    table = table_of(FigurePool(7, 1, 3), 7)
    assert rows(table) == [(7, 4), (1, 3)]
    assert table.slots(0, 7) == [28, 29, 30, 31, 4, 5, 6]


def test_figure_6_the_first_decode_writes_into_the_free_slot():
    """Catches a new block for every token."""
    pool = FigurePool(7, 1, 3)
    table = table_of(pool, 7)
    assert table.blocks_to_append() == 0
    table.append()
    assert rows(table) == [(7, 4), (1, 4)]
    assert table.slot(7) == 7
    assert pool.num_free == 1


def test_figure_6_the_second_decode_takes_a_block_because_the_last_is_full():
    """Catches writing past the end of a block into a neighbour's."""
    table = table_of(FigurePool(7, 1, 3), 8)
    assert table.blocks_to_append() == 1
    table.append()
    assert rows(table) == [(7, 4), (1, 4), (3, 1)]
    assert table.slot(8) == 12


# -- Fig. 7: two requests ----------------------------------------------------------------------------------


def test_figure_7_two_requests_share_no_block():
    """Catches tables that depend on each other: logical blocks need not be neighbours anywhere."""
    pool = FigurePool(7, 1, 5, 2, 3)
    a, b = table_of(pool, 7), table_of(pool, 5)
    assert (rows(a), rows(b)) == ([(7, 4), (1, 3)], [(5, 4), (2, 1)])
    a.append(2)
    b.append()
    assert (rows(a), rows(b)) == ([(7, 4), (1, 4), (3, 1)], [(5, 4), (2, 2)])
    assert not set(a.slots(0, 9)) & set(b.slots(0, 6))


# -- Fig. 8: two samples of one prompt ---------------------------------------------------------------------


def test_figure_8_a_fork_shares_every_block_and_takes_none():
    """Catches a fork that copies the prompt."""
    pool = FigurePool(7, 1, 3)
    a1 = table_of(pool, 7)
    a2 = a1.fork()
    assert rows(a2) == rows(a1) == [(7, 4), (1, 3)]
    assert (pool.ref_count(7), pool.ref_count(1), pool.num_free) == (2, 2, 1)


def test_figure_8_the_first_writer_copies_exactly_the_last_block():
    """Catches a sample that writes into the other's block, and one that copies full blocks too."""
    pool = FigurePool(7, 1, 3)
    a1 = table_of(pool, 7)
    a2 = a1.fork()
    assert a1.blocks_to_append() == 1
    assert a1.append() == (1, 3)
    assert (a1.blocks, a2.blocks) == ([7, 3], [7, 1])
    assert (pool.ref_count(7), pool.ref_count(1), pool.ref_count(3)) == (2, 1, 1)


def test_figure_8_the_second_writer_writes_in_place():
    """Catches a copy of a block that nobody else needs any more."""
    pool = FigurePool(7, 1, 3)
    a1 = table_of(pool, 7)
    a2 = a1.fork()
    a1.append()
    assert a2.blocks_to_append() == 0
    assert a2.append() is None
    assert a2.blocks == [7, 1]
    assert pool.num_free == 0


def test_a_full_last_block_is_never_copied():
    """Catches a copy of a block that nobody writes to: the next token goes to a new one."""
    pool = FigurePool(0, 1, 2, 3)
    a1 = table_of(pool, 8)
    a2 = a1.fork()
    assert a1.append() is None
    assert a2.append() is None
    assert (a1.blocks, a2.blocks) == ([0, 1, 2], [0, 1, 3])


def test_three_samples_copy_the_last_block_twice():
    """Catches miscounted holders: n samples of a partly filled block cost n - 1 copies."""
    pool = FigurePool(*range(9))
    tables = [table_of(pool, 5)]
    tables += [tables[0].fork(), tables[0].fork()]
    assert [table.append() for table in tables] == [(1, 2), (1, 3), None]


def test_no_token_copies_nothing():
    """Catches a table that leaves a shared block although nothing is written."""
    pool = FigurePool(7, 1, 3)
    a1 = table_of(pool, 7)
    a2 = a1.fork()
    assert a1.blocks_to_append(0) == 0
    assert a1.append(0) is None
    assert a1.blocks == a2.blocks == [7, 1]
    assert pool.num_free == 1


def test_the_block_that_is_copied_is_that_of_the_next_token():
    """Catches blocks[-1]: there may be preallocated blocks after the one that is written."""
    pool = FigurePool(7, 1, 3, 5)
    a1 = table_of(pool, 7)
    a1.preallocate(1)
    a2 = a1.fork()
    assert a1.append() == (1, 5)
    assert (a1.blocks, a2.blocks) == ([7, 5, 3], [7, 1])


# -- Fig. 9: beam search, k = 4 ----------------------------------------------------------------------------


def figure_9():
    """The tree of Fig. 9 before the step: candidates 0 to 3 over blocks 0 to 8, block size 2.

            0 -- 1 -- 3 --+-- 5     candidate 0
            |             +-- 6     candidate 1
            |             +-- 7     candidate 2
            +--- 2 -- 4 ----- 8     candidate 3

    It grows by `append` and `fork` alone. All blocks are full, so that each survivor takes a new one.
    """
    pool = FigurePool(*range(16))
    first = table_of(pool, 2, block_size=2)
    last = first.fork()
    for _ in range(2):
        first.append(2)
        last.append(2)
    candidates = [first, first.fork(), first.fork(), last]
    for candidate in candidates:
        candidate.append(2)
    return pool, candidates


def test_figure_9_blocks_of_candidates_that_leave_the_beam_are_freed():
    """Catches beams that leak: 2, 4, 5 and 8 are freed; what the survivors share stays."""
    pool, candidates = figure_9()
    assert [table.blocks for table in candidates] == [[0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8]]
    survivors = [candidates[1], candidates[1].fork(), candidates[2], candidates[2].fork()]
    candidates[0].free()
    candidates[3].free()
    assert {block for block in range(9) if pool.ref_count(block) == 0} == {2, 4, 5, 8}
    assert {block: pool.ref_count(block) for block in (0, 1, 3, 6, 7)} == {0: 4, 1: 4, 3: 4, 6: 2, 7: 2}
    copies = [table.append() for table in survivors]
    assert copies == [None] * 4
    assert sorted(table.blocks[-1] for table in survivors) == [9, 10, 11, 12]


def test_figure_9_candidates_over_a_partly_filled_block_copy_only_that():
    """Catches a copy of the whole history for every beam, as systems without paging make it."""
    pool = FigurePool(*range(16))
    parent = table_of(pool, 5, block_size=2)
    beams = [parent, parent.fork(), parent.fork(), parent.fork()]
    copies = [beam.append() for beam in beams]
    assert copies == [(2, 3), (2, 4), (2, 5), None]
    assert all(beam.blocks[:2] == [0, 1] for beam in beams)


def test_after_the_last_beam_every_block_is_free():
    """Catches references that no table holds."""
    pool, candidates = figure_9()
    for table in candidates:
        table.free()
    assert pool.num_free == 16


# -- the rules behind the figures --------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 256])
def test_waste_is_below_one_block(block_size):
    """Catches a block taken one token early, even when the tokens fill the last one exactly."""
    table = BlockTable(FigurePool(*range(600)), block_size)
    for num_tokens in range(1, 600):
        table.append()
        assert 0 <= table.capacity - num_tokens < block_size


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_chunk_is_the_same_as_its_tokens_one_by_one(block_size):
    """Catches an off-by-one where a chunk ends on a block's edge."""
    chunks, singly = (BlockTable(FigurePool(*range(99)), block_size) for _ in range(2))
    for count in (3, 2, 5, 1, 16, 4):
        chunks.append(count)
        for _ in range(count):
            singly.append()
        assert rows(chunks) == rows(singly)


@pytest.mark.parametrize(
    ("spare", "count", "forked"),
    [([], 2, False), ([3], 6, False), ([], 1, True), ([3], 2, True)],
    ids=["no block", "one of two", "forked, no block", "forked, one of two"],
)
def test_an_append_that_fails_changes_nothing(spare, count, forked):
    """Catches a table half grown, a copy begun, or a block kept when the pool runs dry, for instance because
    blocks are taken one at a time; the error is OutOfBlocksError."""
    pool = FigurePool(7, 1, *spare)
    table = table_of(pool, 7)
    tables = [table, table.fork()] if forked else [table]
    before = [rows(each) for each in tables], +Counter(pool.counts), pool.num_free
    with pytest.raises(OutOfBlocksError):
        table.append(count)
    assert ([rows(each) for each in tables], +Counter(pool.counts), pool.num_free) == before


def test_blocks_to_append_is_what_append_takes():
    """Catches a table that takes more blocks than it told the scheduler."""
    for num_tokens, count, forked, preallocated in product(range(1, 10), range(1, 10), (False, True), (0, 2)):
        pool = FigurePool(*range(20))
        table = table_of(pool, num_tokens)
        other = table.fork() if forked else None
        table.preallocate(preallocated)
        promised, before = table.blocks_to_append(count), pool.num_free
        table.append(count)
        taken = before - pool.num_free
        assert taken == promised, (
            f"{num_tokens} tokens{', forked' * forked}, {preallocated} blocks preallocated: "
            f"blocks_to_append({count}) is {promised}, append took {taken}"
        )
        assert other is None or pool.ref_count(other.blocks[0]) >= 1


def test_preallocated_blocks_are_filled_before_any_is_taken():
    """Catches a reservation that is held but not used."""
    pool = FigurePool(*range(9))
    table = table_of(pool, 3)
    table.preallocate(2)
    assert (table.capacity, table.filled(1), table.num_filled_blocks) == (12, 0, 1)
    table.append(9)
    assert table.blocks == [0, 1, 2]


def test_preallocated_blocks_stay_with_the_parent_of_a_fork():
    """Catches two sequences that would fill the same empty block."""
    pool = FigurePool(*range(9))
    table = table_of(pool, 3)
    table.preallocate(2)
    assert table.fork().blocks == [0]
    assert pool.ref_count(1) == 1


def test_a_shared_prefix_is_mapped_into_an_empty_table():
    """Catches a prefix hit that is copied, or not counted."""
    pool = FigurePool(*range(9))
    first = table_of(pool, 10)
    second = BlockTable(pool, 4)
    second.share(first.blocks[:2])
    assert second.num_tokens == 8
    second.append(3)
    assert second.blocks == [0, 1, 3]
    assert pool.ref_count(0) == 2


def test_truncate_keeps_the_blocks_of_the_first_tokens():
    """Catches a block given back that holds a token, and an empty one kept. (Rows: block, tokens in it.)"""
    pool = FigurePool(*range(9))
    table = table_of(pool, 10)
    table.preallocate(2)
    table.truncate(5)
    assert rows(table) == [(0, 4), (1, 1)]
    assert pool.num_free == 7


def test_a_table_gives_its_tail_back_first():
    """Catches a prefix cache that evicts the beginning of a chain before its end."""
    pool = FigurePool(4, 2, 6)
    table = table_of(pool, 12)
    table.free()
    assert pool.free_blocks == [6, 2, 4]
    assert (table.blocks, table.num_tokens) == ([], 0)


def test_freeing_a_table_twice_is_harmless():
    """Catches an abort of a finished request that gives blocks back again."""
    pool = FigurePool(*range(3))
    table = table_of(pool, 5)
    table.free()
    table.free()
    assert pool.num_free == 3


def test_a_block_size_of_zero_is_refused():
    """Catches a division by zero far from its cause."""
    with pytest.raises(ValueError):
        BlockTable(FigurePool(0), 0)
