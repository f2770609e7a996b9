"""Lesson 09, done wrong; `caught_by` names the test that must notice, `task` the task whose tests must."""

import copy
import math
from dataclasses import replace

from minipaged.decoding.beam_search import BeamSearch
from minipaged.decoding.methods import SamplingMethod
from minipaged.scheduling import Branch


class ForksAgainAndAgain(SamplingMethod):
    """Asks for n candidates at every step: n, n squared, ..."""

    caught_by = "test_the_prompt_is_computed_once"

    def num_candidates(self, request):
        return self.num_sequences


class NeverForks(SamplingMethod):
    """One sample, however many were asked for."""

    caught_by = "test_each_sample_goes_its_own_way"

    def num_candidates(self, request):
        return 1


class AllAreSampleZero(SamplingMethod):
    """The fork gives no numbers: all samples draw the same noise."""

    caught_by = "test_each_sample_goes_its_own_way"

    def advance(self, request, samples):
        return [replace(branch, sample_index=None) for branch in super().advance(request, samples)]


class FreesItsParents(SamplingMethod):
    """Frees the sequences that its branches replace; the scheduler would keep them for one branch each."""

    caught_by = "test_advance_leaves_the_samples_to_the_scheduler"

    def advance(self, request, samples):
        branches = super().advance(request, samples)
        for branch in branches:
            if branch.finish_reason is not None:
                branch.parent.table.free()
        return branches


class FreesTheBeamsThatEnd(BeamSearch):
    """Frees those beams that no branch continues."""

    caught_by = "test_advance_leaves_the_beams_to_the_scheduler"

    def advance(self, request, samples):
        branches = super().advance(request, samples)
        for sequence in request.sequences:
            if not any(branch.parent is sequence for branch in branches):
                sequence.table.free()
        return branches


class EachBeamKeepsOneChild(BeamSearch):
    """W greedy searches side by side."""

    caught_by = "test_the_best_candidates_of_all_beams_go_on_in_beam_order"

    def advance(self, request, samples):
        return [
            Branch(
                sequence,
                sample.token_ids[0],
                sample.logprobs[0],
                self.stop.check(sequence, sample.token_ids[0]),
            )
            for sequence, sample in zip(request.sequences, samples)
        ]


class ForgetsTheSumSoFar(BeamSearch):
    """Compares candidates by their last token alone."""

    caught_by = "test_candidates_are_compared_by_all_their_tokens"

    def advance(self, request, samples):
        sums = [sequence.cumulative_logprob for sequence in request.sequences]
        for sequence in request.sequences:
            sequence.cumulative_logprob = 0.0
        branches = super().advance(request, samples)
        for sequence, total in zip(request.sequences, sums):
            sequence.cumulative_logprob = total
        return branches


class EveryEndIsAHypothesis(BeamSearch):
    """Collects ends from the reserve candidates, too."""

    caught_by = "test_an_end_past_the_first_w_candidates_is_not_a_hypothesis"

    def advance(self, request, samples):
        kept, self.params = self.params, copy.copy(self.params)
        object.__setattr__(self.params, "beam_width", 2 * kept.beam_width)
        branches = super().advance(request, samples)
        self.params = kept
        ended = [branch for branch in branches if branch.finish_reason]
        return ended + [b for b in branches if not b.finish_reason][: kept.beam_width]


class IgnoresTheLengthPenalty(BeamSearch):
    """Divides by n, whatever the penalty is."""

    caught_by = "test_a_score_is_the_sum_over_a_power_of_the_length"

    def normalized(self, total, num_generated_tokens):
        return total / num_generated_tokens


class TheWorstFirst(BeamSearch):
    """Returns the completions in the order in which they ended."""

    caught_by = "test_completions_are_ranked_by_score"

    def rank(self, request):
        return request.completions[: self.params.num_return_sequences]


# -- from the exercise's text alone --------------------------------------------------------------------------


class TheSumAsTheLogprob(SamplingMethod):
    """A branch carries the sum so far; the scheduler adds it to the sum once more."""

    task = 1

    def advance(self, request, samples):
        branches = super().advance(request, samples)
        return [replace(b, logprob=b.parent.cumulative_logprob + b.logprob) for b in branches]


