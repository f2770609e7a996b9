"""Decoding methods that follow a script: the trace says how many tokens each request generates.

They drive the scheduler's real fork, append and free paths; only the choice of tokens is made up.

    sampling   root -> n branches, then one each                     (all samples equally long)
    beams      each of the k places continues its own beam, or, with probability `switch`, one drawn
               at random from all; beams that nobody continues are freed, the others fork

The second is the neutral (Wright-Fisher) model of ancestry with k individuals; its one parameter sets how
fast beams become copies of each other. The tokens are the number of the place, so two sequences have equal
tokens exactly as far as they share ancestors.
"""

import random
from collections.abc import Sequence as SequenceOf

from minipaged.scheduling import Branch, Request, Sample, Sequence

IDLE = ("parallel_sampling", "beam_search", "drafter", "paged_attention")
"""Concepts that nothing calls here: a script takes their place, and there is no model."""

BEAM_SWITCH = 0.08
"""Probability that a place of the beam draws its parent at random; fitted once, to Fig. 15's widths."""


class Script:
    """What both methods share: a known length, and completions in no particular order."""

    __slots__ = ("_num_output_tokens", "num_sequences")

    def __init__(self, num_output_tokens: int, num_sequences: int = 1) -> None:
        self._num_output_tokens = num_output_tokens  # after which all sequences end together
        self.num_sequences = num_sequences  # alive at once

    def rank(self, request: Request) -> list[Sequence]:
        """All completions, as they are."""
        return request.completions

    def score(self, sequence: Sequence) -> None:
        """None: nothing is ranked."""


class ScriptedSampling(Script):
    """`num_sequences` samples that each end after `num_output_tokens`."""

    __slots__ = ("_branches",)

    def num_candidates(self, request: Request) -> int:
        """One for each sample from the prompt, then one each."""
        n = self.num_sequences
        return n if n > 1 and not request.sequences[0].num_generated_tokens else 1

    def advance(self, request: Request, samples: SequenceOf[Sample]) -> list[Branch]:
        """One more token for every sequence, the last with finish reason "stop"."""
        sequences, n = request.sequences, self.num_sequences
        first = sequences[0]
        done = len(first.token_ids) - first.num_prompt_tokens
        last = done + 1 == self._num_output_tokens
        # From the second token to the last but one, the result is the same: made once.
        if done < 2 or last:
            parents = sequences if len(sequences) == n else sequences * n
            reason = "stop" if last else None
            self._branches = [Branch(parent, i, 0.0, reason) for i, parent in enumerate(parents)]
        return self._branches


class ScriptedBeams(Script):
    """`num_sequences` beams; a place draws its parent from all of them with probability `switch`."""

    __slots__ = ("_random", "switch")

    def __init__(self, num_output_tokens: int, width: int, seed: int, switch: float) -> None:
        super().__init__(num_output_tokens, width)
        self.switch = switch
        self._random = random.Random(seed)

    def num_candidates(self, request: Request) -> int:
        """As many as there are beams, as in a real search."""
        return self.num_sequences

    def advance(self, request: Request, samples: SequenceOf[Sample]) -> list[Branch]:
        """Draw the parent of each place."""
        sequences, draw = request.sequences, self._random.random
        reason = "stop" if sequences[0].num_generated_tokens + 1 == self._num_output_tokens else None
        width = self.num_sequences
        branches = []
        for place in range(width):
            parent = place if len(sequences) == width else 0
            if len(sequences) > 1 and draw() < self.switch:
                parent = int(draw() * width)
            branches.append(Branch(sequences[parent], place, 0.0, reason))
        return branches
