"""Logical blocks of each sequence on the left, the pool on the right, arrows between (paper, Figs. 6 to 8).

    A  0 [Four score and seven] 4/4 ---+   +--> 1 [years ago our fathers]
       1 [years ago our fathers] 4/4 --|---+
                                       +------> 7 [Four score and seven]

For views small enough to see every block; larger ones are for `pool`. Draws a `PoolView`, whether
it was looked at or replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minipaged.viewer.pictures.names import colours, fill, holders, label
from minipaged.viewer.pictures.svg import Picture, Svg, text_width
from minipaged.viewer.snapshot import BlockView, PoolView, TableView

TextOf = Callable[[int], str]

MARGIN, ROW, BLOCK, GAP = 18, 35, 28, 128
MOST_BLOCKS = 24
"""Pools up to this size are drawn whole; of larger ones, the blocks that are not free."""


def tables_svg(view: PoolView, text_of: TextOf | None = None, caption: str = "") -> Svg:
    """The picture of all device tables and the pool.

    Args:
        view: what to draw.
        text_of: text of a token id; without it slots show the ids.
        caption: a line above.
    """
    tables = [table for table in view.tables.values() if not table.on_host]
    slot = max(9.0, min(58.0, 236 / view.block_size))
    width = slot * view.block_size
    everything = view.num_blocks <= MOST_BLOCKS
    shown = [block for block in view.blocks() if everything or block.state != "free"]
    top = MARGIN + (26 if caption else 0) + 24
    left_rows = sum(max(1, len(table.blocks)) for table in tables)
    left_height = left_rows * ROW + max(0, len(tables) - 1) * 20
    right_height = len(shown) * ROW
    body = max(left_height, right_height, ROW)
    x = MARGIN + 32 + max((text_width(label(table, view), 14, bold=True) for table in tables), default=0)
    x_pool = x + width + GAP + 34
    picture = Picture(x_pool + width + 96, top + body + 40)
    if caption:
        picture.text(MARGIN, MARGIN + 14, caption, size=15, bold=True)
    picture.text(x, top - 9, "logical blocks of each sequence", "soft")
    picture.text(x_pool, top - 9, "physical blocks of the pool", "soft")
    picture.text(x_pool + width + 10, top - 9, "held by", "soft")
    colour = colours(view)
    place = {block.block: top + i * ROW + (body - right_height) / 2 for i, block in enumerate(shown)}
    # The tables stand where their blocks lie, so that arrows are short.
    ends = [place[block] for table in tables for block in table.blocks] or [top]
    middle = sum(ends) / len(ends) + BLOCK / 2
    y = max(top, min(middle - left_height / 2, top + body - left_height))
    for table in tables:
        number = colour[table.name]
        picture.text(MARGIN, y + 19, label(table, view), bold=True, size=14)
        for logical, block in enumerate(table.blocks):
            filled = table.filled(logical, view.block_size)
            words = slot_words(table, logical, view.block_size, text_of)
            computed = table.computed(logical, view.block_size)
            picture.text(x - 8, y + 19, str(logical), "soft", anchor="end")
            picture.slots(x, y, slot, BLOCK, f"tint{number}", words, computed)
            picture.text(x + width + 8, y + 19, f"{filled}/{view.block_size}", "soft", 12)
            start = x + width + 12 + 7 * len(f"{filled}/{view.block_size}")
            picture.arrow(start, y + BLOCK / 2, x_pool - 30, place[block] + BLOCK / 2, number)
            y += ROW
        y += (0 if table.blocks else ROW) + 20
    for physical in shown:
        _pool_block(picture, view, physical, x_pool, place[physical.block], slot, colour, text_of)
    picture.text(MARGIN, picture.height - 16, _summary(view), "soft", 12.5)
    return picture.render(caption or "Block tables and pool", describe(view))


def _pool_block(
    picture: Picture,
    view: PoolView,
    block: BlockView,
    x: float,
    y: float,
    slot: float,
    colour: Mapping[str, int],
    text_of: TextOf | None,
) -> None:
    width = slot * view.block_size
    picture.text(x - 8, y + 19, str(block.block), "ink", 13, "end", bold=block.state == "used")
    if not block.owners:
        picture.rect(x, y, width, BLOCK, "free" if block.state == "free" else "shade")
        if block.state == "evictable":
            picture.hatch(x, y, width, BLOCK)
        middle, name = x + width / 2, "free" if block.state == "free" else "cached, evictable"
        if block.state == "evictable":
            picture.rect(middle - 44, y + 5, 88, BLOCK - 10, "paper", 9)
        picture.text(middle, y + 18.5, name, "soft", 12, "middle")
        return
    # Of several owners the one that filled most of it knows its tokens best.
    owner = max(block.owners, key=lambda t: t.filled(t.blocks.index(block.block), view.block_size))
    logical = owner.blocks.index(block.block)
    words = slot_words(owner, logical, view.block_size, text_of)
    look = fill(block, colour)
    computed = max(t.computed(t.blocks.index(block.block), view.block_size) for t in block.owners)
    picture.slots(x, y, slot, BLOCK, look, words, computed)
    picture.text(x + width + 10, y + 19, holders(block, view), "ink", 12.5, bold=block.ref_count > 1)


def slot_words(
    table: TableView, logical: int, block_size: int, text_of: TextOf | None
) -> Sequence[str | None]:
    """A word per slot of a logical block; None where the slot is empty."""
    tokens = table.tokens_of(logical, block_size)
    filled = table.filled(logical, block_size)
    known = [str(token) if text_of is None else text_of(token) for token in tokens]
    return [*known, *["\u00b7"] * (filled - len(known)), *[None] * (block_size - filled)]


def _summary(view: PoolView) -> str:
    evictable = f", {len(view.evictable)} cached and evictable" if view.evictable else ""
    held = sum(len(table.blocks) for table in view.tables.values() if not table.on_host)
    saved = held - view.num_used
    shared = f"; {held} table entries, {saved} saved by sharing" if saved else ""
    return f"{view.num_used} of {view.num_blocks} blocks in use{evictable}, {view.num_free} free{shared}"


def describe(view: PoolView) -> str:
    """A view in words, for readers who do not see the picture."""
    sentences = []
    for table in view.tables.values():
        where = "host blocks" if table.on_host else "physical blocks"
        blocks = ", ".join(map(str, table.blocks)) or "none"
        sentences.append(f"Sequence {label(table, view)}: {table.num_tokens} tokens in {where} {blocks}.")
    return " ".join([*sentences, _summary(view) + "."])


def table_svg(table: Any) -> Svg:
    """A `BlockTable` alone, as the paper's Fig. 6 writes it: physical block number, # filled, references."""
    size = table.block_size
    slot = max(9.0, min(24.0, 384 / size))
    x, x_number = MARGIN + 64, MARGIN + 64 + slot * size + 78
    rows = max(1, len(table.blocks))
    picture = Picture(x_number + 150, MARGIN + 26 + rows * ROW + 30)
    top = MARGIN + 26
    for at, anchor, head in (
        (x - 10, "end", "logical"),
        (x + slot * size + 44, "middle", "filled"),
        (x_number + 24, "middle", "physical"),
        (x_number + 96, "middle", "refs"),
    ):
        picture.text(at, top - 9, head, "soft", 12.5, anchor)
    for logical, block in enumerate(table.blocks):
        y, filled = top + logical * ROW, table.filled(logical)
        picture.text(x - 10, y + 19, str(logical), "soft", anchor="end")
        picture.slots(x, y, slot, BLOCK, "tint0", [""] * filled + [None] * (size - filled))
        picture.text(x + slot * size + 44, y + 19, f"{filled}/{size}", anchor="middle")
        picture.text(x_number + 24, y + 19, str(block), anchor="middle", bold=True)
        picture.text(x_number + 96, y + 19, f"\u00d7{table.pool.ref_count(block)}", anchor="middle")
    spare = table.capacity - table.num_tokens
    text = f"{table.num_tokens} tokens, {spare} of {table.capacity} slots empty"
    picture.text(MARGIN, picture.height - 14, text, "soft", 12.5)
    blocks = ", ".join(map(str, table.blocks)) or "none"
    return picture.render("BlockTable", f"Physical blocks {blocks}; {text}.")
