"""Short stories from plots: a plot is a row of beats, a beat has several wordings, the slots stay one cast.

A story picks its hero, friend, place and thing once, so that names and pronouns agree from the first line to the
last.  Longer stories are two or three plots of the same cast.  Knows nothing of tokenizers or models.
"""

import random

from minipaged.pocket_model.grammar import expand, tidy
from minipaged.pocket_model.plots import CLOSINGS, LINKS, MORALS, OPENINGS, PLOTS, REQUESTS, TRAITS

_GIRLS = ["Mia", "Lily", "Anna", "Zoë", "Nora", "Ruby", "Ella", "Ida", "Clara", "Rosa", "June", "Hana"]
_BOYS = ["Tom", "Ben", "Leo", "Max", "Sam", "Finn", "Otto", "Hugo", "Emil", "Noah", "Theo", "Kai"]
_OTHERS = [
    "Pip",
    "Bolt",
    "Momo",
    "Bramble",
    "Pepper",
    "Button",
    "Juno",
    "Biscuit",
    "Clover",
    "Tiko",
    "Nutmeg",
    "Pebble",
]
_KINDS = [
    "robot",
    "robot",
    "fox",
    "rabbit",
    "turtle",
    "owl",
    "mouse",
    "bear",
    "cat",
    "dog",
    "duck",
    "frog",
    "hedgehog",
    "dragon",
    "squirrel",
]
_ADJECTIVES = [
    "little",
    "little",
    "small",
    "young",
    "clever",
    "curious",
    "quiet",
    "brave",
    "gentle",
    "cheerful",
    "shy",
    "kind",
]
_PEOPLE_WORK = ["baker", "fisherman", "gardener", "painter", "clockmaker", "shepherd", "librarian", "teacher"]

_PLACES = (
    "in a quiet village", "in the green forest", "near the sea", "on a small farm", "at the edge of a big city",
    "in a valley between two mountains", "beside a wide river", "on a windy hill", "in an old mill",
    "on a tiny island", "in a house with a red roof", "next to a deep lake", "at the end of a long road",
)  # fmt: skip
_SPOTS = (
    "under the old bridge", "behind the barn", "on top of the hill", "near the well", "inside a hollow tree",
    "beside the stream", "at the bottom of the garden", "under a pile of leaves", "on the kitchen table",
    "behind the waterfall", "in the tall grass", "next to the stone wall", "at the market", "under the bed",
)  # fmt: skip
_THINGS = (
    "red kite", "silver key", "golden bell", "wooden boat", "blue scarf", "little drum", "paper lantern",
    "glass marble", "old map", "music box", "green umbrella", "brass compass", "white shell", "picture book",
    "copper coin", "small lamp", "long rope", "straw hat", "red ball", "shiny button", "magic stone",
)  # fmt: skip
_FOODS = [
    "warm bread",
    "sweet apples",
    "hot soup",
    "berry pie",
    "honey cakes",
    "fresh cheese",
    "pancakes",
    "roasted nuts",
    "ripe plums",
]
_BUILDS = [
    "raft",
    "tree house",
    "kite",
    "bridge",
    "windmill",
    "wagon",
    "flying machine",
    "clock",
    "boat",
    "swing",
    "lighthouse",
]
_SKILLS = [
    "sing",
    "paint",
    "swim",
    "dance",
    "read",
    "play the flute",
    "whistle",
    "bake bread",
    "skate",
    "climb trees",
    "write letters",
]
_FEARS = ["the dark", "thunder", "deep water", "high places", "the big wind", "strangers", "the long tunnel"]
_WEATHER = ["sunny", "rainy", "windy", "cold", "warm", "foggy", "bright", "snowy", "stormy", "cloudy"]
_SEASONS = ["spring", "summer", "autumn", "winter"]


def story(rng: random.Random) -> str:
    """A story of one to three plots; some start in the middle, as a prompt may."""
    slots = _cast(rng)
    paragraphs = _paragraphs(slots, rng)
    if rng.random() < 0.12:
        paragraphs = paragraphs[rng.randint(1, 2) :]
    return "\n".join(paragraphs)


def request(rng: random.Random) -> tuple[str, str]:
    """What a user might say and the story that answers it: the hero, and sometimes the thing, are as asked."""
    slots = _cast(rng)
    return tidy(expand(rng.choice(REQUESTS), slots, rng)), "\n".join(_paragraphs(slots, rng, plots=1))


def _paragraphs(slots: dict[str, str], rng: random.Random, plots: int | None = None) -> list[str]:
    plots = plots or rng.choices([1, 2, 3], weights=[75, 18, 7])[0]

    def told(templates: list[str]) -> str:
        return " ".join(tidy(expand(template, slots, rng)) for template in templates)

    paragraphs = [told([rng.choice(OPENINGS), rng.choice(TRAITS)])]
    for chapter, plot in enumerate(rng.sample(PLOTS, plots)):
        beats = [rng.choice(beat) for beat in plot]
        if chapter:
            beats[0] = f"{rng.choice(LINKS)} {beats[0]}"
        middle = len(beats) // 2
        paragraphs += [told(beats[:middle]), told(beats[middle:])]
    paragraphs.append(told([rng.choice(MORALS), rng.choice(CLOSINGS)]))
    return paragraphs


def _cast(rng: random.Random) -> dict[str, str]:
    """One value for every slot of the plots: the hero's slots without a prefix, the friend's with `f`."""
    hero, friend = _being(rng), _being(rng)
    while friend["name"] == hero["name"] or friend["kind"] == hero["kind"]:
        friend = _being(rng)
    thing, other_thing = rng.sample(_THINGS, 2)
    spot, spot2, spot3 = rng.sample(_SPOTS, 3)
    skill = rng.choice(_SKILLS)
    return {
        **hero,
        **{f"f{key}": value for key, value in friend.items()},
        "place": rng.choice(_PLACES), "spot": spot, "spot2": spot2, "spot3": spot3,
        "thing": thing, "thing2": other_thing, "food": rng.choice(_FOODS), "build": rng.choice(_BUILDS),
        "skill": skill, "fear": rng.choice(_FEARS), "weather": rng.choice(_WEATHER), "season": rng.choice(_SEASONS),
        "worker": rng.choice(_PEOPLE_WORK), "count": rng.choice(["two", "three", "four", "five", "six", "seven", "nine", "ten"]),
    }  # fmt: skip


def _being(rng: random.Random) -> dict[str, str]:
    sort = rng.choices(["girl", "boy", "other"], weights=[2, 2, 6])[0]
    if sort == "girl":
        name, kind, she = rng.choice(_GIRLS), "girl", True
    elif sort == "boy":
        name, kind, she = rng.choice(_BOYS), "boy", False
    else:
        name, kind, she = rng.choice(_OTHERS), rng.choice(_KINDS), rng.random() < 0.5
    he, him, his = ("she", "her", "her") if she else ("he", "him", "his")
    return {"name": name, "kind": kind, "adj": rng.choice(_ADJECTIVES), "he": he, "him": him, "his": his}