class TheFirstCandidatesAlternatives(SamplingMethod):
    """Every branch of a fork gets the first one's `top_logprobs`."""

    task = 1

    def advance(self, request, samples):
        first = {id(s): m.top_logprobs and m.top_logprobs[0] for s, m in zip(request.sequences, samples)}
        return [replace(b, top_logprobs=first[id(b.parent)]) for b in super().advance(request, samples)]


class NoAlternatives(SamplingMethod):
    """`top_logprobs` is asked for and left out."""

    task = 1

    def advance(self, request, samples):
        return [replace(branch, top_logprobs=None) for branch in super().advance(request, samples)]


class AllAlternatives(SamplingMethod):
    """The whole list in place of the branch's own entry."""

    task = 1

    def advance(self, request, samples):
        lists = {id(s): m.top_logprobs for s, m in zip(request.sequences, samples)}
        return [replace(b, top_logprobs=lists[id(b.parent)]) for b in super().advance(request, samples)]


class NumbersEveryStep(SamplingMethod):
    """The only candidate of a sequence is number 0: all samples become sample 0."""

    task = 1

    def advance(self, request, samples):
        return [
            replace(branch, sample_index=branch.sample_index or 0)
            for branch in super().advance(request, samples)
        ]


class TheLastOneForksAgain(SamplingMethod):
    """One live sequence is taken for the prompt: when the others have ended, the last one forks."""

    task = 1

    def num_candidates(self, request):
        return self.num_sequences if len(request.sequences) == 1 else 1


class NeverStops(SamplingMethod):
    """Nobody asks `stop`."""

    task = 1

    def advance(self, request, samples):
        return [replace(branch, finish_reason=None) for branch in super().advance(request, samples)]


class TheirFormula(BeamSearch):
    """((5 + n) / 6) ** penalty, as another system has it."""

    task = 2

    def normalized(self, total, num_generated_tokens):
        return total / ((5 + num_generated_tokens) / 6) ** self.params.length_penalty


class MultipliesThePenalty(BeamSearch):
    """n * penalty instead of n ** penalty."""

    task = 2

    def normalized(self, total, num_generated_tokens):
        return total / max(1, num_generated_tokens * self.params.length_penalty)


class RanksBySum(BeamSearch):
    """The length does not count when completions are ranked."""

    task = 2

    def rank(self, request):
        best = sorted(request.completions, key=lambda s: s.cumulative_logprob, reverse=True)
        return best[: self.params.num_return_sequences]


class TheLaterOfEquals(BeamSearch):
    """Sorts upwards and reverses: of equal scores the later comes first."""

    task = 2

    def rank(self, request):
        return sorted(request.completions, key=self.score)[::-1][: self.params.num_return_sequences]


class ReturnsThemAll(BeamSearch):
    """As many as the beam is wide."""

    task = 2

    def rank(self, request):
        return sorted(request.completions, key=self.score, reverse=True)[: self.params.beam_width]


def search(self, request, samples, **wrong):
    """`BeamSearch.advance`, spelled out, with places for mistakes."""
    width = len(request.sequences) if wrong.get("narrow") else self.params.beam_width
    token_sign, beam_sign = wrong.get("token_sign", 1), wrong.get("beam_sign", 1)
    candidates = sorted(
        (-(sequence.cumulative_logprob + logprob), beam_sign * beam, token_sign * token_id, logprob)
        for beam, (sequence, sample) in enumerate(zip(request.sequences, samples))
        for token_id, logprob in zip(sample.token_ids, sample.logprobs)
        if logprob > -math.inf
    )[: 2 * width if wrong.get("two_each") else self.num_candidates(request)]
    length = request.sequences[0].num_generated_tokens + (0 if wrong.get("old_length") else 1)
    best_scores = self.best_scores(request)
    finished, live = [], []
    for place, (negative, beam, token_id, logprob) in enumerate(candidates):
        if len(live) == width:
            break
        parent, token_id = request.sequences[abs(beam)], abs(token_id)
        branch = Branch(parent, token_id, logprob, self.stop.check(parent, token_id))
        if branch.finish_reason is None:
            live.append(branch)
        elif place < width:
            score = self.normalized(-negative, length)
            scores = list(best_scores) if wrong.get("scores_stay") else best_scores
            if wrong.get("all_enter") or self.enters(scores, score):
                finished.append(branch)
    asked = (live[-1] if wrong.get("asks_the_worst") else live[0]) if live else None
    best_total = -math.inf if asked is None else asked.parent.cumulative_logprob + asked.logprob
    if wrong.get("asks_the_parent") and asked is not None:
        best_total = asked.parent.cumulative_logprob
    if wrong.get("asks_the_best_candidate"):
        best_total = -candidates[0][0]
    if wrong.get("done_needs_an_end") and not finished:
        return live
    if not live or (not wrong.get("never_done") and self.is_done(request, best_scores, best_total, length)):
        return finished
    return live + finished if wrong.get("live_first") else finished + live


