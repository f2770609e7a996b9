"""First steps of the lessons: what an override must do before the concept tests can be run on it at all."""

import re
from array import array
from functools import partial
from types import SimpleNamespace

import pytest

from minipaged.decoding.beam_search import BeamSearch
from minipaged.decoding.methods import SamplingMethod
from minipaged.decoding.params import BeamSearchParams, SamplingParams
from minipaged.decoding.stopping import StopChecker
from minipaged.memory import (
    BlockAllocator,
    BlockTable,
    CachedBlock,
    Chunked,
    KVManager,
    OnDemand,
    OutOfBlocksError,
    PrefixCache,
    Reserve,
    SwapSpace,
)
from minipaged.scheduling import (
    Auto,
    ChunkedPrefill,
    PreemptionCosts,
    PrefillFirst,
    Recompute,
    Sample,
    StepPlan,
    Swap,
)
from tests.concepts.decoding_driver import make_request, make_sequence
from tests.toy import ToyEngine, samples, tokens, toy_scheduler
from tests.toy import beams as toy_beams


def table_over(pool, num_blocks, num_tokens, block_size=4):
    """A table that was given its blocks and tokens, without append."""
    table = BlockTable(pool, block_size)
    table.blocks, table.num_tokens = pool.allocate(num_blocks), num_tokens
    return table


# -- lesson 01, task 1 ----------------------------------------------------------------------


def test_seven_tokens_fill_a_block_and_three_slots_of_the_next():
    """Catches a last block that counts as full, and preallocated blocks that count as filled."""
    table = table_over(BlockAllocator(9, order=[7, 1, 3]), 3, 7)
    assert [table.filled(i) for i in range(3)] == [4, 3, 0]
    assert (table.num_filled_blocks, table.capacity) == (2, 12)


def test_a_block_stays_filled_when_it_is_full():
    """Catches num_tokens % block_size, which is 0 for a last block that is full."""
    table = table_over(BlockAllocator(9), 3, 8)
    assert [table.filled(i) for i in range(3)] == [4, 4, 0]


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
    assert type(table.slot(8)) is int, f"expected a slot that is an int, got {table.slot(8)!r}"
    slots = table.slots(2, 6)
    assert isinstance(slots, list), f"expected a list of slots, got {slots!r}"
    assert slots == [30, 31, 4, 5]


def test_a_preallocated_block_has_slots():
    """Catches a list that is cut at `num_tokens`: a block that is held has a slot for tokens to come."""
    table = table_over(BlockAllocator(9, order=[7, 1, 3]), 3, 7)
    assert table.slots(6, 9) == [6, 7, 12]


def test_no_positions_have_no_slots():
    """Catches looking up the first slot too early: with start == stop the list is empty."""
    assert table_over(BlockAllocator(9), 1, 4).slots(4, 4) == []
    assert table_over(BlockAllocator(9), 0, 0).slots(0, 0) == []


def test_slots_end_with_a_full_block():
    """Catches stop % block_size for the last offset, which is 0 when `stop` is the end of a block."""
    table = table_over(BlockAllocator(9, order=[7, 1, 3]), 3, 9)
    assert table.slots(2, 8) == [30, 31, 4, 5, 6, 7]


def test_slots_may_begin_with_the_last_of_a_block():
    """Catches the block of the next position for that of the first: position 3 is the last in block 7."""
    table = table_over(BlockAllocator(9, order=[7, 1, 3]), 3, 9)
    assert table.slots(3, 6) == [31, 4, 5]


def test_a_block_need_not_have_four_slots():
    """Catches a 4 where `block_size` is meant, and shifts that need a power of two: here it is 3."""
    table = table_over(BlockAllocator(9, order=[7, 1, 3]), 3, 8, block_size=3)
    assert [table.slot(position) for position in (2, 3, 7)] == [23, 3, 10]
    assert table.slots(2, 7) == [23, 3, 4, 5, 9]
    assert ([table.filled(i) for i in range(3)], table.num_filled_blocks, table.capacity) == ([3, 3, 2], 3, 9)


# -- lesson 01, task 2 ----------------------------------------------------------------------


def test_blocks_to_spare_ask_for_none():
    """Catches a negative number of blocks, which would cut the pool's list."""
    table = table_over(BlockAllocator(9), 3, 2)
    assert [table.blocks_to_append(count) for count in (1, 2, 10, 11)] == [0, 0, 0, 1]


def test_asking_for_the_number_of_blocks_takes_none():
    """Catches a `blocks_to_append` that allocates: the scheduler asks, too, and may then append nothing."""
    pool = BlockAllocator(9)
    table = table_over(pool, 1, 3)
    assert [table.blocks_to_append(6) for _ in range(2)] == [2, 2]
    assert (table.blocks, table.num_tokens, pool.num_free) == ([0], 3, 8)


def test_append_returns_nothing():
    """Catches the new blocks, a count or True as the answer: the engine would take it for a block to copy."""
    table = table_over(BlockAllocator(9), 1, 3)
    assert [table.append(count) for count in (0, 1, 5)] == [None, None, None]


def test_preallocating_twice_adds_up():
    """Catches `count` taken for the total of preallocated blocks: it is how many more to take."""
    table = table_over(BlockAllocator(9), 1, 2)
    table.preallocate(2)
    table.preallocate(1)
    assert (len(table.blocks), table.num_tokens) == (4, 2)


def test_a_preallocation_that_fails_takes_no_block():
    """Catches blocks taken one at a time: three are wanted, two are free, and it must be all or none."""
    pool = BlockAllocator(3)
    table = table_over(pool, 1, 2)
    with pytest.raises(OutOfBlocksError):
        table.preallocate(3)
    assert (table.blocks, pool.num_free) == ([0], 2)


def test_an_append_that_fails_keeps_the_preallocated_blocks():
    """Catches a failure that is repaired with `truncate`: it gives back what was there before, too."""
    pool = BlockAllocator(3)
    table = table_over(pool, 2, 2)
    with pytest.raises(OutOfBlocksError):
        table.append(12)
    assert (table.blocks, table.num_tokens, pool.num_free) == ([0, 1], 2, 1)


