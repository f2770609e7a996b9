"""Beam search inside the engine: a step's candidates become forks, appends and frees.

    live beams           candidates (best first)         answer (W = 2, the best first)
    A  -1.0  --+-->      A+x  -1.2                       live: A+x, A+y
    B  -1.9  --+         A+EOS -1.4  ends                finished: A+EOS, if its score is among the best W
               |         A+y  -1.5
               |         B+z  -2.0                       B has no branch left: its blocks are freed

The scheduler forks A for every branch beyond its first (paper, Fig. 9). The semantics are those of
transformers' `generate(num_beams=W)` (5.23, `_beam_search`), which the tests use as the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

from minipaged.decoding.params import BeamSearchParams
from minipaged.decoding.stopping import StopChecker
from minipaged.scheduling.request import Branch, Request, Sample, Sequence


class BeamSearch:
    """Beam search. It keeps no state between steps: the hypotheses are the request's completions."""

    def __init__(self, params: BeamSearchParams, stop: StopChecker) -> None:
        self.params = params
        self.stop = stop
        self.num_sequences = params.beam_width

    def num_candidates(self, request: Request) -> int:
        """(1 + end tokens) * W and at least 2 * W, so that W continue even if every beam can end."""
        return max(2, 1 + len(self.stop.end_ids)) * self.params.beam_width

    def advance(self, request: Request, samples: SequenceOf[Sample]) -> list[Branch]:
        """The next beams, the best first, after the hypotheses that this step finished."""
        width = self.params.beam_width
        # Equal scores: the better beam first, then the smaller token, so that a run is reproducible.
        candidates = sorted(
            (-(sequence.cumulative_logprob + logprob), beam, token_id, logprob, number)
            for beam, (sequence, sample) in enumerate(zip(request.sequences, samples))
            for number, (token_id, logprob) in enumerate(zip(sample.token_ids, sample.logprobs))
            if logprob > -math.inf
        )[: self.num_candidates(request)]
        num_generated_tokens = request.sequences[0].num_generated_tokens + 1
        best_scores = self.best_scores(request)
        finished: list[Branch] = []
        live: list[Branch] = []
        for place, (negative_total, beam, token_id, logprob, number) in enumerate(candidates):
            if len(live) == width:
                break
            parent, total = request.sequences[beam], -negative_total
            reason, top_logprobs = self.stop.check(parent, token_id), samples[beam].top_logprobs
            top = None if top_logprobs is None else top_logprobs[number]
            branch = Branch(parent, token_id, logprob, reason, None, top)
            if reason is None:
                live.append(branch)
            # Candidates past the first W only replace those of the first W that end; they cannot end.
            elif place < width and self.enters(best_scores, self.normalized(total, num_generated_tokens)):
                finished.append(branch)
        best_total = live[0].parent.cumulative_logprob + live[0].logprob if live else -math.inf
        is_done = self.is_done(request, best_scores, best_total, num_generated_tokens)
        return finished if is_done else finished + live

    def normalized(self, total: float, num_generated_tokens: int) -> float:
        """The number by which hypotheses are compared: sum(log p) / n ** length_penalty."""
        return total / num_generated_tokens**self.params.length_penalty

    def score(self, sequence: Sequence) -> float:
        """The score of a hypothesis; 0 before the first token."""
        return self.normalized(sequence.cumulative_logprob, max(1, sequence.num_generated_tokens))

    def rank(self, request: Request) -> list[Sequence]:
        """The completions to return, the best first; of equal scores the earlier is better."""
        # (The others were among the best W when they ended, or are live beams that the scheduler had to end.)
        return sorted(request.completions, key=self.score, reverse=True)[: self.params.num_return_sequences]

    def best_scores(self, request: Request) -> list[float]:
        """The scores of the best W hypotheses so far, the highest first."""
        scores = [self.score(sequence) for sequence in request.completions]
        return sorted(scores, reverse=True)[: self.params.beam_width]

    def enters(self, best_scores: list[float], score: float) -> bool:
        """Whether a new hypothesis is among the best W; if so, its score is added to `best_scores`."""
        if len(best_scores) == self.params.beam_width and score <= best_scores[-1]:
            return False
        best_scores[:] = sorted([*best_scores, score], reverse=True)[: self.params.beam_width]
        return True

    def is_done(
        self, request: Request, best_scores: list[float], best_total: float, num_generated_tokens: int
    ) -> bool:
        """Whether W hypotheses are finished and the best live beam cannot (or need not) beat the worst."""
        if len(best_scores) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        length = num_generated_tokens
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            # Sums of logs only fall; divided by the longest length they fall the least.
            length = request.max_num_tokens - len(request.prompt_token_ids)
        return self.normalized(best_total, length) <= best_scores[-1]