class SumsInTheBranches(BeamSearch):
    """A branch carries the sum so far; the scheduler adds it to the sum once more."""

    task = 3

    def advance(self, request, samples):
        branches = super().advance(request, samples)
        return [replace(b, logprob=b.parent.cumulative_logprob + b.logprob) for b in branches]


class TheLargerTokenOfEquals(BeamSearch):
    """Equal scores in the reverse order of their tokens."""

    task = 3

    def advance(self, request, samples):
        return search(self, request, samples, token_sign=-1)


class TheWorseBeamOfEquals(BeamSearch):
    """Equal scores in the reverse order of their beams."""

    task = 3

    def advance(self, request, samples):
        return search(self, request, samples, beam_sign=-1)


class AsManyAsTwoEach(BeamSearch):
    """2 * W candidates, however many end tokens there are."""

    task = 3

    def advance(self, request, samples):
        return search(self, request, samples, two_each=True)


class TheLengthBefore(BeamSearch):
    """Scores without the new token in the length."""

    task = 3

    def advance(self, request, samples):
        return search(self, request, samples, old_length=True)


class ForgetsThisStepsHypotheses(BeamSearch):
    """A hypothesis does not count when the next one of the same step asks to enter."""

    task = 3

    def advance(self, request, samples):
        return search(self, request, samples, scores_stay=True)


class EverybodyEnters(BeamSearch):
    """Ends are kept whatever their score."""

    task = 3

    def advance(self, request, samples):
        return search(self, request, samples, all_enter=True)


class AsksAboutTheWorst(BeamSearch):
    """Stops when the worst live beam cannot win."""

    task = 3

    def advance(self, request, samples):
        return search(self, request, samples, asks_the_worst=True)


class AsksAboutTheParent(BeamSearch):
    """The sum without the new token: the search goes on for too long."""

    task = 3

    def advance(self, request, samples):
        return search(self, request, samples, asks_the_parent=True)


class NeverDone(BeamSearch):
    """Goes on until the longest length."""

    task = 3

    def advance(self, request, samples):
        return search(self, request, samples, never_done=True)


class AsksAboutTheBestCandidate(BeamSearch):
    """The best candidate may have ended, and is no live beam: the search goes on for too long."""

    caught_by = "test_a_beam_that_ended_does_not_decide_whether_to_stop"

    def advance(self, request, samples):
        return search(self, request, samples, asks_the_best_candidate=True)


class EqualSamplesAreOne(SamplingMethod):
    """Candidates with the same token become a single branch."""

    task = 1

    def advance(self, request, samples):
        branches = {}
        for branch in super().advance(request, samples):
            branches.setdefault((id(branch.parent), branch.token_id), branch)
        return list(branches.values())


class NumbersByPlace(SamplingMethod):
    """Once sample 0 has ended, sample 1 is number 0."""

    task = 1

    def advance(self, request, samples):
        branches = super().advance(request, samples)
        places = {id(sequence): place for place, sequence in enumerate(request.sequences)}
        forks = any(len(sample.token_ids) > 1 for sample in samples)
        return branches if forks else [replace(b, sample_index=places[id(b.parent)]) for b in branches]


class CountsAllCandidates(BeamSearch):
    """The list is not cut: where the best ones end, worse ones go on."""

    task = 3

    def advance(self, request, samples):
        roomy = copy.copy(self)
        roomy.num_candidates = lambda request: sum(len(sample.token_ids) for sample in samples)
        roomy.is_done = self.is_done
        return BeamSearch.advance(roomy, request, samples)