@pytest.mark.parametrize("num_tokens", [0, 3, 8])
def test_nothing_to_append_takes_no_block(num_tokens):
    """Catches one block at least: for 0 tokens when the last block is full, or for 0 preallocated blocks."""
    table = table_over(BlockAllocator(9), -(-num_tokens // 4), num_tokens)
    blocks = table.blocks[:]
    assert table.blocks_to_append(0) == 0
    table.append(0)
    assert (table.blocks, table.num_tokens) == (blocks, num_tokens)
    table.preallocate(0)
    assert (table.blocks, table.num_tokens) == (blocks, num_tokens)


# -- lesson 01, task 3 ----------------------------------------------------------------------


def test_preallocated_blocks_are_given_back_with_the_rest():
    """Catches a table that keeps what it preallocated when none of its tokens go."""
    pool = BlockAllocator(9, order=[7, 1, 3])
    table = table_over(pool, 3, 7)
    table.truncate(7)
    assert (table.blocks, table.num_tokens) == ([7, 1], 7)
    assert pool.ref_count(3) == 0


@pytest.mark.parametrize("num_tokens", [5, 8])
def test_truncate_gives_nothing_back_when_all_is_needed(num_tokens):
    """Catches `self.blocks[-0:]`, which is the whole list when no block goes."""
    pool = BlockAllocator(9, order=[7, 1, 3])
    table = table_over(pool, 2, 8)
    table.truncate(num_tokens)
    assert (table.blocks, table.num_tokens, pool.num_free) == ([7, 1], num_tokens, 7)


def test_no_token_keeps_no_block():
    """Catches a table that always keeps one block: the first one stays held when nothing is left."""
    pool = BlockAllocator(9)
    table = table_over(pool, 2, 5)
    table.truncate(0)
    assert (table.blocks, table.num_tokens, pool.num_free) == ([], 0, 9)


def test_truncate_gives_back_the_last_block_first():
    """Catches the front first: the tail of a prefix is worth less, so it is reused first."""
    pool = BlockAllocator(9, order=[7, 1, 3, 4])
    table = table_over(pool, 4, 14)
    table.truncate(3)
    assert pool.allocate(3) == [1, 3, 4]


def test_an_ended_table_gives_back_preallocated_blocks_too():
    """Catches a leak: `free` that gives back only the blocks with tokens."""
    pool = BlockAllocator(9)
    table = table_over(pool, 3, 5)
    table.free()
    assert (table.blocks, table.num_tokens, pool.num_free) == ([], 0, 9)


@pytest.mark.parametrize("give_back", ["free()", "truncate(0)"])
def test_a_table_without_tokens_gives_its_blocks_back(give_back):
    """Catches a table that looks only at its tokens: it has none, but two preallocated blocks."""
    pool = BlockAllocator(9)
    table = table_over(pool, 2, 0)
    table.free() if give_back == "free()" else table.truncate(0)
    message = f"after {give_back}: expected no block in the table and 9 free"
    assert (table.blocks, pool.num_free) == ([], 9), f"{message}; got {table.blocks} and {pool.num_free}"


# -- lesson 02, task 3 ----------------------------------------------------------------------


def test_a_fork_holds_the_same_blocks_and_counts():
    """Catches a child that does not count its references, shares its parent's list or is not yours."""
    pool = BlockAllocator(9, order=[7, 1, 3])
    parent = table_over(pool, 2, 7)
    child = parent.fork()
    assert (child.blocks, child.num_tokens) == ([7, 1], 7)
    assert child.blocks is not parent.blocks, "the child's list of blocks is its parent's own list"
    assert [pool.ref_count(block) for block in (7, 1)] == [2, 2]
    of_yours = "the child is of another class than yours: its tokens would never come to your `append`"
    assert isinstance(child, BlockTable), of_yours


def test_preallocated_blocks_stay_with_the_parent():
    """Catches two tables that would both write into a block that is still empty."""
    pool = BlockAllocator(9, order=[7, 1, 3])
    parent = table_over(pool, 3, 7)
    assert parent.fork().blocks == [7, 1]
    assert pool.ref_count(3) == 1


def test_a_fork_after_a_full_block_shares_no_preallocated_one():
    """Catches num_tokens // block_size + 1 blocks: 8 tokens fill two, and the third has no token yet."""
    pool = BlockAllocator(9, order=[7, 1, 3])
    assert table_over(pool, 3, 8).fork().blocks == [7, 1]
    assert pool.ref_count(3) == 1


def test_a_table_without_tokens_has_a_fork():
    """Catches a fork that needs a block, and one that is the table itself: each will get its own tokens."""
    for preallocated in (0, 1):
        pool = BlockAllocator(9)
        parent = table_over(pool, preallocated, 0)
        child = parent.fork()
        assert child is not parent, "fork() returned the table itself"
        assert (child.blocks, child.num_tokens, pool.num_free) == ([], 0, 9 - preallocated)
        assert [pool.ref_count(block) for block in parent.blocks] == [1] * preallocated


# -- lesson 02, task 4 ----------------------------------------------------------------------


def test_appended_tokens_are_added_to_those_there():
    """Catches `num_tokens = count`, and a token that is not counted because its block was copied."""
    table = table_over(BlockAllocator(9), 3, 9)
    table.fork()
    for count, total in ((1, 10), (1, 11), (3, 14)):
        table.append(count)
        message = f"after append({count}): expected num_tokens {total}, got {table.num_tokens}"
        assert table.num_tokens == total, message


def test_after_its_copy_a_table_writes_in_place():
    """Catches the wrong block looked at: the first two are shared for ever, the third is no longer."""
    table = table_over(BlockAllocator(9), 3, 9)
    table.fork()
    assert table.append() is not None, "append() returned no copy although the block of its token is shared"
    assert table.blocks_to_append() == 0
    assert table.append() is None


def test_a_chunk_of_tokens_leaves_a_shared_block_too():
    """Catches copy-on-write for single tokens alone, and one fresh block for the copy and the next block."""
    pool = BlockAllocator(9, order=[7, 1, 3, 4])
    parent = table_over(pool, 2, 7)
    child = parent.fork()
    assert child.blocks_to_append(5) == 2
    copy = child.append(5)
    assert copy is not None, "append(5) returned no copy although the block of its first token is shared"
    assert (copy.source, parent.blocks, len(child.blocks)) == (1, [7, 1], 3)
    assert child.blocks[1] == copy.destination


# -- lesson 08, tasks 1 to 3: a cache whose blocks come straight from its allocator -----


def cache_of(*values, block_size=2, **options):
    """A cache, the hashes of the tokens and as many blocks as there are hashes, held by nobody we know."""
    cache = PrefixCache(BlockAllocator(8), block_size, **options)
    hashes: list[int] = []
    cache.extend_hashes(hashes, tokens(*values))
    return cache, hashes, cache.allocator.allocate(len(hashes))


def test_full_blocks_have_a_hash_and_partly_filled_ones_have_none():
    """Catches a text that ends with its block and gets one hash too few, and a hash for a part of a block."""
    numbers = [len(cache_of(*range(length))[1]) for length in range(6)]
    assert numbers == [0, 0, 1, 1, 2, 2]


def test_a_text_that_was_hashed_is_as_it_was():
    """Catches tokens that are taken out of the text, or hashes that are written over."""
    cache, hashes, _ = cache_of(1, 2)
    before, text = hashes[:], tokens(1, 2, 3, 4, 5)
    cache.extend_hashes(hashes, text)
    assert text == tokens(1, 2, 3, 4, 5), "extend_hashes changed the tokens"
    assert hashes[:1] == before, "extend_hashes changed a hash that was there"


@pytest.mark.parametrize("salt", ["", "alice"])
def test_the_first_block_follows_the_salt(salt):
    """Catches a case of its own for no salt: the first block follows the hash of (0, salt), also of "". And
    each block follows the one before it, with all its tokens."""
    keys = []

    def recorded(key):
        keys.append(key)
        return 100 + len(keys)

    cache = PrefixCache(BlockAllocator(8), block_size=2, hash_function=recorded)
    keys.clear()
    cache.extend_hashes([], tokens(2, 1, 4, 3), salt)
    assert keys == [(0, salt.encode()), (101, tokens(2, 1).tobytes()), (102, tokens(4, 3).tobytes())]


def test_a_block_need_not_have_two_tokens():
    """Catches a 2 where `block_size` is meant: here it is 3, and two of three blocks are full."""
    cache = PrefixCache(BlockAllocator(8), block_size=3, hash_function=lambda key: 10 * key[0] + sum(key[1]))
    hashes: list[int] = []
    cache.extend_hashes(hashes, tokens(1, 2, 3, 4, 5, 6, 7, 8))
    assert hashes == [6, 75], f"expected the hashes of (1, 2, 3) and (4, 5, 6), 6 and 75; got {hashes}"


def test_a_salted_text_goes_on_from_its_last_hash():
    """Catches a salt that joins the chain again whenever a text grows: the hashes depend on its chunks."""
    cache, _, _ = cache_of(1)
    at_once: list[int] = []
    cache.extend_hashes(at_once, tokens(1, 2, 3, 4), "alice")
    in_two: list[int] = []
    cache.extend_hashes(in_two, tokens(1, 2, 3), "alice")
    cache.extend_hashes(in_two, tokens(1, 2, 3, 4), "alice")
    assert in_two == at_once


def test_two_texts_may_grow_in_turn():
    """Catches the last hash kept in the cache: each text goes on from its own."""
    cache, _, _ = cache_of(1)
    at_once: list[int] = []
    cache.extend_hashes(at_once, tokens(1, 2, 3, 4))
    in_turn: list[int] = []
    cache.extend_hashes(in_turn, tokens(1, 2))
    cache.extend_hashes([], tokens(5, 6))
    cache.extend_hashes(in_turn, tokens(1, 2, 3, 4))
    assert in_turn == at_once


def test_a_salt_gives_every_block_another_hash():
    """Catches a salt that is ignored, or joins the chain only after its first block."""
    cache, hashes, _ = cache_of(1, 2, 3, 4)
    salted: list[int] = []
    cache.extend_hashes(salted, tokens(1, 2, 3, 4), "alice")
    assert len(set(hashes + salted)) == 4


def test_a_name_is_for_a_block_and_all_before_it():
    """Catches a hash of the block alone, or of its place: after other tokens it is a different prefix."""
    cache, hashes, _ = cache_of(1, 2, 3, 4)
    other: list[int] = []
    cache.extend_hashes(other, tokens(9, 9, 3, 4))
    assert other[1] != hashes[1]
    twice: list[int] = []
    cache.extend_hashes(twice, tokens(1, 2, 1, 2))
    assert twice[0] == hashes[0] != twice[1]


def test_a_registered_block_is_known_and_pending():
    """Catches a block that can be copied from before its step has run."""
    cache, hashes, blocks = cache_of(1, 2, 3, 4)
    cache.register(blocks[0], hashes[0], tokens(1, 2))
    assert len(cache.block_of) == 1
    assert cache.is_pending(blocks[0])
    assert not cache.is_pending(blocks[1])


def test_the_same_content_is_registered_once():
    """Catches a second block with the same content, which would be counted but never found."""
    cache, hashes, blocks = cache_of(1, 2, 3, 4)
    first, second = [cache.register(block, hashes[0], tokens(1, 2)) for block in blocks]
    assert first is second, "register returned a new entry for tokens and a parent that have one"
    assert len(cache.block_of) == 1
    assert not cache.is_pending(blocks[1])
    assert cache.cached[blocks[1]] is None, "the second block is in `cached`, but cannot be found"


def test_what_a_failed_step_registered_is_forgotten():
    """Catches a prefix that was never computed; blocks in use stay with their holder."""
    cache, hashes, blocks = cache_of(1, 2, 3, 4)
    cache.register(blocks[0], hashes[0], tokens(1, 2))
    cache.commit()
    cache.register(blocks[1], hashes[1], tokens(3, 4))
    cache.roll_back()
    assert len(cache.block_of) == 1
    assert not cache.is_pending(blocks[1])
    assert cache.allocator.ref_count(blocks[1]) == 1


def test_a_block_that_was_computed_is_not_pending_again():
    """Catches a block called pending again because another step registers the same content elsewhere."""
    cache, hashes, [first] = cache_of(1, 2)
    cache.register(first, hashes[0], tokens(1, 2))
    cache.commit()
    cache.register(cache.allocator.allocate()[0], hashes[0], tokens(1, 2))
    assert not cache.is_pending(first)


def another(text):
    """An equal string that is not the same object."""
    return "".join(list(text))


def test_equal_salts_are_one_parent():
    """Catches `is` for a salt: every request brings a string of its own."""
    cache, hashes, [first] = cache_of(1, 2)
    entry = cache.register(first, hashes[0], tokens(1, 2), another("alice"))
    again = cache.register(cache.allocator.allocate()[0], hashes[0], tokens(1, 2), another("alice"))
    assert again is entry, "equal tokens after equal salts have two entries"


@pytest.mark.parametrize(("number", "other"), [(7, (8, 9)), (7, (0, 9)), (0, (8, 9))])
def test_different_content_with_a_known_hash_is_not_registered(number, other):
    """Catches a collision that hides the first content, or that can never be detected afterwards. A hash may
    be 0, too."""
    cache, _, _ = cache_of(1, 2, 3, 4, hash_function=lambda key: number)
    first, second = cache.allocator.allocate(2)
    cache.register(first, number, tokens(1, 2))
    entry = cache.register(second, number, tokens(*other))
    assert entry.tokens == tokens(*other).tobytes(), f"the entry returned for {other} has other tokens"
    assert cache.block_of == {number: first}
    assert not cache.is_pending(second)
    assert cache.cached[second] is None, "the second block is in `cached`, but cannot be found"


def test_equal_tokens_after_another_prefix_get_an_entry_of_their_own():
    """Catches an entry known by hash and tokens alone: it would stand for another prefix, or another salt."""
    cache, _, (first, second) = cache_of(1, 2, 3, 4, hash_function=lambda key: 7)
    cache.register(first, 7, tokens(1, 2), "alice")
    assert cache.register(second, 7, tokens(1, 2), "bob").parent == "bob"
    assert cache.block_of == {7: first}


def test_parents_that_look_alike_are_two():
    """Catches parents compared by hash or tokens: they may agree in both and follow different texts."""
    cache, _, (first, second) = cache_of(1, 2, 3, 4, hash_function=lambda key: 7)
    one, other = (CachedBlock(7, tokens(8, 9).tobytes(), salt) for salt in ("alice", "bob"))
    cache.register(first, 7, tokens(1, 2), one)
    found = cache.register(second, 7, tokens(1, 2), other)
    assert found.parent is other, "the entry returned has another parent, with the same tokens and hash"


def release_into_cache(cache, block):
    """What `free` will do in task 4 when the last holder lets go."""
    assert cache.allocator.release(block)
    cache.evictable[block] = None


def test_a_failed_step_returns_what_nobody_holds_to_the_free_list():
    """Catches blocks that stay evictable though nobody can find them, and blocks lost to the pool."""
    cache, hashes, blocks = cache_of(1, 2, 3, 4)
    for block, chain_hash, content in zip(blocks, hashes, (tokens(1, 2), tokens(3, 4))):
        cache.register(block, chain_hash, content)
    release_into_cache(cache, blocks[1])
    cache.roll_back()
    assert len(cache.evictable) == 0
    assert cache.allocator.num_free == 7
    cache.check_invariants(blocks[:1])


def test_a_failed_step_is_forgotten_whole():
    """Catches a rollback that ends at the first block that nobody holds, or knows the last block alone."""
    cache, hashes, blocks = cache_of(1, 2, 3, 4, 5, 6)
    for block, chain_hash, content in zip(blocks, hashes, (tokens(1, 2), tokens(3, 4), tokens(5, 6))):
        cache.register(block, chain_hash, content)
    release_into_cache(cache, blocks[0])
    cache.roll_back()
    assert len(cache.block_of) == 0
    assert not cache.pending
    assert cache.allocator.num_free == 6


def test_a_failed_step_takes_nothing_from_the_steps_before():
    """Catches a rollback that empties the whole cache, with or without something to roll back."""
    cache, hashes, blocks = cache_of(1, 2, 3, 4)
    first = cache.register(blocks[0], hashes[0], tokens(1, 2))
    cache.commit()
    release_into_cache(cache, blocks[0])
    cache.roll_back()
    assert (len(cache.evictable), len(cache.block_of)) == (1, 1)
    cache.register(blocks[1], hashes[1], tokens(3, 4), first)
    cache.roll_back()
    assert (len(cache.evictable), len(cache.block_of)) == (1, 1)


def test_the_walk_finds_every_block_of_a_cached_prefix():
    """Catches a walk that stops early, or begins with the second block."""
    cache, hashes, blocks = cache_of(1, 2, 3, 4, 5)
    entry = cache.register(blocks[0], hashes[0], tokens(1, 2))
    cache.register(blocks[1], hashes[1], tokens(3, 4), entry)
    cache.commit()
    assert cache.match(hashes, tokens(1, 2, 3, 4, 5)) == blocks
    assert cache.match(hashes[:1], tokens(1, 2)) == blocks[:1]
    assert cache.match([], tokens(1)) == []


def test_a_pending_block_is_found():
    """Catches a walk that skips pending blocks: equal prompts admitted in one step share them."""
    cache, hashes, blocks = cache_of(1, 2)
    cache.register(blocks[0], hashes[0], tokens(1, 2))
    assert cache.match(hashes, tokens(1, 2)) == blocks


def test_looking_holds_nothing():
    """Catches a walk that shares what it finds: admission looks often, and may still refuse."""
    cache, hashes, blocks = cache_of(1, 2)
    cache.register(blocks[0], hashes[0], tokens(1, 2))
    assert cache.match(hashes, tokens(1, 2)) == blocks
    assert cache.allocator.ref_count(blocks[0]) == 1


def test_looking_moves_no_block():
    """Catches a walk that makes what it finds the newest, or takes it off the list: only `share` does."""
    cache, hashes, blocks = cache_of(1, 2, 3, 4)
    entry = cache.register(blocks[0], hashes[0], tokens(1, 2))
    cache.register(blocks[1], hashes[1], tokens(3, 4), entry)
    for block in reversed(blocks):
        cache.allocator.release(block)
        cache.evictable[block] = None
    assert cache.match(hashes, tokens(1, 2, 3, 4)) == blocks
    assert list(cache.evictable) == blocks[::-1], "`match` has changed `evictable`"


def test_a_prefix_is_found_with_an_equal_salt():
    """Catches `is` for a salt: every request brings a string of its own."""
    cache = PrefixCache(BlockAllocator(8), block_size=2)
    hashes: list[int] = []
    cache.extend_hashes(hashes, tokens(1, 2), "alice")
    [block] = cache.allocator.allocate()
    cache.register(block, hashes[0], tokens(1, 2), another("alice"))
    assert cache.match(hashes, tokens(1, 2), another("alice")) == [block]


def test_the_first_blocks_parent_is_the_salt():
    """Catches a tenant who reads another's prompt because the hashes of their salts collide."""
    cache, hashes, blocks = cache_of(1, 2, hash_function=lambda key: 7)
    cache.register(blocks[0], hashes[0], tokens(1, 2), "alice")
    assert cache.match(hashes, tokens(1, 2), "bob") == []
    assert cache.match(hashes, tokens(1, 2), "alice") == blocks


def test_the_walk_ends_at_the_first_miss():
    """Catches blocks from after a gap: their content is right, but their position is wrong."""
    cache, hashes, blocks = cache_of(1, 2, 3, 4, 5, 6)
    entry = cache.register(blocks[0], hashes[0], tokens(1, 2))
    cache.register(blocks[2], hashes[2], tokens(5, 6), CachedBlock(hashes[1], tokens(3, 4).tobytes(), entry))
    assert cache.match(hashes, tokens(1, 2, 3, 4, 5, 6)) == blocks[:1]


def test_equal_hashes_of_other_tokens_are_a_miss():
    """Catches a cache that trusts its hash function."""
    cache, hashes, blocks = cache_of(1, 2, hash_function=lambda key: 7)
    cache.register(blocks[0], hashes[0], tokens(1, 2))
    assert cache.match([7], tokens(8, 9)) == []
    assert cache.match([7], tokens(1, 2)) == blocks


def test_tokens_are_compared_in_their_order_and_place():
    """Catches tokens compared as a set, by a part of their bytes, or anywhere in the text."""
    cache, _, blocks = cache_of(1, 2, hash_function=lambda key: 7)
    cache.register(blocks[0], 7, tokens(1, 2))
    for other in [(2, 1), (0, 9), (1, 2 + 256), (1, 2 + 65536)]:
        assert cache.match([7], tokens(*other)) == [], f"the block of 1, 2 was found for {other}"
    assert cache.match([7, 7], tokens(8, 9, 1, 2)) == []


@pytest.mark.parametrize("second", [(9, 9), (3, 9)])
def test_nothing_is_found_behind_a_miss(second):
    """Catches a walk that goes on after a miss with the same parent: 3 3 is known after 1 1, not after both.
    The hash of a block is its first token: 9 9 is unknown, 3 9 has the hash of 3 3."""
    cache, hashes, blocks = cache_of(1, 1, 3, 3, hash_function=lambda key: len(key[1]) and key[1][0])
    entry = cache.register(blocks[0], hashes[0], tokens(1, 1))
    cache.register(blocks[1], hashes[1], tokens(3, 3), entry)
    text = tokens(1, 1, *second, 3, 3)
    assert cache.match([1, second[0], 3], text) == blocks[:1]


def test_a_parent_with_equal_tokens_may_be_another_parent():
    """Catches parents compared by their own tokens: the text before the parent differs, near or far."""
    cache, hashes, blocks = cache_of(1, 2, 3, 4, hash_function=lambda key: len(key[1]) and key[1][0])
    cache.register(blocks[0], hashes[0], tokens(1, 2))
    before = CachedBlock(9, tokens(9, 9).tobytes(), "")
    cache.register(blocks[1], hashes[1], tokens(3, 4), CachedBlock(hashes[0], tokens(1, 2).tobytes(), before))
    assert cache.match(hashes, tokens(1, 2, 3, 4)) == blocks[:1]
    cache, hashes, blocks = cache_of(*range(1, 9))
    texts = [tokens(1, 2), tokens(3, 4), tokens(5, 6), tokens(7, 8)]
    entry = ""
    for i, text in enumerate(texts):
        if i == 3:
            entry = CachedBlock(hashes[2], texts[2].tobytes(), before)
        entry = cache.register(blocks[i], hashes[i], text, entry)
    assert cache.match(hashes, tokens(*range(1, 9))) == blocks[:3]


def test_equal_hashes_after_another_prefix_are_a_miss():
    """Catches a cache that compares a block's own tokens alone: its K/V depends on those before it."""
    cache, hashes, blocks = cache_of(1, 2, 3, 4, hash_function=lambda key: len(key[1]) and key[1][0])
    cache.register(blocks[0], hashes[0], tokens(1, 2))
    cache.register(blocks[1], hashes[1], tokens(3, 4), CachedBlock(hashes[0], tokens(1, 9).tobytes(), ""))
    assert cache.match(hashes, tokens(1, 2, 3, 4)) == blocks[:1]


def test_of_blocks_with_the_same_content_the_first_is_found():
    """Catches a second computation of a prefix that hides the first."""
    cache, hashes, blocks = cache_of(1, 2, 3, 4)
    for block in blocks:
        cache.register(block, hashes[0], tokens(1, 2))
    assert cache.match(hashes[:1], tokens(1, 2)) == blocks[:1]


# -- lesson 08, task 4 -----


def test_a_pending_block_that_nobody_holds_is_evictable():
    """Catches a block on the free list that can still be found: the step that computes it may yet succeed."""
    cache, hashes, blocks = cache_of(1, 2)
    cache.register(blocks[0], hashes[0], tokens(1, 2))
    cache.free(blocks[0])
    assert (len(cache.evictable), cache.allocator.num_free) == (1, 7)
    cache.check_invariants([])
    cache.commit()
    assert cache.match(hashes, tokens(1, 2)) == blocks


def test_only_as_many_blocks_are_evicted_as_are_missing():
    """Catches an allocation that is one block short and empties the whole cache."""
    cache, hashes, blocks = cache_of(1, 2, 3, 4, 5, 6)
    for block, chain_hash, content in zip(blocks, hashes, (tokens(1, 2), tokens(3, 4), tokens(5, 6))):
        cache.register(block, chain_hash, content)
    cache.commit()
    for block in blocks:
        release_into_cache(cache, block)
    taken = cache.allocate(6)  # five are free
    assert list(cache.evictable) == blocks[1:]
    counts = [cache.ref_count(block) for block in taken]
    assert counts == [1] * 6, f"6 blocks were allocated; their reference counts are {counts}"
    assert cache.allocate(0) == []
    assert list(cache.evictable) == blocks[1:]


def test_a_pending_block_can_be_evicted():
    """Catches an allocation that fails although `num_free` has enough: it counts pending blocks, too."""
    cache, hashes, blocks = cache_of(1, 2)
    cache.register(blocks[0], hashes[0], tokens(1, 2))
    release_into_cache(cache, blocks[0])
    assert sorted(cache.allocate(8)) == list(range(8))
    assert cache.match(hashes, tokens(1, 2)) == []
    cache.roll_back()
    assert cache.num_free == 0


# -- lesson 04, task 1, and lesson 07, task 1: one phase of a step at a time -----


class Script:
    """A batch policy that does what it is told, step by step; `returned` keeps the answers."""

    def __init__(self, *steps):
        self.steps = list(steps)
        self.returned = []

    def fill(self, plan, scheduler):
        self.returned.append(self.steps.pop(0)(plan, scheduler))


def scripted(*steps, lengths, **options):
    """A toy engine whose policy is a script, and requests with prompts of these lengths."""
    engine = ToyEngine(toy_scheduler(policy=Script(*steps), **options))
    for number, length in enumerate(lengths):
        engine.add([number] * length)
    return engine


def scheduled(plan):
    """(request, first token, number of tokens) of each scheduled sequence."""
    return [(s.sequence.request.request_id, s.start, s.num_tokens) for s in plan.scheduled]


def waiting(engine):
    """Names of those who wait."""
    return [request.request_id for request in engine.scheduler.waiting]


def test_the_first_that_does_not_fit_stops_the_admission():
    """Catches a short request that overtakes a long one: three blocks do not fit, the one behind would."""
    engine = scripted(lambda plan, s: s.admit_waiting(plan, 64), lengths=[13, 12, 4], num_blocks=6)
    assert scheduled(engine.step()) == [("r0", 0, 13)]
    assert waiting(engine) == ["r1", "r2"]
    assert engine.scheduler.policy.returned == [13]


def test_admission_ends_with_the_budget():
    """Catches the whole budget for each, an admission with no token left, and a phase without a result."""
    engine = scripted(lambda plan, s: s.admit_waiting(plan, 10), lengths=[6, 6, 6])
    assert scheduled(engine.step()) == [("r0", 0, 6), ("r1", 0, 4)]
    assert waiting(engine) == ["r2"]
    assert engine.scheduler.policy.returned == [10]


def test_the_last_token_of_the_budget_goes_to_a_prompt():
    """Catches an admission that ends with one token left: it is the first token of the next prompt."""
    engine = scripted(lambda plan, s: s.admit_waiting(plan, 7), lengths=[6, 6])
    assert scheduled(engine.step()) == [("r0", 0, 6), ("r1", 0, 1)]


def test_a_prompt_is_admitted_whole_if_that_is_asked():
    """Catches `whole` not being passed on: the second prompt would be cut."""
    engine = scripted(lambda plan, s: s.admit_waiting(plan, 10, whole=True), lengths=[6, 6])
    assert scheduled(engine.step()) == [("r0", 0, 6)]


def test_a_prompt_is_held_to_its_share_if_one_is_given():
    """Catches `share` not being passed on: the first prompt would take the whole budget."""
    engine = scripted(lambda plan, s: s.admit_waiting(plan, 6, share=3), lengths=[10, 10])
    assert scheduled(engine.step()) == [("r0", 0, 3), ("r1", 0, 3)]


def test_each_waiting_prompt_has_a_share_of_its_own():
    """Catches one share that all of them use up together: the second of three would get less."""
    engine = scripted(lambda plan, s: s.admit_waiting(plan, 10, share=3), lengths=[10, 10, 10])
    assert scheduled(engine.step()) == [("r0", 0, 3), ("r1", 0, 3), ("r2", 0, 4)]


@pytest.mark.parametrize(("length", "admitted"), [(7, []), (6, [("r1", 0, 6)])], ids=["too long", "fits"])
def test_beside_a_prompt_that_goes_on_the_first_is_admitted_whole_too(length, admitted):
    """Catches `whole` kept for later prompts only, a step that counts as empty, or as full; and returning
    the tokens of the whole step."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 4),
        lambda plan, s: (s.continue_prefills(plan, 4), s.admit_waiting(plan, 6, whole=True))[1],
        lengths=[8],
    )
    engine.step()
    engine.add([1] * length)
    assert scheduled(engine.step()) == [("r0", 4, 4), *admitted]
    returned, expected = engine.scheduler.policy.returned[1], len(admitted) * length
    assert returned == expected, f"admit_waiting admitted {admitted}: expected {expected}, got {returned}"


def test_the_last_in_the_queue_gets_all_that_is_left():
    """Catches a budget cut to the share: only those with another behind them are held to it."""
    engine = scripted(lambda plan, s: s.admit_waiting(plan, 8, share=3), lengths=[10, 10])
    assert scheduled(engine.step()) == [("r0", 0, 3), ("r1", 0, 5)]


def test_nobody_is_admitted_in_a_step_that_preempted():
    """Catches blocks that were freed for running requests and go to a waiting one."""

    def fill(plan, scheduler):
        plan.num_preempted = 1
        return scheduler.admit_waiting(plan, 10)

    engine = scripted(fill, lengths=[6])
    engine.scheduler.schedule()
    assert engine.scheduler.policy.returned == [0]
    assert waiting(engine) == ["r0"]


def test_nobody_is_admitted_while_somebody_is_swapped_out():
    """Catches a newcomer that takes the room of a request that was already being served."""
    engine = scripted(lambda plan, s: s.admit_waiting(plan, 10), lengths=[6, 6])
    scheduler = engine.scheduler
    scheduler.swapped.append(scheduler.waiting.popleft())
    scheduler.schedule()
    assert scheduler.policy.returned == [0]
    assert waiting(engine) == ["r1"]


# -- lesson 04, tasks 2 and 3 -----


def test_the_first_group_beyond_the_budget_ends_the_decodes():
    """Catches a later request that overtakes: r1 has three sequences, and two tokens are left."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64),
        lambda plan, s: s.plan_decodes(plan, 64),
        lambda plan, s: s.plan_decodes(plan, 3),
        lengths=[],
    )
    for number, num_samples in enumerate((1, 3, 1)):
        engine.add([number] * 5, method=samples(num_samples))
    engine.step()
    assert len(scheduled(engine.step())) == 5
    assert scheduled(engine.step()) == [("r0", 6, 1)]
    assert engine.scheduler.policy.returned == [15, 5, 1]


def test_a_victim_is_not_scheduled():
    """Catches a walk over a copy of `self.running`: a request that was swapped out is still on it."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64),
        lambda plan, s: s.plan_decodes(plan, 64),
        lengths=[8, 8],
        num_blocks=4,
        num_host_blocks=4,
        preemption=Swap(),
    )
    engine.step()
    assert scheduled(engine.scheduler.schedule()) == [("r0", 8, 1)]


def test_a_preemption_does_not_end_the_decodes():
    """Catches a step that ends with its first preemption: r0 takes the block of r2, and r1 has room."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64),
        lambda plan, s: s.plan_decodes(plan, 64),
        lengths=[8, 6, 8],
        num_blocks=6,
    )
    engine.step()
    assert scheduled(engine.scheduler.schedule()) == [("r0", 8, 1), ("r1", 6, 1)]


