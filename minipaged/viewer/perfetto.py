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
from minipaged.viewer.recorder import StepRecord
from minipaged.viewer.replay import read_trace

STEP = 1000  # microseconds
COUNTERS, REQUESTS = 1, 2  # "processes": the groups of rows


def perfetto(path: Path) -> str:
    """A trace in this format, as JSON. Raises `TraceError` if it is not a trace."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": COUNTERS, "args": {"name": "engine"}},
        {"ph": "M", "name": "process_name", "pid": REQUESTS, "args": {"name": "requests"}},
    ]
    rows: defaultdict[str, int] = defaultdict(lambda: len(rows) + 1)
    for record in read_trace(path):
        events += _counters(record)
        events += _slices(record, rows)
    for request, row in rows.items():
        name = {"name": f"request {request}"}
        events.append({"ph": "M", "name": "thread_name", "pid": REQUESTS, "tid": row, "args": name})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _counters(record: StepRecord) -> Iterator[dict[str, Any]]:
    view = record.planned
    prompts = {name: table.num_prompt for name, table in view.tables.items()}
    decodes = sum(t.num_tokens == 1 and t.start >= prompts.get(t.name, 0) for t in record.scheduled)
    computed = sum(tokens.num_tokens for tokens in record.scheduled)
    values = {
        "blocks": {"in use": view.num_used, "cached": len(view.evictable)},
        "tokens": {"decode": decodes, "prefill": computed - decodes},
        "waiting": {"requests": record.num_waiting},
    }
    for name, counts in values.items():
        yield {"ph": "C", "name": name, "pid": COUNTERS, "ts": record.step * STEP, "args": counts}


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
