"""The table of lesson 15: the worked one, or the one that `--use block_table=...` puts in its place."""

import random
from pathlib import Path

import pytest

from minipaged.learn.overrides import load_override
from minipaged.memory import BlockAllocator, BlockTable

WORKED = Path(__file__).parent / "worked/15_after_paged_attention.py"
SIZE = 4


@pytest.fixture
def table_class():
    """The override, or the worked one."""
    own = BlockTable.__module__.startswith("minipaged.")
    return load_override(f"{WORKED}:BlockTable") if own else BlockTable


@pytest.fixture
def make(table_class):
    """Makes a pool whose first block, 0 or `null`, is the null block, and a table of so many tokens."""

    def made(num_tokens, num_blocks=20, block_size=SIZE, null=0):
        pool = BlockAllocator(num_blocks, [null])
        [null] = pool.allocate()
        table = table_class(pool, block_size)
        table.append(num_tokens)
        return pool, null, table

    return made


def check_counts(pool, null, *tables):
    """Every reference is an entry of a table; the null block's first is the pool owner's own."""
    pool.check_invariants([null, *(block for table in tables for block in table.blocks)])


# -- task 1 --------------------------------------------------------------------------------------------------


def test_blocks_before_the_window_go_back_to_the_pool(make):
    """Catches a window that saves no memory, or one too wide: 12 tokens, the next sees positions 8 to 12."""
    pool, null, table = make(12)
    free, last = pool.num_free, table.blocks[2]
    assert table.slide(5, null) == 2
    assert table.blocks == [null, null, last]
    assert pool.num_free == free + 2


@pytest.mark.parametrize(
    ("window", "hidden"), [(13, 0), (10, 0), (9, 1), (8, 1), (6, 1), (5, 2), (2, 2), (1, 3)]
)
def test_a_block_goes_when_its_last_slot_is_out_of_sight(make, window, hidden):
    """Catches a window that is off by one, and a block that goes while a slot of it is still visible."""
    _, null, table = make(12)
    found = table.slide(window, null)
    message = f"12 tokens, a window of {window}: expected slide to return {hidden}, got {found}"
    assert found == hidden, message
    assert table.blocks.count(null) == hidden


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_any_length_and_window_hide_what_is_before_the_window(make, block_size):
    """Catches blocks counted from the end of the table, and a sum that is right only for full blocks."""
    for num_tokens in range(14):
        for window in range(1, 16):
            _, null, table = make(num_tokens, block_size=block_size)
            visible = num_tokens + 1 - window  # the first position that the next token sees
            hidden = sum(first + block_size <= visible for first in range(0, num_tokens, block_size))
            found = table.slide(window, null)
            case = f"{num_tokens} tokens in blocks of {block_size}, a window of {window}"
            assert found == hidden, f"{case}: expected slide to return {hidden}, got {found}"
            assert table.blocks[:hidden] == [null] * hidden, f"{case}: entries before the window are not null"


def test_the_null_block_may_be_any_block(make):
    """Catches `block > null`, and `is not` for numbers: two equal ones above 256 are not one object."""
    pool, null, table = make(12, num_blocks=400, null=300)
    assert table.slide(5, null) == 2
    table.append(4)
    assert table.slide(5, int(str(null))) == 1
    assert table.slide(5, int(str(null))) == 0
    check_counts(pool, null, table)


def test_a_full_window_has_lost_a_block_of_one_token(make):
    """Catches a window that hides nothing while num_tokens <= window: the next token sees itself, too."""
    pool, null, table = make(5, block_size=1)
    assert table.slide(5, null) == 1
    assert table.blocks.index(null) == 0
    check_counts(pool, null, table)


@pytest.mark.parametrize("window", [14, 17, 100])
def test_a_window_longer_than_the_text_hides_nothing(make, window):
    """Catches a first visible position below 0: `self.blocks[:-1]` is all blocks but the last."""
    _, null, table = make(12)
    assert table.slide(window, null) == 0
    assert null not in table.blocks


def test_preallocated_blocks_do_not_move_the_window(make):
    """Catches a window behind the last slot instead of the last token: the blocks behind it are empty."""
    pool, null, table = make(12)
    table.preallocate(2)
    last = table.blocks[2:]
    assert table.slide(5, null) == 2
    assert table.blocks == [null, null, *last]
    check_counts(pool, null, table)


def test_positions_and_slots_of_the_visible_tokens_stay(make):
    """Catches entries that are deleted: every later position would be read from another block."""
    _, null, table = make(11)
    slots = table.slots(8, 11)
    table.slide(3, null)
    assert table.num_tokens == 11
    assert table.slots(8, 11) == slots


def test_a_second_slide_counts_what_is_new(make):
    """Catches null entries that are given back, or counted, again."""
    pool, null, table = make(12)
    assert table.slide(5, null) == 2
    assert table.slide(5, null) == 0
    check_counts(pool, null, table)
    table.append(4)
    assert table.slide(5, null) == 1


def test_each_null_entry_holds_a_reference(make):
    """Catches a null block that is freed by the first table that ends, under everybody who points to it."""
    pool, null, table = make(12)
    table.slide(1, null)
    count = pool.ref_count(null)
    assert count == 4, f"the null block has its owner and 3 entries: expected 4 references, got {count}"
    check_counts(pool, null, table)
    table.free()
    assert pool.ref_count(null) == 1
    assert pool.num_free == 19


