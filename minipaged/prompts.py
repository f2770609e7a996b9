"""What a prompt may be."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from minipaged.text_io import lone_surrogate

KEYS = ("prompt_token_ids", "cache_salt")
"""Of a prompt that is a mapping."""


class RequestError(ValueError):
    """A request that the engine cannot take; the message names the value and the fix."""


class FailedRequestError(RequestError):
    """A request that ended with finish reason "error" while it was streamed; the message is the reason."""


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """The token ids as Python's integers (NumPy's are taken, too).

    Raises:
        RequestError: there is none, or one is not of the model's vocabulary.
    """
    if isinstance(token_ids, str | bytes | Mapping) or not hasattr(token_ids, "__iter__"):
        raise RequestError(f"the prompt's token ids are {shortened(token_ids)}; give a list of integers")
    if not len(token_ids):
        raise RequestError("the prompt is empty; give at least one token")
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise RequestError(f"the prompt has {shortened(token_id)} as a token id; give integers")
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"the prompt has token id {token_id}; give one of the model's, 0 to {vocab_size - 1}"
            )
    return [int(token_id) for token_id in token_ids]


def check_prompt(prompt: Any) -> None:
    """Raise RequestError unless it is a text, or a mapping with token ids and known keys."""
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("the prompt is empty; give at least one character")
        if wrong := lone_surrogate(prompt):
            raise RequestError(f"the prompt {wrong}")
        return
    if not isinstance(prompt, Mapping) or "prompt_token_ids" not in prompt:
        shown = shortened(prompt)
        raise RequestError(f'the prompt is {shown}; give a string or {{"prompt_token_ids": [...]}}')
    for key in prompt:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"give {' and '.join(KEYS)}"
            raise RequestError(f"the prompt has the key {key!r}; {hint}")
    salt = prompt.get("cache_salt", "")
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt is {shortened(salt)}; give a string")


def shortened(value: Any) -> str:
    """How a value looks, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
