"""The difference between two views of the memory, which keeps a trace small.

    difference(old, new) -> change          apply(old, change) == new

A change is JSON: `{"tables": {NAME: {...} or null}, "evictable": [blocks], "not_evictable": [blocks]}`,
without empty parts. A table has only the fields of `TableView` that differ; `"blocks": [2, [5]]` means: keep
the first 2, then 5; `"token_ids"` likewise; null means that the table is gone. Fields that follow from the
plan (`planned`, `computed`) are not written either, so a decode takes a line with little more than the new
token ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from minipaged.viewer.snapshot import PoolView, TableView

LISTS = ("blocks", "token_ids")  # only the changed end is written
FIELDS = ("on_host", "num_tokens", "num_computed", "num_prompt", *LISTS)


class ScheduledTokens(NamedTuple):
    """What a trace keeps of a `ScheduledSequence`."""

    request: str
    position: int
    start: int
    num_tokens: int
    num_candidates: int

    @property
    def name(self) -> str:
        """Name of the sequence, as in `PoolView.tables`."""
        return f"{self.request}/{self.position}"

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.start + self.num_tokens


def planned(view: PoolView, scheduled: Iterable[ScheduledTokens]) -> PoolView:
    """The memory after a plan: every token it computes has a slot."""
    return _reaching(view, scheduled, "num_tokens")


def computed(view: PoolView, scheduled: Iterable[ScheduledTokens]) -> PoolView:
    """The memory once they are computed."""
    return _reaching(view, scheduled, "num_computed")


def _reaching(view: PoolView, scheduled: Iterable[ScheduledTokens], field: str) -> PoolView:
    tables = dict(view.tables)
    for tokens in scheduled:
        if table := tables.get(tokens.name):
            tables[table.name] = table._replace(**{field: max(getattr(table, field), tokens.stop)})
    return replace(view, tables=tables)


def difference(old: PoolView, new: PoolView) -> dict[str, Any]:
    """What must be applied to `old` to get `new`, a view of the same pool."""
    tables: dict[str, Any] = {name: None for name in old.tables if name not in new.tables}
    for name, table in new.tables.items():
        if table != old.tables.get(name):
            tables[name] = _table_difference(old.tables.get(name, _empty(name)), table)
    change = {
        "tables": tables,
        "evictable": sorted(new.evictable - old.evictable),
        "not_evictable": sorted(old.evictable - new.evictable),
    }
    return {key: value for key, value in change.items() if value}


def apply(old: PoolView, change: dict[str, Any]) -> PoolView:
    """The view after a change; KeyError, TypeError or ValueError if it is not one that `difference` makes."""
    tables = dict(old.tables)
    for name, entry in change.get("tables", {}).items():
        if entry is None:
            del tables[name]
            continue
        before, values = tables.get(name, _empty(name)), dict(entry)
        for field in values.keys() & set(LISTS):
            keep, added = values[field]
            if keep > len(getattr(before, field)):
                raise ValueError(f"{name} keeps {keep} of its {len(getattr(before, field))} {field}")
            values[field] = (*getattr(before, field)[:keep], *added)
        tables[name] = before._replace(**values)
    evictable = (old.evictable | set(change.get("evictable", ()))) - set(change.get("not_evictable", ()))
    return replace(old, tables=tables, evictable=evictable)


def _empty(name: str) -> TableView:
    request, _, position = name.rpartition("/")
    return TableView(request, int(position))


def _table_difference(old: TableView, new: TableView) -> dict[str, Any]:
    change: dict[str, Any] = {}
    for field in FIELDS:
        before, after = getattr(old, field), getattr(new, field)
        if before != after:
            change[field] = after
            if field in LISTS:
                differing = (i for i, (a, b) in enumerate(zip(before, after)) if a != b)
                keep = len(before) if after[: len(before)] == before else next(differing, len(after))
                change[field] = [keep, list(after[keep:])]
    return change
