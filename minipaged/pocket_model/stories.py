"""Short stories from plots: a plot is a series of beats, each with several wordings, and the cast stays the
same.

A story picks its hero, friend, place and thing once, so that names and pronouns agree from the first line
to the last. Longer stories are two or three plots of the same cast.
"""

import random
from pathlib import Path

from minipaged.pocket_model.grammar import expand, read_sections, tidy

_SECTIONS = read_sections(Path(__file__).parent / "text" / "stories.txt")
_WORDS = {name: words.split(", ") for name, words in (line.split(": ") for line in _SECTIONS["words"][0])}
_PLOTS = [beats for name, beats in _SECTIONS.items() if name.startswith("plot ")]


def story(rng: random.Random) -> str:
    """A story of one to three plots; some start in the middle, as a prompt may."""
    slots = _cast(rng)
    paragraphs = _paragraphs(slots, rng)
    if rng.random() < 0.12:
        paragraphs = paragraphs[rng.randint(1, 2) :]
    return "\n".join(paragraphs)


def request(rng: random.Random) -> tuple[str, str]:
    """What a user might say and the story that answers it: the cast is the one asked for."""
    slots = _cast(rng)
    asked = tidy(expand(rng.choice(_SECTIONS["requests"][0]), slots, rng))
    return asked, "\n".join(_paragraphs(slots, rng, plots=1))


def _paragraphs(slots: dict[str, str], rng: random.Random, plots: int | None = None) -> list[str]:
    plots = plots or rng.choices([1, 2, 3], weights=[75, 18, 7])[0]

    def wording(section: str) -> str:
        return rng.choice(_SECTIONS[section][0])

    def paragraph(templates: list[str]) -> str:
        return " ".join(tidy(expand(template, slots, rng)) for template in templates)

    paragraphs = [paragraph([wording("openings"), wording("traits")])]
    for chapter, plot in enumerate(rng.sample(_PLOTS, plots)):
        beats = [rng.choice(beat) for beat in plot]
        if chapter:
            beats[0] = f"{wording('links')} {beats[0]}"
        middle = len(beats) // 2
        paragraphs += [paragraph(beats[:middle]), paragraph(beats[middle:])]
    paragraphs.append(paragraph([wording("morals"), wording("closings")]))
    return paragraphs


def _cast(rng: random.Random) -> dict[str, str]:
    """One value for every slot of the plots: the hero's without a prefix, the friend's with `f`."""
    hero, friend = _being(rng), _being(rng)
    while friend["name"] == hero["name"] or friend["kind"] == hero["kind"]:
        friend = _being(rng)
    slots = hero | {f"f{key}": value for key, value in friend.items()}
    slots |= zip(("thing", "thing2"), rng.sample(_WORDS["things"], 2))
    slots |= zip(("spot", "spot2", "spot3"), rng.sample(_WORDS["spots"], 3))
    # (The order of the draws is part of the corpus.)
    for words in ("skills", "places", "foods", "builds", "fears", "weather", "seasons", "workers", "counts"):
        slots[words.removesuffix("s")] = rng.choice(_WORDS[words])
    return slots


def _being(rng: random.Random) -> dict[str, str]:
    sort = rng.choices(["girl", "boy", "other"], weights=[2, 2, 6])[0]
    if sort == "other":
        name, kind, she = rng.choice(_WORDS["others"]), rng.choice(_WORDS["kinds"]), rng.random() < 0.5
    else:
        name, kind, she = rng.choice(_WORDS[f"{sort}s"]), sort, sort == "girl"
    he, him, his = ("she", "her", "her") if she else ("he", "him", "his")
    adjective = rng.choice(_WORDS["adjectives"])
    return {"name": name, "kind": kind, "adj": adjective, "he": he, "him": him, "his": his}
