"""Lesson 06, done wrong; `caught_by` names the test that must notice."""

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
