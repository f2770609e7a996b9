"""Two views of the memory, and the little that lies between them: how a trace stays small.

    difference(old, new) -> change          apply(old, change) == new

A change is JSON: `{"tables": {NAME: {...} or null}, "evictable": [blocks], "not_evictable": [blocks]}`, empty parts
left out. A table has only the fields that differ; `"blocks": [2, [5]]` means: keep the first 2, then 5;
`"tokens"` likewise; null means that the table is gone.

What follows from the plan is not written either (`planned`, `computed`), so that a decode costs a line
with the new token ids and little else. Knows no files and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minipaged.viewer.snapshot import PoolView, TableView

FIELDS = {
    "host": "on_host",
    "num_tokens": "num_tokens",
    "num_computed": "num_computed",
    "num_prompt": "num_prompt",
}
"""Name in the file -> field of `TableView`, for those that are written whole."""

LISTS = {"blocks": "blocks", "tokens": "token_ids"}
"""The same for those of which only the changed end is written."""


class ChunkLine(NamedTuple):
    """A chunk as a trace has it: tokens start <= position < start + num_tokens of a sequence."""

    request: str
    position: int
    start: int
    num_tokens: int
    num_candidates: int

    @property
    def name(self) -> str:
        """Name of the sequence, as in `PoolView.tables`."""
        return f"{self.request}/{self.position}"


def planned(view: PoolView, chunks: Iterable[ChunkLine]) -> PoolView:
    """What a plan with these chunks says of the memory: every token it computes has a slot."""
    tables = dict(view.tables)
    for chunk in chunks:
        table = tables.get(chunk.name)
        if table is not None:
            end = max(table.num_tokens, chunk.start + chunk.num_tokens)
            tables[chunk.name] = table._replace(num_tokens=end)
    return replace(view, tables=tables)


def computed(view: PoolView, chunks: Iterable[ChunkLine]) -> PoolView:
    """What is true once the chunks are computed."""
    tables = dict(view.tables)
    for chunk in chunks:
        table = tables.get(chunk.name)
        if table is not None:
            tables[chunk.name] = table._replace(num_computed=chunk.start + chunk.num_tokens)
    return replace(view, tables=tables)


def difference(old: PoolView, new: PoolView) -> dict[str, Any]:
    """What must be applied to `old` to get `new`; both are of the same pool."""
    tables: dict[str, Any] = {name: None for name in old.tables if name not in new.tables}
    for name, table in new.tables.items():
        before = old.tables.get(name, _empty(name))
        if table != before or name not in old.tables:
            tables[name] = _table_difference(before, table)
    change = {
        "tables": tables,
        "evictable": sorted(new.evictable - old.evictable),
        "not_evictable": sorted(old.evictable - new.evictable),
    }
    return {key: value for key, value in change.items() if value}


def apply(old: PoolView, change: dict[str, Any]) -> PoolView:
    """The view after a change.

    Raises:
        KeyError, TypeError, ValueError: the change is not one that `difference` makes.
    """
    tables = dict(old.tables)
    for name, entry in change.get("tables", {}).items():
        if entry is None:
            del tables[name]
            continue
        before = tables.get(name, _empty(name))
        values = {field: entry[key] for key, field in FIELDS.items() if key in entry}
        for key, field in LISTS.items():
            if key in entry:
                keep, added = entry[key]
                if keep > len(getattr(before, field)):
                    raise ValueError(f"{name} keeps {keep} {key} of {len(getattr(before, field))}")
                values[field] = (*getattr(before, field)[:keep], *added)
        tables[name] = before._replace(**values)
    evictable = (old.evictable | set(change.get("evictable", ()))) - set(change.get("not_evictable", ()))
    return replace(old, tables=tables, evictable=evictable)


def _empty(name: str) -> TableView:
    request, _, position = name.rpartition("/")
    return TableView(request, int(position), False, (), 0, 0, 0, ())


def _table_difference(old: TableView, new: TableView) -> dict[str, Any]:
    change: dict[str, Any] = {
        key: getattr(new, field)
        for key, field in FIELDS.items()
        if getattr(new, field) != getattr(old, field)
    }
    for key, field in LISTS.items():
        before, after = getattr(old, field), getattr(new, field)
        if before != after:
            keep = _common(before, after)
            change[key] = [keep, list(after[keep:])]
    return change


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    if second[: len(first)] == first:
        return len(first)
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
