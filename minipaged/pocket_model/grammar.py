"""A template grammar: `[a|b]` picks a branch, `{slot}` is filled in, English is tidied.

Choices may nest, and a slot's text may hold choices and slots of its own. Everything random comes from the
`random.Random` that is passed in, so one seed gives one text.
"""

import random
import re
from collections.abc import Mapping
from pathlib import Path

_INNERMOST_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeio])")
_SENTENCE_START = re.compile(r"((?:^|[.!?] )\"?)([a-z])")

Groups = list[tuple[str, ...]]


def read_sections(path: Path) -> dict[str, Groups]:
    """Sections of a text file: `# name` or `# name: remark` opens one, blank lines part its groups of lines.

    What stands before the first section is for the reader of the file.
    """
    sections = {}
    for section in re.split(r"^# ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        name = title.partition(":")[0]
        sections[name] = [tuple(group.splitlines()) for group in body.strip().split("\n\n")]
    return sections


def expand(template: str, slots: Mapping[str, str], rng: random.Random) -> str:
    """Resolve every choice and slot of `template`.

    Raises KeyError for a slot that `slots` does not have.
    """
    text = template
    while "[" in text or "{" in text:
        text = _INNERMOST_CHOICE.sub(lambda choice: rng.choice(choice[1].split("|")), text, count=1)
        if "[" not in text:
            # Slots wait until the choices are settled: a "|" in a slot must not split the choice around it.
            text = _SLOT.sub(lambda slot: slots[slot[1]], text, count=1)
    return text


def tidy(text: str) -> str:
    """Fix articles (`a owl` -> `an owl`), capitals at sentence starts, and doubled spaces.

    A word after a closing quote is left alone: in `"Where?" she asked` it continues the sentence. So is the
    second half of a split speech: `"Come," he said, "let us run."`
    """
    text = re.sub(r" +", " ", text).strip()
    text = _ARTICLE.sub(r"\1n ", text)
    return _SENTENCE_START.sub(lambda start: start[1] + start[2].upper(), text)
