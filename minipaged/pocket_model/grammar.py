"""A template grammar in one function: `[a|b]` picks a branch, `{slot}` is filled in, English is tidied.

Choices may nest, and a slot's text may hold choices and slots of its own.  Everything random comes from the
`random.Random` that is passed in, so one seed gives one text.  Knows nothing of stories, facts or models.
"""

import random
import re
from collections.abc import Mapping

_INNERMOST_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")
_SENTENCE_START = re.compile(r"((?:^|[.!?] )\"?)([a-z])")


def expand(template: str, slots: Mapping[str, str], rng: random.Random) -> str:
    """Resolve every choice and slot of `template`.

    Raises KeyError for a slot that `slots` does not have.
    """
    text = template
    while "[" in text or "{" in text:
        text = _INNERMOST_CHOICE.sub(lambda choice: rng.choice(choice[1].split("|")), text, count=1)
        if "[" not in text:
            # Slots wait until the choices around them are settled: a "|" inside a slot must not split an outer choice.
            text = _SLOT.sub(lambda slot: slots[slot[1]], text, count=1)
    return text


def tidy(text: str) -> str:
    """Fix articles (`a owl` -> `an owl`), capitals at sentence starts, and doubled spaces.

    A word after a closing quote is left alone: in `"Where?" she asked` it continues the sentence.  So is the second
    half of a split speech: `"Come," he said, "let us run."`
    """
    text = re.sub(r" +", " ", text).strip()
    text = _ARTICLE.sub(r"\1n ", text)
    return _SENTENCE_START.sub(lambda start: start[1] + start[2].upper(), text)
