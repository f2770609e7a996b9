"""Lesson 06, done wrong; `caught_by` names the test that must notice, `task` the task whose tests must."""

from minipaged.scheduling import Auto, Decision, Recompute, Swap


class FirstComeFirstPreempted(Recompute):
    """The earliest request is preempted, again and again, and never ends."""

    caught_by = "test_the_latest_arrived_is_preempted"

    def choose_victim(self, candidates):
        return candidates[0]


class NeverTheOneThatNeeds(Recompute):
    """Spares the last candidate, which may be the one that needs blocks."""

    caught_by = "test_recompute_is_one_prefill_of_prompt_and_generated_tokens"

    def choose_victim(self, candidates):
        return candidates[-2] if len(candidates) > 1 else candidates[-1]


class NamesAModeThatIsNone(Recompute):
    """The engine takes any mode but "swap" for recomputation; the log would repeat the wrong name."""

    task = 1

    def choose_mode(self, victim, kv):
        return Decision("Recompute", "no blocks are left")


class FreesWhatItGivesUp(Recompute):
    """Does the scheduler's work, too; the engine refuses such a policy."""

    task, first_red = 1, "leaves_the_victim"

    def choose_mode(self, victim, kv):
        kv.free(victim.sequences)
        return Decision("recompute", "no blocks are left")


class SwapsWithoutAsking(Swap):
    """Swaps although the host is full."""

    caught_by = "test_a_full_host_is_not_swapped_to"

    def choose_mode(self, victim, kv):
        return Decision("swap", "always")


class NeverSwaps(Swap):
    """Falls back to recomputation without need."""

    caught_by = "test_a_full_host_is_not_swapped_to"

    def choose_mode(self, victim, kv):
        return Decision("recompute", "always")


class CountsOneWay(Auto):
    """Forgets that the blocks must come back."""

    caught_by = "test_moving_costs_both_ways"

    def choose_mode(self, victim, kv):
        transfer, block, token = self.costs
        return Auto(type(self.costs)(transfer / 2, block / 2, token)).choose_mode(victim, kv)


class CountsSharedBlocksTwice(Auto):
    """Adds the blocks of each sequence up."""

    caught_by = "test_a_shared_block_moves_once"

    def choose_mode(self, victim, kv):
        if not kv.can_swap_out(victim.sequences):
            return Decision("recompute", "no room")
        blocks = sum(kv.num_blocks_of(s.num_computed_tokens) for s in victim.sequences)
        tokens = sum(s.num_computed_tokens for s in victim.sequences)
        swap = 2 * blocks * (self.costs.seconds_per_transfer + self.costs.seconds_per_block)
        cheaper = swap < tokens * self.costs.seconds_per_token
        return Decision("swap" if cheaper else "recompute", "")


class Backwards(Auto):
    """Takes the dearer way."""

    caught_by = "test_auto_takes_the_cheaper_way_and_says_why"

    def choose_mode(self, victim, kv):
        mode, reason = super().choose_mode(victim, kv)
        swaps = mode == "recompute" and kv.can_swap_out(victim.sequences)
        return Decision("swap" if swaps else "recompute", reason)


class MovesPreallocatedBlocks(Auto):
    """Counts every block of the table."""

    caught_by = "test_a_block_without_computed_tokens_does_not_move"

    def choose_mode(self, victim, kv):
        blocks = {block for sequence in victim.sequences for block in sequence.table.blocks}
        return Decision("recompute", f"moving {len(blocks)} blocks")


# -- from the exercise's text alone --------------------------------------------------------------------------


class TheLargestFirst(Recompute):
    """Preempts whoever frees the most blocks: a long request never ends."""

    task = 1

    def choose_victim(self, candidates):
        return max(candidates, key=lambda request: max(s.num_tokens for s in request.sequences))


class SaysNoReason(Recompute):
    """The log shows nobody why."""

    task = 1

    def choose_mode(self, victim, kv):
        return Decision("recompute", "")


class AsksForOneSequence(Swap):
    """The host has room for the first sequence of the group."""

    task = 2

    def choose_mode(self, victim, kv):
        can = kv.can_swap_out(victim.sequences[:1])
        return Decision("swap", "there is room") if can else Decision("recompute", "there is none")


def estimate(self, victim, kv, ways=2, block_of=None, tokens_of=None, cap=True, equal=False):
    """`Auto.choose_mode`, spelled out, with places for mistakes."""
    if not kv.can_swap_out(victim.sequences):
        return Decision("recompute", "no room")
    blocks = kv.computed_blocks(victim.sequences)
    tokens = sum(tokens_of(s) if tokens_of else s.num_computed_tokens for s in victim.sequences)
    if cap:
        tokens = min(tokens, len(blocks) * kv.block_size)
    per_block = self.costs.seconds_per_transfer + self.costs.seconds_per_block
    swap = block_of(self, len(blocks)) if block_of else ways * len(blocks) * per_block
    recompute = tokens * self.costs.seconds_per_token
    is_cheaper = swap <= recompute if equal else swap < recompute
    reason = f"moving {len(blocks)} blocks takes {swap:.3g}, computing {tokens} tokens {recompute:.3g}"
    return Decision("swap" if is_cheaper else "recompute", reason)


