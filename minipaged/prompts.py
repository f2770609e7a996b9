"""What a prompt may be."""

from __future__ import annotations

from collections.abc import Sequence


class RequestError(ValueError):
    """A request that the engine cannot take; the message names the value and the fix."""


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError unless there is at least one token, and all are of the model's vocabulary."""
    if not len(token_ids):
        raise RequestError("the prompt is empty; give at least one token")
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"the prompt has token id {token_id!r}; the model's ids are 0 to {vocab_size - 1}"
            )
