"""Sequences that share blocks, as a tree (paper, Fig. 9): a path is a table.

Blocks of an earlier view that are no longer in any table can be shown as ghosts, because they became free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from minipaged.text_io import counted
from minipaged.viewer.pictures.names import colours, labels
from minipaged.viewer.pictures.svg import MARGIN, Picture, Svg, below_caption, in_both_forms, text_width
from minipaged.viewer.snapshot import PoolView

ROW, HIGH = 42, 30
STEP, WIDE = 88, 56
STEP_ON_A_PHONE, WIDE_ON_A_PHONE = 58, 48


class Leaf(NamedTuple):
    """A row of the picture: the blocks of a table, its name, and its colour (None: a ghost)."""

    blocks: tuple[int, ...]
    name: str
    colour: int | None


@dataclass
class Node:
    """A block on the paths of some tables: the first of their rows, their colours except those of ghosts,
    and the blocks that come next, by id."""

    row: int
    owners: list[int] = field(default_factory=list)
    children: dict[int, Node] = field(default_factory=dict)


def tree_svg(view: PoolView, before: PoolView | None = None, caption: str = "") -> Svg:
    """The picture of the device tables; those of an earlier view with a freed block are ghosts."""
    return in_both_forms(lambda narrow: _draw(view, before, caption, narrow))


def _draw(view: PoolView, before: PoolView | None, caption: str, narrow: bool) -> Svg:
    step, wide = (STEP_ON_A_PHONE, WIDE_ON_A_PHONE) if narrow else (STEP, WIDE)
    tables, colour, label = view.on_device(), colours(view), labels(view)
    held = {block for table in tables for block in table.blocks}
    gone = [t for t in (before.tables.values() if before else ()) if not held.issuperset(t.blocks)]
    live = [Leaf(table.blocks, label[table.name], colour[table.name]) for table in tables]
    leaves = sorted([*live, *(Leaf(t.blocks, "gone", None) for t in gone)], key=lambda leaf: leaf.blocks)
    root = Node(0)
    for row, leaf in enumerate(leaves):
        node = root
        for block in leaf.blocks:
            node = node.children.setdefault(block, Node(row))
            node.owners += [] if leaf.colour is None else [leaf.colour]
    depth = max((len(leaf.blocks) for leaf in leaves), default=1)
    names = max((text_width(leaf.name) for leaf in leaves), default=0)
    fell = sorted({block for table in gone for block in table.blocks} - held)
    num_entries = sum(len(table.blocks) for table in tables)
    entries = f"{num_entries} table entr{'y' if num_entries == 1 else 'ies'}"
    notes = [f"{counted(len(held), 'block')} for {entries}"]
    notes += [f"block{'s' * (len(fell) > 1)} {', '.join(map(str, fell))} became free"] if fell else []
    text = "; ".join(notes)
    shown = notes if narrow else [text]
    width = 2 * MARGIN + max(depth * step + names + 20, *(text_width(line, 12.5) for line in shown))
    top = below_caption(caption, width) + 8
    picture = Picture(width, top + len(leaves) * ROW + 16 + 18 * len(shown), caption)
    for block, node in root.children.items():
        _subtree(picture, block, node, MARGIN, top, step, wide)
    for row, leaf in enumerate(leaves):
        x, ghost = MARGIN + len(leaf.blocks) * step - (step - wide) + 14, leaf.colour is None
        picture.text(x, top + row * ROW + 20, leaf.name, "soft" if ghost else "ink", bold=not ghost)
    picture.note(*shown)
    paths = [f"{leaf.name}: {', '.join(map(str, leaf.blocks))}" for leaf in leaves if leaf.colour is not None]
    return picture.render(caption or "Blocks shared by sequences", f"{'; '.join(paths)}. {text}.")


def _subtree(picture: Picture, block: int, node: Node, x: float, top: float, step: int, wide: int) -> float:
    """Draw a node and what follows it; return the height of its middle."""
    below = [
        _subtree(picture, following, child, x + step, top, step, wide)
        for following, child in node.children.items()
    ]
    y = sum(below) / len(below) if below else top + node.row * ROW + HIGH / 2
    for child, middle in zip(node.children.values(), below):
        dashes = "" if child.owners else "3 3"
        ends = (x + wide, y, x + step, middle)
        picture.curve(*ends, look="rule", stroke_width=1.5, stroke_dasharray=dashes)
    owners = node.owners
    look = f"tint{owners[0]}" if len(owners) == 1 else "shade"
    picture.block(x, y - HIGH / 2, wide, HIGH, "used" if owners else "free", look)
    if not owners:
        picture.line(x + 6, y + HIGH / 2 - 5, x + wide - 6, y - HIGH / 2 + 5)
    picture.text(x + 6, y + 5, str(block), "ink" if owners else "soft", 14, bold=bool(owners))
    if len(owners) > 1:
        picture.text(x + wide - 5, y + 5, f"\u00d7{len(owners)}", "ink", 12, "end")
    return y
