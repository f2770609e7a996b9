"""A task whose answers can be checked: number words to digits and back, for 0 to 999.

Some numbers are held out of the training text in one direction or the other, so a right answer is not a
remembered line. One-word numbers and bare hundreds are never held out, so every part of a held-out answer has
been seen, but the combination has not.
"""

import random
from typing import Literal

Direction = Literal["digits", "words"]
DIRECTIONS: tuple[Direction, ...] = ("digits", "words")
LIMIT = 1000
HELD_OUT_PER_DIRECTION = 200

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """Spell 0 <= number < 1000 without hyphens or "and": 342 -> "three hundred forty two"."""
    if not 0 <= number < LIMIT:
        raise ValueError(f"number is {number}; it must be from 0 to {LIMIT - 1}")
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return _TENS[tens - 2] + (f" {_SMALL[rest]}" if rest else "")
    hundreds, rest = divmod(number, 100)
    return f"{_SMALL[hundreds]} hundred" + (f" {in_words(rest)}" if rest else "")


def question(number: int, direction: Direction) -> tuple[str, str]:
    """A question and its answer in digits ("forty two", "42") or in words ("42", "forty two")."""
    digits, words = str(number), in_words(number)
    return (words, digits) if direction == "digits" else (digits, words)


def _hold_out(direction: Direction) -> frozenset[int]:
    composite = [n for n in range(21, LIMIT) if len(in_words(n).split()) > 1 and n % 100]
    return frozenset(random.Random(f"held out, {direction}").sample(composite, HELD_OUT_PER_DIRECTION))


HELD_OUT: dict[Direction, frozenset[int]] = {direction: _hold_out(direction) for direction in DIRECTIONS}
TRAINING: dict[Direction, tuple[int, ...]] = {
    direction: tuple(n for n in range(LIMIT) if n not in HELD_OUT[direction]) for direction in DIRECTIONS
}


def draw(direction: Direction, rng: random.Random) -> tuple[str, str]:
    """A question of the training text: small numbers somewhat more often than their share."""
    small = rng.random() < 0.15
    number = rng.choice(TRAINING[direction])
    while small and number >= 100:
        number = rng.choice(TRAINING[direction])
    return question(number, direction)


def few_shot(examples: list[tuple[str, str]], asked: str | None = None) -> str:
    """`Q: forty two` / `A: 42` line by line; with `asked`, one more question ending in `A:` for the model."""
    text = "".join(f"Q: {asked_}\nA: {answer}\n" for asked_, answer in examples)
    return text if asked is None else f"{text}Q: {asked}\nA:"


def document(rng: random.Random) -> str:
    """A list of questions and answers, in one direction or mixed."""
    directions = rng.choice([DIRECTIONS[:1], DIRECTIONS[1:], DIRECTIONS])
    length = rng.choice([3, 6, 6, 10, 20, 40])
    return few_shot([draw(rng.choice(directions), rng) for _ in range(length)])
