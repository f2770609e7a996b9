"""Lesson 09, done wrong; `caught_by` names the test that must notice."""

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
        return [branch._replace(sample_index=None) for branch in super().advance(request, samples)]


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

    caught_by = "test_an_end_past_the_first_w_candidates_is_no_hypothesis"

    def advance(self, request, samples):
        kept = self.params
        self.params = type(kept)(**{f: getattr(kept, f) for f in kept.__dataclass_fields__})
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
