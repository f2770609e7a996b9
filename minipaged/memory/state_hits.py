"""Prefix hits of models with recurrent layers: where a request begins, somebody must have kept the state."""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence

from minipaged.memory.prefix_cache import PrefixCache


def match_where_states_are(cache: PrefixCache, kept: Container[int]) -> None:
    """From now on `cache.match` finds only prefixes with a state after them, and leaves a token to compute.

    `kept`: blocks at whose end there is a state; it may change between steps.
    """
    match = cache.match

    def match_with_state(hashes: Sequence[int], token_ids: array[int], salt: str = "") -> list[int]:
        blocks = match(hashes, token_ids, salt)
        while blocks and not (
            blocks[-1] in kept
            and not cache.is_pending(blocks[-1])  # what is kept is what it contained before
            and len(blocks) * cache.block_size < len(token_ids)
        ):
            blocks.pop()
        return blocks

    cache.match = match_with_state  # type: ignore[method-assign]
