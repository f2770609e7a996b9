"""Prefix hits of models with recurrent layers: a request can start only where the state was kept."""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence

from minipaged.memory.prefix_cache import PrefixCache


def match_where_states_are(cache: PrefixCache, kept: Container[int]) -> None:
    """Make `cache.match` find only prefixes whose final state is kept, and leave a token to compute.

    `kept`: the chain hashes of prefixes with a state; it may change between steps.
    """
    match = cache.match

    def match_with_state(hashes: Sequence[int], token_ids: array[int], salt: str = "") -> list[int]:
        blocks = match(hashes, token_ids, salt)
        if len(blocks) * cache.block_size == len(token_ids):
            del blocks[-1:]
        while blocks and hashes[len(blocks) - 1] not in kept:
            blocks.pop()
        return blocks

    cache.match = match_with_state  # type: ignore[method-assign]