def test_a_shared_block_keeps_its_other_holder(make):
    """Catches a fork that loses blocks, and a shared block that is spared."""
    pool, null, table = make(12)
    other = table.fork()
    before = list(other.blocks)
    assert table.slide(5, null) == 2
    assert other.blocks == before
    check_counts(pool, null, table, other)


def test_a_sequence_of_any_length_holds_what_its_window_needs(make):
    """Catches memory that grows with the sequence: a window of 7 never needs more than 3 blocks of 4."""
    pool, null, table = make(0, num_blocks=5)
    for _ in range(200):
        table.slide(7, null)
        table.append()
        check_counts(pool, null, table)
    assert len(table.blocks) == 50


# -- task 2 --------------------------------------------------------------------------------------------------


def test_a_draft_is_kept_up_to_the_first_wrong_token(make):
    """Catches tokens kept after a wrong one, and the rejected token in place of the model's."""
    pool, null, table = make(10)
    assert table.settle([5, 6, 7, 8], [5, 6, 1, 8, 9]) == [5, 6, 1]
    assert table.num_tokens == 8
    assert len(table.blocks) == 2
    check_counts(pool, null, table)


def test_a_token_may_be_drafted_twice(make):
    """Catches a wrong token looked up by its value: 5 is right at first, and wrong the second time."""
    _, _, table = make(10)
    assert table.settle([5, 6, 5], [5, 6, 1, 8]) == [5, 6, 1]
    assert table.num_tokens == 9


def test_a_draft_may_be_long_and_any_sequence(make):
    """Catches `is` for numbers: equal ones above 256 are not one object; and a tuple where a list is due."""
    _, _, table = make(310, num_blocks=80)
    drafted, chosen = tuple(range(1000, 1300)), tuple(map(int, map(str, range(1000, 1301))))
    found = table.settle(drafted, chosen)
    assert isinstance(found, list), f"expected a list of the new tokens, got a {type(found).__name__}"
    assert len(found) == 301
    assert table.num_tokens == 310


def test_an_accepted_draft_brings_one_token_more(make):
    """Catches the model's own next token dropped, and a slot for it: the next step computes it."""
    _, _, table = make(10)
    assert table.settle([5, 6, 7], [5, 6, 7, 8]) == [5, 6, 7, 8]
    assert table.num_tokens == 10


def test_a_draft_that_is_wrong_at_once_still_brings_a_token(make):
    """Catches a step that yields nothing, and choices compared one position off."""
    _, _, table = make(10)
    assert table.settle([5, 6, 7], [4, 5, 6, 7]) == [4]
    assert table.num_tokens == 7


def test_without_a_draft_it_is_a_plain_decode(make):
    """Catches an empty draft that fails, or changes the table."""
    _, _, table = make(10)
    assert table.settle([], [3]) == [3]
    assert table.num_tokens == 10


def test_an_accepted_draft_leaves_preallocated_blocks_alone(make):
    """Catches blocks taken ahead by the growth policy that are given back for nothing."""
    pool, null, table = make(8)
    table.preallocate(2)
    table.settle([5], [5, 6])
    assert len(table.blocks) == 4
    check_counts(pool, null, table)


def test_a_draft_may_be_all_of_the_table(make):
    """Catches >= instead of >: only a draft that is longer than the table is refused."""
    _, _, table = make(2)
    assert table.settle([5, 6], [5, 1, 7]) == [5, 1]
    assert table.num_tokens == 1


@pytest.mark.parametrize(
    ("drafted", "chosen"),
    [([5, 6], [5, 6]), ([5, 6], [5, 1]), ([5], [5, 6, 7]), ([], []), ([5] * 11, [5] * 12)],
)
def test_a_draft_of_another_length_is_refused(make, drafted, chosen):
    """Catches tokens silently cut, and a table that was changed before the error."""
    pool, null, table = make(10)
    blocks = list(table.blocks)
    with pytest.raises(ValueError):
        table.settle(drafted, chosen)
    assert (table.blocks, table.num_tokens) == (blocks, 10)
    check_counts(pool, null, table)


def test_rejected_slots_of_a_shared_prompt_go_back_once(make):
    """Catches a block freed under the sample that shares it."""
    pool, null, table = make(6)
    other = table.fork()
    table.append(7)
    table.settle([1] * 7, [2] * 8)
    assert table.num_tokens == 6
    check_counts(pool, null, table, other)


def test_any_draft_gives_the_tokens_of_plain_decoding(make):
    """Catches output that depends on the draft: with 200 random drafts the text is the model's own."""
    rng = random.Random(0)
    text = [rng.randrange(3) for _ in range(400)]
    pool, null, table = make(1, num_blocks=110)
    written = text[:1]  # its last token is not computed yet: it is the newest
    while len(written) < 390:
        drafted = [rng.randrange(3) for _ in range(rng.randrange(5))]
        table.append(len(drafted))
        start, chosen = len(written), []
        for i in range(len(drafted) + 1):
            agreed = drafted[:i] == text[start : start + i]
            chosen.append(text[start + i] if agreed else rng.randrange(3))
        written += table.settle(drafted, chosen)
        table.append()  # the newest token gets its slot in the next step
        assert table.num_tokens == len(written)
        check_counts(pool, null, table)
    assert written == text[: len(written)]
