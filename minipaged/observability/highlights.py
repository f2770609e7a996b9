"""What is worth showing after a run: the fullest moment, and where the tokens of each output lay.

    with Highlights(llm.engine) as seen:
        outputs = llm.generate(...)
    seen.fullest, seen.place(outputs[0])

A finished request holds no blocks; so its tables are remembered as they were when it ended, as plain data.
Listens to the records of `recorder.py`; holds nothing of the engine's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from minipaged.observability.recorder import StepRecord, Tap
from minipaged.observability.snapshot import PoolView, TableView

if TYPE_CHECKING:
    from minipaged.engine import Engine
    from minipaged.outputs import RequestOutput

TextOf = Callable[[int], str]


class Placement(NamedTuple):
    """Where the tokens of an output lay.

    Attributes:
        block_size: tokens a block.
        tables: of each completion its table when it ended (its last token was sampled then and has no
            slot); None for a completion that ended before it was computed.
        text_of: text of a token id; None without a tokenizer.
    """

    block_size: int
    tables: tuple[TableView | None, ...]
    text_of: TextOf | None


def text_of(engine: Engine) -> TextOf | None:
    """The texts of an engine's tokens, one by one."""
    if engine.detokenizer is None:
        return None
    tokenizer = engine.detokenizer.tokenizer
    return lambda token: tokenizer.decode([token])


class Highlights:
    """Watches an engine until `close`; use as a context manager.

    Attributes:
        fullest: the planned memory with the most blocks in use; None before the first step.
        fullest_step: its step.
    """

    def __init__(self, engine: Engine) -> None:
        self.fullest: PoolView | None = None
        self.fullest_step = 0
        self.text_of = text_of(engine)
        self._block_size = engine.scheduler.kv.block_size
        self._current: dict[str, list[TableView]] = {}  # of each request, when it was last computed
        self._ended: dict[str, list[TableView]] = {}  # those that went no further
        self._tap = Tap(engine, self.observe)

    def observe(self, record: StepRecord) -> None:
        """Take a step into account."""
        if self.fullest is None or record.planned.num_used > self.fullest.num_used:
            self.fullest, self.fullest_step = record.planned, record.step
        going_on = _by_request(record.committed)
        computed = {chunk.request for chunk in record.chunks}
        for request, tables in _by_request(record.planned).items():
            if request in computed:
                self._current[request] = tables
                self._ended.setdefault(request, []).extend(
                    table for table in tables if not _continued(table, going_on.get(request, ()))
                )
        for request, completions in record.completions.items():
            seen = [*self._ended.pop(request, []), *self._current.pop(request, [])]
            self._ended[request] = [t for t in seen if _generated(t) in {c[:-1] for c in completions}]

    def place(self, output: RequestOutput) -> RequestOutput:
        """The output with its `placement`, which is then part of its picture."""
        seen = {_generated(t): t for t in reversed(self._ended.get(output.request_id, []))}
        tables = tuple(seen.get(tuple(completion.token_ids[:-1])) for completion in output.outputs)
        return replace(output, placement=Placement(self._block_size, tables, self.text_of))

    def close(self) -> None:
        """Stop watching."""
        self._tap.remove()

    def __enter__(self) -> Highlights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _by_request(view: PoolView) -> dict[str, list[TableView]]:
    found: dict[str, list[TableView]] = {}
    for table in view.tables.values():
        found.setdefault(table.request, []).append(table)
    return found


def _continued(table: TableView, others: Sequence[TableView]) -> bool:
    length = len(table.token_ids)
    return any(other.token_ids[:length] == table.token_ids for other in others)


def _generated(table: TableView) -> tuple[int, ...]:
    return table.token_ids[table.num_prompt :]
