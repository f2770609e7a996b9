"""Lesson 07, done wrong; `caught_by` names the test that must notice, `task` the task whose tests must."""

from minipaged.scheduling import ChunkedPrefill, FCFSScheduler


def share_of(scheduler):
    return max(1, scheduler.max_num_batched_tokens * 3 // 4)


class PromptsFirst(ChunkedPrefill):
    """Prompts take the budget, decodes what is left: the stall that chunking was to end."""

    caught_by = "test_decodes_come_first_and_share_the_step_with_a_prompt"

    def fill(self, plan, scheduler):
        budget, share = scheduler.max_num_batched_tokens, share_of(scheduler)
        budget -= scheduler.continue_prefills(plan, budget, share)
        budget -= scheduler.admit_waiting(plan, budget, share=share)
        budget -= scheduler.plan_decodes(plan, budget)
        scheduler.resume_preempted(plan, budget)


class ForgetsWhatWasSpent(ChunkedPrefill):
    """Each phase gets the whole budget."""

    caught_by = "test_decodes_come_first_and_share_the_step_with_a_prompt"

    def fill(self, plan, scheduler):
        budget, share = scheduler.max_num_batched_tokens, share_of(scheduler)
        scheduler.plan_decodes(plan, budget)
        scheduler.continue_prefills(plan, budget, share)
        scheduler.resume_preempted(plan, budget)
        scheduler.admit_waiting(plan, budget, share=share)


class WholePrompts(ChunkedPrefill):
    """Admits a prompt only if it fits whole."""

    caught_by = "test_decodes_come_first_and_share_the_step_with_a_prompt"

    def fill(self, plan, scheduler):
        budget, share = scheduler.max_num_batched_tokens, share_of(scheduler)
        budget -= scheduler.plan_decodes(plan, budget)
        budget -= scheduler.continue_prefills(plan, budget, share)
        budget -= scheduler.resume_preempted(plan, budget)
        scheduler.admit_waiting(plan, budget, whole=True, share=share)


class StarvesTheShort(ChunkedPrefill):
    """No share: a long prompt takes whole steps while 20 tokens wait behind it."""

    caught_by = "test_a_short_prompt_behind_a_long_one_runs_in_the_same_step"

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.plan_decodes(plan, budget)
        budget -= scheduler.continue_prefills(plan, budget)
        budget -= scheduler.resume_preempted(plan, budget)
        scheduler.admit_waiting(plan, budget)


class AlwaysASmallShare(ChunkedPrefill):
    """Every prompt is held to a share, the only one, too."""

    caught_by = "test_a_prompt_with_nobody_behind_it_takes_the_whole_budget"

    def fill(self, plan, scheduler):
        budget, share = scheduler.max_num_batched_tokens, share_of(scheduler)
        budget -= scheduler.plan_decodes(plan, budget)
        budget -= scheduler.continue_prefills(plan, min(budget, share))
        budget -= scheduler.resume_preempted(plan, budget)
        scheduler.admit_waiting(plan, min(budget, share))


class OnlyTheFirstGoesOn(FCFSScheduler):
    """One chunk a step, although the budget has room for the next prompt's."""

    caught_by = "test_two_prompts_go_on_in_order_of_arrival"

    def continue_prefills(self, plan, budget, share=None):
        for request in [r for r in self.running if r.is_prefill][:1]:
            return self.schedule_request(plan, request, min(budget, share or budget))
        return 0


class NewestFirst(FCFSScheduler):
    """The prompt that came last is computed first."""

    caught_by = "test_two_prompts_go_on_in_order_of_arrival"

    def continue_prefills(self, plan, budget, share=None):
        left = budget
        for request in [r for r in reversed(self.running) if r.is_prefill]:
            if left:
                left -= self.schedule_request(plan, request, min(left, share or left))
        return budget - left


class NeverGoesOn(FCFSScheduler):
    """A prompt that was cut stays cut."""

    caught_by = "test_a_prompt_goes_on_where_its_last_chunk_ended"

    def continue_prefills(self, plan, budget, share=None):
        return 0


# -- from the exercise's text alone --------------------------------------------------------------------------


def go_on(self, plan, budget, share, limit_of):
    """`continue_prefills`, spelled out; `limit_of(left, is_last)` is the limit of a request."""
    left = budget
    prefills = [request for request in self.running if request.is_prefill]
    for request in prefills:
        if not left:
            break
        left -= self.schedule_request(plan, request, limit_of(left, request is prefills[-1]))
    return budget - left


class ForgetsTheQueue(FCFSScheduler):
    """The last of the running takes all, though others wait behind it."""

    task = 1

    def continue_prefills(self, plan, budget, share=None):
        return go_on(self, plan, budget, share, lambda left, last: left if last else min(left, share or left))


class HoldsTheLastToItsShare(FCFSScheduler):
    """Nobody is behind it, and a quarter of the budget is left over."""

    task = 1

    def continue_prefills(self, plan, budget, share=None):
        return go_on(self, plan, budget, share, lambda left, last: min(left, share or left))


class SharesWhatIsLeft(FCFSScheduler):
    """Each request gets the whole budget as its limit."""

    task = 1

    def continue_prefills(self, plan, budget, share=None):
        prefills = [request for request in self.running if request.is_prefill]
        return sum(self.schedule_request(plan, r, min(budget, share or budget)) for r in prefills)


class ReturnsWhatIsLeft(FCFSScheduler):
    """The rest of the budget instead of the tokens scheduled."""

    task = 1

    def continue_prefills(self, plan, budget, share=None):
        return budget - super().continue_prefills(plan, budget, share)


def phases(scheduler, plan, order, shares=(None, None), spent=("decode", "continue", "resume")):
    """The phases in an order; only those in `spent` are taken off the budget."""
    budget = scheduler.max_num_batched_tokens
    calls = {
        "decode": lambda: scheduler.plan_decodes(plan, budget),
        "continue": lambda: scheduler.continue_prefills(plan, budget, shares[0]),
        "resume": lambda: scheduler.resume_preempted(plan, budget),
        "admit": lambda: scheduler.admit_waiting(plan, budget, share=shares[1]),
    }
    for phase in order.split():
        used = calls[phase]()
        if phase in spent or phase == "admit":
            budget -= used


ORDER = "decode continue resume admit"


class NewcomersFirst(ChunkedPrefill):
    """Admits before the preempted come back."""

    task = 2

    def fill(self, plan, scheduler):
        phases(scheduler, plan, "decode continue admit resume", [share_of(scheduler)] * 2)


class ResumesBeforePromptsGoOn(ChunkedPrefill):
    """Resumed requests take the budget of prompts that are half done."""

    task = 2

    def fill(self, plan, scheduler):
        phases(scheduler, plan, "decode resume continue admit", [share_of(scheduler)] * 2)


class ResumesForFree(ChunkedPrefill):
    """What the resumed requests spend is spent again on admission."""

    task = 2

    def fill(self, plan, scheduler):
        phases(scheduler, plan, ORDER, [share_of(scheduler)] * 2, spent=("decode", "continue"))


class SharesTheRest(ChunkedPrefill):
    """Three quarters of what the decodes left instead of three quarters of the budget."""

    task = 3

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.plan_decodes(plan, budget)
        share = max(1, budget * 3 // 4)
        budget -= scheduler.continue_prefills(plan, budget, share)
        budget -= scheduler.resume_preempted(plan, budget)
        scheduler.admit_waiting(plan, budget, share=share)


class AShareOfNothing(ChunkedPrefill):
    """1 * 3 // 4 is 0: with the smallest budget no prompt ever begins."""

    task = 3

    def fill(self, plan, scheduler):
        phases(scheduler, plan, ORDER, [scheduler.max_num_batched_tokens * 3 // 4] * 2)


class RoundsTheShareUp(ChunkedPrefill):
    """-(-3 * budget // 4): with a budget of 2 the first takes it all."""

    task = 3

    def fill(self, plan, scheduler):
        phases(scheduler, plan, ORDER, [-(-scheduler.max_num_batched_tokens * 3 // 4)] * 2)


class SharesOnlyWhenGoingOn(ChunkedPrefill):
    """The first chunk of a prompt takes the whole step."""

    task = 3

    def fill(self, plan, scheduler):
        phases(scheduler, plan, ORDER, (share_of(scheduler), None))


class SharesOnlyAtAdmission(ChunkedPrefill):
    """From its second chunk on a prompt takes the whole step."""

    task = 3

    def fill(self, plan, scheduler):
        phases(scheduler, plan, ORDER, (None, share_of(scheduler)))


class HeldBackByDecodes(FCFSScheduler):
    """Any running request behind a prompt holds it to its share, even one that only decodes."""

    caught_by = "test_a_decode_behind_a_prompt_does_not_hold_it_to_its_share"

    def continue_prefills(self, plan, budget, share=None):
        left = budget
        for index, request in enumerate(self.running):
            if left and request.is_prefill:
                behind = index + 1 < len(self.running) or bool(self.waiting)
                limit = left if share is None or not behind else min(left, share)
                left -= self.schedule_request(plan, request, limit)
        return budget - left


class OneShareForAll(FCFSScheduler):
    """What one prompt takes of the share, the next one lacks."""

    task = 1

    def continue_prefills(self, plan, budget, share=None):
        left = budget
        prefills = [request for request in self.running if request.is_prefill]
        for request in prefills:
            is_last = request is prefills[-1] and not self.waiting
            used = self.schedule_request(
                plan, request, left if share is None or is_last else min(left, share)
            )
            left -= used
            share = None if share is None else max(0, share - used)
        return budget - left


def go_on_while(self, plan, budget, share, is_behind):
    """`continue_prefills`, with a rule of its own for who is behind."""
    left = budget
    prefills = [request for request in self.running if request.is_prefill]
    for request in prefills:
        limit = left if share is None or not is_behind(prefills, request) else min(left, share)
        left -= self.schedule_request(plan, request, limit)
    return budget - left


class LooksAtTheNextAlone(FCFSScheduler):
    """A prompt behind a decode is not seen."""

    task = 1

    def continue_prefills(self, plan, budget, share=None):
        def is_behind(_, request):
            return self.waiting or any(
                r.is_prefill for r in self.running[self.running.index(request) + 1 :][:1]
            )

        return go_on_while(self, plan, budget, share, is_behind)


class SwappedOutIsBehind(FCFSScheduler):
    """A request without blocks holds the last prompt to its share."""

    task = 1

    def continue_prefills(self, plan, budget, share=None):
        def is_behind(prefills, request):
            return self.waiting or self.swapped or request is not prefills[-1]

        return go_on_while(self, plan, budget, share, is_behind)


class TheQueueIsBehindTheFirst(FCFSScheduler):
    """Looks at the queue for the first prompt alone."""

    caught_by = "test_the_queue_is_behind_the_last_of_two_prompts"

    def continue_prefills(self, plan, budget, share=None):
        def is_behind(prefills, request):
            return request is not prefills[-1] or (self.waiting and request is prefills[0])

        return go_on_while(self, plan, budget, share, is_behind)


class AsksOnceWhoIsBehind(FCFSScheduler):
    """With two prompts both are held to the share, although nobody is behind the second."""

    task = 1

    def continue_prefills(self, plan, budget, share=None):
        return go_on_while(self, plan, budget, share, lambda prefills, _: self.waiting or len(prefills) > 1)


class PassesTheShareAsWhole(ChunkedPrefill):
    """The third argument of `admit_waiting` is `whole`: no prompt is cut, and none is held to its share."""

    caught_by = "test_a_waiting_prompt_need_not_be_admitted_whole"

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        share = max(1, budget * 3 // 4)
        budget -= scheduler.plan_decodes(plan, budget)
        budget -= scheduler.continue_prefills(plan, budget, share)
        budget -= scheduler.resume_preempted(plan, budget)
        scheduler.admit_waiting(plan, budget, share)


class ADecodingGroupIsAPrompt(FCFSScheduler):
    """More than one uncomputed token: a group of two has as many when it decodes."""

    caught_by = "test_a_group_of_decodes_is_not_a_prompt"

    def continue_prefills(self, plan, budget, share=None):
        left = budget
        for request in [r for r in self.running if r.num_uncomputed_tokens > 1]:
            left -= self.schedule_request(plan, request, left if share is None else min(left, share))
        return budget - left


class OnlyFirstPromptsGoOn(FCFSScheduler):
    """What was generated before a preemption is computed again, too."""

    caught_by = "test_a_group_that_is_computed_again_goes_on"

    def continue_prefills(self, plan, budget, share=None):
        others = [r for r in self.running if r.sequences[0].num_generated_tokens]
        prefills, self.running = self.running, [r for r in self.running if r not in others]
        used = super().continue_prefills(plan, budget, share)
        self.running = prefills
        return used


class ReturnsTheLastChunk(FCFSScheduler):
    """Of two prompts, what the second one computes."""

    caught_by = "test_the_last_of_two_prompts_gets_what_is_left"

    def continue_prefills(self, plan, budget, share=None):
        used = super().continue_prefills(plan, budget, share)
        return plan.scheduled[-1].num_tokens if used else 0


class RoundsUpAtFive(ChunkedPrefill):
    """(3 * budget + 1) // 4: 4 of 5."""

    caught_by = "test_the_share_is_three_quarters_of_the_whole_budget"

    def fill(self, plan, scheduler):
        phases(scheduler, plan, ORDER, [(scheduler.max_num_batched_tokens * 3 + 1) // 4] * 2)


class OneShareForBothPhases(ChunkedPrefill):
    """What running prompts take of the share, those that wait do without."""

    task = 3

    def fill(self, plan, scheduler):
        budget, share = scheduler.max_num_batched_tokens, share_of(scheduler)
        budget -= scheduler.plan_decodes(plan, budget)
        used = scheduler.continue_prefills(plan, budget, share)
        budget -= used
        budget -= scheduler.resume_preempted(plan, budget)
        scheduler.admit_waiting(plan, budget, share=max(1, share - used))


class ResumesWithTheShare(ChunkedPrefill):
    """A share where what is left of the budget belongs."""

    caught_by = "test_a_chunked_step_has_its_phases_in_order"

    def fill(self, plan, scheduler):
        budget, share = scheduler.max_num_batched_tokens, share_of(scheduler)
        budget -= scheduler.plan_decodes(plan, budget)
        budget -= scheduler.continue_prefills(plan, budget, share)
        budget -= scheduler.resume_preempted(plan, share)
        scheduler.admit_waiting(plan, budget, share=share)


class NobodyNewWhilePromptsGoOn(ChunkedPrefill):
    """The rest of the budget is lost while a prompt is half done."""

    task = 2

    def fill(self, plan, scheduler):
        go_on = any(request.is_prefill for request in scheduler.running)
        order = "decode continue resume" if go_on else ORDER
        phases(scheduler, plan, order, [share_of(scheduler)] * 2)
