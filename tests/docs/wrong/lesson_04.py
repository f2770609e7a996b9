"""Lesson 04, done wrong; `caught_by` names the test that must notice, `task` the task whose tests must."""

from minipaged.scheduling import FCFSScheduler, PrefillFirst


class LastComeFirstServed(FCFSScheduler):
    """LIFO: the newest request is admitted first."""

    caught_by = "test_requests_are_admitted_in_the_order_of_arrival"

    def admit_waiting(self, plan, budget, whole=False, share=None):
        self.waiting.reverse()
        used = super().admit_waiting(plan, budget, whole, share)
        self.waiting.reverse()
        return used


class SkipsWhatDoesNotFit(FCFSScheduler):
    """A long request waits forever behind a stream of short ones."""

    caught_by = "test_the_first_that_does_not_fit_stops_the_admission"

    def admit_waiting(self, plan, budget, whole=False, share=None):
        used, skipped = 0, []
        while self.waiting and used < budget and not self.swapped and not plan.num_preempted:
            tokens = self.admit_first(plan, budget - used, whole, share)
            used += tokens
            if not tokens:
                skipped.append(self.waiting.popleft())
        self.waiting.extendleft(reversed(skipped))
        return used


class SpendsTheBudgetTwice(FCFSScheduler):
    """Every prompt gets the whole budget."""

    caught_by = "test_admission_ends_with_the_budget"

    def admit_waiting(self, plan, budget, whole=False, share=None):
        while self.waiting and not self.swapped and not plan.num_preempted:
            if not self.admit_first(plan, budget, whole, share):
                break
        return budget


class CutsTheBudgetToTheShare(FCFSScheduler):
    """The last in the queue is held to its share, too, although nobody is behind it."""

    caught_by = "test_the_last_in_the_queue_gets_all_that_is_left"

    def admit_waiting(self, plan, budget, whole=False, share=None):
        left = budget
        while self.waiting and left and not self.swapped and not plan.num_preempted:
            used = self.admit_first(plan, left if share is None else min(left, share), whole)
            if not used:
                break
            left -= used
        return budget - left


class AdmitsWhatWasJustPreempted(FCFSScheduler):
    """Room that came free by preemption is given to whoever waits: the victim itself."""

    caught_by = "test_nobody_is_admitted_in_a_step_that_preempted"

    def admit_waiting(self, plan, budget, whole=False, share=None):
        left = budget
        while self.waiting and left and not self.swapped:
            used = self.admit_first(plan, left, whole, share)
            if not used:
                break
            left -= used
        return budget - left


class DecodesOneRequest(FCFSScheduler):
    """One request after the other: no batching at all."""

    caught_by = "test_a_prompt_runs_in_one_step_alone"

    def plan_decodes(self, plan, budget):
        later, self.running = self.running[1:], self.running[:1]
        used = super().plan_decodes(plan, budget)
        self.running += later
        return used


class NeverMakesRoom(FCFSScheduler):
    """Takes blocks without asking whether there are any."""

    caught_by = "test_the_latest_arrived_is_preempted"

    def make_room(self, plan, request, needed, position):
        return True


class ForgetsTheCopies(FCFSScheduler):
    """Grows the tables and drops the copy-on-write copies."""

    caught_by = "test_every_output_is_that_of_the_request_alone"

    def plan_decodes(self, plan, budget):
        before = len(plan.copies)
        used = super().plan_decodes(plan, budget)
        del plan.copies[before:]
        return used


class DecodesWhoFits(FCFSScheduler):
    """A group that the budget is too small for is overtaken by whoever stands behind it."""

    caught_by = "test_the_first_group_beyond_the_budget_ends_the_decodes"

    def plan_decodes(self, plan, budget):
        left = budget
        for request in [r for r in self.running if not r.is_prefill]:
            needed = self.kv.blocks_to_grow(request.sequences)
            if len(request.sequences) <= left:
                plan.copies += self.kv.grow(request.sequences, needed)
                left -= self.schedule_request(plan, request, left)
        return budget - left


class DecodesPrompts(FCFSScheduler):
    """Schedules a half computed prompt as if it were one token."""

    caught_by = "test_a_prompt_that_goes_on_is_not_decoded"

    def plan_decodes(self, plan, budget):
        left = budget
        for request in list(self.running):
            needed = self.kv.blocks_to_grow(request.sequences)
            plan.copies += self.kv.grow(request.sequences, needed)
            left -= self.schedule_request(plan, request, left)
        return budget - left


