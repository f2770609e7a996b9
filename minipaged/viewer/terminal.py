"""The pool and the block tables in a terminal: the same views as the SVGs, in characters.

 0 A    ████   1 A    ██░░   2 cached     3 free       block, owner, how full
A  0 → 7  Four score and seven                         logical, physical, tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from minipaged.outputs import RequestOutput
from minipaged.text_io import without_controls
from minipaged.viewer.highlights import Highlights, TextOf
from minipaged.viewer.pictures.names import colour_of_block, colours, labels, owner, worth_showing
from minipaged.viewer.pictures.palette import OWNERS
from minipaged.viewer.snapshot import BlockView, PoolView, TableView

CELL, BAR = 19, 4


@dataclass(frozen=True)
class Pool:
    """A pool, with as many blocks per line as fit; free blocks at the end are only counted."""

    view: PoolView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lines of cells, then a line of counts."""
        yield from self._lines(self.view.blocks(), options)
        host = self.view.blocks(on_host=True)
        if any(block.owners for block in host):
            yield Text("host (swapped out)", style="dim")
            yield from self._lines(host, options)
        yield Text(self.view.usage, style="dim")

    def _lines(self, blocks: Sequence[BlockView], options: ConsoleOptions) -> Iterable[Text]:
        colour, label = colours(self.view), labels(self.view)
        signs = ("x", "#", ".") if options.ascii_only else ("\u00d7", "█", "░")
        cells = [self._cell(block, colour, label, signs) for block in blocks[: worth_showing(blocks)]]
        columns = max(1, options.max_width // CELL)
        for start in range(0, len(cells), columns):
            yield Text().join(cells[start : start + columns])

    def _cell(
        self, block: BlockView, colour: Mapping[str, int], label: Mapping[str, str], signs: Sequence[str]
    ) -> Text:
        cell = Text(f"{block.block:>5} ")
        times, held, empty = signs
        if not block.owners:
            cell.append("cached" if block.state == "evictable" else "free", style="dim")
        else:
            name = owner(block, label) + (f"{times}{block.ref_count}" if block.ref_count > 1 else "")
            number = colour_of_block(block, colour)
            style = "bold" if number is None else OWNERS[number]
            full = -(-BAR * (block.filled or 0) // self.view.block_size)
            cell.append(f"{name[:7]:<7} {held * full}{empty * (BAR - full)}", style=style)
        cell.pad_right(max(0, CELL - cell.cell_len))
        return cell


@dataclass(frozen=True)
class Table:
    """A block table: one line per block, with the tokens in it."""

    name: str
    table: TableView
    block_size: int
    text_of: TextOf | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A title, then the blocks."""
        table, size, arrow = self.table, self.block_size, "->" if options.ascii_only else "\u2192"
        yield Text(f"{self.name}: {table.usage(size)}", "bold")
        lines = Grid.grid(padding=(0, 1))
        for _ in range(4):
            lines.add_column(justify="right", no_wrap=True)
        lines.add_column(overflow="fold")
        for logical, block in enumerate(table.blocks):
            words = Text(
                without_controls("".join(table.texts_of(logical, size, self.text_of)), console.is_terminal)
            )
            filled = f"{table.filled(logical, size)}/{size}"
            lines.add_row(f"  {logical}", arrow, str(block), Text(filled, "dim"), words)
        yield lines


def print_blocks(seen: Highlights, outputs: Sequence[RequestOutput], console: Console) -> None:
    """What `generate --show-blocks` adds: the pool at its fullest, then where each output ended."""
    if seen.fullest is None:
        return
    console.print(Text(f"\nThe pool at its fullest (step {seen.fullest_step})", style="bold"))
    console.print(Pool(seen.fullest))
    for placed in map(seen.place, outputs):
        for number, table in enumerate(placed.tables):
            if table is not None:
                console.print()
                console.print(Table(placed.title(number), table, placed.block_size, placed.text_of))
