"""Checks of single values: each raises `ParamsError`, one line with the field, its value and the fix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, NoReturn

from minipaged.text_io import lone_surrogate


class ParamsError(ValueError):
    """A decoding parameter that cannot work; one line with the field, its value and the fix."""


def refuse(name: str, value: Any, fix: str) -> NoReturn:
    """Raise `ParamsError`."""
    raise ParamsError(f"{name} is {value!r}; give {fix}")


def _is_integer(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _is_between(value: Any, low: float, high: float) -> bool:
    if type(value) not in (int, float) and (not isinstance(value, Real) or isinstance(value, bool)):
        return False
    number: Any = value  # (Real has no comparison with float, to mypy)
    return bool(low <= number <= high)


def integer(params: Any, name: str, least: float = -math.inf, fix: str = "", optional: bool = False) -> None:
    """An integer of at least `least`, or None if it is optional."""
    value = getattr(params, name)
    if value is None and optional:
        return
    if not (_is_integer(value) and value >= least):
        refuse(name, value, fix or ("an integer" if least < 0 else f"an integer of at least {least}"))
    if least >= -1 and value >= 2**63:
        refuse(name, value, "an integer below 2**63")
    object.__setattr__(params, name, int(value))  # (it may be NumPy's)


def number(params: Any, name: str, low: float, high: float, fix: str) -> None:
    """A number from `low` to `high`."""
    value = getattr(params, name)
    if not _is_between(value, low, high):
        refuse(name, value, f"a number {fix}")
    if not isinstance(value, int | float):
        object.__setattr__(params, name, float(value))  # (it is NumPy's)


def boolean(params: Any, name: str) -> None:
    """Exactly True or False, nothing merely truthy or falsy."""
    if not isinstance(getattr(params, name), bool):
        refuse(name, getattr(params, name), "True or False")


def items(
    name: str, value: Any, good: Callable[[Any], Any] = lambda item: True, fix: str = ""
) -> tuple[Any, ...]:
    """A list whose every item is good, as a tuple; None is an empty one."""
    if not isinstance(value, list | tuple | set | frozenset | None):
        refuse(name, value, "a list")
    for item in value or ():
        if not good(item):
            raise ParamsError(f"{name} has {item!r}; give {fix}")
    return tuple(value or ())


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of integers of at least 0, as a tuple."""
    ids = items(name, value, lambda i: _is_integer(i) and i >= 0, "token ids, integers of at least 0")
    return tuple(map(int, ids))


def stop_strings(value: Any) -> tuple[str, ...]:
    """One string or a list of them, none empty."""
    if not isinstance(value, str | list | tuple | set | frozenset | None):
        refuse("stop", value, "a string or a list of strings")
    strings = (value,) if isinstance(value, str) else value
    fix = "strings of at least one character"
    return _unicode("stop", items("stop", strings, lambda s: isinstance(s, str) and s, fix))


def bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A list of strings and token id lists, none empty."""
    words = [w if isinstance(w, str) else token_ids("bad_words", w) for w in items("bad_words", value)]
    return _unicode("bad_words", items("bad_words", words, bool, "words of at least one character or token"))


def _unicode(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    for value in values:
        if isinstance(value, str) and (wrong := lone_surrogate(value)):
            raise ParamsError(f"{name} {wrong}")
    return values


def logit_bias(value: Any) -> dict[int, float]:
    """A mapping from token id to a number that float32 logits can bear, or -inf."""
    if not isinstance(value, Mapping):
        refuse("logit_bias", value, "a mapping from token id to number")
    for token_id in token_ids("logit_bias", tuple(value)):
        bias = value[token_id]
        if not (_is_between(bias, -100, 100) or bias == -math.inf):
            refuse(f"logit_bias of token {token_id}", bias, "-100 to 100, or -inf to forbid")
    return {int(token_id): float(bias) for token_id, bias in value.items()}


def at_most_vocabulary(params: Any, name: str, size: int) -> None:
    """A count of tokens that the vocabulary must have; None passes."""
    value = getattr(params, name)
    if value is not None and value > size:
        raise ParamsError(f"{name} is {value}; the vocabulary has {size} tokens; give at most that many")


def in_vocabulary(name: str, ids: Iterable[int] | None, size: int) -> None:
    """Token ids that the vocabulary must have; None passes."""
    for token_id in ids or ():
        if token_id >= size:
            raise ParamsError(f"{name} has token {token_id}; give ids from 0 to {size - 1}")
