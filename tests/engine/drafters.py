"""Drafters whose drafts a test decides; a draft model that errs; a schema that leaves little choice."""

from __future__ import annotations

import json
import random
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minipaged import pocket_model
from tests.toy import content, next_tokens

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "favourite_colour": {"enum": ["red", "green", "blue"]},
        "number_of_friends": {"type": "integer", "minimum": 0, "maximum": 99},
        "lives_in_a_village": {"type": "boolean"},
    },
    "required": ["favourite_colour", "number_of_friends", "lives_in_a_village"],
    "additionalProperties": False,
}


def blurred_copy(folder: Path, noise: float) -> Path:
    """The embedded model with noise on its weights, so that it errs now and then."""
    import torch
    from safetensors.torch import load_file, save_file

    path = Path(shutil.copytree(pocket_model.PATH, folder / "model"))
    weights = load_file(path / "model.safetensors")
    source = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        weights[name] = weight + noise * weight.float().std() * torch.randn(weight.shape, generator=source)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def changed_copy(folder: Path, **settings: Any) -> Path:
    """The embedded model with other settings in its configuration."""
    path = Path(shutil.copytree(pocket_model.PATH, folder / "model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
    return path


class Foresight:
    """Drafts what the toy model says next, but errs on purpose: a token is right with probability `right`."""

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
    """Drafts the first tokens of each list that it is given, in order; then nothing."""

    def __init__(self, *drafts: list[int]) -> None:
        self.drafts = list(drafts)

    def draft(self, sequences, counts: Sequence[int]) -> list[list[int]]:
        """See `Drafter`."""
        return [self.drafts.pop(0)[:count] if self.drafts else [] for count in counts]