def test_every_decode_has_a_slot_for_its_token():
    """Catches `grow` called only when a block is needed: it also gives a slot in the last block."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64), lambda plan, s: s.plan_decodes(plan, 64), lengths=[5]
    )
    engine.step()
    [request] = [s.sequence.request for s in engine.scheduler.schedule().scheduled]
    assert request.sequences[0].table.num_tokens == 6


def test_a_group_beyond_the_budget_preempts_nobody():
    """Catches room made before the budget is looked at: r1 loses its blocks and is not scheduled either."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64),
        lambda plan, s: s.plan_decodes(plan, 2),
        lengths=[5],
        num_blocks=4,
    )
    engine.add([1] * 8, method=samples(2))
    engine.step()
    assert scheduled(engine.step()) == [("r0", 5, 1)]
    assert engine.scheduler.num_preemptions == 0


def test_a_prompt_that_goes_on_does_not_end_the_decodes():
    """Catches `break` where the walk must go on: r1, behind the prompt of r0, has one token to compute."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 8, share=4),
        lambda plan, s: s.plan_decodes(plan, 64),
        lengths=[9, 4],
    )
    assert scheduled(engine.step()) == [("r0", 0, 4), ("r1", 0, 4)]
    assert scheduled(engine.step()) == [("r1", 4, 1)]


def test_a_group_with_more_to_compute_does_not_end_the_decodes():
    """Catches the budget looked at before `is_prefill`: one token is left, r0 computes its two sequences
    again, and r1, behind it, has one token to compute."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64),
        lambda plan, s: s.plan_decodes(plan, 64),
        lambda plan, s: s.admit_waiting(plan, 8, share=4),
        lambda plan, s: s.plan_decodes(plan, 1),
        lengths=[],
    )
    engine.add([0] * 5, method=samples(2))
    engine.step()
    scheduler = engine.scheduler
    scheduler.roll_back(scheduler.schedule())
    engine.add([1] * 4)
    assert scheduled(engine.step()) == [("r0", 0, 4), ("r1", 0, 4)]
    assert scheduled(engine.step()) == [("r1", 4, 1)]


