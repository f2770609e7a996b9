"""Logical blocks of each sequence on the left, the pool on the right, arrows between (paper, Figs. 6-8)."""

from __future__ import annotations

from minipaged.memory import BlockTable
from minipaged.text_io import counted
from minipaged.viewer.highlights import TextOf
from minipaged.viewer.pictures.names import colours, fill, holders, labels
from minipaged.viewer.pictures.svg import MARGIN, Picture, Svg, below_caption, in_both_forms, text_width
from minipaged.viewer.snapshot import PoolView, TableView

ROW, BLOCK, GAP = 35, 28, 128
MOST_BLOCKS = 24  # of a larger pool, free blocks are not drawn


def tables_svg(view: PoolView, text_of: TextOf | None = None, caption: str = "") -> Svg:
    """The picture of all device tables and the pool; without `text_of` slots show token ids.

    The narrow form has the pool below the tables, and numbers in place of arrows.
    """
    return in_both_forms(lambda narrow: _draw(view, text_of, caption, stacked=narrow))


def _draw(view: PoolView, text_of: TextOf | None, caption: str, stacked: bool) -> Svg:
    tables, size, colour, label = view.on_device(), view.block_size, colours(view), labels(view)
    slot = max(9.0, min(50.0 if stacked else 58.0, 236 / size))
    width = slot * size
    shown = [b for b in view.blocks() if view.num_blocks <= MOST_BLOCKS or b.state != "free"]
    notes = _summary(view).split("; ") if stacked else [_summary(view)]
    x = MARGIN + 32 + max((text_width(label[table.name], 14, bold=True) for table in tables), default=0)
    x_pool = x if stacked else x + width + GAP + 34
    sheet = x_pool + width + 96
    top = below_caption(caption, sheet) + 24
    left_height = sum(max(1, len(table.blocks)) * ROW + 20 for table in tables) - 20 * bool(tables)
    right_height = len(shown) * ROW
    above = max(left_height, ROW) + 44
    body = above + right_height if stacked else max(left_height, right_height, ROW)
    top_pool = top + (above if stacked else (body - right_height) / 2)
    picture = Picture(sheet, top + body + 22 + 18 * len(notes), caption)
    head = (top_pool if stacked else top) - 9
    picture.text(x, top - 9, "logical blocks of each sequence", "soft")
    picture.text(x_pool, head, "physical blocks of the pool", "soft")
    picture.text(x_pool + width + 10, head, "held by", "soft")
    place = {block.block: top_pool + i * ROW for i, block in enumerate(shown)}
    # The tables are level with their blocks, so that arrows are short.
    ends = [place[block] for table in tables for block in table.blocks] or [top]
    middle = sum(ends) / len(ends) + BLOCK / 2
    y = top if stacked else max(top, min(middle - left_height / 2, top + body - left_height))
    for table in tables:
        number = colour[table.name]
        picture.text(MARGIN, y + 19, label[table.name], bold=True, size=14)
        for logical, block in enumerate(table.blocks):
            words, filled = slot_words(table, logical, size, text_of), f"{table.filled(logical, size)}/{size}"
            picture.text(x - 8, y + 19, str(logical), "soft", anchor="end")
            picture.slots(x, y, slot, BLOCK, f"tint{number}", words, table.computed(logical, size))
            picture.text(x + width + 8, y + 19, filled, "soft", 12)
            start = x + width + 12 + 7 * len(filled)
            if stacked:
                picture.text(start + 4, y + 19, f"\u2192 {block}", bold=True)
            else:
                picture.arrow(start, y + BLOCK / 2, x_pool - 30, place[block] + BLOCK / 2, number)
            y += ROW
        y += (0 if table.blocks else ROW) + 20
    for physical in shown:
        y, state = place[physical.block], physical.state
        picture.text(x_pool - 8, y + 19, str(physical.block), "ink", 13, "end", bold=state == "used")
        if not physical.owners:
            picture.block(x_pool, y, width, BLOCK, state)
            middle = x_pool + width / 2
            if state == "evictable":
                picture.rect(middle - 44, y + 5, 88, BLOCK - 10, "paper", 9)
            name = "free" if state == "free" else "cached, evictable"
            picture.text(middle, y + 18.5, name, "soft", 12, "middle")
            continue
        # Of several owners, the one that filled most of the block knows its tokens best.
        held = [(table, table.blocks.index(physical.block)) for table in physical.owners]
        table, logical = max(held, key=lambda at: at[0].filled(at[1], size))
        computed = max(table.computed(logical, size) for table, logical in held)
        words, who = slot_words(table, logical, size, text_of), holders(physical, label)
        picture.slots(x_pool, y, slot, BLOCK, fill(physical, colour), words, computed)
        picture.text(x_pool + width + 10, y + 19, who, "ink", 12.5, bold=physical.ref_count > 1)
    picture.note(*notes)
    return picture.render(caption or "Block tables and pool", describe(view))


def slot_words(table: TableView, logical: int, block_size: int, text_of: TextOf | None) -> list[str | None]:
    """A word per slot of a logical block; None where the slot is empty."""
    known = [(text_of or str)(token) for token in table.tokens_of(logical, block_size)]
    filled = table.filled(logical, block_size)
    return [*known, *["\u00b7"] * (filled - len(known)), *[None] * (block_size - filled)]


def _summary(view: PoolView) -> str:
    held = sum(len(table.blocks) for table in view.on_device())
    saved = held - view.num_used
    return view.usage + (f"; {held} table entries, {saved} saved by sharing" if saved else "")


def describe(view: PoolView) -> str:
    """A view in words, for readers who do not see the picture."""
    sentences, label = [], labels(view)
    for table in view.tables.values():
        where = f"{'host' if table.on_host else 'physical'} block{'s' * (len(table.blocks) != 1)}"
        blocks = ", ".join(map(str, table.blocks)) or "none"
        tokens = counted(table.num_tokens, "token")
        sentences.append(f"Sequence {label[table.name]}: {tokens} in {where} {blocks}.")
    return " ".join([*sentences, _summary(view) + "."])


def table_svg(table: BlockTable) -> Svg:
    """A `BlockTable` alone, in the columns of the paper's Fig. 6 and its references."""
    size = table.block_size
    slot = max(9.0, min(24.0, 384 / size))
    x, top = MARGIN + 64, MARGIN + 26
    x_next = x + slot * size
    picture = Picture(x_next + 228, top + max(1, len(table.blocks)) * ROW + 30)
    columns = ((x - 10, "end"), (x_next + 44, "middle"), (x_next + 102, "middle"), (x_next + 174, "middle"))
    for (at, anchor), head in zip(columns, ("logical", "filled", "physical", "refs")):
        picture.text(at, top - 9, head, "soft", 12.5, anchor)
    for logical, block in enumerate(table.blocks):
        y, filled = top + logical * ROW, table.filled(logical)
        picture.slots(x, y, slot, BLOCK, "tint0", [""] * filled + [None] * (size - filled))
        cells = (str(logical), f"{filled}/{size}", str(block), f"\u00d7{table.pool.ref_count(block)}")
        for i, ((at, anchor), cell) in enumerate(zip(columns, cells)):
            picture.text(at, y + 19, cell, "ink" if i else "soft", anchor=anchor, bold=i == 2)
    free = table.capacity - table.num_tokens
    text = f"{counted(table.num_tokens, 'token')}, {free} of {counted(table.capacity, 'slot')} empty"
    picture.note(text, above=14)
    blocks = ", ".join(map(str, table.blocks)) or "none"
    return picture.render("BlockTable", f"Physical blocks {blocks}; {text}.")
