"""Drafters whose guesses a test decides, over the toy model."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from tests.toy import content, next_tokens


class Foresight:
    """Knows what the toy model says next, but errs on purpose: a token is right with probability `right`."""

    def __init__(self, right: float = 1.0, vocabulary: int = 50, seed: int = 0) -> None:
        self.right = right
        self.vocabulary = vocabulary
        self.rng = random.Random(seed)
        self.asked: list[int] = []  # lengths of the drafts that were asked for

    def draft(self, sequences, counts: Sequence[int]) -> list[list[int]]:
        """See `Drafter`."""
        self.asked += counts
        return [self._continue(s.token_ids, count) for s, count in zip(sequences, counts)]

    def _continue(self, text: array, count: int) -> list[int]:
        tokens = list(text)
        for _ in range(count):
            read = [content(position, token) for position, token in enumerate(tokens)]
            (token,) = next_tokens(read, 1, self.vocabulary).token_ids
            tokens.append(token if self.rng.random() < self.right else (token + 1) % self.vocabulary)
        return tokens[len(text) :]


class Script:
    """Guesses the first tokens of what it is given, once per list; then it has no idea."""

    def __init__(self, *guesses: list[int]) -> None:
        self.guesses = list(guesses)

    def draft(self, sequences, counts: Sequence[int]) -> list[list[int]]:
        """See `Drafter`."""
        return [self.guesses.pop(0)[:count] if self.guesses else [] for count in counts]