def test_no_more_is_preempted_than_is_needed():
    """Catches room made for a block too many: the one block of r2 is all that r0 needs."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64),
        lambda plan, s: s.plan_decodes(plan, 64),
        lengths=[8, 6, 4],
        num_blocks=5,
    )
    engine.step()
    assert scheduled(engine.scheduler.schedule()) == [("r0", 8, 1), ("r1", 6, 1)]
    assert waiting(engine) == ["r2"]


def test_room_is_made_for_all_blocks_that_are_needed():
    """Catches `make_room` asked for the missing block alone: two samples need two blocks, and one is free.
    `needed` is how many must be free in all."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64),
        lambda plan, s: s.plan_decodes(plan, 64),
        lengths=[],
        num_blocks=4,
    )
    engine.add([0] * 8, method=samples(2))
    engine.add([1] * 4)
    engine.step()
    assert engine.scheduler.kv.num_free == 1
    assert scheduled(engine.scheduler.schedule()) == [("r0", 8, 1), ("r0", 8, 1)]
    assert waiting(engine) == ["r1"]


def test_a_copy_that_a_group_shares_is_counted_once():
    """Catches `blocks_to_grow` added up over single sequences: of two samples, one copies the shared block,
    and the other then writes in place. One block is free."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64),
        lambda plan, s: s.plan_decodes(plan, 64),
        lengths=[],
        num_blocks=4,
    )
    engine.add([0] * 5, method=samples(2))
    engine.add([1] * 3)
    engine.step()
    assert scheduled(engine.scheduler.schedule()) == [("r0", 5, 1), ("r0", 5, 1), ("r1", 3, 1)]


def test_a_group_is_scheduled_in_the_blocks_that_it_has_grown():
    """Catches `schedule_request` before `grow`: it registers the full block for the prefix cache, and the one
    of r0/0 is the copy that `grow` makes. A later prompt would find r0/1's tokens under those of r0/0."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64),
        lambda plan, s: s.plan_decodes(plan, 64),
        lengths=[],
        caching=True,
    )
    request = engine.add([0] * 3, method=samples(2))
    engine.step()
    engine.scheduler.schedule()
    cache = engine.scheduler.kv.prefix_cache
    for sequence in request.sequences:
        assert cache.match(sequence.block_hashes, sequence.token_ids) == sequence.table.blocks


def test_a_sample_that_ended_costs_no_token():
    """Catches a budget for as many sequences as a request began with: of three, two are left."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64), lambda plan, s: s.plan_decodes(plan, 2), lengths=[]
    )
    request = engine.add([0] * 5, method=samples(3))
    engine.step()
    request.sequences.pop().table.free()
    assert scheduled(engine.scheduler.schedule()) == [("r0", 5, 1)] * 2


def half_recomputed(last_phase):
    """A group of two that is computed again: the first sequence up to its newest token, the second not."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64),
        lambda plan, s: s.plan_decodes(plan, 64),
        lambda plan, s: s.admit_waiting(plan, 5),
        last_phase,
        lengths=[],
    )
    request = engine.add([0] * 5, method=samples(2))
    engine.step()
    engine.scheduler.roll_back(engine.scheduler.schedule())
    engine.step()
    assert [sequence.num_uncomputed_tokens for sequence in request.sequences] == [1, 2]
    return engine


def test_a_group_is_decoded_when_all_its_sequences_are_ready():
    """Catches `is_prefill` asked of the first sequence alone: the second has two tokens to compute."""
    engine = half_recomputed(lambda plan, s: s.plan_decodes(plan, 64))
    assert scheduled(engine.scheduler.schedule()) == []


def test_every_sequence_of_a_request_costs_a_token():
    """Catches counting requests instead of tokens: three samples of one request compute three tokens."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64), lambda plan, s: s.plan_decodes(plan, 64), lengths=[]
    )
    engine.add([0] * 5, method=samples(3))
    engine.step()
    assert len(scheduled(engine.step())) == 3
    assert engine.scheduler.policy.returned == [5, 3]


def test_the_copies_of_every_request_are_in_the_plan():
    """Catches `=` for `+=`: the copies of the second request would replace those of the first."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64), lambda plan, s: s.plan_decodes(plan, 64), lengths=[]
    )
    for number in range(2):
        engine.add([number] * 5, method=samples(2))
    engine.step()
    assert len(engine.scheduler.schedule().copies) == 2


def test_growth_that_needs_no_block_preempts_nobody():
    """Catches room made for one block each: the pool is full, but both last blocks have free slots."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64),
        lambda plan, s: s.plan_decodes(plan, 64),
        lengths=[5, 5],
        num_blocks=4,
    )
    engine.step()
    assert engine.scheduler.kv.num_free == 0
    assert scheduled(engine.step()) == [("r0", 5, 1), ("r1", 5, 1)]


def test_decodes_report_their_own_tokens():
    """Catches returning the tokens of the whole step: a prompt's tokens would be charged twice."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64),
        lambda plan, s: (s.admit_waiting(plan, 64), s.plan_decodes(plan, 64))[1],
        lengths=[5],
    )
    engine.step()
    engine.add([1] * 6)
    assert scheduled(engine.step()) == [("r1", 0, 6), ("r0", 5, 1)]
    assert engine.scheduler.policy.returned == [5, 1]


