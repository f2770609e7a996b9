"""The contract of paged attention (paper, section 4.1). No torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from minipaged.learn.contracts.rules import ContractError, Rules, check_arguments


def paged_attention(
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
    """Query [T, Hq, Dk], pools [blocks, Hkv, block_size, Dk or Dv] -> [T, Hq, Dv] in the query's dtype.

    A function like this one, or a class without arguments whose objects can be called.

    1. Row t of sequence s stands at position `context_len[s] - query_len[s] + (t - query_start[s])` and
       sees the keys at positions k with 0 <= q - k (< sliding_window), through the block table.
    2. Nothing else is read: slots that were never written may hold anything, NaN included.
    3. The pools are not changed.
    """


def check_paged_attention(concept: str, override: Any) -> None:
    """Raise `ContractError` unless it can be called as the contract says."""
    name = getattr(override, "__name__", repr(override))
    if not callable(override) or (inspect.isclass(override) and "__call__" not in dir(override)):
        raise ContractError(f"{concept}: {name} cannot be called; see {__name__}")
    wanted = dict(inspect.signature(paged_attention).parameters)
    text = f"{name}({', '.join(wanted)})"
    if inspect.isclass(override):
        check_arguments(concept, text, override.__call__, {"self": wanted["query"], **wanted})
    else:
        check_arguments(concept, text, override, wanted)


def watch_paged_attention(concept: str, override: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its results checked."""
    rules = Rules(concept)
    function = rules.call(override) if inspect.isclass(override) else override

    def watched(query: Any, key_cache: Any, value_cache: Any, metadata: Any, **parameters: Any) -> Any:
        attended = rules.call(function, query, key_cache, value_cache, metadata, **parameters)
        rules.require(hasattr(attended, "shape"), f"the result is {type(attended).__name__}; give a tensor")
        wanted = [*query.shape[:2], value_cache.shape[-1]]
        told = f"the result for a query {list(query.shape)} is {list(attended.shape)}"
        rules.require(list(attended.shape) == wanted, f"{told}; give [T, Hq, Dv] = {wanted}")
        told = f"the result is {attended.dtype}; the query is {query.dtype}"
        rules.require(attended.dtype == query.dtype, told)
        told = "the result has NaN; a row read a slot that nobody wrote, or saw no key at all"
        rules.require(not bool(attended.isnan().any()), told)
        return attended

    return watched
