"""Checks of single values, for the parameter classes: each raises `ParamsError` or lets the value pass.

The message is one line: the field, the value, the fix. Knows no field by itself and no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class ParamsError(ValueError):
    """A decoding parameter that cannot work; one line: the field, its value, the fix."""


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    # An int past float's range is as little use as infinity.
    return isinstance(value, float) or (_is_integer(value) and abs(value) < 2**63)


def integer(name: str, value: Any, least: int | None = None, fix: str | None = None) -> None:
    """An integer, of at least `least`."""
    if not _is_integer(value) or (least is not None and value < least):
        wanted = fix or ("an integer" if least is None else f"an integer of at least {least}")
        raise ParamsError(f"{name} is {value!r}; give {wanted}")


def number(name: str, value: Any, wanted: str, good: Callable[[float], bool]) -> None:
    """A finite number for which `good` holds."""
    if not _is_number(value) or not math.isfinite(value) or not good(value):
        raise ParamsError(f"{name} is {value!r}; give a number {wanted}")


def boolean(name: str, value: Any) -> None:
    """True or False, nothing that merely counts as such."""
    if not isinstance(value, bool):
        raise ParamsError(f"{name} is {value!r}; give True or False")


def _items(name: str, value: Any) -> Iterable[Any]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise ParamsError(f"{name} is {value!r}; give a list")
    return value


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of integers of at least 0, as a tuple."""
    ids = tuple(_items(name, () if value is None else value))
    for token_id in ids:
        if not _is_integer(token_id) or token_id < 0:
            raise ParamsError(f"{name} has {token_id!r}; give token ids, integers of at least 0")
    return ids


def stop_strings(value: Any) -> tuple[str, ...]:
    """One string or a list of them, none empty."""
    strings = (value,) if isinstance(value, str) else tuple(_items("stop", () if value is None else value))
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ParamsError(f"stop has {string!r}; give strings of at least one character")
    return strings


def bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A list of strings and token id lists, none empty."""
    words: list[str | tuple[int, ...]] = []
    for word in _items("bad_words", () if value is None else value):
        words.append(word if isinstance(word, str) else token_ids("bad_words", word))
        if not words[-1]:
            raise ParamsError(f"bad_words has {word!r}; give words of at least one character or token")
    return tuple(words)


def logit_bias(value: Any) -> dict[int, float]:
    """A mapping from token id to a number that float32 logits can bear, or -inf."""
    if not isinstance(value, Mapping):
        raise ParamsError(f"logit_bias is {value!r}; give a mapping from token id to number")
    token_ids("logit_bias", tuple(value))
    for token_id, bias in value.items():
        if not _is_number(bias) or not (-100 <= bias <= 100 or bias == -math.inf):
            raise ParamsError(
                f"logit_bias of token {token_id} is {bias!r}; give -100 to 100, or -inf to forbid"
            )
    return {token_id: float(bias) for token_id, bias in value.items()}


def at_most_vocabulary(name: str, value: int, vocab_size: int) -> None:
    """A count of tokens that the vocabulary must have."""
    if value > vocab_size:
        raise ParamsError(
            f"{name} is {value}; the vocabulary has {vocab_size} tokens, give at most that many"
        )


def in_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Token ids that the vocabulary must have."""
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise ParamsError(f"{name} has token {token_id}; the vocabulary ends at {vocab_size - 1}")
