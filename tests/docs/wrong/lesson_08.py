"""Lesson 08, done wrong; `caught_by` names the test that must notice, `task` the task whose tests must."""

from array import array

from minipaged.memory import CachedBlock, KVManager, OutOfBlocksError, PrefixCache


class HashesABlockAlone(PrefixCache):
    """No parent: the same 16 tokens after another beginning look cached."""

    caught_by = "test_a_block_is_found_only_after_its_own_prefix"

    def extend_hashes(self, hashes, token_ids, salt=""):
        size = self.block_size
        for i in range(len(hashes), len(token_ids) // size):
            hashes.append(hash((salt, token_ids[i * size : (i + 1) * size].tobytes())))


class HashesThePartialBlock(PrefixCache):
    """The last block gets a hash before it is full."""

    caught_by = "test_only_full_blocks_are_hashed"

    def extend_hashes(self, hashes, token_ids, salt=""):
        padded = token_ids[:]
        while len(padded) % self.block_size:
            padded.append(0)
        super().extend_hashes(hashes, padded, salt)


class ForgetsTheSalt(PrefixCache):
    """Another tenant's prompt has the same name."""

    caught_by = "test_a_salt_gives_every_block_another_hash"

    def extend_hashes(self, hashes, token_ids, salt=""):
        super().extend_hashes(hashes, token_ids)


class TrustsTheHash(PrefixCache):
    """Two contents with one hash, and a sequence reads somebody else's keys."""

    caught_by = "test_a_hash_collision_is_a_miss"

    def match(self, hashes, token_ids, salt=""):
        blocks = []
        for chain_hash in hashes:
            if chain_hash not in self.block_of:
                break
            blocks.append(self.block_of[chain_hash])
        return blocks


class ComparesABlockAlone(PrefixCache):
    """The tokens are right, those before them are not."""

    caught_by = "test_equal_hashes_after_another_prefix_are_a_miss"

    def match(self, hashes, token_ids, salt=""):
        blocks = []
        for i, chain_hash in enumerate(hashes):
            block = self.block_of.get(chain_hash)
            tokens = token_ids[i * self.block_size : (i + 1) * self.block_size]
            if block is None or self.cached[block].tokens != tokens.tobytes():
                break
            blocks.append(block)
        return blocks


class IgnoresTheSalt(ComparesABlockAlone):
    """One tenant finds another's prompt when the hashes of their salts collide."""

    caught_by = "test_a_collision_never_crosses_salts"


class SkipsOverAMiss(PrefixCache):
    """Goes on after the first miss: the blocks found are no prefix."""

    caught_by = "test_the_walk_ends_at_the_first_miss"

    def match(self, hashes, token_ids, salt=""):
        return [block for block in map(self.block_of.get, hashes) if block is not None]


class TheLastOneWins(PrefixCache):
    """Two blocks of one content; the hash leads to the second, the first is never found again."""

    caught_by = "test_of_blocks_with_the_same_content_the_first_is_found"

    def register(self, block, chain_hash, tokens, parent=""):
        first = self.block_of.get(chain_hash)
        if first is not None:
            self.cached[first] = None
        self.block_of[chain_hash] = block
        self.cached[block] = CachedBlock(chain_hash, tokens.tobytes(), parent)
        self.pending.add(block)
        return self.cached[block]


class EachBlockHasAnEntryOfItsOwn(PrefixCache):
    """The block after the second copy of a prefix has a parent that no walk reaches."""

    caught_by = "test_the_same_content_is_registered_once"

    def register(self, block, chain_hash, tokens, parent=""):
        super().register(block, chain_hash, tokens, parent)
        return CachedBlock(chain_hash, tokens.tobytes(), parent)


class KeepsWhatAFailedStepRegistered(PrefixCache):
    """Registered before compute, and never taken back: garbage prefixes."""

    caught_by = "test_a_failed_step_rolls_back_what_it_registered"

    def roll_back(self):
        self.pending.clear()


class EvictsFirst(PrefixCache):
    """Evicts, then finds that it was not enough."""

    caught_by = "test_an_allocation_that_fails_evicts_nothing"

    def allocate(self, count=1):
        while self.allocator.num_free < count and self.evictable:
            block, _ = self.evictable.popitem(last=False)
            self.forget(block)
            self.allocator.reclaim(block)
        if self.allocator.num_free < count:
            raise OutOfBlocksError(f"{count} blocks wanted")
        return self.allocator.allocate(count)


class DoesNotForget(PrefixCache):
    """Hands an evicted block out while it can still be found."""

    caught_by = "test_the_tail_of_a_chain_is_evicted_before_its_head"

    def forget(self, block):
        self.pending.discard(block)


class FreesWhatIsCached(PrefixCache):
    """Nothing survives the last holder: a cache for requests that overlap in time only."""

    caught_by = "test_a_block_that_nobody_holds_keeps_its_content"

    def free(self, block):
        if self.allocator.release(block):
            if self.cached[block] is not None:
                self.forget(block)
            self.allocator.reclaim(block)


class HashesTwoTokens(PrefixCache):
    """2, the block size of the tests, written down: hits are lost, and nothing says why."""

    caught_by = "test_a_block_need_not_have_two_tokens"

    def extend_hashes(self, hashes, token_ids, salt=""):
        size, self.block_size = self.block_size, 2
        super().extend_hashes(hashes, token_ids, salt)
        self.block_size = size


# -- from the exercise's text alone --------------------------------------------------------------------------


def chain(self, hashes, token_ids, salt, name_of, begin=None):
    """`extend_hashes`, spelled out; `name_of(i, parent, content)` is what is hashed."""
    size = self.block_size
    parent = hashes[-1] if hashes and begin is None else self._hash((0, salt.encode()))
    for i in range(len(hashes), len(token_ids) // size):
        parent = self._hash(name_of(i, parent, token_ids[i * size : (i + 1) * size].tobytes()))
        hashes.append(parent)


class IgnoresTheParentHash(PrefixCache):
    """The name of a block is that of its own tokens."""

    task = 1

    def extend_hashes(self, hashes, token_ids, salt=""):
        chain(self, hashes, token_ids, salt, lambda i, parent, content: (0, content + salt.encode()))


class NamesAPlaceNotAPrefix(PrefixCache):
    """The block's number in place of its parent."""

    task = 1

    def extend_hashes(self, hashes, token_ids, salt=""):
        chain(self, hashes, token_ids, salt, lambda i, parent, content: (i, content + salt.encode()))


class IgnoresTheSaltInTheName(PrefixCache):
    """Every tenant's prompt has the same name."""

    task = 1

    def extend_hashes(self, hashes, token_ids, salt=""):
        chain(self, hashes, token_ids, "", lambda i, parent, content: (parent, content))


class BeginsAnewForEveryChunk(PrefixCache):
    """The parent of the first new block is the salt, also when there are hashes already."""

    task = 1

    def extend_hashes(self, hashes, token_ids, salt=""):
        chain(self, hashes, token_ids, salt, lambda i, parent, content: (parent, content), begin=0)


class AppendsAllOfThem(PrefixCache):
    """Hashes every full block again, behind those that are there."""

    task = 1

    def extend_hashes(self, hashes, token_ids, salt=""):
        fresh = []
        super().extend_hashes(fresh, token_ids, salt)
        hashes += fresh


class RegisteredAndNotPending(PrefixCache):
    """A block that others may copy from before it is computed."""

    task = 2

    def register(self, block, chain_hash, tokens, parent=""):
        entry = super().register(block, chain_hash, tokens, parent)
        self.pending.discard(block)
        return entry


class TrustsTheHashOfTheHolder(PrefixCache):
    """Returns the kept entry although its tokens are others: a parent that is not one."""

    task = 2

    def register(self, block, chain_hash, tokens, parent=""):
        if chain_hash in self.block_of:
            return self.cached[self.block_of[chain_hash]]
        return super().register(block, chain_hash, tokens, parent)


class TakesTheHashOver(PrefixCache):
    """Of two contents with one hash the second is found, and the first's entry stays."""

    task = 2

    def register(self, block, chain_hash, tokens, parent=""):
        kept = self.block_of.pop(chain_hash, None)
        if kept is not None and self.cached[kept].tokens == tokens.tobytes():
            self.block_of[chain_hash] = kept
        return super().register(block, chain_hash, tokens, parent)


class RollsBackButLeavesThemEvictable(PrefixCache):
    """Blocks that nobody can find stay among the evictable ones."""

    task = 2

    def roll_back(self):
        for block in list(self.pending):
            self.forget(block)


class LosesWhatNobodyHolds(PrefixCache):
    """Takes them from the evictable ones and gives them to nobody: the pool shrinks."""

    task = 2

    def roll_back(self):
        for block in list(self.pending):
            self.forget(block)
            self.evictable.pop(block, None)


class RollsEverythingBack(PrefixCache):
    """A failed step costs the whole cache."""

    task = 2

    def roll_back(self):
        super().roll_back()
        self.clear()


class TheLastHitIsLeftOut(PrefixCache):
    """Stops one block early."""

    task = 3

    def match(self, hashes, token_ids, salt=""):
        return super().match(hashes, token_ids, salt)[:-1]


class FindsAndHolds(PrefixCache):
    """Shares what it finds: looking costs a reference."""

    task = 3

    def match(self, hashes, token_ids, salt=""):
        blocks = super().match(hashes, token_ids, salt)
        for block in blocks:
            self.share(block)
        return blocks


class AnyFirstBlockWillDo(PrefixCache):
    """The first block's parent, the salt, is not compared."""

    task = 3

    def match(self, hashes, token_ids, salt=""):
        if hashes and (block := self.block_of.get(hashes[0])) is not None:
            salt = self.cached[block].parent
        return super().match(hashes, token_ids, salt)


class FreesPendingBlocks(PrefixCache):
    """A block whose step is not committed goes to the free list, and can still be found."""

    task = 4

    def free(self, block):
        if self.allocator.release(block):
            if self.cached[block] is None or block in self.pending:
                self.allocator.reclaim(block)
            else:
                self.evictable[block] = None


class EvictsTheNewest(PrefixCache):
    """A stack instead of a queue: the least recently used stays forever."""

    task = 4

    def free(self, block):
        super().free(block)
        if block in self.evictable:
            self.evictable.move_to_end(block, last=False)


class EvictsOneTooMany(PrefixCache):
    """Evicts until more than enough is free."""

    task = 4

    def allocate(self, count=1):
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted")
        while self.evictable and self.allocator.num_free <= count:
            self._evict(next(iter(self.evictable)))
        return self.allocator.allocate(count)


class NeverEvicts(PrefixCache):
    """Only free blocks count: a full cache stops the engine."""

    task = 4

    def allocate(self, count=1):
        return self.allocator.allocate(count)


class EvictableWhileHeld(PrefixCache):
    """Every release makes a block evictable, the first of two as well."""

    task = 4

    def free(self, block):
        last = self.allocator.release(block)
        if self.cached[block] is not None:
            self.evictable[block] = None
        elif last:
            self.allocator.reclaim(block)


class EvictsWithoutReclaiming(PrefixCache):
    """Forgets the block and never puts it on the free list."""

    task = 4

    def allocate(self, count=1):
        while self.evictable and self.allocator.num_free < count:
            block, _ = self.evictable.popitem(last=False)
            self.forget(block)
        return self.allocator.allocate(count)


class ChargesNoBlock(KVManager):
    """Cached blocks are free of charge, evictable or not."""

    task = 5

    def admission_charge(self, cached, num_tokens, num_cached):
        return 0, num_tokens - num_cached


class ChargesEveryCachedBlock(KVManager):
    """Held blocks are charged, too."""

    task = 5

    def admission_charge(self, cached, num_tokens, num_cached):
        return len(cached), num_tokens - num_cached


class ChargesTheHeldBlocks(KVManager):
    """The other way round: those that somebody holds."""

    task = 5

    def admission_charge(self, cached, num_tokens, num_cached):
        evictable = self.prefix_cache.count_evictable(cached) if self.prefix_cache else 0
        return len(cached) - evictable, num_tokens - num_cached


class ChargesAllEvictableBlocks(KVManager):
    """Every evictable block of the cache, whether this request shares it or not."""

    task = 5

    def admission_charge(self, cached, num_tokens, num_cached):
        evictable = len(self.prefix_cache.evictable) if self.prefix_cache else 0
        return evictable, num_tokens - num_cached


class ChargesCachedTokens(KVManager):
    """The budget pays for the whole prompt."""

    task = 5

    def admission_charge(self, cached, num_tokens, num_cached):
        return (self.prefix_cache.count_evictable(cached) if self.prefix_cache else 0), num_tokens


class ChargesWholeBlocks(KVManager):
    """Tokens that are cached, counted in blocks: the last token of a full hit is computed all the same."""

    task = 5

    def admission_charge(self, cached, num_tokens, num_cached):
        evictable = self.prefix_cache.count_evictable(cached) if self.prefix_cache else 0
        return evictable, num_tokens - len(cached) * self.block_size


class NeedsACache(KVManager):
    """Asks a cache that is not there."""

    task = 5

    def admission_charge(self, cached, num_tokens, num_cached):
        return self.prefix_cache.count_evictable(cached), num_tokens - num_cached


class KnowsByTokensAlone(PrefixCache):
    """Equal hash and equal tokens are taken for the same content, whatever is before them."""

    caught_by = "test_equal_tokens_after_another_prefix_get_an_entry_of_their_own"

    def register(self, block, chain_hash, tokens, parent=""):
        known = chain_hash in self.block_of and self.cached[self.block_of[chain_hash]]
        if known and known.tokens == tokens.tobytes():
            return known
        return super().register(block, chain_hash, tokens, parent)


class PendingIsAMiss(PrefixCache):
    """The walk ends at a block that this step computes: equal prompts of one step share nothing."""

    caught_by = "test_a_pending_block_is_found"

    def match(self, hashes, token_ids, salt=""):
        blocks = super().match(hashes, token_ids, salt)
        return blocks[: next((i for i, block in enumerate(blocks) if block in self.pending), None)]


class ParentsByTheirTokens(PrefixCache):
    """Two parents with equal tokens are taken for one, whatever came before them."""

    task = 3

    def match(self, hashes, token_ids, salt=""):
        size, found, parent = self.block_size, [], salt
        for i, chain_hash in enumerate(hashes):
            block = self.block_of.get(chain_hash)
            entry = None if block is None else self.cached[block]
            if entry is None or entry.tokens != token_ids[i * size : (i + 1) * size].tobytes():
                break
            if getattr(entry.parent, "tokens", entry.parent) != getattr(parent, "tokens", parent):
                break
            found.append(block)
            parent = entry
        return found


class EvictsAllAtOnce(PrefixCache):
    """One block is missing, and the whole cache goes."""

    task = 4

    def allocate(self, count=1):
        if self.allocator.num_free < count <= self.num_free:
            self.clear()
        return super().allocate(count)


class NoSaltNoHash(PrefixCache):
    """Without a salt, the first block follows 0 instead of the hash of an empty salt."""

    task = 1

    def extend_hashes(self, hashes, token_ids, salt=""):
        size = self.block_size
        for start in range(len(hashes) * size, len(token_ids) - size + 1, size):
            parent = hashes[-1] if hashes else self._hash((0, salt.encode())) if salt else 0
            hashes.append(self._hash((parent, token_ids[start : start + size].tobytes())))


class PendingOnceMore(PrefixCache):
    """Marks the block that has the content, although it was computed long ago."""

    task = 2

    def register(self, block, chain_hash, tokens, parent=""):
        entry = super().register(block, chain_hash, tokens, parent)
        self.pending.add(self.block_of[chain_hash])
        return entry


class OneObjectForASalt(PrefixCache):
    """Compares salts by identity, as entries are compared."""

    task = 2

    def register(self, block, chain_hash, tokens, parent=""):
        known = self.block_of.get(chain_hash)
        if known is not None and self.cached[known].parent is not parent:
            return type(self.cached[known])(chain_hash, tokens.tobytes(), parent)
        return super().register(block, chain_hash, tokens, parent)


class FindsOneObjectOfASalt(PrefixCache):
    """Compares salts by identity, as entries are compared."""

    task = 3

    def match(self, hashes, token_ids, salt=""):
        blocks = super().match(hashes, token_ids, salt)
        return blocks if blocks and self.cached[blocks[0]].parent is salt else []


class HashesTheTokensInOrder(PrefixCache):
    """The same tokens in another order have the same name."""

    task = 1

    def extend_hashes(self, hashes, token_ids, salt=""):
        def name_of(i, parent, content):
            return parent, array("i", sorted(array("i", content))).tobytes()

        chain(self, hashes, token_ids, salt, name_of)


class SaltsEveryChunk(PrefixCache):
    """The salt joins the chain again whenever the text grows."""

    task = 1

    def extend_hashes(self, hashes, token_ids, salt=""):
        size = self.block_size
        parent = hashes[-1] if hashes else 0
        if salt or not hashes:
            parent = self._hash((parent, salt.encode()))
        for start in range(len(hashes) * size, len(token_ids) - size + 1, size):
            parent = self._hash((parent, token_ids[start : start + size].tobytes()))
            hashes.append(parent)


def register(self, block, chain_hash, tokens, parent, same):
    """`PrefixCache.register`, spelled out; `same(known, entry)`: whether these two are one content."""
    entry = CachedBlock(chain_hash, tokens.tobytes(), parent)
    holder = self.block_of.get(chain_hash)
    if holder is not None:
        known = self.cached[holder]
        return known if same(known, entry) else entry
    self.block_of[chain_hash] = block
    self.cached[block] = entry
    self.pending.add(block)
    return entry


class NoHashIsZero(PrefixCache):
    """A hash of 0 is taken for none: the second content takes the place of the first."""

    task = 2

    def register(self, block, chain_hash, tokens, parent=""):
        if not chain_hash:
            self.block_of.pop(chain_hash, None)
        return super().register(block, chain_hash, tokens, parent)


class ParentsByTheirHash(PrefixCache):
    """Two parents with one hash are taken for one."""

    task = 2

    def register(self, block, chain_hash, tokens, parent=""):
        def same(known, entry):
            parents = (getattr(e.parent, "chain_hash", e.parent) for e in (known, entry))
            return known.tokens == entry.tokens and len(set(parents)) == 1

        return register(self, block, chain_hash, tokens, parent, same)


class OnePendingBlock(PrefixCache):
    """A set of its own for each block: a failed step forgets the last one."""

    task = 2

    def register(self, block, chain_hash, tokens, parent=""):
        entry = super().register(block, chain_hash, tokens, parent)
        if block in self.pending:
            self.pending = {block}
        return entry


class EntriesOfCopies(PrefixCache):
    """The second block with the same content gets its entry, too, and is evictable but never found."""

    task = 2

    def register(self, block, chain_hash, tokens, parent=""):
        entry = super().register(block, chain_hash, tokens, parent)
        self.cached[block] = entry
        return entry


class StopsAtWhatNobodyHolds(PrefixCache):
    """Ends at the first block that goes back to the free list."""

    task = 2

    def roll_back(self):
        for block in sorted(self.pending):
            if block in self.evictable:
                self._evict(block)
                break
            self.forget(block)


def walk(self, hashes, token_ids, salt, same=bytes.__eq__, behind=False, depth=None):
    """`PrefixCache.match`, spelled out: how tokens compare, whether it goes on, how many parents count."""
    size, found, parent = self.block_size, [], salt
    for i, chain_hash in enumerate(hashes):
        block = self.block_of.get(chain_hash)
        entry = None if block is None else self.cached[block]
        tokens = token_ids[i * size : (i + 1) * size].tobytes()
        right = entry is not None and same(entry.tokens, tokens)
        if not right or ((depth is None or i < depth) and entry.parent != parent):
            if behind:
                continue
            break
        found.append(block)
        parent = entry
    return found


class TokensInAnyOrder(PrefixCache):
    """Compares the tokens as a set."""

    caught_by = "test_tokens_are_compared_in_their_order_and_place"

    def match(self, hashes, token_ids, salt=""):
        return walk(self, hashes, token_ids, salt, lambda a, b: sorted(a) == sorted(b))


class TheLowByteOfEachToken(PrefixCache):
    """Compares one byte of four."""

    task = 3

    def match(self, hashes, token_ids, salt=""):
        return walk(self, hashes, token_ids, salt, lambda a, b: a[::4] == b[::4])


class TokensAnywhere(PrefixCache):
    """`in`: the tokens may be anywhere in the text."""

    task = 3

    def match(self, hashes, token_ids, salt=""):
        return walk(self, hashes, token_ids, salt, lambda a, b: a in token_ids.tobytes())


class GoesOnWithTheSameParent(PrefixCache):
    """`continue` where `break` is needed."""

    caught_by = "test_nothing_is_found_behind_a_miss"

    def match(self, hashes, token_ids, salt=""):
        return walk(self, hashes, token_ids, salt, behind=True)


class ChecksTwoParents(PrefixCache):
    """From the third block on, the parent is not compared."""

    task = 3

    def match(self, hashes, token_ids, salt=""):
        return walk(self, hashes, token_ids, salt, depth=2)


class SparesPendingBlocks(PrefixCache):
    """A pending block is not evicted, though `num_free` counts it."""

    task = 4

    def allocate(self, count=1):
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted")
        for block in [block for block in self.evictable if block not in self.pending]:
            if self.allocator.num_free < count:
                self._evict(block)
        return self.allocator.allocate(count)


class HandsOutWithoutAReference(PrefixCache):
    """Evicted blocks do not pass through the allocator: nobody holds them."""

    task = 4

    def allocate(self, count=1):
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted")
        evicted = []
        while self.allocator.num_free + len(evicted) < count:
            evicted.append(self.evictable.popitem(last=False)[0])
            self.forget(evicted[-1])
        return evicted + self.allocator.allocate(count - len(evicted))


class OneAtLeast(PrefixCache):
    """Makes room for one block, also when none is wanted."""

    task = 4

    def allocate(self, count=1):
        if self.evictable and not self.allocator.num_free:
            self._evict(next(iter(self.evictable)))
        return super().allocate(count)


class PendingIsHeld(KVManager):
    """Blocks that this step computes are not charged, though nobody may hold them any more."""

    task = 5

    def admission_charge(self, cached, num_tokens, num_cached):
        known = self.prefix_cache and cached - self.prefix_cache.pending
        return (self.prefix_cache.count_evictable(known) if known else 0), num_tokens - num_cached


class NamesAfterTheFirstBlock(PrefixCache):
    """The end of the slice is forgotten: from the second block on, the tokens do not matter."""

    task = 1

    def extend_hashes(self, hashes, token_ids, salt=""):
        size = self.block_size
        parent = hashes[-1] if hashes else self._hash((0, salt.encode()))
        for i in range(len(hashes), len(token_ids) // size):
            parent = self._hash((parent, token_ids[i * size : size].tobytes()))
            hashes.append(parent)


class UsesUpTheText(PrefixCache):
    """Takes the tokens of each block out of the text."""

    caught_by = "test_a_text_that_was_hashed_is_as_it_was"

    def extend_hashes(self, hashes, token_ids, salt=""):
        super().extend_hashes(hashes, token_ids, salt)
        del token_ids[: len(hashes) * self.block_size]


class TakesFromTheSet(KVManager):
    """Leaves the evictable blocks in the set, not a copy of it."""

    caught_by = "test_an_admission_pays_for_evictable_hits_alone"

    def admission_charge(self, cached, num_tokens, num_cached):
        cached &= set(self.prefix_cache.evictable) if self.prefix_cache else set()
        return len(cached), num_tokens - num_cached


class MakesWhatItFindsTheNewest(PrefixCache):
    """Looking counts as use: the head of a chain is evicted before its tail."""

    task = 3
    first_red = "test_looking_moves_no_block"

    def match(self, hashes, token_ids, salt=""):
        blocks = super().match(hashes, token_ids, salt)
        for block in blocks:
            if block in self.evictable:
                self.evictable.move_to_end(block)
        return blocks


class TakesWhatItFindsOffTheList(PrefixCache):
    """What is found is no longer evictable, though nobody holds it."""

    task = 3
    first_red = "test_looking_moves_no_block"

    def match(self, hashes, token_ids, salt=""):
        blocks = super().match(hashes, token_ids, salt)
        for block in blocks:
            self.evictable.pop(block, None)
        return blocks


class KeepsTheLastHash(PrefixCache):
    """The last hash is kept in the cache, for all texts together."""

    task = 1

    def extend_hashes(self, hashes, token_ids, salt=""):
        known = hashes[:]
        hashes[-1:] = [self.last] if known else []
        super().extend_hashes(hashes, token_ids, salt)
        self.last = hashes[-1] if hashes else None
        hashes[: len(known)] = known