class KeepsTheScoreOfADroppedEnd(BeamSearch):
    """`enters` is asked before the place is looked at."""

    task = 3

    def advance(self, request, samples):
        roomy = copy.copy(self)

        def is_done(request, best_scores, best_total, length):
            kept = list(best_scores)
            for sequence, sample in zip(request.sequences, samples):
                for token_id, logprob in zip(sample.token_ids, sample.logprobs):
                    score = self.normalized(sequence.cumulative_logprob + logprob, length)
                    if self.stop.check(sequence, token_id) and score not in kept:
                        self.enters(kept, score)
            return self.is_done(request, kept, best_total, length)

        roomy.is_done = is_done
        return BeamSearch.advance(roomy, request, samples)


class GoesOnUntilSomethingEnds(BeamSearch):
    """The search is done, but this step finished no hypothesis: the beams go on."""

    task = 3

    def advance(self, request, samples):
        return search(self, request, samples, done_needs_an_end=True)


class TwoAreNoFork(SamplingMethod):
    """Numbers the branches of a fork from three on: both of two samples are sample 0."""

    task = 1

    def advance(self, request, samples):
        branches = super().advance(request, samples)
        return [replace(b, sample_index=None) for b in branches] if len(branches) == 2 else branches


class AsWideAsItIs(BeamSearch):
    """As many go on as there are beams now: one beam stays alone."""

    task = 3

    def advance(self, request, samples):
        return search(self, request, samples, narrow=request.sequences[0].num_generated_tokens > 0)


class InOneOrder(BeamSearch):
    """Hypotheses and beams in one list, by their totals."""

    task = 3

    def advance(self, request, samples):
        branches = super().advance(request, samples)
        return sorted(branches, key=lambda b: -(b.parent.cumulative_logprob + b.logprob))


class RoundsTheTotals(BeamSearch):
    """Candidates that are close are equal, and the smaller token goes on."""

    task = 3

    def advance(self, request, samples):
        rounded = [
            s._replace(logprobs=[round(x, 3) if x > -math.inf else x for x in s.logprobs]) for s in samples
        ]
        return super().advance(request, rounded)


class DropsTheUnlikely(BeamSearch):
    """A candidate below -1000 is taken for a forbidden one."""

    task = 3

    def advance(self, request, samples):
        kept = [s._replace(logprobs=[x if x > -1000 else -math.inf for x in s.logprobs]) for s in samples]
        return super().advance(request, kept)


class ForksUntilTheSumFalls(SamplingMethod):
    """A sum of 0 is taken for the prompt; a token that was certain leaves it at 0."""

    task = 1

    def num_candidates(self, request):
        return self.num_sequences if request.sequences[0].cumulative_logprob == 0 else 1


class DrawsAsManyAsAreReturned(SamplingMethod):
    """`params.n` is how many texts are returned, not how many are drawn."""

    task = 1

    def num_candidates(self, request):
        return self.params.n if request.sequences[0].num_generated_tokens == 0 else 1


class TheLastLiveSampleIsZero(SamplingMethod):
    """One sequence is taken for a fork: the last live sample draws the noise of sample 0."""

    task = 1

    def advance(self, request, samples):
        branches = super().advance(request, samples)
        alone = len(samples) == 1 and self.num_sequences > 1
        return [replace(b, sample_index=i) for i, b in enumerate(branches)] if alone else branches


class AlternativesOfTheForkAlone(SamplingMethod):
    """After the fork, `top_logprobs` are left out."""

    task = 1

    def advance(self, request, samples):
        branches = super().advance(request, samples)
        return [b if b.sample_index is not None else replace(b, top_logprobs=None) for b in branches]


class NoAlternativesOfASingleSample(SamplingMethod):
    """A short way for n = 1, in which `top_logprobs` are forgotten."""

    caught_by = "test_a_branch_carries_the_alternatives_of_its_own_candidate"

    def advance(self, request, samples):
        branches = super().advance(request, samples)
        return [replace(b, top_logprobs=None) for b in branches] if self.num_sequences == 1 else branches


class ASingleSampleNeverStops(SamplingMethod):
    """A short way for n = 1, in which `stop.check` is forgotten."""

    task = 1
    first_red = "test_every_candidate_is_asked_whether_it_ends"

    def advance(self, request, samples):
        branches = super().advance(request, samples)
        return [replace(b, finish_reason=None) for b in branches] if self.num_sequences == 1 else branches


