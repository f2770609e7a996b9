"""Sequences that share blocks, as the tree that they are (paper, Fig. 9).

    [0] -+- [1] --- [3] -+- [6]   beam 1
         |               +- [7]   beam 2          a block on a path is in the table of every leaf behind it
         +- [2] --- [4] --- [8]   beam 3

A prefix that several requests share is drawn the same way. Blocks that were in an earlier view of the same
sequences and are in no table now can be shown as ghosts: they fell free. Draws tables; knows no beams.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from minipaged.viewer.pictures.names import colours, label
from minipaged.viewer.pictures.svg import Picture, Svg, text_width
from minipaged.viewer.snapshot import PoolView

MARGIN, STEP, ROW, WIDE, HIGH = 18, 88, 42, 56, 30


@dataclass
class Node:
    """A block on the paths of some tables.

    Attributes:
        block: its id.
        leaves: rows of the tables that pass through it.
        children: the blocks that come next, by id.
        ghost: whether it is in no table of the view that is drawn.
    """

    block: int
    leaves: list[int] = field(default_factory=list)
    children: dict[int, Node] = field(default_factory=dict)
    ghost: bool = False


def grow(paths: Iterable[tuple[tuple[int, ...], bool]]) -> dict[int, Node]:
    """The tree of block lists; of each, whether it is a ghost."""
    roots: dict[int, Node] = {}
    for row, (blocks, ghost) in enumerate(paths):
        level = roots
        for block in blocks:
            node = level.setdefault(block, Node(block, ghost=ghost))
            node.leaves.append(row)
            node.ghost = node.ghost and ghost
            level = node.children
    return roots


def tree_svg(view: PoolView, before: PoolView | None = None, caption: str = "") -> Svg:
    """The picture of the device tables of a view.

    Args:
        view: what to draw.
        before: an earlier view; tables whose last block no table has any more are drawn as ghosts.
    """
    tables = [table for table in view.tables.values() if not table.on_host]
    held = {block for table in tables for block in table.blocks}
    gone = [t for t in (before.tables.values() if before else ()) if not held.issuperset(t.blocks)]
    live = [(table.blocks, False, label(table, view)) for table in tables]
    ghosts = [(table.blocks, True, "gone") for table in gone]
    rows = sorted((*live, *ghosts), key=lambda row: row[0])
    depth = max((len(blocks) for blocks, _, _ in rows), default=1)
    head = 34 if caption else 6
    names = max((text_width(name) for _, _, name in rows), default=0)
    picture = Picture(
        max(2 * MARGIN + depth * STEP + names + 20, 2 * MARGIN + text_width(caption, 15)),
        2 * MARGIN + head + len(rows) * ROW + 16,
    )
    if caption:
        picture.text(MARGIN, MARGIN + 14, caption, size=15, bold=True)
    top = MARGIN + head
    roots = grow((blocks, ghost) for blocks, ghost, _ in rows)
    number = {label(table, view): colours(view)[table.name] for table in tables}
    colour = {row: number[name] for row, (_, ghost, name) in enumerate(rows) if not ghost}
    for node in roots.values():
        _draw(picture, node, MARGIN, top, colour)
    for row, (_, ghost, name) in enumerate(rows):
        x = MARGIN + len(rows[row][0]) * STEP - (STEP - WIDE) + 14
        picture.text(x, top + row * ROW + 20, name, "soft" if ghost else "ink", bold=not ghost)
    fell = sorted({block for table in gone for block in table.blocks} - held)
    entries = sum(len(table.blocks) for table in tables)
    text = f"{len(held)} blocks for {entries} table entries"
    text += f"; blocks {', '.join(map(str, fell))} fell free" if fell else ""
    picture.text(MARGIN, picture.height - 16, text, "soft", 12.5)
    paths = [f"{name}: {', '.join(map(str, blocks))}" for blocks, ghost, name in rows if not ghost]
    return picture.render(caption or "Blocks shared by sequences", f"{'; '.join(paths)}. {text}.")


def _draw(picture: Picture, node: Node, x: float, top: float, colour: dict[int, int]) -> float:
    """Draw a node and what is behind it; return the height of its middle."""
    below = [_draw(picture, child, x + STEP, top, colour) for child in node.children.values()]
    y = sum(below) / len(below) if below else top + node.leaves[0] * ROW + HIGH / 2
    for child, middle in zip(node.children.values(), below):
        bend = x + WIDE + (STEP - WIDE) / 2
        path = (
            f"M{x + WIDE:.1f} {y:.1f}C{bend:.1f} {y:.1f} {bend:.1f} {middle:.1f} {x + STEP:.1f} {middle:.1f}"
        )
        dash = ' stroke-dasharray="3 3"' if child.ghost else ""
        picture.add(f'<path d="{path}" class="rule" stroke-width="1.5"{dash}/>')
    owners = [row for row in node.leaves if row in colour]
    look = "free" if node.ghost else f"tint{colour[owners[0]]}" if len(owners) == 1 else "shade"
    picture.rect(x, y - HIGH / 2, WIDE, HIGH, look)
    if node.ghost:
        picture.line(x + 6, y + HIGH / 2 - 5, x + WIDE - 6, y - HIGH / 2 + 5)
    text = "soft" if node.ghost else "ink"
    picture.text(x + 8, y + 5, str(node.block), text, 14, bold=not node.ghost)
    if len(owners) > 1:
        picture.text(x + WIDE - 6, y + 5, f"\u00d7{len(owners)}", "ink", 12, "end")
    return y