def test_a_prompt_that_goes_on_is_not_decoded():
    """Catches a chunk of a prompt that is scheduled as if it were one token."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 4),
        lambda plan, s: s.plan_decodes(plan, 4) + s.continue_prefills(plan, 3),
        lengths=[9],
    )
    engine.step()
    assert scheduled(engine.step()) == [("r0", 4, 3)]


def test_those_that_are_scheduled_are_not_candidates_for_preemption():
    """Catches a victim that is scheduled already: r0 took the last block, r1 needs one."""
    offered = []

    class Watched(Recompute):
        def choose_victim(self, candidates):
            offered.append([request.request_id for request in candidates])
            return super().choose_victim(candidates)

    engine = ToyEngine(toy_scheduler(7, preemption=Watched()))
    for number in range(3):
        engine.add([number] * 8)
    engine.step()
    engine.step()
    assert offered[:1] == [["r1", "r2"]]


class Spends:
    """Phases that write down the budget they are offered, and spend what they are told."""

    max_num_batched_tokens = 10
    running = (SimpleNamespace(is_prefill=True),)

    def __init__(self, **spends):
        self.spends = spends
        self.offered = {}
        self.shares = {}
        self.whole = False
        self.plans = {}

    def admit_waiting(self, plan, budget, whole=False, share=None):
        self.whole = whole
        return self._run("admit_waiting", plan, budget, share)

    def __getattr__(self, phase):
        return partial(self._run, phase)

    def _run(self, phase, plan, budget, share=None):
        self.offered[phase] = budget
        self.plans[phase] = plan
        self.shares[phase] = share
        plan.scheduled += [SimpleNamespace(num_tokens=1)] * self.spends.get(phase, 0)
        return self.spends.get(phase, 0)


@pytest.mark.parametrize(
    ("spends", "phases"),
    [
        ({"continue_prefills": 4}, "continue_prefills admit_waiting"),
        ({"admit_waiting": 4}, "continue_prefills admit_waiting"),
        ({"continue_prefills": 4, "admit_waiting": 4}, "continue_prefills admit_waiting"),
        ({}, "continue_prefills admit_waiting plan_decodes resume_preempted"),
        ({"plan_decodes": 4}, "continue_prefills admit_waiting plan_decodes resume_preempted"),
    ],
    ids=["a prompt goes on", "a prompt begins", "both", "no prompt", "decodes"],
)
def test_a_step_calls_its_phases_in_order(spends, phases):
    """Catches decodes or swapped-out requests beside prompts, a waiting prompt that is not looked at, and
    swapped-out requests that wait until nobody decodes."""
    step = Spends(**spends)
    PrefillFirst().fill(StepPlan(0), step)
    called = " ".join(step.offered)
    assert called == phases, f"expected the phases {phases}; got {called}"


def test_every_prompt_of_a_step_is_whole_and_has_no_share():
    """Catches `whole=True` for an empty step only, where it matters least, and a share (of lesson 07)."""
    for spends in ({}, {"continue_prefills": 4}):
        step, plan = Spends(**spends), StepPlan(0)
        PrefillFirst().fill(plan, step)
        message = f"with {len(plan.scheduled)} tokens in the step, admit_waiting got whole={step.whole}"
        assert step.whole, message
        shares = [step.shares["continue_prefills"], step.shares["admit_waiting"]]
        assert shares == [None, None], f"expected no share; continue_prefills, admit_waiting got {shares}"


def test_each_phase_is_offered_what_the_one_before_it_left():
    """Catches a step over budget: two phases that may both spend all of it."""
    prompts = Spends(continue_prefills=4)
    PrefillFirst().fill(StepPlan(0), prompts)
    assert prompts.offered == {"continue_prefills": 10, "admit_waiting": 6}
    decodes = Spends(plan_decodes=7)
    PrefillFirst().fill(StepPlan(0), decodes)
    assert decodes.offered == {
        "continue_prefills": 10, "admit_waiting": 10, "plan_decodes": 10, "resume_preempted": 3,
    }  # fmt: skip


def test_a_chunked_step_has_its_phases_in_order():
    """Catches newcomers going before requests already being served, and a budget spent twice."""
    step, plan = Spends(plan_decodes=1, continue_prefills=3, resume_preempted=2), StepPlan(0)
    ChunkedPrefill().fill(plan, step)
    assert list(step.offered.items()) == [
        ("plan_decodes", 10), ("continue_prefills", 9), ("resume_preempted", 6), ("admit_waiting", 4),
    ]  # fmt: skip
    others = [phase for phase, given in step.plans.items() if given is not plan]
    assert not others, f"{others} got something else than the plan of the step"


def test_a_waiting_prompt_need_not_be_admitted_whole():
    """Catches `whole=True`, and a share in its place: `whole` is the third argument of `admit_waiting`."""
    step = Spends()
    ChunkedPrefill().fill(StepPlan(0), step)
    message = f"admit_waiting got whole={step.whole}; a prompt that does not fit whole is to be cut"
    assert not step.whole, message


@pytest.mark.parametrize(("budget", "share"), [(10, 7), (5, 3), (2, 1), (1, 1)])
def test_the_share_is_three_quarters_of_the_whole_budget(budget, share):
    """Catches three quarters of what the decodes left, or less what prompts took; 0 tokens; rounding up."""
    step = Spends(plan_decodes=budget // 2, continue_prefills=budget // 4)
    step.max_num_batched_tokens = budget
    ChunkedPrefill().fill(StepPlan(0), step)
    found = [step.shares[phase] for phase in ("continue_prefills", "admit_waiting")]
    assert found == [share, share], f"the share of a budget of {budget} is {share}; the phases got {found}"


def test_a_prompt_goes_on_where_its_last_chunk_ended():
    """Catches a chunk that starts over, and a finished prompt that stays on the list."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 4),
        *[lambda plan, s: s.continue_prefills(plan, 5)] * 3,
        lengths=[11],
    )
    assert [scheduled(engine.step()) for _ in range(3)] == [[("r0", 0, 4)], [("r0", 4, 5)], [("r0", 9, 2)]]
    assert engine.scheduler.policy.returned == [4, 5, 2]


def test_two_prompts_go_on_in_order_of_arrival():
    """Catches a list that changes while it is walked, and a share that is not passed on."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 6, share=3),
        lambda plan, s: s.continue_prefills(plan, 6, share=4),
        lambda plan, s: s.continue_prefills(plan, 64, share=48),
        lengths=[10, 10],
    )
    assert scheduled(engine.step()) == [("r0", 0, 3), ("r1", 0, 3)]
    assert scheduled(engine.step()) == [("r0", 3, 4), ("r1", 3, 2)]
    assert scheduled(engine.step()) == [("r0", 7, 3), ("r1", 5, 5)]


@pytest.mark.parametrize(("somebody_waits", "chunk"), [(False, 8), (True, 6)])
def test_the_last_prompt_is_held_to_its_share_only_if_somebody_waits(somebody_waits, chunk):
    """Catches budget left unused with nobody behind, and a queue that is not looked at."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 4),
        lambda plan, s: s.continue_prefills(plan, 8, share=6),
        lengths=[20],
    )
    engine.step()
    if somebody_waits:
        engine.add([1])
    assert scheduled(engine.step()) == [("r0", 4, chunk)]


def test_a_decode_behind_a_prompt_does_not_hold_it_to_its_share():
    """Catches a prompt cut for a running request that only decodes: only prompts and the queue count."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 6, share=4),
        lambda plan, s: s.continue_prefills(plan, 8, share=6),
        lengths=[20, 2],
    )
    assert scheduled(engine.step()) == [("r0", 0, 4), ("r1", 0, 2)]
    assert scheduled(engine.step()) == [("r0", 4, 8)]


def test_the_queue_is_behind_the_last_of_two_prompts():
    """Catches a queue that holds only the first running prompt to its share: r2 waits behind r1, too."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 6, share=4),
        lambda plan, s: s.continue_prefills(plan, 10, share=6),
        lengths=[6, 20],
    )
    assert scheduled(engine.step()) == [("r0", 0, 4), ("r1", 0, 2)]
    engine.add([1])
    assert scheduled(engine.step()) == [("r0", 4, 2), ("r1", 2, 6)]


def test_a_prompt_behind_a_decode_holds_the_first_to_its_share():
    """Catches looking at the next running request alone: r1 only decodes, and r2 is behind it."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 8, share=4),
        lambda plan, s: s.continue_prefills(plan, 10, share=6),
        lengths=[20, 2, 20],
    )
    assert scheduled(engine.step()) == [("r0", 0, 4), ("r1", 0, 2), ("r2", 0, 2)]
    assert scheduled(engine.step()) == [("r0", 4, 6), ("r2", 2, 4)]


def test_the_last_of_two_prompts_gets_what_is_left():
    """Catches asking once for all whether somebody is behind: nobody is behind the last one."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 6, share=3),
        lambda plan, s: s.continue_prefills(plan, 16, share=6),
        lengths=[20, 20],
    )
    engine.step()
    assert scheduled(engine.step()) == [("r0", 3, 6), ("r1", 3, 10)]
    returned = engine.scheduler.policy.returned[1]
    assert returned == 16, f"continue_prefills scheduled 6 and 10 tokens: expected 16, got {returned}"


def test_each_prompt_has_a_share_of_its_own():
    """Catches one share that all prompts use up together: the second of three would get nothing."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 9, share=3),
        lambda plan, s: s.continue_prefills(plan, 16, share=6),
        lengths=[20, 20, 20],
    )
    assert scheduled(engine.step()) == [("r0", 0, 3), ("r1", 0, 3), ("r2", 0, 3)]
    assert scheduled(engine.step()) == [("r0", 3, 6), ("r1", 3, 6), ("r2", 3, 4)]


def test_a_share_is_never_more_than_what_is_left():
    """Catches a share that is given out whole: 4 tokens are left of the budget, and a share is 6."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 6, share=3),
        lambda plan, s: s.continue_prefills(plan, 10, share=6),
        lengths=[20, 20, 20],
    )
    engine.step()
    assert scheduled(engine.step()) == [("r0", 3, 6), ("r1", 3, 4)]


def test_a_swapped_out_request_does_not_hold_a_prompt_to_its_share():
    """Catches a prompt cut for a request that has no block: only prompts and the queue count."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 4),
        lambda plan, s: s.continue_prefills(plan, 8, share=6),
        lengths=[20],
    )
    engine.step()
    engine.add([1])
    engine.scheduler.swapped.append(engine.scheduler.waiting.popleft())
    assert scheduled(engine.scheduler.schedule()) == [("r0", 4, 8)]


def test_a_group_of_decodes_is_not_a_prompt():
    """Catches more than one uncomputed token taken for a prompt: two samples have one each."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 64), lambda plan, s: s.continue_prefills(plan, 64), lengths=[]
    )
    engine.add([0] * 5, method=samples(2))
    engine.step()
    assert scheduled(engine.scheduler.schedule()) == []


def test_a_group_that_is_computed_again_goes_on():
    """Catches `is_prefill` asked of the first sequence, of the prompt alone, or of single sequences only."""
    engine = half_recomputed(lambda plan, s: s.continue_prefills(plan, 64))
    assert scheduled(engine.scheduler.schedule()) == [("r0", 5, 1), ("r0", 4, 2)]


def test_going_on_ends_with_the_budget():
    """Catches a chunk of no tokens, or of more than are left."""
    engine = scripted(
        lambda plan, s: s.admit_waiting(plan, 6, share=3),
        lambda plan, s: s.continue_prefills(plan, 2),
        lengths=[10, 10],
    )
    engine.step()
    assert scheduled(engine.step()) == [("r0", 3, 2)]
    assert engine.scheduler.policy.returned == [6, 2]


# -- lesson 09, task 1 ----------------------------------------------------------------------


def sampled(*totals, n=3):
    """n samples of one prompt; the sequences have generated one token and have these sums."""
    params = SamplingParams(n=n, max_tokens=20)
    request = make_request([1, 2], SamplingMethod(params, StopChecker(params, ())), params)
    request.sequences = [make_sequence([1, 2], [3], params) for _ in totals]
    for sequence, total in zip(request.sequences, totals):
        sequence.cumulative_logprob = total
    return request