class AsksTheFirstSequence(SamplingMethod):
    """`stop.check` is asked of the first sequence for all of them."""

    task = 1

    def advance(self, request, samples):
        first = request.sequences[0]
        branches = super().advance(request, samples)
        return [replace(b, finish_reason=self.stop.check(first, b.token_id)) for b in branches]


class TheLikeliestFirst(SamplingMethod):
    """Sorts the branches: sample 0 is whichever is the likeliest."""

    task = 1

    def advance(self, request, samples):
        return sorted(super().advance(request, samples), key=lambda branch: -branch.logprob)


class AWholePenalty(BeamSearch):
    """A penalty of 0.5 is 0."""

    task = 2

    def normalized(self, total, num_generated_tokens):
        return total / num_generated_tokens ** int(self.params.length_penalty)


class NoPenaltyBelowZero(BeamSearch):
    """A penalty below 0 is 0."""

    task = 2

    def normalized(self, total, num_generated_tokens):
        return total / num_generated_tokens ** max(0.0, self.params.length_penalty)


class RoundsTheScore(BeamSearch):
    """Four digits."""

    task = 2

    def normalized(self, total, num_generated_tokens):
        return round(super().normalized(total, num_generated_tokens), 4)


class SortsTheCompletions(BeamSearch):
    """Ranks in place."""

    caught_by = "test_ranking_changes_no_completion"

    def rank(self, request):
        request.completions.sort(key=self.score, reverse=True)
        return request.completions[: self.params.num_return_sequences]


class RanksWithoutScore(BeamSearch):
    """`normalized` in place of `score`: a text without a token has no length to divide by."""

    task = 2

    def rank(self, request):
        def key(sequence):
            return -self.normalized(sequence.cumulative_logprob, sequence.num_generated_tokens)

        return sorted(request.completions, key=key)[: self.params.num_return_sequences]


def beams_by(key):
    """An advance whose next beams are in the order of `key(request, branch)`; the ends come first."""

    def advance(self, request, samples):
        branches = BeamSearch.advance(self, request, samples)
        live = [branch for branch in branches if branch.finish_reason is None]
        ended = [branch for branch in branches if branch.finish_reason is not None]
        return ended + sorted(live, key=lambda branch: key(request, branch))

    return advance


class GroupsTheBeams(BeamSearch):
    """The beams in the order of their parents, not of their totals."""

    caught_by = "test_the_next_beams_are_in_the_order_of_their_totals"
    advance = beams_by(lambda request, branch: request.sequences.index(branch.parent))


class TheLikeliestTokenFirst(BeamSearch):
    """The beams in the order of their last tokens."""

    caught_by = "test_the_next_beams_are_in_the_order_of_their_totals"
    advance = beams_by(lambda request, branch: -branch.logprob)


class AsksTheBestBeam(BeamSearch):
    """`stop.check` is asked of the first beam for all of them."""

    caught_by = "test_a_beam_is_asked_for_itself"

    def advance(self, request, samples):
        asks = copy.copy(self)
        asks.stop = copy.copy(self.stop)
        asks.stop.check = lambda _, token_id: self.stop.check(request.sequences[0], token_id)
        return BeamSearch.advance(asks, request, samples)


class AScoreEntersOnce(BeamSearch):
    """Of two ends with one score, the second is dropped."""

    caught_by = "test_two_ends_with_one_score_are_two_hypotheses"

    def enters(self, best_scores, score):
        return score not in best_scores and super().enters(best_scores, score)


class KeepsTheScores(BeamSearch):
    """The best scores are kept between the steps: a step that is tried again finds its own."""

    caught_by = "test_a_step_that_is_tried_again_finds_the_same_hypotheses"

    def best_scores(self, request):
        self.kept = getattr(self, "kept", None) or super().best_scores(request)
        return self.kept


class TheLowerPlaceOfEquals(BeamSearch):
    """Equal scores in the order of their places among the beams, not of their ends."""

    caught_by = "test_of_equal_scores_the_earlier_is_returned_first"

    def rank(self, request):
        best = sorted(request.completions, key=lambda s: (-self.score(s), s.index))
        return best[: self.params.num_return_sequences]