class SwapsOnATie(Auto):
    """<= instead of <."""

    task = 3

    def choose_mode(self, victim, kv):
        return estimate(self, victim, kv, equal=True)


class ComputesSharedTokensTwice(Auto):
    """No cap: the tokens of a shared block are computed once for each sequence."""

    task = 3

    def choose_mode(self, victim, kv):
        return estimate(self, victim, kv, cap=False)


class CountsTheNewestToken(Auto):
    """The newest token has not been computed: it is not computed again."""

    task = 3

    def choose_mode(self, victim, kv):
        return estimate(self, victim, kv, tokens_of=lambda s: s.num_tokens)


class PaysForOneTransfer(Auto):
    """One transfer for all blocks; each block is a transfer of its own."""

    task = 3

    def choose_mode(self, victim, kv):
        def cost(self, n):
            return 2 * (self.costs.seconds_per_transfer + n * self.costs.seconds_per_block)

        return estimate(self, victim, kv, block_of=cost)


class TransfersAreFree(Auto):
    """Leaves out the fixed part, which decides for small blocks."""

    task = 3

    def choose_mode(self, victim, kv):
        def cost(self, n):
            return 2 * n * self.costs.seconds_per_block

        return estimate(self, victim, kv, block_of=cost)


class NeverAsksTheHost(Auto):
    """Compares the costs and forgets that the host may be full."""

    task = 3

    def choose_mode(self, victim, kv):
        class Roomy:
            block_size = kv.block_size
            computed_blocks = staticmethod(kv.computed_blocks)

            def can_swap_out(self, sequences):
                return True

        return estimate(self, victim, Roomy())


class TheLeastWorkIsLost(Recompute):
    """Preempts whoever has generated the least, of equals the latest."""

    caught_by = "test_the_last_candidate_is_the_victim"

    def choose_victim(self, candidates):
        return min(reversed(candidates), key=lambda r: sum(s.num_generated_tokens for s in r.sequences))


class TheShortestPrompt(Recompute):
    """Preempts whoever is computed again the soonest, of equals the latest."""

    caught_by = "test_the_last_candidate_is_the_victim"

    def choose_victim(self, candidates):
        return min(reversed(candidates), key=lambda r: len(r.prompt_token_ids))


class SparesTheLast(Recompute):
    """The last candidate may be the request that asks, so the one before it is preempted."""

    caught_by = "test_the_last_candidate_is_the_victim"

    def choose_victim(self, candidates):
        return candidates[max(0, len(candidates) - 2)]


def reckon(self, victim, kv, blocks, tokens, starts=2):
    """`choose_mode` from these numbers."""
    swap = len(blocks) * (starts * self.costs.seconds_per_transfer + 2 * self.costs.seconds_per_block)
    again = tokens * self.costs.seconds_per_token
    fits = kv.can_swap_out(victim.sequences)
    reason = f"moving {len(blocks)} blocks takes {swap} s, computing {tokens} tokens {again} s"
    return Decision("swap" if fits and swap < again else "recompute", reason)


class PacksTheBlocks(Auto):
    """As many blocks as all tokens together would fill: two blocks that are half full are counted as one."""

    caught_by = "test_the_blocks_of_all_sequences_move"

    def choose_mode(self, victim, kv):
        blocks = kv.computed_blocks(victim.sequences)
        computed = min(sum(s.num_computed_tokens for s in victim.sequences), len(blocks) * kv.block_size)
        return reckon(self, victim, kv, range(kv.num_blocks_of(computed)), computed)


class StartsOnceABlock(Auto):
    """A transfer is started on the way out and not on the way in."""

    task = 3

    def choose_mode(self, victim, kv):
        blocks = kv.computed_blocks(victim.sequences)
        computed = sum(s.num_computed_tokens for s in victim.sequences)
        return reckon(self, victim, kv, blocks, min(computed, len(blocks) * kv.block_size), starts=1)


class TheAnswerIsFree(Auto):
    """Only the prompt is computed again."""

    task = 3

    def choose_mode(self, victim, kv):
        blocks = kv.computed_blocks(victim.sequences)
        computed = sum(min(s.num_computed_tokens, s.num_prompt_tokens) for s in victim.sequences)
        return reckon(self, victim, kv, blocks, min(computed, len(blocks) * kv.block_size))