def test_advance_returns_a_list_of_branches():
    """Catches a forgotten `return`: the scheduler takes None for a request that failed."""
    request = sampled(-1.0, n=1)
    branches = request.method.advance(request, [Sample([4], [-0.5])])
    assert isinstance(branches, list | tuple), f"expected a list of Branch, got {branches!r}"
    assert [branch.token_id for branch in branches] == [4]


def check_that_advance_changes_nothing(method):
    """A request of ten tokens and its forks, in a toy engine: what `advance` finds is there after it."""

    def state():
        groups = request.sequences, request.completions
        return [[(id(s), s.token_ids[:], s.table.blocks[:]) for s in group] for group in groups]

    given = method.advance

    def advance(request, samples):
        before = state()
        branches = given(request, samples)
        message = "`advance` only returns branches: the scheduler appends their tokens, forks and frees"
        assert state() == before, message
        return branches

    method.advance = advance
    engine = ToyEngine(toy_scheduler())
    request = engine.add([1, 2, 3], 10, method)
    engine.run()
    assert len(request.completions) > 1


def test_advance_leaves_the_samples_to_the_scheduler():
    """Catches `advance` that frees, forks or appends by itself: if the step fails, that is not undone."""
    check_that_advance_changes_nothing(samples(3))


def test_a_branch_carries_the_logprob_of_its_token():
    """Catches the sum instead of the token's own log-probability (the scheduler adds it to the sum), and
    candidates that are sorted: the number of a sample is the place of its candidate."""
    request = sampled(-5.0, -7.0)
    branches = request.method.advance(request, [Sample([4], [-0.25]), Sample([5], [-0.5])])
    assert [branch.logprob for branch in branches] == [-0.25, -0.5]
    request = sampled(-5.0)
    branches = request.method.advance(request, [Sample([4, 5], [-0.5, -0.25])])
    assert [branch.logprob for branch in branches] == [-0.5, -0.25]


def test_a_branch_carries_the_alternatives_of_its_own_candidate():
    """Catches top_logprobs left out, at the fork, later or of a single sample, or all those of the first."""
    request = sampled(-5.0)
    first, second = {4: -0.25, 6: -3.0}, {5: -0.5, 6: -2.0}
    branches = request.method.advance(request, [Sample([4, 5], [-0.25, -0.5], [first, second])])
    assert [branch.top_logprobs for branch in branches] == [first, second]
    request = sampled(-5.0, -7.0)
    branches = request.method.advance(request, [Sample([4], [-0.25], [first]), Sample([5], [-0.5], [second])])
    assert [branch.top_logprobs for branch in branches] == [first, second]
    request = sampled(-5.0, n=1)
    [branch] = request.method.advance(request, [Sample([4], [-0.25], [first])])
    assert branch.top_logprobs == first


@pytest.mark.parametrize("total", [-5.0, 0.0])
def test_the_last_live_sample_does_not_fork(total):
    """Catches n candidates at every step, and one live sequence taken for the prompt: two of three samples
    have ended. The sum is no sign: it is 0 after a token that was certain."""
    request = sampled(total)
    assert request.method.num_candidates(request) == 1


def test_as_many_candidates_are_drawn_as_there_will_be_sequences():
    """Catches `params.n`: with best_of = 5, five are drawn, of which the best two are returned."""
    params = SamplingParams(n=2, best_of=5, max_tokens=20)
    request = make_request([1, 2], SamplingMethod(params, StopChecker(params, ())), params)
    assert request.method.num_candidates(request) == 5


def test_a_sample_that_goes_on_keeps_its_number():
    """Catches numbers counted anew: once sample 0 has ended, sample 1 would become 0 and draw its noise."""
    request = sampled(-5.0, -7.0)
    branches = request.method.advance(request, [Sample([4], [-0.25]), Sample([5], [-0.5])])
    assert [branch.sample_index for branch in branches] == [None, None]
    request = sampled(-7.0)  # the last of three
    [branch] = request.method.advance(request, [Sample([5], [-0.5])])
    assert branch.sample_index is None


def test_every_candidate_is_asked_whether_it_ends():
    """Catches a finish reason missing or given to all, and an end left out: the second of three ends, or the
    only one."""
    request = sampled(-5.0)
    request.method.stop.check = lambda sequence, token_id: "stop" if token_id == 5 else None
    branches = request.method.advance(request, [Sample([4, 5, 6], [-0.25, -0.5, -1.0])])
    assert [branch.finish_reason for branch in branches] == [None, "stop", None]
    request = sampled(-5.0, n=1)
    request.method.stop.check = lambda sequence, token_id: "stop"
    [branch] = request.method.advance(request, [Sample([5], [-0.5])])
    assert branch.finish_reason == "stop"


def test_a_sequence_is_asked_for_itself():
    """Catches `stop.check` asked of the first sequence for all: only the second has reached its end."""
    request = sampled(-5.0, -7.0)
    second = request.sequences[1]
    request.method.stop.check = lambda sequence, token_id: "length" if sequence is second else None
    branches = request.method.advance(request, [Sample([4], [-0.25]), Sample([5], [-0.5])])
    assert [branch.finish_reason for branch in branches] == [None, "length"]


@pytest.mark.parametrize("n", [2, 3])
def test_equal_candidates_are_samples_of_their_own(n):
    """Catches candidates taken for one because they have the same token, and numbers that begin with 1."""
    params = SamplingParams(n=n, max_tokens=20)
    request = make_request([1, 2], SamplingMethod(params, StopChecker(params, ())), params)
    branches = request.method.advance(request, [Sample([4] * n, [-0.25] * n)])
    assert [(branch.token_id, branch.sample_index) for branch in branches] == [(4, i) for i in range(n)]


# -- lesson 09, task 2 ----------------------------------------------------------------------


def beams(**options):
    """A beam search of width 3 and a request whose completions have the given sums and lengths."""
    params = BeamSearchParams(beam_width=3, max_tokens=20, **options)
    request = make_request([1, 2], BeamSearch(params, StopChecker(params, ())), params)
    for total, length in [(-3.0, 3), (-4.0, 8), (-1.5, 1)]:
        sequence = make_sequence([1, 2], range(length), params)
        sequence.cumulative_logprob = total
        request.completions.append(sequence)
    return request


def test_a_score_is_the_sum_over_a_power_of_the_length():
    """Catches a mean that ignores the penalty, a penalty cut off or made whole, and a rounded score."""
    method = beams(length_penalty=2.0).method
    assert method.normalized(-8.0, 4) == pytest.approx(-0.5, rel=1e-12)
    assert beams(length_penalty=0.0).method.normalized(-8.0, 4) == pytest.approx(-8.0, rel=1e-12)
    assert beams(length_penalty=0.5).method.normalized(-8.0, 4) == pytest.approx(-4.0, rel=1e-12)
    assert beams(length_penalty=-1.0).method.normalized(-8.0, 4) == pytest.approx(-32.0, rel=1e-12)
    assert beams().method.normalized(-1.0, 3) == pytest.approx(-1.0 / 3, rel=1e-12)


def test_completions_are_ranked_by_score():
    """Catches the order in which they ended, and sums of unequal lengths that are compared."""
    request = beams(num_return_sequences=3)
    assert [s.num_generated_tokens for s in request.method.rank(request)] == [8, 3, 1]
    request = beams(num_return_sequences=3, length_penalty=0.0)
    assert [s.num_generated_tokens for s in request.method.rank(request)] == [1, 3, 8]


def test_ranking_changes_no_completion():
    """Catches `completions.sort`: of equal scores, the one that ended earlier would not be known any more."""
    request = beams(num_return_sequences=3)
    ranked = request.method.rank(request)
    assert [s.num_generated_tokens for s in request.completions] == [3, 8, 1]
    assert type(ranked) is list


def test_of_equal_scores_the_earlier_is_returned_first():
    """Catches a list that is sorted upwards and reversed, and the place among the beams as the second key."""
    request = beams(num_return_sequences=3)
    for index, sequence in enumerate(reversed(request.completions)):
        sequence.cumulative_logprob, sequence.index = -1.0 * sequence.num_generated_tokens, index
    assert [s.num_generated_tokens for s in request.method.rank(request)] == [3, 8, 1]


def test_only_as_many_are_returned_as_were_asked_for():
    """Catches a request for one text that gets three."""
    request = beams(num_return_sequences=1)
    assert [s.num_generated_tokens for s in request.method.rank(request)] == [8]


# -- lesson 09, task 3 -----


def searching(*ends, **options):
    """A request whose beam search of width 2 begins; `ends` end a text."""
    params = BeamSearchParams(beam_width=2, max_tokens=20, **options)
    return make_request([1, 2], BeamSearch(params, StopChecker(params, ends)), params)


def test_candidates_are_compared_by_all_their_tokens():
    """Catches a search by the last token alone (the second beam offers likelier ones), and a third beam."""
    request = searching()
    request.sequences = [make_sequence([1, 2], [token], request.params) for token in (3, 4)]
    request.sequences[0].cumulative_logprob, request.sequences[1].cumulative_logprob = -1.0, -3.0
    samples = [Sample([5, 6], [-1.0, -1.1]), Sample([7, 8], [-0.1, -0.2])]
    branches = request.method.advance(request, samples)
    assert [branch.token_id for branch in branches] == [5, 6]
    assert all(branch.parent is request.sequences[0] for branch in branches)
    assert [branch.logprob for branch in branches] == [-1.0, -1.1]  # of the token: the scheduler has the sum


def test_advance_leaves_the_beams_to_the_scheduler():
    """Catches `advance` that frees the beams which nothing continues: the scheduler does."""
    check_that_advance_changes_nothing(toy_beams(3))


def test_three_ends_leave_a_beam_of_two():
    """Catches 2 * W candidates with three end tokens: of the four best only one can go on."""
    request = searching(0, 1, 2, early_stopping="never", length_penalty=2.0)
    sample = Sample([0, 1, 2, 5, 6, 7, 8, 9], [-1.0, -1.1, -1.2, -1.3, -1.4, -5.0, -6.0, -7.0])
    branches = request.method.advance(request, [sample])
    assert [branch.token_id for branch in branches] == [0, 1, 5, 6]


def test_only_the_best_candidates_of_the_whole_list_count(monkeypatch):
    """Catches candidates past the best `num_candidates`: the four best end, so nothing goes on."""
    request = searching(early_stopping="never", length_penalty=2.0)
    request.sequences = [make_sequence([1, 2], [token], request.params) for token in (3, 4)]
    monkeypatch.setattr(request.method.stop, "check", lambda _, token: "stop" if token < 4 else None)
    samples = [Sample([0, 1, 2, 3], [-0.1, -0.2, -0.3, -0.4]), Sample([5, 6, 7, 8], [-2.0, -3.0, -4.0, -5.0])]
    assert [branch.token_id for branch in request.method.advance(request, samples)] == [0, 1]


def test_hypotheses_are_returned_before_beams():
    """Catches one list by total: the end is worse than the best beam, and comes first all the same."""
    request = searching(0, early_stopping="never", length_penalty=2.0)
    branches = request.method.advance(request, [Sample([5, 0, 6, 7], [-1.0, -1.1, -1.2, -5.0])])
    assert [branch.token_id for branch in branches] == [0, 5, 6]


