"""The prefix cache: full blocks found again by their content (paper, section 4.4).

registered, in blocks of 2    1 2 | 3 4 | 5 6        physical blocks 0, 1, 2
a prompt that begins alike    1 2 | 3 4 | 9 9 | 7    finds 0 and 1, and computes the rest
"""

import tracemalloc
from array import array

import pytest

from minipaged.memory import BlockAllocator, OutOfBlocksError, PrefixCache
from tests.slow import slow_but
from tests.toy import ToyEngine, samples, tokens, toy_scheduler


def cache_of(num_blocks, block_size=2, **options):
    return PrefixCache(BlockAllocator(num_blocks), block_size, **options)


def hashes_of(cache, values, salt=""):
    hashes = []
    cache.extend_hashes(hashes, array("i", values), salt)
    return hashes


def registered(cache, *values, salt="", commit=True):
    """The blocks, held once, of a sequence whose full blocks were computed and registered."""
    size, hashes = cache.block_size, hashes_of(cache, values, salt)
    blocks = list(cache.allocate(len(hashes)))
    entry = salt
    for i, block in enumerate(blocks):
        entry = cache.register(block, hashes[i], tokens(*values[size * i : size * (i + 1)]), entry)
    if commit:
        cache.commit()
    return blocks


def found(cache, *values, salt=""):
    return list(cache.match(hashes_of(cache, values, salt), array("i", values), salt))


def give_back(cache, blocks):
    """As a table does: the tail first."""
    for block in reversed(blocks):
        cache.free(block)


# -- finding -----------------------------------------------------------------------------------------------


def test_the_longest_cached_prefix_is_found():
    """Catches a walk that stops too early or goes past the first difference."""
    cache = cache_of(8)
    blocks = registered(cache, 1, 2, 3, 4, 5, 6)
    assert found(cache, 1, 2, 3, 4, 5, 6, 7) == blocks
    assert found(cache, 1, 2, 3, 4, 9, 9) == blocks[:2]
    assert found(cache, 1, 2) == blocks[:1]
    assert found(cache, 9, 2, 3, 4) == []


def test_only_full_blocks_are_hashed():
    """Catches a partly filled block that is shared and then written."""
    cache = cache_of(8)
    assert len(hashes_of(cache, [1, 2, 3])) == 1
    assert hashes_of(cache, [1]) == []


def test_a_block_is_found_only_after_its_own_prefix():
    """Catches a hash of the block alone: its K/V depends on everything before it."""
    cache = cache_of(8)
    registered(cache, 1, 2, 5, 6)
    assert found(cache, 5, 6) == []
    assert found(cache, 3, 4, 5, 6) == []
    assert hashes_of(cache, [5, 6]) != hashes_of(cache, [1, 2, 5, 6])[1:]


def test_hashes_are_extended_and_not_recomputed():
    """Catches hashing the whole sequence again for every new block, or going back to the salt for it."""
    calls = []
    cache = cache_of(8, hash_function=lambda key: calls.append(key) or hash(key))
    hashes = hashes_of(cache, [1, 2, 3, 4])
    calls.clear()
    first_two = list(hashes)
    cache.extend_hashes(hashes, tokens(1, 2, 3, 4, 5, 6))
    assert len(calls) == 1
    assert hashes[:2] == first_two
    assert hashes == hashes_of(cache, [1, 2, 3, 4, 5, 6])


def test_a_salt_keeps_prefixes_apart():
    """Catches a user who learns from the time to first token what another one asked."""
    cache = cache_of(8)
    blocks = registered(cache, 1, 2, 3, 4, salt="alice")
    assert found(cache, 1, 2, 3, 4, salt="bob") == []
    assert found(cache, 1, 2, 3, 4) == []
    assert found(cache, 1, 2, 3, 4, salt="alice") == blocks


def test_without_a_salt_a_prefix_is_found():
    """Catches methods that do not agree on what no salt is."""
    cache, hashes, content = cache_of(2), [], tokens(1, 2)
    cache.extend_hashes(hashes, content)
    (block,) = cache.allocate()
    cache.register(block, hashes[0], content)
    assert cache.match(hashes, content) == [block]
    assert found(cache, 1, 2) == [block]


def test_of_blocks_with_the_same_content_the_first_wins():
    """Catches two blocks under one hash: freeing the one would forget the other."""
    cache = cache_of(8)
    first = registered(cache, 1, 2)
    second = registered(cache, 1, 2)
    assert found(cache, 1, 2) == first
    give_back(cache, second)
    assert found(cache, 1, 2) == first
    assert len(cache.block_of) == 1


