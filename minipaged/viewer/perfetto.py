"""A trace for ui.perfetto.dev and chrome://tracing (the JSON of both): one row per request, counters above.

A trace has no clock, so each step lasts a millisecond: the page shows the order of events, not their
duration.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minipaged.text_io import counted
from minipaged.viewer.delta import ScheduledTokens
from minipaged.viewer.recorder import StepRecord, admitted
from minipaged.viewer.replay import read_trace
from minipaged.viewer.snapshot import TableView

STEP = 1000  # microseconds
COUNTERS, REQUESTS = 1, 2  # "processes": the groups of rows


def perfetto(path: Path) -> str:
    """A trace in this format, as JSON. Raises `TraceError` if it is not a trace."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": COUNTERS, "args": {"name": "engine"}},
        {"ph": "M", "name": "process_name", "pid": REQUESTS, "args": {"name": "requests"}},
    ]
    rows: defaultdict[str, int] = defaultdict(lambda: len(rows) + 1)
    tables: Mapping[str, TableView] = {}  # after the last step
    for record in read_trace(path):
        events += _counters(record, tables)
        events += _slices(record, rows)
        tables = record.committed.tables
    for request, row in rows.items():
        name = {"name": f"request {request}"}
        events.append({"ph": "M", "name": "thread_name", "pid": REQUESTS, "tid": row, "args": name})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _counters(record: StepRecord, tables: Mapping[str, TableView]) -> Iterator[dict[str, Any]]:
    view = record.planned
    anew = admitted(record.events)
    decodes = sum(t.request not in anew and _is_decode(tables.get(t.name), t) for t in record.scheduled)
    computed = sum(tokens.num_tokens for tokens in record.scheduled)
    values = {
        "blocks": {"in use": view.num_used, "cached": len(view.evictable)},
        "tokens": {"decode": decodes, "prefill": computed - decodes},
        "waiting": {"requests": record.num_waiting},
    }
    for name, counts in values.items():
        yield {"ph": "C", "name": name, "pid": COUNTERS, "ts": record.step * STEP, "args": counts}


def _is_decode(old: TableView | None, tokens: ScheduledTokens) -> bool:
    """Whether its token was chosen in the last step of the sequence. The last one of a prompt or of a
    recomputation has had its slot since the admission; `old` is the table before the step."""
    if old is None or tokens.num_tokens > 1 or not tokens.num_candidates:
        return False
    return old.num_computed == old.num_tokens and tokens.start >= old.num_prompt


def _slices(record: StepRecord, rows: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    computed: defaultdict[str, int] = defaultdict(int)
    for tokens in record.scheduled:
        computed[tokens.request] += tokens.num_tokens
    start = record.step * STEP
    for request, count in computed.items():
        name = counted(count, "token")
        row = {"pid": REQUESTS, "tid": rows[request]}
        yield {"ph": "X", "name": name, **row, "ts": start, "dur": STEP, "args": {"step": record.step}}
    for event in record.events:
        if "request" in event:
            row = {"pid": REQUESTS, "tid": rows[str(event["request"])]}
            yield {"ph": "i", "s": "t", "name": str(event["kind"]), **row, "ts": start, "args": dict(event)}