def test_one_beam_may_become_as_many_as_there_can_be():
    """Catches a beam as wide as it is now, and unlikely tokens dropped: only -inf is no candidate."""
    request = searching()
    request.sequences = [make_sequence([1, 2], [3], request.params)]
    branches = request.method.advance(request, [Sample([5, 6], [-1.0, -2000.0])])
    assert [branch.token_id for branch in branches] == [5, 6]


def test_totals_are_not_rounded():
    """Catches close totals taken for equal, and ordered by their tokens."""
    request = searching()
    branches = request.method.advance(request, [Sample([9, 4, 7, 8], [-1.0, -1.000001, -2.0, -3.0])])
    assert [branch.token_id for branch in branches] == [9, 4]


def asked_whether_done(monkeypatch, request, samples):
    """What `advance` gives `is_done`, by name."""
    asked = []
    monkeypatch.setattr(request.method, "is_done", lambda _, *numbers: asked.append(numbers))
    request.method.advance(request, samples)
    assert len(asked) == 1, f"expected `advance` to ask `is_done` once, got {len(asked)} times"
    [(scores, total, length)] = asked
    rounded = [round(score, 3) for score in scores]
    return {"best_scores": rounded, "best_total": round(total, 3), "num_generated_tokens": length}


def test_whether_to_stop_is_asked_of_the_texts_with_their_new_tokens(monkeypatch):
    """Catches scores without this step's ends, a total or length without its token, an end's total."""
    request = searching(0)
    request.sequences = [make_sequence([1, 2], [3], request.params)]  # the sum is -1.0
    found = asked_whether_done(monkeypatch, request, [Sample([0, 5, 6, 7], [-0.5, -2.0, -3.0, -4.0])])
    assert found == {"best_scores": [-0.75], "best_total": -3.0, "num_generated_tokens": 2}


def test_an_end_past_the_first_w_counts_for_nothing(monkeypatch):
    """Catches `enters` asked before the place is looked at: it keeps the score of an end that is dropped."""
    request = searching(0, 1)
    sample = Sample([0, 5, 1, 6, 7, 8], [-0.5, -2.0, -3.0, -4.0, -5.0, -6.0])
    found = asked_whether_done(monkeypatch, request, [sample])
    assert found == {"best_scores": [-0.5], "best_total": -2.0, "num_generated_tokens": 1}


def test_the_next_beams_are_in_the_order_of_their_totals():
    """Catches beams grouped by parent, or ordered by their last token: of equal totals, the first beam's is
    better, so their order counts."""
    request = searching()
    request.sequences = [make_sequence([1, 2], [token], request.params) for token in (3, 4)]
    request.sequences[1].cumulative_logprob = -2.0  # the first has -1.0
    branches = request.method.advance(request, [Sample([5, 6], [-2.0, -9.0]), Sample([7, 8], [-0.5, -9.0])])
    assert [branch.token_id for branch in branches] == [7, 5]
    request.sequences[1].cumulative_logprob = -4.0
    branches = request.method.advance(request, [Sample([5, 6], [-2.0, -9.0]), Sample([7, 8], [-0.5, -9.0])])
    assert [branch.token_id for branch in branches] == [5, 7]


def test_a_beam_is_asked_for_itself(monkeypatch):
    """Catches `stop.check` asked of the best beam for all: a stop string ends the text that it is in."""
    request = searching(early_stopping="never", length_penalty=2.0)
    request.sequences = [make_sequence([1, 2], [token], request.params) for token in (3, 4)]
    second = request.sequences[1]
    monkeypatch.setattr(
        request.method.stop, "check", lambda sequence, _: "stop" if sequence is second else None
    )
    samples = [Sample([5, 6], [-1.0, -2.0]), Sample([7, 8], [-1.5, -9.0])]
    branches = request.method.advance(request, samples)
    found = [(branch.token_id, branch.finish_reason) for branch in branches]
    assert found == [(7, "stop"), (5, None), (6, None)]


def test_two_ends_with_one_score_are_two_hypotheses():
    """Catches a score that enters once: two texts may be equally likely."""
    request = searching(0, 1)
    branches = request.method.advance(
        request, [Sample([0, 1, 5, 6, 7, 8], [-0.5, -0.5, -2.0, -3.0, -4.0, -5.0])]
    )
    assert [branch.token_id for branch in branches] == [0, 1]


def with_hypotheses(request):
    """The same request when two of its texts have ended, with scores of -2 and -3."""
    for total in (-2.0, -3.0):
        request.completions.append(make_sequence([1, 2], [3], request.params))
        request.completions[-1].cumulative_logprob = total
    return request


def test_the_best_live_beam_decides_whether_to_stop():
    """Catches a search that ends because its worst beam cannot win: the best one can."""
    request = with_hypotheses(searching())
    sample = Sample([5, 6, 7, 8], [-1.0, -9.0, -10.0, -11.0])
    assert [branch.token_id for branch in request.method.advance(request, [sample])] == [5, 6]


def test_a_beam_that_ended_does_not_decide_whether_to_stop():
    """Catches asking about the best candidate: it ended, and the best of those that go on cannot win."""
    request = with_hypotheses(searching(0))
    sample = Sample([0, 5, 6, 7], [-0.1, -9.0, -10.0, -11.0])
    assert [branch.token_id for branch in request.method.advance(request, [sample])] == [0]


def test_a_search_that_is_done_leaves_no_beam():
    """Catches beams that go on because this step finished no hypothesis: earlier ones cannot be beaten."""
    request = with_hypotheses(searching(0))
    sample = Sample([5, 6, 7, 8], [-9.0, -10.0, -11.0, -12.0])
    assert [branch.token_id for branch in request.method.advance(request, [sample])] == []


# -- lesson 05 -----


@pytest.mark.parametrize("policy", ["on demand", "chunked"])
def test_what_is_needed_is_never_cut(policy):
    """Catches one block, or one grant, for growth that needs more (a copy-on-write is a block, too)."""
    if policy == "on demand":
        assert OnDemand().while_running(2, 8) == (2,)
    else:
        assert distinct(Chunked(4).while_running(6, 9)) == (6,)


WHEN = ["at_admission", "while_running"]


def distinct(wishes):
    return tuple(dict.fromkeys(wishes))


def wrong_answer(name, policy, when, expected_of):
    """The first answer of a policy, for `needed` and `remaining` up to 9, that is not `expected_of(them)`.

    To wish twice for the same is to wish for it once.
    """
    for remaining in range(1, 10):
        for needed in range(1, remaining + 1):
            found, expected = getattr(policy, when)(needed, remaining), expected_of(needed, remaining)
            if not isinstance(found, tuple) or not all(isinstance(count, int) for count in found):
                return f"{name}.{when}({needed}, {remaining}): expected a tuple of ints, got {found!r}"
            if distinct(found) != distinct(expected):
                return f"{name}.{when}({needed}, {remaining}): expected {expected}, got {found}"
    return None


@pytest.mark.parametrize("when", WHEN)
def test_on_demand_growth_looks_only_at_what_is_needed(when):
    """Catches a block more, or fewer, when few or many remain."""
    wrong = wrong_answer("OnDemand()", OnDemand(), when, lambda needed, remaining: (needed,))
    assert wrong is None, wrong


@pytest.mark.parametrize("when", WHEN)
def test_a_reservation_is_all_that_remains(when):
    """Catches a second number at admission, and none, or 1, while running."""
    expected = (lambda *both: both[1:]) if when == "at_admission" else lambda *both: both[::-1]
    wrong = wrong_answer("Reserve()", Reserve(), when, expected)
    assert wrong is None, wrong


@pytest.mark.parametrize("when", WHEN)
def test_a_grant_lies_between_what_is_needed_and_what_remains(when):
    """Catches a grant of 4 that is left out where fewer remain, is one below `needed`, or gets smaller."""
    expected = lambda needed, remaining: (sorted([needed, 4, remaining])[1], needed)  # noqa: E731
    wrong = wrong_answer("Chunked(4)", Chunked(4), when, expected)
    assert wrong is None, wrong


def test_a_fork_of_a_reservation_makes_do_with_what_it_must_have():
    """Catches a fork that preempts others for blocks it does not need yet."""
    assert Reserve().while_running(1, 32) == (32, 1)
    assert distinct(Reserve().while_running(3, 3)) == (3,)


def test_two_policies_keep_a_grant_each():
    """Catches a grant kept in the class (the second policy would change the first), and 16 for all."""
    small, large = Chunked(2), Chunked(8)
    assert [policy.at_admission(1, 20) for policy in (small, large)] == [(2, 1), (8, 1)]


# -- lesson 06, one decision at a time -----


def test_the_last_candidate_is_the_victim():
    """Catches one spared because it asks for blocks, and a choice by size, progress, name or clock."""
    requests = [
        make_sequence([1] * prompt, [1] * output, arrival=arrival).request
        for arrival, (prompt, output) in enumerate([(1, 4), (3, 0), (2, 2)])  # the last is in between
    ]
    for count in (1, 2, 3):
        candidates = requests[:count]
        victim = Recompute().choose_victim(candidates)
        assert victim in requests, f"expected one of the candidates, a Request, got {victim!r}"
        place = requests.index(victim)
        message = f"{count} candidates by arrival: expected candidates[{count - 1}], got candidates[{place}]"
        assert place == count - 1, message
        assert candidates == requests[:count], "choose_victim changed the list of candidates"


def victim_of(kv, *num_tokens, fork=False):
    """A request with sequences of these lengths, all but the newest token computed."""
    request = make_request([1], None, None)
    request.sequences = []
    for length in num_tokens:
        sequence = make_sequence([1] * length)
        if fork and request.sequences:
            sequence.table = request.sequences[0].table.fork()
        else:
            sequence.table = kv.new_table()
            sequence.table.append(length - 1)
        sequence.num_computed_tokens = length - 1
        request.sequences.append(sequence)
    return request


def manager(num_host_blocks):
    """A pool of 16 blocks of 4 tokens, and host blocks."""
    swap_space = SwapSpace(num_host_blocks, 16) if num_host_blocks else None
    return KVManager(BlockAllocator(16), 4, OnDemand(), None, swap_space)


def test_a_full_host_is_not_swapped_to():
    """Catches a swap without checking for room: two blocks into one, or into none."""
    for num_host_blocks, mode in ((0, "recompute"), (1, "recompute"), (2, "swap")):
        kv = manager(num_host_blocks)
        assert Swap().choose_mode(victim_of(kv, 9), kv).mode == mode


def test_a_group_is_swapped_whole_or_not_at_all():
    """Catches checking room for only one of two sequences: 3 blocks do not fit into 2."""
    for num_host_blocks, mode in ((2, "recompute"), (3, "swap")):
        kv = manager(num_host_blocks)
        victim = victim_of(kv, 5, 9)
        assert Swap().choose_mode(victim, kv).mode == mode


SWAPPING = [Swap(), Auto(PreemptionCosts(0.0, 0.0, 1.0))]


@pytest.mark.parametrize("policy", SWAPPING, ids=["Swap", "Auto"])
def test_a_half_recomputed_group_is_not_swapped(policy):
    """Catches free host blocks counted instead of asking `kv.can_swap_out`, which knows more reasons."""
    kv = manager(16)
    victim = victim_of(kv, 9, 9)
    victim.sequences[1].num_computed_tokens = 4
    assert policy.choose_mode(victim, kv).mode == "recompute"


@pytest.mark.parametrize("policy", SWAPPING, ids=["Swap", "Auto"])
def test_every_decision_is_made_anew(policy):
    """Catches an answer that is remembered: the second time there is no room for the same victim."""
    kv = manager(16)
    victim = victim_of(kv, 9)
    modes = [policy.choose_mode(victim, kv).mode]
    kv.swap_space = None
    modes.append(policy.choose_mode(victim, kv).mode)
    assert modes == ["swap", "recompute"]


