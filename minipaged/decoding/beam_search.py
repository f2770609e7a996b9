"""Beam search inside the engine: a step's candidates become forks, appends and frees.

    live beams           candidates (best first)         answer
    A  -1.0  --+-->      A+x  -1.2                       live: A+x, B+y   (in beam order)
    B  -1.3  --+         A+EOS -1.4  ends                finished: A+EOS, if its score is among the best W
               |         B+y  -1.5
               |         A+z  -1.9                       C has no branch left: its blocks are freed

The paper's Fig. 9, seen from above: the scheduler forks A for every branch beyond its first, and the
sharing tree follows. The semantics are those of transformers' `generate(num_beams=W)` (5.23,
`_beam_search`), which the tests use as the oracle. Knows neither blocks nor logits.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from minipaged.decoding.params import BeamSearchParams
from minipaged.decoding.stopping import StopChecker
from minipaged.scheduling import Sample
from minipaged.scheduling.request import Branch, Request, Sequence


class BeamSearch:
    """Beam search for one request.

    Args:
        params: width, length penalty, early stopping.
        stop: when a beam ends; it must know no stop strings.
    """

    def __init__(self, params: BeamSearchParams, stop: StopChecker) -> None:
        self.params = params
        self.stop = stop
        self.num_sequences = params.beam_width
        self._best_scores: list[float] = []  # of finished hypotheses: the best W, highest first

    def num_candidates(self, request: Request) -> int:
        """W go on even if each end token is among the W best of every beam: (1 + end tokens) * W."""
        return max(2, 1 + len(self.stop.end_ids)) * self.params.beam_width

    def advance(self, request: Request, samples: SequenceOf[Sample]) -> list[Branch]:
        """The next beams, the best first, after the hypotheses that this step finished."""
        width = self.params.beam_width
        # Equal scores: the better beam first, then the smaller token, so that a run can be repeated.
        candidates = sorted(
            (-(sequence.cumulative_logprob + logprob), beam, token_id, logprob)
            for beam, (sequence, sample) in enumerate(zip(request.sequences, samples))
            for token_id, logprob in zip(sample.token_ids, sample.logprobs)
            if logprob > -float("inf")
        )[: self.num_candidates(request)]
        finished, live, totals = [], [], []
        for place, (negative_total, beam, token_id, logprob) in enumerate(candidates):
            sequence = request.sequences[beam]
            reason = self.stop.check(sequence, token_id)
            branch = Branch(sequence, token_id, logprob, reason)
            if reason is None:
                live.append(branch)
                totals.append(-negative_total)
            # The candidates past the first W are there to replace the ends among these, not to end.
            elif place < width and self._enters(-negative_total, sequence.num_generated_tokens + 1):
                finished.append(branch)
        if not live or self._is_done(request, totals[0], live[0].parent.num_generated_tokens + 1):
            return finished
        return finished + live[:width]

    def normalized(self, total: float, num_generated_tokens: int) -> float:
        """What hypotheses are compared by: sum(log p) / n ** length_penalty."""
        return total / num_generated_tokens**self.params.length_penalty

    def rank(self, request: Request) -> list[Sequence]:
        """The completions to return, the best first.

        `request.completions` has every hypothesis that was among the best W when it ended, and the
        live beams if the scheduler had to end them; of equal scores the earlier is better.
        """
        ranked = sorted(request.completions, key=lambda s: -self.score(s))
        return ranked[: self.params.num_return_sequences]

    def score(self, sequence: Sequence) -> float:
        """The score of a hypothesis."""
        return self.normalized(sequence.cumulative_logprob, sequence.num_generated_tokens)

    def _enters(self, total: float, num_generated_tokens: int) -> bool:
        """Whether a finished hypothesis is among the best W so far; remembers its score if so."""
        score = self.normalized(total, num_generated_tokens)
        if len(self._best_scores) == self.params.beam_width and score <= self._best_scores[-1]:
            return False
        self._best_scores = sorted([*self._best_scores, score], reverse=True)[: self.params.beam_width]
        return True

    def _is_done(self, request: Request, best_total: float, num_generated_tokens: int) -> bool:
        """Whether W hypotheses are finished and the best live beam cannot (or need not) beat the worst."""
        if len(self._best_scores) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        length = num_generated_tokens
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            # Sums of logs only fall; divided by the longest length they fall the least.
            length = request.max_num_tokens - len(request.prompt_token_ids)
        return self.normalized(best_total, length) <= self._best_scores[-1]