class OffersEverybody(FCFSScheduler):
    """A request that is scheduled already may be preempted."""

    caught_by = "test_those_that_are_scheduled_are_not_candidates_for_preemption"

    def make_room(self, plan, request, needed, position):
        return super().make_room(plan, request, needed, 0)


class MixesPromptsAndDecodes(PrefillFirst):
    """Decodes with what the prompts left of the budget."""

    caught_by = "test_a_prompt_runs_in_one_step_alone"

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.continue_prefills(plan, budget)
        budget -= scheduler.admit_waiting(plan, budget, whole=True)
        budget -= scheduler.plan_decodes(plan, budget)
        scheduler.resume_preempted(plan, budget)


def decode_if_there_are_no_prompts(plan, scheduler):
    """The second half of `PrefillFirst.fill`, as it should be."""
    if not plan.scheduled:
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.plan_decodes(plan, budget)
        scheduler.resume_preempted(plan, budget)


class CutsPrompts(PrefillFirst):
    """Admits a prompt that does not fit whole."""

    caught_by = "test_a_prompt_is_not_cut_while_another_is_in_the_step"

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.continue_prefills(plan, budget)
        scheduler.admit_waiting(plan, budget)
        decode_if_there_are_no_prompts(plan, scheduler)


class SpendsOnAdmissionWhatThePromptsSpent(PrefillFirst):
    """Offers the whole budget to every phase."""

    caught_by = "test_each_phase_is_offered_what_the_one_before_it_left"

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        scheduler.continue_prefills(plan, budget)
        scheduler.admit_waiting(plan, budget, whole=True)
        decode_if_there_are_no_prompts(plan, scheduler)


class BringsBackBeyondTheBudget(PrefillFirst):
    """Offers swapped-out requests what the decodes have spent."""

    caught_by = "test_each_phase_is_offered_what_the_one_before_it_left"

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.continue_prefills(plan, budget)
        scheduler.admit_waiting(plan, budget, whole=True)
        if not plan.scheduled:
            scheduler.plan_decodes(plan, scheduler.max_num_batched_tokens)
            scheduler.resume_preempted(plan, scheduler.max_num_batched_tokens)


# -- from the exercise's text alone --------------------------------------------------------------------------


def admit(self, plan, budget, whole=False, share=None, stop_for_swapped=True):
    """`admit_waiting`, spelled out."""
    left = budget
    while self.waiting and left and not plan.num_preempted and not (stop_for_swapped and self.swapped):
        used = self.admit_first(plan, left, whole, share)
        if not used:
            break
        left -= used
    return budget - left


class AdmitsBeforeTheSwapped(FCFSScheduler):
    """A newcomer takes the room that a swapped request waits for."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        return admit(self, plan, budget, whole, share, stop_for_swapped=False)


class ForgetsWhole(FCFSScheduler):
    """Does not pass `whole` on."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        return admit(self, plan, budget, False, share)


class ForgetsTheShare(FCFSScheduler):
    """Does not pass `share` on."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        return admit(self, plan, budget, whole)


class ReturnsTheRest(FCFSScheduler):
    """What is left of the budget instead of what was spent."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        return budget - admit(self, plan, budget, whole, share)


