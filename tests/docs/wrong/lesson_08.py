"""Lesson 08, done wrong; `caught_by` names the test that must notice."""

from minipaged.memory import OutOfBlocksError, PrefixCache


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
    """One tenant finds another's prompt."""

    caught_by = "test_a_salt_keeps_prefixes_apart"

    def extend_hashes(self, hashes, token_ids, salt=""):
        super().extend_hashes(hashes, token_ids)


class TrustsTheHash(PrefixCache):
    """Two contents with one hash, and a sequence reads somebody else's keys."""

    caught_by = "test_a_hash_collision_is_a_miss"

    def match(self, hashes, token_ids):
        blocks = []
        for chain_hash in hashes:
            block = self._index.find(chain_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks


class SkipsOverAMiss(PrefixCache):
    """Goes on after the first miss: the blocks found are no prefix."""

    caught_by = "test_the_walk_ends_at_the_first_miss"

    def match(self, hashes, token_ids):
        return [block for block in map(self._index.find, hashes) if block is not None]


class TheLastPublisherWins(PrefixCache):
    """Two blocks of one content; the index points to the second, the first is never found again."""

    caught_by = "test_the_first_block_of_a_content_is_the_one_that_is_found"

    def register(self, block, chain_hash, tokens):
        first = self._index.find(chain_hash)
        if first is not None:
            self._index.remove(first)
        self._index.add(chain_hash, block)
        self._content[block] = tokens.tobytes()
        self._pending.add(block)


class KeepsWhatAFailedStepPublished(PrefixCache):
    """Published before compute, and never taken back: garbage prefixes."""

    caught_by = "test_a_failed_step_withdraws_what_it_published"

    def roll_back(self):
        self._pending.clear()


class EvictsFirst(PrefixCache):
    """Evicts, then finds that it was not enough."""

    caught_by = "test_an_allocation_that_fails_evicts_nothing"

    def allocate(self, count=1):
        while self.allocator.num_free < count and self._evictable:
            block = self._evictable.pop_oldest()
            self._forget(block)
            self.allocator.reclaim(block)
        if self.allocator.num_free < count:
            raise OutOfBlocksError(f"{count} blocks wanted")
        return self.allocator.allocate(count)


class DoesNotForget(PrefixCache):
    """Hands an evicted block out while the index still knows it."""

    caught_by = "test_the_tail_of_a_chain_is_evicted_before_its_head"

    def _forget(self, block):
        self._pending.discard(block)


class FreesWhatIsCached(PrefixCache):
    """Nothing survives the last holder: a cache for requests that overlap in time only."""

    caught_by = "test_a_block_that_nobody_holds_keeps_its_content"

    def free(self, block):
        if self.allocator.release(block):
            if self._content[block] is not None:
                self._forget(block)
            self.allocator.reclaim(block)