def test_what_follows_a_second_block_with_the_same_content_is_found():
    """Catches a chain that goes on from the block that is not in the index."""
    cache = cache_of(8)
    (first,) = registered(cache, 1, 2)
    _, behind = registered(cache, 1, 2, 3, 4)
    assert found(cache, 1, 2, 3, 4) == [first, behind]


# -- collisions -------------------------------------------------------------------------------------------


def seven(key):
    """The worst hash: all blocks collide."""
    return 7


def first_token(key):
    """A weak hash: of the block's tokens, the first one alone."""
    _, content = key
    return content[0] if content else 0  # (a salt has no tokens)


def test_a_hash_collision_is_a_miss():
    """Catches a hit accepted without comparing tokens: another prompt's K/V, and nobody would notice."""
    cache = cache_of(8, hash_function=seven)
    (block, _) = registered(cache, 1, 2, 3, 4)
    assert found(cache, 5, 6) == []
    assert found(cache, 1, 2) == [block]


def test_a_collision_compares_the_whole_chain():
    """Catches a block found under another prefix that hashes alike: its K/V depends on that prefix."""
    cache = cache_of(8, hash_function=first_token)
    first, second = registered(cache, 1, 1, 3, 3), registered(cache, 1, 2, 4, 4)
    assert found(cache, 1, 1, 3, 3) == first
    assert found(cache, 1, 1, 4, 4) == first[:1]
    assert found(cache, 1, 2, 4, 4) == found(cache, 1, 2, 3, 3) == []
    give_back(cache, first + second)
    cache.check_invariants([])


def test_a_collision_never_crosses_salts():
    """Catches tenants who share a prefix because their salts hash alike."""
    cache = cache_of(8, hash_function=seven)
    blocks = registered(cache, 1, 2, salt="alice")
    assert found(cache, 1, 2, salt="bob") == []
    assert found(cache, 1, 2, salt="alice") == blocks


def test_a_collision_does_not_replace_what_is_cached():
    """Catches an index that loses a block which is still marked as registered."""
    cache = cache_of(8, hash_function=seven)
    first = registered(cache, 1, 2)
    second = registered(cache, 5, 6)
    assert found(cache, 1, 2) == first
    give_back(cache, first + second)
    cache.check_invariants([])
    assert cache.num_free == 8


def test_a_collision_does_not_replace_what_follows_a_block():
    """Catches a block taken for one behind a hole, though its prefix is cached."""
    cache = cache_of(8, hash_function=first_token)
    first = registered(cache, 1, 1, 3, 3)
    registered(cache, 1, 1, 3, 4)
    assert found(cache, 1, 1, 3, 3) == first
    assert found(cache, 1, 1, 3, 4) == first[:1]


def test_a_block_behind_a_collision_gives_way_to_one_that_can_be_found():
    """Catches a block whose prefix collided, so that nothing finds it, and which keeps another from being
    found."""
    cache = cache_of(8, hash_function=first_token)
    (first,) = registered(cache, 1, 1)
    behind = registered(cache, 1, 2, 4, 4)
    anew = registered(cache, 1, 1, 4, 4)
    assert found(cache, 1, 1, 4, 4) == [first, anew[1]]
    cache.check_invariants([first, *behind, *anew])


# -- keeping and evicting ----------------------------------------------------------------------------------


def test_a_block_that_nobody_holds_keeps_its_content():
    """Catches a cache that forgets a prompt when its last request ends."""
    cache = cache_of(4)
    blocks = registered(cache, 1, 2, 3, 4)
    give_back(cache, blocks)
    assert found(cache, 1, 2, 3, 4) == blocks
    assert cache.num_free == 4
    assert len(cache.evictable) == 2


def test_free_blocks_are_used_before_cached_ones_are_evicted():
    """Catches an eviction that was not needed."""
    cache = cache_of(4)
    blocks = registered(cache, 1, 2, 3, 4)
    give_back(cache, blocks)
    assert not set(cache.allocate(2)) & set(blocks)
    assert found(cache, 1, 2, 3, 4) == blocks


