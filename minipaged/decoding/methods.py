"""Greedy and random sampling as a decoding method: n samples of a prompt fork once, then continue separately.

    step 1   one sequence, the prompt          needs n candidates     -> n branches, blocks shared
    step 2.. n sequences (or what is alive)    needs 1 candidate each -> 1 branch each, in place

That is all of parallel sampling (paper, section 4.4, Fig. 8): one fork; copy-on-write does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from minipaged.decoding.params import SamplingParams
from minipaged.decoding.stopping import StopChecker
from minipaged.scheduling.request import Branch, Request, Sample, Sequence


class SamplingMethod:
    """Greedy decoding and random sampling, with one sample or several; `stop` says when a sequence ends."""

    def __init__(self, params: SamplingParams, stop: StopChecker) -> None:
        self.params = params
        self.stop = stop
        self.num_sequences = params.num_samples

    def num_candidates(self, request: Request) -> int:
        """All samples from the prompt, then one from each sequence."""
        is_prompt = self.num_sequences > 1 and request.sequences[0].num_generated_tokens == 0
        return self.num_sequences if is_prompt else 1

    def advance(self, request: Request, samples: SequenceOf[Sample]) -> list[Branch]:
        """One branch per candidate, in the order of the sequences; the fork numbers the samples."""
        if self.num_sequences == 1:
            # Nearly every request of nearly every step: this saves 14 % of a step of 256 decodes.
            token_ids, logprobs, top_logprobs = samples[0]
            sequence, token_id = request.sequences[0], token_ids[0]
            reason = self.stop.check(sequence, token_id)
            top = None if top_logprobs is None else top_logprobs[0]
            return [Branch(sequence, token_id, logprobs[0], reason, None, top)]
        return [
            Branch(
                sequence,
                token_id,
                logprob,
                self.stop.check(sequence, token_id),
                number if len(sample.token_ids) > 1 else None,
                None if sample.top_logprobs is None else sample.top_logprobs[number],
            )
            for sequence, sample in zip(request.sequences, samples)
            for number, (token_id, logprob) in enumerate(zip(sample.token_ids, sample.logprobs))
        ]

    def rank(self, request: Request) -> list[Sequence]:
        """The completions to return: by sample number; of `best_of`, the n likeliest, the best first."""
        if self.params.num_samples == self.params.n:
            return sorted(request.completions, key=lambda sequence: sequence.index)
        likeliest = sorted(request.completions, key=lambda sequence: -sequence.cumulative_logprob)
        return likeliest[: self.params.n]

    def score(self, sequence: Sequence) -> None:
        """Samples have no score."""
