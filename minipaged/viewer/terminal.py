"""The pool and the block tables in a terminal: the same views as the SVGs, in characters.

     0 A    ████   1 A    ██░░   2 cached     3 free       block, owner, how full
    A  0 → 7  Four score and seven                         logical, physical, tokens

Colours are the palette's hues; every block also has its owner's name, so nothing is said by colour alone.
Knows rich and views; no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from minipaged.outputs import RequestOutput
from minipaged.viewer.highlights import Highlights, TextOf
from minipaged.viewer.pictures.names import colours, label
from minipaged.viewer.pictures.palette import OWNERS
from minipaged.viewer.snapshot import BlockView, PoolView, TableView

CELL, BAR = 19, 4


class Pool:
    """A pool, as many blocks a line as fit; free blocks after the last that is not are only counted."""

    def __init__(self, view: PoolView) -> None:
        self.view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lines of cells, then a line of counts."""
        view, colour = self.view, colours(self.view)
        columns = max(1, options.max_width // CELL)
        yield from _lines([_cell(b, view, colour) for b in _worth_showing(view.blocks())], columns)
        host = view.blocks(on_host=True)
        if any(block.owners for block in host):
            yield Text("host (swapped out)", style="dim")
            yield from _lines([_cell(b, view, colour) for b in _worth_showing(host)], columns)
        evictable = f"{len(view.evictable):,} cached and evictable, " if view.evictable else ""
        yield Text(
            f"{view.num_used:,} of {view.num_blocks:,} blocks in use, {evictable}{view.num_free:,} free",
            style="dim",
        )


def _worth_showing(blocks: Sequence[BlockView]) -> Sequence[BlockView]:
    last = max((block.block for block in blocks if block.state != "free"), default=-1)
    return blocks[: last + 1]


def _lines(cells: Sequence[Text], columns: int) -> Iterable[Text]:
    for start in range(0, len(cells), columns):
        yield Text().join(cells[start : start + columns])


def _cell(block: BlockView, view: PoolView, colour: Mapping[str, int]) -> Text:
    cell = Text(f"{block.block:>5} ")
    if not block.owners:
        cell.append("cached" if block.state == "evictable" else "free", style="dim")
    else:
        names = list(dict.fromkeys(label(table, view) for table in block.owners))
        requests = {table.request for table in block.owners}
        name = names[0] if len(names) == 1 else requests.pop() if len(requests) == 1 else "shared"
        name += f"\u00d7{block.ref_count}" if block.ref_count > 1 else ""
        numbers = {colour[table.name] for table in block.owners}
        style = OWNERS[numbers.pop()] if len(numbers) == 1 else "bold"
        full = -(-BAR * (block.filled or 0) // view.block_size)
        cell.append(f"{name[:7]:<7} ", style=style)
        cell.append("\u2588" * full + "\u2591" * (BAR - full), style=style)
    cell.pad_right(max(0, CELL - cell.cell_len))
    return cell


class Table:
    """A block table: a line a block, with the tokens in it."""

    def __init__(self, name: str, table: TableView, block_size: int, text_of: TextOf | None) -> None:
        self.name = name
        self.table = table
        self.block_size = block_size
        self.text_of = text_of

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A title, then the blocks."""
        table, size = self.table, self.block_size
        slots = len(table.blocks) * size
        empty = f"{slots - table.num_tokens} of {slots} slots empty"
        yield Text(
            f"{self.name}: {table.num_tokens} tokens in {len(table.blocks)} blocks, {empty}",
            "bold",
        )
        lines = Grid.grid(padding=(0, 1))
        for _ in range(4):
            lines.add_column(justify="right", no_wrap=True)
        lines.add_column(overflow="fold")
        for logical, block in enumerate(table.blocks):
            tokens = table.tokens_of(logical, size)
            texts = [self.text_of(t) if self.text_of else f"{t} " for t in tokens]
            words = Text("".join(texts).replace("\n", "\u23ce"))
            filled = f"{table.filled(logical, size)}/{size}"
            lines.add_row(f"  {logical}", "\u2192", str(block), Text(filled, "dim"), words)
        yield lines


def print_blocks(seen: Highlights, outputs: Sequence[RequestOutput], console: Console) -> None:
    """What `minipaged generate --show-blocks` adds: the pool at its fullest, then where the tokens lay."""
    if seen.fullest is None:
        return
    console.print(Text(f"\nThe pool at its fullest (step {seen.fullest_step})", style="bold"))
    console.print(Pool(seen.fullest))
    for output in map(seen.place, outputs):
        for number, table in enumerate(output.placement.tables):
            if table is not None:
                name = f"Request {output.request_id}"
                name += f", completion {number + 1}" if len(output.outputs) > 1 else ""
                console.print()
                console.print(Table(name, table, seen.fullest.block_size, seen.text_of))
