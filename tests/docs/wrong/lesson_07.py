"""Lesson 07, done wrong; `caught_by` names the test that must notice."""

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