def test_the_tail_of_a_chain_is_evicted_before_its_head():
    """Catches a chain without its head: the rest can never be found and only takes up room."""
    cache = cache_of(3)
    blocks = registered(cache, 1, 2, 3, 4, 5, 6)
    give_back(cache, blocks)
    for left in (2, 1, 0):
        cache.allocate()
        assert found(cache, 1, 2, 3, 4, 5, 6) == blocks[:left]


def test_a_block_whose_parent_is_gone_gives_way_to_one_computed_anew():
    """Catches blocks behind a hole: nothing finds them, and they keep the same content from being found."""
    cache = cache_of(6)
    first, behind = registered(cache, 1, 2, 3, 4)
    cache.forget(first)
    anew = registered(cache, 1, 2, 3, 4)
    assert found(cache, 1, 2, 3, 4) == anew
    cache.check_invariants([first, behind, *anew])


def test_the_least_recently_used_chain_is_evicted_first():
    """Catches first in, first out: a prompt that everybody uses would be evicted."""
    cache = cache_of(3)
    old, middle, new = registered(cache, 1, 1), registered(cache, 2, 2), registered(cache, 3, 3)
    for blocks in (old, middle, new):
        give_back(cache, blocks)
    cache.share(old[0])  # a hit
    cache.free(old[0])
    cache.allocate(2)
    assert [found(cache, v, v) for v in (1, 2, 3)] == [old, [], []]


def test_a_block_in_use_is_never_evicted():
    """Catches content taken away under a running request."""
    cache = cache_of(3)
    held = registered(cache, 1, 2)
    give_back(cache, registered(cache, 3, 4))
    assert not set(cache.allocate(2)) & set(held)
    with pytest.raises(OutOfBlocksError):
        cache.allocate()
    assert found(cache, 1, 2) == held


def test_an_allocation_that_fails_evicts_nothing():
    """Catches cached prompts thrown away for a request that is then not admitted."""
    cache = cache_of(4)
    blocks = registered(cache, 1, 2, 3, 4)
    give_back(cache, blocks)
    with pytest.raises(OutOfBlocksError):
        cache.allocate(5)
    assert found(cache, 1, 2, 3, 4) == blocks
    assert cache.num_free == 4


def test_a_hit_takes_an_evictable_block_out_of_the_reach_of_eviction():
    """Catches a shared prefix that is evicted by the allocation for the rest of the same prompt."""
    cache = cache_of(3)
    blocks = registered(cache, 1, 2, 3, 4)
    give_back(cache, blocks)
    cache.share(blocks[0])
    cache.allocate(2)
    assert found(cache, 1, 2, 3, 4) == blocks[:1]


def test_count_evictable_says_what_sharing_uses_up():
    """Catches an admission that counts an evictable hit as free as well."""
    cache = cache_of(4)
    blocks = registered(cache, 1, 2, 3, 4)
    give_back(cache, blocks[1:])
    assert cache.count_evictable(blocks) == 1


def test_clear_forgets_evictable_blocks_only():
    """Catches a reset that pulls content away from a running request."""
    cache = cache_of(4)
    held = registered(cache, 1, 2)
    give_back(cache, registered(cache, 3, 4))
    cache.clear()
    assert (found(cache, 1, 2), found(cache, 3, 4)) == (held, [])
    assert (cache.num_free, len(cache.evictable)) == (3, 0)


def test_a_double_free_of_a_cached_block_raises():
    """Catches a cached block that stands in the LRU list twice."""
    cache = cache_of(2)
    (block,) = registered(cache, 1, 2)
    cache.free(block)
    with pytest.raises(ValueError):
        cache.free(block)
    cache.check_invariants([])


def test_the_check_sees_a_block_that_is_neither_free_nor_used_nor_cached():
    """Catches a check that checks nothing: free + used + evictable = all blocks; here, one of each."""
    cache = cache_of(3)
    used, evictable = registered(cache, 1, 2, 3, 4)
    cache.free(evictable)
    assert (cache.allocator.num_free, list(cache.evictable)) == (1, [evictable])
    cache.check_invariants([used])
    cache.evictable.clear()
    with pytest.raises(AssertionError, match="held by nobody"):
        cache.check_invariants([used])


