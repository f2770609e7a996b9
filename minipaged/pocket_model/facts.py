"""Short true sentences: animals, everyday things, emoji, and the machinery of paged attention itself.

Readers of this project will ask about the last group, so the pocket model learns to answer. The emoji make
sure that generated text contains characters of several tokens. The sentences are in text/facts.txt.
"""

import random
from pathlib import Path

from minipaged.pocket_model.grammar import expand, read_sections, tidy

_SECTIONS = read_sections(Path(__file__).parent / "text" / "facts.txt")
_LINES = {name: groups[0] for name, groups in _SECTIONS.items()}


def _pairs(section: str) -> tuple[tuple[str, str], ...]:
    return tuple((first, second) for first, second in (line.split(" | ") for line in _LINES[section]))


# What a document may say of an animal; every entry continues a sentence.
_ABOUT = ("name", "home", "food", "skill", "emoji")
ANIMALS = [dict(zip(_ABOUT, line.split(" | "))) for line in _LINES["animals"]]
EMOJI = _pairs("emoji")
# Question, answer. Every answer is a full sentence, so that it reads well in a document without the question.
THE_WORLD = _pairs("the world")
PAGED_ATTENTION = _pairs("paged attention")
GREETINGS = _pairs("greetings")
SYSTEM_PROMPTS = _LINES["system prompts"]
_ANIMAL_QUESTIONS = _pairs("about an animal")
_ANIMAL_SENTENCES = _LINES["animal sentences"]


def document(rng: random.Random) -> str:
    """A few facts of one topic, as a paragraph."""
    topic = rng.choice(["animals", "the world", "paged attention", "paged attention", "emoji"])
    if topic == "animals":
        return " ".join(_about(animal, rng) for animal in rng.sample(ANIMALS, rng.randint(1, 4)))
    if topic == "emoji":
        pairs = [*EMOJI, *((f"a {animal['name']}", animal["emoji"]) for animal in ANIMALS)]
        chosen = rng.sample(pairs, rng.randint(2, 6))
        return tidy(" ".join(f"the emoji for {name} is {emoji}." for name, emoji in chosen))
    source = THE_WORLD if topic == "the world" else PAGED_ATTENTION
    return " ".join(answer for _, answer in rng.sample(source, rng.randint(3, 8)))


def question(rng: random.Random) -> tuple[str, str]:
    """A question and its one-sentence answer."""
    source = rng.choice([THE_WORLD, PAGED_ATTENTION, PAGED_ATTENTION, _ANIMAL_QUESTIONS])
    asked, answer = rng.choice(source)
    if source is not _ANIMAL_QUESTIONS:
        return asked, answer
    slots = rng.choice(ANIMALS)
    return tidy(expand(asked, slots, rng)), tidy(expand(answer, slots, rng))


def _about(animal: dict[str, str], rng: random.Random) -> str:
    return tidy(" ".join(expand(sentence, animal, rng) for sentence in _ANIMAL_SENTENCES))
