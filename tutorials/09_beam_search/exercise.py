"""Lesson 09: parallel sampling and beam search. Write the methods that raise; the lesson is in lesson.md.

Check with    minipaged learn check 09
Stuck?        minipaged learn hint 09

A decoding method never sees a block. It returns branches: Branch(parent, token_id, logprob,
finish_reason, sample_index, top_logprobs). The parent is the sequence that the token continues; the last
three default to None, and beams need neither of the last two. The scheduler turns branches into
fork, append and free, and adds logprob to the sum.

What you may use:
    samples    one for each of request.sequences, in that order; a sample has token_ids and logprobs, lists
               with an entry for each candidate, and top_logprobs, another such list or None
    sequence   num_generated_tokens; cumulative_logprob, the sum of its tokens' log-probabilities
"""

from collections.abc import Sequence as SequenceOf

from minipaged.decoding.beam_search import BeamSearch as GivenBeamSearch
from minipaged.decoding.methods import SamplingMethod as GivenSampling
from minipaged.scheduling import Branch, Request, Sample, Sequence


class SamplingMethod(GivenSampling):
    """n samples of one prompt. Given: self.num_sequences (n), self.stop."""

    # -- task 1 ---------------------------------------------------------------------------------

    def num_candidates(self, request: Request) -> int:
        """n from the prompt (its one sequence has generated nothing yet), then one from each sequence."""
        raise NotImplementedError("Lesson 9, task 1: how many candidates each live sequence needs")

    def advance(self, request: Request, samples: SequenceOf[Sample]) -> list[Branch]:
        """One branch per candidate, in the order of the sequences.

        `self.stop.check(sequence, token_id)` is the finish reason or None. Where a sequence forks, its
        branches are numbered 0, 1, ... (`sample_index`); elsewhere the number does not change (None).
        `sample.top_logprobs`, unless None, has an entry for each candidate, to pass on to its branch.
        """
        raise NotImplementedError("Lesson 9, task 1: one branch per candidate")


class BeamSearch(GivenBeamSearch):
    """Beam search with the semantics of transformers' `generate(num_beams=W)`.

    Given: self.params (beam_width, length_penalty, early_stopping, num_return_sequences), self.stop
    (`check`, `end_ids`), self.num_candidates(request), self.score(sequence), which calls your `normalized`
    and is 0 before the first token, and what finished hypotheses need: self.best_scores(request) is a list of
    the W best scores so far; self.enters(best_scores, score) says whether a new one is among them, and adds
    it; self.is_done(request, best_scores, best_total, num_generated_tokens) says whether the live beams may
    stop. All of them include the new token: totals and scores contain its log-probability, and
    `num_generated_tokens` is one more than that of the sequence.
    """

    # -- task 2 ---------------------------------------------------------------------------------

    def normalized(self, total: float, num_generated_tokens: int) -> float:
        """The score by which hypotheses are compared: sum(log p) / n ** length_penalty."""
        raise NotImplementedError("Lesson 9, task 2: sum(log p) / n ** length_penalty")

    def rank(self, request: Request) -> list[Sequence]:
        """The best `num_return_sequences` of `request.completions`, best first; among equals, the earlier first."""
        raise NotImplementedError("Lesson 9, task 2: the best completions, the best first")

    # -- task 3 ---------------------------------------------------------------------------------

    def advance(self, request: Request, samples: SequenceOf[Sample]) -> list[Branch]:
        """The hypotheses that this step finished, then the next beams, best first.

        1. Sort all candidates of all beams in one list by cumulative log-probability (among equals: the better
           beam, which is the earlier sequence, then the smaller token). Only the best
           `self.num_candidates(request)` of the whole list count, and one of -inf never does.
        2. One that ends is a hypothesis only if it is among the first W and its score `self.enters`.
        3. The first W that do not end go on, unless `self.is_done` (called with the best of them, if there
           is one); then only the hypotheses are returned.
        """
        raise NotImplementedError("Lesson 9, task 3: the best W of all beams' candidates go on")