class AdmitsOne(FCFSScheduler):
    """An `if` where a `while` should be."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        if not self.waiting or self.swapped or plan.num_preempted:
            return 0
        return self.admit_first(plan, budget, whole, share)


def decode(self, plan, budget, **wrong):
    """`plan_decodes`, spelled out, with places for mistakes."""
    left = budget
    position = 0
    while position < len(self.running):
        request = self.running[position]
        sequences = request.sequences
        position += 1
        if request.is_prefill:
            continue
        if len(sequences) > left:
            break
        needed = self.kv.blocks_to_grow(sequences)
        wanted = len(sequences) if wrong.get("a_block_each") else needed
        if wanted and not self.make_room(plan, request, wanted, position - 1):
            break
        copies = self.kv.grow(sequences, needed)
        if wrong.get("last_copies"):
            plan.copies = copies
        else:
            plan.copies += copies
        self.schedule_request(plan, request, left)
        left -= 1 if wrong.get("one_token_a_request") else len(sequences)
    return len(plan.scheduled) if wrong.get("counts_the_plan") else budget - left


class ABlockForEverySequence(FCFSScheduler):
    """Makes room for blocks that nobody needs yet: preempts without need."""

    task = 2

    def plan_decodes(self, plan, budget):
        return decode(self, plan, budget, a_block_each=True)


class KeepsTheLastCopies(FCFSScheduler):
    """= instead of +=: the copies of the requests before are lost."""

    task = 2

    def plan_decodes(self, plan, budget):
        return decode(self, plan, budget, last_copies=True)


class OneTokenARequest(FCFSScheduler):
    """A group of four costs one token of the budget."""

    task = 2

    def plan_decodes(self, plan, budget):
        return decode(self, plan, budget, one_token_a_request=True)


class CountsThePlan(FCFSScheduler):
    """Returns what the whole step has scheduled, prompts included."""

    task = 2

    def plan_decodes(self, plan, budget):
        return decode(self, plan, budget, counts_the_plan=True)


class ResumesFirst(PrefillFirst):
    """Swapped requests come back before the running ones have grown."""

    task = 3

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.continue_prefills(plan, budget)
        scheduler.admit_waiting(plan, budget, whole=True)
        if not plan.scheduled:
            budget = scheduler.max_num_batched_tokens
            budget -= scheduler.resume_preempted(plan, budget)
            scheduler.plan_decodes(plan, budget)


class NobodyComesBack(PrefillFirst):
    """Whoever was swapped out stays there."""

    task = 3

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.continue_prefills(plan, budget)
        scheduler.admit_waiting(plan, budget, whole=True)
        if not plan.scheduled:
            scheduler.plan_decodes(plan, scheduler.max_num_batched_tokens)


class NewPromptsFirst(PrefillFirst):
    """A prompt that is half done waits for those behind it."""

    task = 3

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.admit_waiting(plan, budget, whole=True)
        budget -= scheduler.continue_prefills(plan, budget)
        if not plan.scheduled:
            budget -= scheduler.plan_decodes(plan, budget)
            scheduler.resume_preempted(plan, budget)


class CountsRequests(FCFSScheduler):
    """Returns how many requests decode, not how many tokens they compute."""

    caught_by = "test_every_sequence_of_a_request_costs_a_token"

    def plan_decodes(self, plan, budget):
        before = len(plan.scheduled)
        super().plan_decodes(plan, budget)
        return len({s.sequence.request.request_id for s in plan.scheduled[before:]})


class TheLastCopiesAlone(FCFSScheduler):
    """`plan.copies = ...`: each request's copies replace those of the ones before it."""

    caught_by = "test_the_copies_of_every_request_are_in_the_plan"

    def plan_decodes(self, plan, budget):
        grow = self.kv.grow

        def forgetful(sequences, needed):
            copies = grow(sequences, needed)
            plan.copies.clear()
            return copies

        self.kv.grow = forgetful
        try:
            return super().plan_decodes(plan, budget)
        finally:
            del self.kv.grow


class PreemptsThenStops(FCFSScheduler):
    """Makes room first and looks at the budget after that."""

    task = 2

    def plan_decodes(self, plan, budget):
        left, index = budget, 0
        while index < len(self.running):
            request = self.running[index]
            if request.is_prefill:
                index += 1
                continue
            needed = self.kv.blocks_to_grow(request.sequences)
            if needed > self.kv.num_free and not self.make_room(plan, request, needed, index):
                continue
            if len(request.sequences) > left:
                break
            plan.copies += self.kv.grow(request.sequences, needed)
            left -= self.schedule_request(plan, request, left)
            index += 1
        return budget - left


def decode_in_order(self, plan, budget, requests, at_a_prompt="continue", grow_always=True):
    """`plan_decodes` over `requests`, with a mistake or two."""
    left = budget
    for index, request in enumerate(requests):
        if request.is_prefill:
            if at_a_prompt == "break":
                break
            continue
        if len(request.sequences) > left:
            break
        needed = self.kv.blocks_to_grow(request.sequences)
        if needed > self.kv.num_free and not self.make_room(plan, request, needed, index):
            break
        if needed or grow_always:
            plan.copies += self.kv.grow(request.sequences, needed)
        left -= self.schedule_request(plan, request, left)
    return budget - left


class APromptEndsTheDecodes(FCFSScheduler):
    """`break` for `continue`."""

    task = 2

    def plan_decodes(self, plan, budget):
        return decode_in_order(self, plan, budget, self.running, at_a_prompt="break")


class WalksACopy(FCFSScheduler):
    """A victim that was swapped out is still on the copy."""

    task = 2

    def plan_decodes(self, plan, budget):
        return decode_in_order(self, plan, budget, list(self.running))