@pytest.mark.parametrize(
    ("spoil", "num_held"),
    [
        (lambda cache, used, free: cache.share(used), 2),
        (lambda cache, used, free: cache.block_of.clear(), 2),
        (lambda cache, used, free: cache.allocator.release(free), 1),
    ],
    ids=["a reference too many", "not in the index", "in no place at all"],
)
def test_the_check_sees_what_is_wrong(spoil, num_held):
    """Catches a check that checks nothing, one case for each assertion that the test above does not reach."""
    cache = cache_of(4)
    (used,) = registered(cache, 1, 2)
    (free,) = cache.allocate()
    cache.check_invariants(iter([used, free]))
    spoil(cache, used, free)
    with pytest.raises(AssertionError):
        cache.check_invariants([used, free][:num_held])


# -- pending and rolled back ---------------------------------------------------------------------------------


def test_registered_blocks_are_pending_until_their_step_is_committed():
    """Catches a copy from a block that this very step still computes."""
    cache = cache_of(4)
    (block,) = registered(cache, 1, 2, commit=False)
    assert found(cache, 1, 2) == [block]
    assert cache.is_pending(block)
    cache.commit()
    assert not cache.is_pending(block)


def test_a_failed_step_rolls_back_what_it_registered():
    """Catches garbage that the next request attends to."""
    cache = cache_of(4)
    kept = registered(cache, 1, 2)
    lost = registered(cache, 3, 4, commit=False)
    cache.roll_back()
    assert (found(cache, 1, 2), found(cache, 3, 4)) == (kept, [])
    give_back(cache, lost)
    assert len(cache.evictable) == 0
    assert cache.num_free == 3


def test_a_pending_block_that_nobody_holds_any_more_is_free_after_a_roll_back():
    """Catches a block lost between the cache and the free list."""
    cache = cache_of(2)
    give_back(cache, registered(cache, 1, 2, commit=False))
    cache.roll_back()
    cache.check_invariants([])
    assert (cache.num_free, len(cache.evictable)) == (2, 0)


def test_content_can_be_registered_again_after_a_roll_back():
    """Catches a hash that stays taken by a block which is gone."""
    cache = cache_of(4)
    give_back(cache, registered(cache, 1, 2, commit=False))
    cache.roll_back()
    blocks = registered(cache, 1, 2)
    assert found(cache, 1, 2) == blocks


# -- in the engine -----------------------------------------------------------------------------------------


def cached_tokens(engine):
    return [request.num_cached_tokens for request in engine.requests]


def test_a_prompt_seen_before_is_not_computed_again():
    """Catches a cache that is filled and never asked. Blocks of 4: 8 of 10 tokens are in full blocks."""
    engine = ToyEngine(toy_scheduler(caching=True))
    for _ in range(2):
        engine.add(range(10), 1)
        engine.run()
    assert cached_tokens(engine) == [0, 8]
    assert engine.executor.num_tokens_computed == 10 + 2


def test_what_follows_a_hit_is_found_too():
    """Catches a chain that breaks where a request went on from what it found: the third would find no more
    than the second."""
    engine = ToyEngine(toy_scheduler(block_size=2, caching=True))
    for length in (5, 9, 13):
        engine.add(range(length), 1)
        engine.run()
    assert cached_tokens(engine) == [0, 4, 8]


def test_generated_tokens_are_cached_too():
    """Catches the second round of a chat that computes the first answer again."""
    engine = ToyEngine(toy_scheduler(caching=True))
    engine.add(range(6), 11)
    ((answer,),) = engine.run()
    engine.add([*range(6), *answer, 1, 2, 3], 1)
    engine.run()
    assert cached_tokens(engine) == [0, 16]


def test_what_every_sample_generates_is_cached():
    """Catches a fork whose blocks are not linked to those it shares: its own text would never be found."""
    engine = ToyEngine(toy_scheduler(caching=True))
    request = engine.add(range(10), 9, samples(2))
    engine.run()
    for sample in request.completions:
        again = engine.add(sample.token_ids, 1)
        engine.run()
        assert again.num_cached_tokens == 16


def test_equal_prompts_admitted_in_one_step_share():
    """Catches a burst of the same system prompt that is computed once per request."""
    engine = ToyEngine(toy_scheduler(caching=True))
    requests = [engine.add(range(10), 4) for _ in range(3)]
    plan = engine.step()
    assert [chunk.num_tokens for chunk in plan.scheduled] == [10, 2, 2]
    first, *others = (request.sequences[0].table.blocks for request in requests)
    assert all(blocks[:2] == first[:2] and blocks[2] != first[2] for blocks in others)
    assert engine.run() == engine.alone()


