"""The contract of paged attention (paper, section 4.1). No torch."""

from __future__ import annotations

import inspect
import itertools
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
    3. Neither the pools nor the block tables are changed.
    4. The result is that of `kernels/reference/attention.py` up to rounding; two rows a call are checked.
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
    rules, calls = Rules(concept), itertools.count()
    function = rules.make(override) if inspect.isclass(override) else override

    def watched(query: Any, key_cache: Any, value_cache: Any, metadata: Any, **parameters: Any) -> Any:
        asked, tables = query.clone(), metadata.block_tables.clone()
        written = key_cache._version, value_cache._version
        attended = rules.call(function, query, key_cache, value_cache, metadata, **parameters)
        is_tensor = isinstance(attended, type(query))
        rules.require(is_tensor, f"the result is {type(attended).__name__}; give a tensor of torch")
        message = "the block tables were changed; other layers and later steps read them"
        rules.require(bool((metadata.block_tables == tables).all()), message)
        message = "a pool was changed; attention only reads, for K and V are written before"
        rules.require((key_cache._version, value_cache._version) == written, message)
        wanted = [*query.shape[:2], value_cache.shape[-1]]
        message = f"the result for a query {list(query.shape)} is {list(attended.shape)}"
        rules.require(list(attended.shape) == wanted, f"{message}; give [T, Hq, Dv] = {wanted}")
        message = f"the result is {attended.dtype}; give the type of the query, {query.dtype}"
        rules.require(attended.dtype == query.dtype, message)
        message = "the result has NaN; a row read a slot that nobody wrote, or saw no key at all"
        rules.require(not bool(attended.isnan().any()), message)
        _compare(rules, next(calls), attended, asked, (key_cache, value_cache), metadata, parameters)
        return attended

    return watched


def _compare(
    rules: Rules,
    number: int,
    attended: Any,
    query: Any,
    pools: tuple[Any, Any],
    metadata: Any,
    parameters: dict[str, Any],
) -> None:
    """Rule 4, for the last row of a sequence and one before it: others with each `number` of a call."""
    from minipaged.kernels.metadata import AttentionParameters
    from minipaged.kernels.reference.attention import attend_sequence

    sequence = number % len(metadata.context_len_list)
    first, end = metadata.query_start_list[sequence : sequence + 2]
    for row in {first + number % (end - first), end - 1} if end > first else ():
        position = metadata.context_len_list[sequence] - (end - row)
        table = metadata.block_tables[sequence].long()
        given = AttentionParameters(**parameters)
        wanted = attend_sequence(query[row : row + 1], pools, table, position + 1, given)[0].float()
        if wanted.isfinite().all():
            error = (attended[row].float() - wanted).norm(dim=-1).max() / wanted.norm(dim=-1).max()
            message = f"row {row}, which is at position {position} of sequence {sequence}, is {error:.0%} off"
            message += f"; compare with {attend_sequence.__module__}"
            rules.require(not error > (0.01 if query.dtype.itemsize == 4 else 0.1), message)