class GrowsOnlyForABlock(FCFSScheduler):
    """The table does not hear of a token that goes to a slot it has."""

    task = 2

    def plan_decodes(self, plan, budget):
        return decode_in_order(self, plan, budget, self.running, grow_always=False)


class DecodesOnlyIfNobodyWaits(PrefillFirst):
    """A request that does not fit stops all decodes."""

    task = 3

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.continue_prefills(plan, budget)
        budget -= scheduler.admit_waiting(plan, budget, whole=True)
        if not plan.scheduled and not scheduler.waiting:
            budget -= scheduler.plan_decodes(plan, budget)
            scheduler.resume_preempted(plan, budget)


class ResumesIfNobodyDecodes(PrefillFirst):
    """Swapped-out requests wait until the last running one has ended."""

    task = 3

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.continue_prefills(plan, budget)
        scheduler.admit_waiting(plan, budget, whole=True)
        if not plan.scheduled:
            scheduler.plan_decodes(plan, scheduler.max_num_batched_tokens)
        if not plan.scheduled:
            scheduler.resume_preempted(plan, scheduler.max_num_batched_tokens)


class APreemptionEndsTheDecodes(FCFSScheduler):
    """One request gets its token, and the others wait for the next step."""

    task = 2

    def plan_decodes(self, plan, budget):
        left, index = budget, 0
        while index < len(self.running) and not plan.num_preempted:
            request = self.running[index]
            index += 1
            if request.is_prefill:
                continue
            if len(request.sequences) > left:
                break
            needed = self.kv.blocks_to_grow(request.sequences)
            if needed > self.kv.num_free and not self.make_room(plan, request, needed, index - 1):
                break
            plan.copies += self.kv.grow(request.sequences, needed)
            left -= self.schedule_request(plan, request, left)
        return budget - left


class ALongPromptEndsTheWalk(FCFSScheduler):
    """The budget is looked at before it is clear that the request has only its newest tokens to compute."""

    caught_by = "test_a_group_with_more_to_compute_does_not_end_the_decodes"

    def plan_decodes(self, plan, budget):
        left, index = budget, 0
        while index < len(self.running) and left:
            request = self.running[index]
            index += 1
            if len(request.sequences) > left:
                break
            if request.is_prefill:
                continue
            needed = self.kv.blocks_to_grow(request.sequences)
            if needed > self.kv.num_free and not self.make_room(plan, request, needed, index - 1):
                index -= 1
                continue
            plan.copies += self.kv.grow(request.sequences, needed)
            left -= self.schedule_request(plan, request, left)
        return budget - left


class KeepsATokenBack(FCFSScheduler):
    """`left > 1`: the last token of the budget is nobody's."""

    caught_by = "test_the_last_token_of_the_budget_goes_to_a_prompt"

    def admit_waiting(self, plan, budget, whole=False, share=None):
        left = budget
        while self.waiting and left > 1 and not self.swapped and not plan.num_preempted:
            used = self.admit_first(plan, left, whole, share)
            if not used:
                break
            left -= used
        return budget - left


class CutsTheFirstBesideAPrompt(FCFSScheduler):
    """Takes the step for empty because this call has admitted nobody yet."""

    caught_by = "test_beside_a_prompt_that_goes_on_the_first_is_admitted_whole_too"

    def admit_waiting(self, plan, budget, whole=False, share=None):
        left = budget
        while self.waiting and left and not self.swapped and not plan.num_preempted:
            used = self.admit_first(plan, left, whole and left < budget, share)
            if not used:
                break
            left -= used
        return budget - left


