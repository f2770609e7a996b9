"""Lesson 08, done wrong; `caught_by` names the test that must notice."""

from minipaged.memory import CachedBlock, OutOfBlocksError, PrefixCache


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

    caught_by = "test_the_first_block_of_a_content_is_the_one_that_is_found"

    def register(self, block, chain_hash, tokens, parent=""):
        first = self.block_of.get(chain_hash)
        if first is not None:
            self.cached[first] = None
        self.block_of[chain_hash] = block
        self.cached[block] = CachedBlock(chain_hash, tokens.tobytes(), parent)
        self.pending.add(block)
        return self.cached[block]


class EachBlockHasAnEntryOfItsOwn(PrefixCache):
    """The block after the second copy of a prefix has a parent that no walk comes by."""

    caught_by = "test_a_content_is_registered_once"

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