class TheLongestStandsForAll(Auto):
    """The blocks of the longest sequence are taken for those of the group."""

    task = 3

    def choose_mode(self, victim, kv):
        blocks = max((kv.computed_blocks([s]) for s in victim.sequences), key=len)
        computed = sum(s.num_computed_tokens for s in victim.sequences)
        return reckon(self, victim, kv, blocks, min(computed, len(blocks) * kv.block_size))


class TheLatestByTheClock(Recompute):
    """Goes by the caller's clock, on which two requests may arrive together."""

    caught_by = "test_the_last_candidate_is_the_victim"

    def choose_victim(self, candidates):
        return max(candidates, key=lambda request: request.arrival_time)


class TheLatestByName(Recompute):
    """Names are the callers' own: r10 is not after r9."""

    caught_by = "test_the_last_candidate_is_the_victim"

    def choose_victim(self, candidates):
        return max(candidates, key=lambda request: request.request_id)


class PopsTheVictim(Recompute):
    """Takes the victim off the caller's list."""

    caught_by = "test_the_last_candidate_is_the_victim"

    def choose_victim(self, candidates):
        return candidates.pop()


def has_room(kv, victim):
    """Whether the host has a free block for each that moves; `kv.can_swap_out` knows more reasons."""
    blocks = kv.computed_blocks(victim.sequences)
    return kv.swap_space is not None and len(blocks) <= kv.swap_space.allocator.num_free


class CountsFreeHostBlocks(Swap):
    """A group that is half recomputed cannot be moved, whatever the host has."""

    task = 2

    def choose_mode(self, victim, kv):
        return Decision("swap" if has_room(kv, victim) else "recompute", "the host has room, or not")


class RemembersItsAnswer(Swap):
    """Asks once whether the host has room."""

    task = 2

    def choose_mode(self, victim, kv):
        if not hasattr(self, "decision"):
            self.decision = super().choose_mode(victim, kv)
        return self.decision


class WantsRoomForTheWholeTable(Swap):
    """Preallocated blocks hold nothing to move."""

    task = 2

    def choose_mode(self, victim, kv):
        num_blocks = len({block for s in victim.sequences for block in s.table.blocks})
        fits = kv.can_swap_out(victim.sequences) and num_blocks <= kv.swap_space.allocator.num_free
        return Decision("swap" if fits else "recompute", "the host has room, or not")


class MovesWhatHasASlot(Auto):
    """The blocks of all tokens that have a slot, computed or not."""

    caught_by = "test_a_prompt_that_is_half_computed_moves_by_half"

    def choose_mode(self, victim, kv):
        tables = [s.table for s in victim.sequences]
        blocks = {block for table in tables for block in table.blocks[: table.num_filled_blocks]}
        return reckon(self, victim, kv, blocks, sum(s.num_computed_tokens for s in victim.sequences))


class CountsEachLengthOnce(Auto):
    """A set of lengths."""

    caught_by = "test_sequences_of_one_length_are_counted_each"

    def choose_mode(self, victim, kv):
        blocks = kv.computed_blocks(victim.sequences)
        tokens = sum({s.num_computed_tokens for s in victim.sequences})
        return reckon(self, victim, kv, blocks, min(tokens, len(blocks) * kv.block_size))


class BlocksOfFour(Auto):
    """The block size of the tests, written down."""

    caught_by = "test_a_shared_block_holds_its_own_number_of_tokens"

    def choose_mode(self, victim, kv):
        blocks = kv.computed_blocks(victim.sequences)
        computed = sum(s.num_computed_tokens for s in victim.sequences)
        return reckon(self, victim, kv, blocks, min(computed, len(blocks) * 4))


class ComparesCostsPerBlock(Auto):
    """Divides by the number of blocks, of which there may be none."""

    caught_by = "test_nothing_computed_is_nothing_to_move"

    def choose_mode(self, victim, kv):
        blocks = kv.computed_blocks(victim.sequences)
        computed = min(sum(s.num_computed_tokens for s in victim.sequences), len(blocks) * kv.block_size)
        decision = reckon(self, victim, kv, blocks, computed)
        return decision._replace(reason=f"{decision.reason}: {computed / len(blocks)} tokens a block")


class ATokenTooFew(Auto):
    """One token of the computed ones is not paid for."""

    caught_by = "test_every_block_and_every_token_counts"

    def choose_mode(self, victim, kv):
        blocks = kv.computed_blocks(victim.sequences)
        computed = min(sum(s.num_computed_tokens for s in victim.sequences), len(blocks) * kv.block_size)
        mode = reckon(self, victim, kv, blocks, computed - 1).mode
        return Decision(mode, reckon(self, victim, kv, blocks, computed).reason)


class KeepsTheNumbersToItself(Auto):
    """The reason names the choice alone."""

    caught_by = "test_the_reason_states_both_sides"

    def choose_mode(self, victim, kv):
        return super().choose_mode(victim, kv)._replace(reason="the cheaper way")