@pytest.mark.parametrize("policy", SWAPPING, ids=["Swap", "Auto"])
def test_a_preallocated_block_needs_no_room(policy):
    """Catches room for every block of the table: two hold tokens, and the host has two."""
    kv = manager(2)
    victim = victim_of(kv, 9)
    victim.sequences[0].table.preallocate(3)
    assert policy.choose_mode(victim, kv).mode == "swap"


def test_the_newest_token_is_not_computed_again():
    """Catches num_tokens used for num_computed_tokens: 5 x 1 s is cheaper than 2 x 2 blocks x 1.4 s."""
    kv = manager(16)
    assert Auto(PreemptionCosts(0.0, 1.4, 1.0)).choose_mode(victim_of(kv, 6), kv).mode == "recompute"


@pytest.mark.parametrize("policy", [Recompute(), Swap()], ids=["Recompute", "Swap"])
def test_a_decision_names_a_mode_and_says_why(policy):
    """Catches a mode that the engine does not know, and a log line that does not say why."""
    for num_host_blocks in (0, 16):
        kv = manager(num_host_blocks)
        decision = policy.choose_mode(victim_of(kv, 9), kv)
        is_pair = isinstance(decision, tuple) and len(decision) == 2
        assert is_pair, f"Expected Decision(mode, reason), got {decision!r}."
        mode, reason = decision
        assert mode in ("recompute", "swap"), f'Expected the mode "recompute" or "swap", got {mode!r}.'
        has_reason = isinstance(reason, str) and reason.strip()
        assert has_reason, f"Expected a reason in your words, got {reason!r}."


@pytest.mark.parametrize("policy", [Recompute(), *SWAPPING], ids=["Recompute", "Swap", "Auto"])
def test_a_decision_leaves_the_victim_as_it_is(policy):
    """Catches blocks freed by the policy: it only decides, and the scheduler frees or moves them."""
    for num_host_blocks in (0, 16):
        kv = manager(num_host_blocks)
        victim = victim_of(kv, 5, 9)
        before = [(list(s.token_ids), s.num_computed_tokens, list(s.table.blocks)) for s in victim.sequences]
        policy.choose_mode(victim, kv)
        after = [(list(s.token_ids), s.num_computed_tokens, list(s.table.blocks)) for s in victim.sequences]
        assert after == before, "choose_mode changed the victim's sequences, tokens or blocks; only decide"


def test_moving_costs_both_ways():
    """Catches blocks that are moved out and never back: 2 x 2 blocks x 3 s against 8 tokens x 1 s."""
    kv = manager(16)
    assert Auto(PreemptionCosts(1.0, 2.0, 1.0)).choose_mode(victim_of(kv, 9), kv).mode == "recompute"
    assert Auto(PreemptionCosts(1.0, 2.0, 2.0)).choose_mode(victim_of(kv, 9), kv).mode == "swap"


def test_a_transfer_is_started_for_every_block_both_ways():
    """Catches one start a block, or one each way: 2 x 2 starts x 1 s against 8 tokens x 0.4 s, then 0.6 s."""
    kv = manager(16)
    assert Auto(PreemptionCosts(1.0, 0.0, 0.4)).choose_mode(victim_of(kv, 9), kv).mode == "recompute"
    assert Auto(PreemptionCosts(1.0, 0.0, 0.6)).choose_mode(victim_of(kv, 9), kv).mode == "swap"


def test_generated_tokens_are_computed_again_too():
    """Catches counting the prompt alone: after a recompute the generated tokens need their keys, too."""
    kv = manager(16)
    victim = victim_of(kv, 9)
    victim.sequences[0].request.prompt_token_ids = [1] * 3
    assert "8 tokens" in Auto(PreemptionCosts(0.0, 1.0, 1.0)).choose_mode(victim, kv).reason


def test_the_reason_states_both_sides():
    """Catches a log that names the choice and not the numbers it was made from."""
    kv = manager(16)
    reason = Auto(PreemptionCosts(0.0, 1.0, 1.0)).choose_mode(victim_of(kv, 6), kv).reason
    for number in (r"\d+ blocks", r"\d+ tokens"):
        assert re.search(number, reason), f"the reason must say how many blocks and tokens: {reason!r}"


def test_a_partly_filled_block_moves_too():
    """Catches full blocks alone: 5 computed tokens are in 2 blocks of 4."""
    kv = manager(16)
    assert "2 blocks" in Auto(PreemptionCosts(0.0, 1.0, 1.0)).choose_mode(victim_of(kv, 6), kv).reason


def test_the_blocks_of_all_sequences_move():
    """Catches one sequence taken for the group, and the blocks that its tokens would fill together: 5 tokens
    are in 2 blocks, 9 in 3."""
    kv = manager(16)
    reason = Auto(PreemptionCosts(0.0, 1.0, 1.0)).choose_mode(victim_of(kv, 6, 10), kv).reason
    assert "5 blocks" in reason
    assert "14 tokens" in reason


def test_a_shared_block_moves_once():
    """Catches two samples of one prompt that count as two prompts: 2 blocks each way, 8 tokens."""
    kv = manager(16)
    victim = victim_of(kv, 9, 9, 9, fork=True)
    decision = Auto(PreemptionCosts(0.0, 1.0, 0.9)).choose_mode(victim, kv)
    assert decision.mode == "swap"
    assert "2 blocks" in decision.reason
    assert "8 tokens" in decision.reason


def test_a_swap_to_a_full_host_is_impossible_however_cheap():
    """Catches a comparison of costs alone: moving costs nothing here, but the host has no block."""
    kv = manager(0)
    mode = Auto(PreemptionCosts(0.0, 0.0, 1.0)).choose_mode(victim_of(kv, 9), kv).mode
    assert mode == "recompute"


def reason_of(kv, victim):
    """What `Auto` says when it moves blocks at no cost."""
    return Auto(PreemptionCosts(0.0, 0.0, 1.0)).choose_mode(victim, kv).reason


def test_a_prompt_that_is_half_computed_moves_by_half():
    """Catches the tokens that have a slot for those that are computed: here 16 have one, and 5 are."""
    kv = manager(16)
    victim = victim_of(kv, 17)
    victim.sequences[0].num_computed_tokens = 5
    reason = reason_of(kv, victim)
    assert "2 blocks" in reason
    assert "5 tokens" in reason


def test_sequences_of_one_length_are_counted_each():
    """Catches lengths in a set: two sequences of 8 computed tokens share no block, and have 16."""
    kv = manager(16)
    reason = reason_of(kv, victim_of(kv, 9, 9))
    assert "4 blocks" in reason
    assert "16 tokens" in reason


def test_a_shared_block_holds_its_own_number_of_tokens():
    """Catches a 4 where `kv.block_size` is meant: three samples share 4 blocks of 2 tokens."""
    kv = KVManager(BlockAllocator(16), 2, OnDemand(), None, SwapSpace(16, 16))
    assert "8 tokens" in reason_of(kv, victim_of(kv, 9, 9, 9, fork=True))


def test_nothing_computed_is_nothing_to_move():
    """Catches a division by the number of blocks, and a tie that swaps: both ways cost nothing."""
    kv = manager(16)
    assert Auto(PreemptionCosts(1.0, 1.0, 1.0)).choose_mode(victim_of(kv, 1), kv).mode == "recompute"


@pytest.mark.parametrize(("seconds", "mode"), [(0.69, "swap"), (0.71, "recompute")])
def test_every_block_and_every_token_counts(seconds, mode):
    """Catches one block or token too many or too few, and 2 + blocks: 5 blocks of 4 hold 17 tokens.

    A block takes 1 s each way, and 0.69 s or 0.71 s to start: 2 x 5 of them are 16.9 s or 17.1 s.
    """
    kv = manager(16)
    decision = Auto(PreemptionCosts(seconds, 1.0, 1.0)).choose_mode(victim_of(kv, 18), kv)
    message = f"2 x 5 blocks x {1 + seconds} s against 17 tokens x 1 s: expected {mode}, got {decision.mode}"
    assert decision.mode == mode, f"{message} ({decision.reason})"


def test_equal_costs_are_recomputed():
    """Catches a swap that gains nothing: recomputation keeps the host free."""
    kv = manager(16)
    mode = Auto(PreemptionCosts(0.0, 2.0, 1.0)).choose_mode(victim_of(kv, 9), kv).mode
    assert mode == "recompute", f"2 x 2 blocks x 2 s against 8 tokens x 1 s: expected recompute, got {mode}"


def test_a_block_without_computed_tokens_does_not_move():
    """Catches charging for preallocated blocks, which hold nothing to move."""
    kv = manager(16)
    victim = victim_of(kv, 9)
    victim.sequences[0].table.preallocate(3)
    assert "2 blocks" in Auto(PreemptionCosts(0.0, 1.0, 1.0)).choose_mode(victim, kv).reason


def cached_manager(num_blocks=20):
    """A manager whose cache knows three blocks: 0 held by two tables, 1 by one, 2 by none."""
    allocator = BlockAllocator(num_blocks)
    cache = PrefixCache(allocator, 4)
    kv = KVManager(allocator, 4, OnDemand(), cache)
    hashes, entry = [], ""
    cache.extend_hashes(hashes, array("i", range(12)))
    blocks = cache.allocate(3)
    for i, block in enumerate(blocks):
        entry = cache.register(block, hashes[i], array("i", range(4 * i, 4 * i + 4)), entry)
    cache.commit()
    cache.share(blocks[0])
    cache.free(blocks[2])
    return kv, blocks


def test_an_admission_pays_for_evictable_hits_alone():
    """Catches charging for held blocks, and not charging for evictable ones, which count as free."""
    kv, blocks = cached_manager()
    free = kv.num_free
    cached = [set(blocks[:n]) for n in range(4)]
    charged = [kv.admission_charge(cached[n], 20, 4 * n)[0] for n in range(4)]
    assert charged == [0, 0, 0, 1]
    assert cached == [set(blocks[:n]) for n in range(4)], "admission_charge changed the set of cached blocks"
    assert kv.num_free == free


def test_a_pending_block_that_nobody_holds_is_charged():
    """Catches pending blocks taken for held ones: the request that computes one may have been aborted."""
    kv, _ = cached_manager()
    [block] = kv.prefix_cache.allocate()
    kv.prefix_cache.register(block, 12345, array("i", range(4)))
    kv.prefix_cache.free(block)
    assert kv.admission_charge({block}, 20, 4) == (1, 16)


def test_cached_tokens_are_not_charged():
    """Catches budget spent on tokens that nobody computes."""
    kv, blocks = cached_manager()
    assert [kv.admission_charge(set(blocks), 20, cached)[1] for cached in (0, 4, 12, 19)] == [20, 16, 8, 1]


def test_without_a_cache_every_token_is_charged():
    """Catches an engine that stops when prefix caching is off."""
    kv = KVManager(BlockAllocator(20), 4, OnDemand())
    assert kv.admission_charge(set(), 20, 0) == (0, 20)


def test_a_block_that_somebody_still_holds_is_not_evictable():
    """Catches the first of two releases taken for the last: the block would be evicted under a reader."""
    kv, blocks = cached_manager()
    kv.prefix_cache.free(blocks[0])
    assert kv.prefix_cache.allocator.ref_count(blocks[0]) == 1
    assert list(kv.prefix_cache.evictable) == [blocks[2]]
