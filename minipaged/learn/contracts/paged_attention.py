"""The contract of paged attention, and a function that is watched (paper, section 4.1). No torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from minipaged.learn.contracts.rules import ContractError, Rules, check_arguments

CONCEPT = "paged_attention"


class PagedAttention(Protocol):
    """A function, or a class without arguments whose objects can be called.

    1. Row t of sequence s stands at position `context_len[s] - query_len[s] + (t - query_start[s])` and
       sees the keys at positions k with 0 <= q - k (< sliding_window), through the block table.
    2. The result is [T, Hq, Dv] in the query's dtype.
    3. Nothing else is read: slots that were never written may hold anything, NaN included.
    4. The pools are not changed.
    """

    def __call__(
        self,
        query: Any,
        key_cache: Any,
        value_cache: Any,
        metadata: Any,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Any = None,
    ) -> Any:
        """Query [T, Hq, Dk], pools [blocks, Hkv, block_size, Dk or Dv] -> [T, Hq, Dv]."""
        ...


def check(part: Any) -> None:
    """Raise `ContractError` unless it can be called as the contract says."""
    name = getattr(part, "__name__", repr(part))
    function = part.__call__ if inspect.isclass(part) else part
    if not callable(part) or (inspect.isclass(part) and "__call__" not in dir(part)):
        raise ContractError(f"{CONCEPT}: {name} cannot be called; see {PagedAttention.__module__}")
    wanted = dict(inspect.signature(PagedAttention.__call__).parameters)
    if not inspect.isclass(part):
        del wanted["self"]
    check_arguments(CONCEPT, f"{name}({', '.join(wanted)})", function, wanted)


def watch(part: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its results checked."""
    rules = Rules(CONCEPT)
    function = rules.call(part) if inspect.isclass(part) else part

    def paged_attention(query: Any, key_cache: Any, value_cache: Any, metadata: Any, **options: Any) -> Any:
        attended = rules.call(function, query, key_cache, value_cache, metadata, **options)
        rules.require(hasattr(attended, "shape"), f"the result is {type(attended).__name__}; give a tensor")
        wanted = (*query.shape[:2], value_cache.shape[-1])
        rules.require(
            tuple(attended.shape) == wanted,
            f"the result for a query {list(query.shape)} is {list(attended.shape)}; give [T, Hq, Dv] = "
            f"{list(wanted)}",
        )
        rules.require(
            attended.dtype == query.dtype, f"the result is {attended.dtype}; the query is {query.dtype}"
        )
        rules.require(
            not bool(attended.isnan().any()),
            "the result has NaN; a row read a slot that nobody wrote, or saw no key at all",
        )
        return attended

    return paged_attention
