"""What is worth showing after a run: the fullest moment, and where the tokens of each output were.

A finished request holds no blocks, so its tables are kept as plain data, as they were when it ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from minipaged.decoding.token_bytes import token_bytes
from minipaged.engine import Engine
from minipaged.outputs import RequestOutput
from minipaged.viewer.recorder import Recorder, StepRecord
from minipaged.viewer.snapshot import PoolView, TableView

TextOf = Callable[[int], str]


class PlacedOutput(NamedTuple):
    """An output, and where its tokens were."""

    output: RequestOutput
    block_size: int
    # Each completion's table when it ended: its last token has no slot. None if it was never computed.
    tables: tuple[TableView | None, ...]
    text_of: TextOf | None  # None without a tokenizer

    def title(self, number: int) -> str:
        """The name of a completion."""
        name = f"Request {self.output.request_id}"
        return f"{name}, completion {number + 1}" if len(self.output.outputs) > 1 else name


def engine_texts(engine: Engine) -> TextOf | None:
    """The texts of an engine's tokens, one by one; None without a tokenizer.

    A part of a character has no text of its own; its bytes are written as <0xE2><0x82>.
    """
    detokenizer = engine.detokenizer
    if detokenizer is None:
        return None

    def text(token_id: int) -> str:
        own = detokenizer.token(token_id)
        data = token_bytes(detokenizer.tokenizer, token_id, own)
        return own if data == own.encode() else "".join(f"<0x{byte:02X}>" for byte in data)

    return text


class Highlights(Recorder):
    """Watches an engine until `close`; use as a context manager."""

    def __init__(self, engine: Engine) -> None:
        self.fullest: PoolView | None = None  # the last planned memory with the most blocks in use
        self.fullest_step = 0
        self.text_of = engine_texts(engine)
        self._block_size = engine.scheduler.kv.block_size
        self._last: dict[str, list[TableView]] = {}  # of each request, when it was last computed
        self._ended: dict[str, dict[tuple[int, ...], TableView]] = {}  # by generated tokens but the last
        super().__init__(engine, self.observe)

    def observe(self, record: StepRecord) -> None:
        """Record a step."""
        if self.fullest is None or record.planned.num_used >= self.fullest.num_used:
            self.fullest, self.fullest_step = record.planned, record.step
        tables: defaultdict[str, list[TableView]] = defaultdict(list)
        for table in record.planned.tables.values():
            tables[table.request].append(table)
        self._last |= {tokens.request: tables[tokens.request] for tokens in record.scheduled}
        for request, completions in record.completions.items():
            # (A request that outgrew the pool ends before it is computed: its last step counts.)
            last = {table.token_ids[table.num_prompt :]: table for table in self._last.get(request, ())}
            ended = {tokens[:-1]: last[tokens[:-1]] for tokens in completions if tokens[:-1] in last}
            self._ended.setdefault(request, {}).update(ended)
        for request in record.finished:
            self._last.pop(request, None)

    def place(self, output: RequestOutput) -> PlacedOutput:
        """The output, and where its tokens were."""
        ended = self._ended.get(output.request_id, {})
        tables = tuple(ended.get(tuple(completion.token_ids[:-1])) for completion in output.outputs)
        return PlacedOutput(output, self._block_size, tables, self.text_of)