def test_equal_prompts_of_full_blocks_admitted_in_one_step_share_all_but_the_last():
    """Catches a copy of a block that is computed only after the copies of the step."""
    engine = ToyEngine(toy_scheduler(caching=True))
    for _ in range(2):
        engine.add(range(8), 4)
    plan = engine.step()
    assert [chunk.num_tokens for chunk in plan.scheduled] == [8, 4]
    assert plan.copies == []
    assert engine.run() == engine.alone()


def test_a_chunk_registers_only_the_blocks_it_fills():
    """Catches a long prompt whose later blocks are shared before their chunk ran."""
    engine = ToyEngine(toy_scheduler(caching=True, budget=8))
    engine.add(range(16), 2)
    engine.add(range(16), 2)
    plan = engine.step()
    assert [(c.sequence.request.request_id, c.start, c.num_tokens) for c in plan.scheduled] == [
        ("r0", 0, 6),
        ("r1", 4, 2),
    ]
    assert engine.run() == engine.alone()


def test_a_request_dropped_before_its_step_registers_nothing():
    """Catches blocks registered at free time that were never computed: garbage for the next request."""
    engine = ToyEngine(toy_scheduler(caching=True, budget=6))
    request = engine.add(range(20), 2)
    engine.step()
    engine.scheduler.abort(request)
    engine.add(range(20), 2)
    assert engine.run()[1:] == engine.alone()[1:]
    assert cached_tokens(engine)[1] == 4


def test_a_failed_step_leaves_no_prefix_behind():
    """Catches a hit on what the failed step was to compute."""
    engine = ToyEngine(toy_scheduler(caching=True))
    engine.add(range(10), 3)
    engine.fail_step()
    engine.add(range(10), 3)
    assert engine.run() == engine.alone()


def test_a_request_whose_step_failed_is_not_admitted_anew():
    """Catches prompt tokens that are counted twice, and hits in what the request computed itself."""
    engine = ToyEngine(toy_scheduler(caching=True))
    engine.add(range(10), 8)
    for _ in range(5):
        engine.step()
    engine.fail_step()
    assert engine.run() == engine.alone()
    assert [e.kind for plan in engine.plans for e in plan.events] == ["admitted", "resumed"]
    assert cached_tokens(engine) == [0]


def test_a_preempted_request_finds_its_own_blocks_again():
    """Catches a recomputation of everything although the blocks were not needed by others."""
    engine = ToyEngine(toy_scheduler(9, 2, caching=True))
    engine.add(range(6), 10)
    engine.add(range(20, 26), 10)
    assert engine.run() == engine.alone()
    resumed = [e for plan in engine.plans for e in plan.events if e.kind == "resumed"]
    assert resumed
    assert any(event.detail["cached_tokens"] for event in resumed)


def test_salts_keep_requests_apart_in_the_engine():
    """Catches a salt that is accepted and not handed on."""
    engine = ToyEngine(toy_scheduler(caching=True))
    for salt in ("a", "b", "a"):
        engine.add(range(10), 1, salt=salt)
        engine.run()
    assert cached_tokens(engine) == [0, 0, 8]


# -- size --------------------------------------------------------------------------------------------------


SIZES = [1000, 40_000, 43_691, 44_000, 87_382, 100_000]


@pytest.mark.parametrize("num_blocks", slow_but([1000, 43_691], SIZES))
def test_the_cache_takes_under_460_bytes_a_block(num_blocks):
    """Catches an index that keeps what was evicted, at every fill level: steps that each take a hundredth of
    the pool until it is full, then evict half of it. 97 of the bytes are a block's tokens."""
    size, step = 16, num_blocks // 100
    prompt = array("i", range(150 * step * size))
    allocator = BlockAllocator(num_blocks)
    tracemalloc.start()
    cache = PrefixCache(allocator, size)
    used = []
    for number in range(150):
        content = prompt[number * step * size : (number + 1) * step * size]
        hashes = []
        cache.extend_hashes(hashes, content)
        blocks = cache.allocate(step)
        entry = ""
        for i, block in enumerate(blocks):
            entry = cache.register(block, hashes[i], content[i * size : (i + 1) * size], entry)
        give_back(cache, blocks)
        used.append(tracemalloc.get_traced_memory()[0])
        cache.commit()
    tracemalloc.stop()
    assert len(cache.block_of) > 0.98 * num_blocks
    most = max(used)
    assert most < 460 * num_blocks, f"{most / num_blocks:.0f} bytes a block in step {used.index(most)}"