class AdmitsToAnEmptyStepOnly(FCFSScheduler):
    """A prompt that goes on keeps all others waiting."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        return 0 if plan.scheduled else super().admit_waiting(plan, budget, whole, share)


class AdmissionCountsThePlan(FCFSScheduler):
    """Returns the tokens of the whole step."""

    task = 1

    def admit_waiting(self, plan, budget, whole=False, share=None):
        super().admit_waiting(plan, budget, whole, share)
        return plan.num_tokens


class AllAdmittedHaveOneShare(FCFSScheduler):
    """What the first prompt takes of the share, the second one lacks."""

    caught_by = "test_each_waiting_prompt_has_a_share_of_its_own"

    def admit_waiting(self, plan, budget, whole=False, share=None):
        left = budget
        while self.waiting and left and not self.swapped and not plan.num_preempted:
            used = self.admit_first(plan, left, whole, share)
            if not used:
                break
            left -= used
            share = share and max(1, share - used)
        return budget - left


def walk(self, plan, budget, size_of=None, is_prefill=None, more=0):
    """`plan_decodes`, with one mistake."""
    left, position = budget, 0
    while position < len(self.running):
        request = self.running[position]
        if is_prefill(request) if is_prefill else request.is_prefill:
            position += 1
            continue
        if (size_of(request) if size_of else len(request.sequences)) > left:
            break
        needed = self.kv.blocks_to_grow(request.sequences)
        if needed > self.kv.num_free and not self.make_room(plan, request, needed + more, position):
            continue
        plan.copies += self.kv.grow(request.sequences, needed)
        left -= self.schedule_request(plan, request, left)
        position += 1
    return budget - left


class CountsSamplesThatEnded(FCFSScheduler):
    """The sequences that a request began with, not those it has."""

    caught_by = "test_a_sample_that_ended_costs_no_token"

    def plan_decodes(self, plan, budget):
        return walk(self, plan, budget, size_of=lambda request: request.method.num_sequences)


class LooksAtTheFirstSequence(FCFSScheduler):
    """The first sequence of a group may be ready when the others are not."""

    caught_by = "test_a_group_is_decoded_when_all_its_sequences_are_ready"

    def plan_decodes(self, plan, budget):
        return walk(self, plan, budget, is_prefill=lambda r: r.sequences[0].num_uncomputed_tokens > 1)


class MakesRoomForWhatIsMissing(FCFSScheduler):
    """Subtracts the free blocks: `make_room` finds that there are as many, and nobody is preempted."""

    caught_by = "test_room_is_made_for_all_blocks_that_are_needed"

    def plan_decodes(self, plan, budget):
        return walk(self, plan, budget, more=-self.kv.num_free)


class MakesRoomForOneMore(FCFSScheduler):
    """A block in reserve, for which somebody is preempted."""

    caught_by = "test_no_more_is_preempted_than_is_needed"

    def plan_decodes(self, plan, budget):
        return walk(self, plan, budget, more=1)


class TakesEqualForNothing(PrefillFirst):
    """Compares what the two phases spent with each other."""

    caught_by = "test_a_step_calls_its_phases_in_order"

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        used = scheduler.continue_prefills(plan, budget)
        if scheduler.admit_waiting(plan, budget - used, whole=True) == used:
            budget -= scheduler.plan_decodes(plan, budget)
            scheduler.resume_preempted(plan, budget)


class WholeInAnEmptyStepOnly(PrefillFirst):
    """Beside a prompt that goes on, the next one is cut."""

    caught_by = "test_every_prompt_of_a_step_is_whole_and_has_no_share"

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        used = scheduler.continue_prefills(plan, budget)
        scheduler.admit_waiting(plan, budget - used, whole=not used)
        decode_if_there_are_no_prompts(plan, scheduler)


class HoldsPromptsToAShare(PrefillFirst):
    """The share of lesson 07: here prompts are not cut for those behind them."""

    task = 3

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        used = scheduler.continue_prefills(plan, budget, budget * 3 // 4)
        scheduler.admit_waiting(plan, budget - used, whole=True, share=budget * 3 // 4)
        decode_if_there_are_no_prompts(plan, scheduler)


class AddsUpSequences(FCFSScheduler):
    """Asks for the growth of each sequence alone: a shared block would be copied for both of two samples."""

    caught_by = "test_a_copy_that_a_group_shares_is_counted_once"

    def plan_decodes(self, plan, budget):
        left = budget
        for position, request in enumerate(self.running):
            if request.is_prefill:
                continue
            if len(request.sequences) > left:
                break
            needed = sum(self.kv.blocks_to_grow([sequence]) for sequence in request.sequences)
            if needed > self.kv.num_free and not self.make_room(plan, request, needed, position):
                break
            plan.copies += self.kv.grow(request.sequences, needed)
            left -= self.schedule_request(plan, request, left)
        return budget - left


class SchedulesBeforeItGrows(FCFSScheduler):
    """Schedules in the blocks of before: the prefix cache would find one sample under another's tokens."""

    caught_by = "test_a_group_is_scheduled_in_the_blocks_that_it_has_grown"

    def plan_decodes(self, plan, budget):
        left = budget
        for position, request in enumerate(self.running):
            if request.is_prefill:
                continue
            if len(request.sequences) > left:
                break
            needed = self.kv.blocks_to_grow(request.sequences)
            if needed > self.kv.num_free and not self.make_room(plan, request, needed, position):
                break
            left -= self.schedule_request(plan, request, left)
            plan.copies += self.kv.grow(request.sequences, needed)
        return budget - left
