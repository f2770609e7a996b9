"""Every block of a pool as a small tile: who holds it, how often, how full it is; or evictable, or free.

    +-----+ +-----+ +-----+ +- - -+
    |0    | |1  x2| |2 /// | 3
    | A   | | B   | | /evictable   free        the bar below a name: filled slots
    |#### | |##   | |/////| |     |
    +-----+ +-----+ +-----+ +- - -+

For pools too large to draw with their tokens (`tables` does that). Draws a `PoolView`, or what a
`KVManager` knows by itself: counts without names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minipaged.viewer.pictures.names import colours, fill, label
from minipaged.viewer.pictures.svg import Picture, Svg, text_width
from minipaged.viewer.pictures.tables import describe
from minipaged.viewer.snapshot import BlockView, PoolView, evictable_blocks

MARGIN, TILE, HEIGHT, GAP = 18, 50, 46, 6
MOST_BLOCKS = 192
"""Tiles that are drawn; of a larger pool the first ones, and a line says how many more there are."""


def pool_svg(view: PoolView, caption: str = "", columns: int = 12) -> Svg:
    """The picture of a pool whose owners are known; host blocks, if any are in use, below it."""
    host = view.blocks(on_host=True)
    groups = [("device", view.blocks())]
    if any(block.owners for block in host):
        groups.append(("host", host))
    return _draw(groups, view.block_size, columns, caption, describe(view), view)


def manager_svg(kv: Any) -> Svg:
    """The picture of a `KVManager`: reference counts, evictable and free blocks, without names."""
    evictable = evictable_blocks(kv)
    blocks = []
    for block in range(kv.allocator.num_blocks):
        count = kv.allocator.ref_count(block)
        state: Any = "used" if count else "evictable" if block in evictable else "free"
        blocks.append(BlockView(block, state, (), count, None))
    words = f"{kv.num_used} of {len(blocks)} blocks in use, {len(evictable)} cached and evictable."
    return _draw([("device", blocks)], kv.block_size, 12, "KV pool", words, None)


def _draw(
    groups: Sequence[tuple[str, Sequence[BlockView]]],
    block_size: int,
    columns: int,
    caption: str,
    words: str,
    view: PoolView | None,
) -> Svg:
    shown = [(name, _worth_drawing(blocks), blocks) for name, blocks in groups]
    rows = sum(-(-len(some) // columns) for _, some, _ in shown)
    head = 26 if caption else 0
    extra = sum(22 for _, some, blocks in shown if len(some) < len(blocks)) + 24 * (len(shown) - 1)
    width = max(430, 2 * MARGIN + columns * (TILE + GAP) - GAP)
    picture = Picture(width, 2 * MARGIN + head + rows * (HEIGHT + GAP) + extra + 20)
    if caption:
        picture.text(MARGIN, MARGIN + 14, caption, size=15, bold=True)
    y: float = MARGIN + head
    colour = colours(view) if view is not None else {}
    for name, some, blocks in shown:
        if name == "host":
            picture.text(MARGIN, y + 14, "host (swapped out)", "soft")
            y += 24
        for i, block in enumerate(some):
            left = MARGIN + i % columns * (TILE + GAP)
            _tile(picture, block, left, y + i // columns * (HEIGHT + GAP), block_size, colour, view)
        y += -(-len(some) // columns) * (HEIGHT + GAP)
        if len(some) < len(blocks):
            picture.text(MARGIN, y + 12, _rest(blocks[len(some) :]), "soft", 12.5)
            y += 22
    # Counts of device and host together would say nothing.
    _legend(picture, y + 12, [block for _, some, _ in shown for block in some], counts=len(shown) == 1)
    return picture.render(caption or "KV pool", words)


def _worth_drawing(blocks: Sequence[BlockView]) -> Sequence[BlockView]:
    """All of a small pool; of a large one, up to the last block that is not free."""
    if len(blocks) <= 48:
        return blocks
    last = max((block.block for block in blocks if block.state != "free"), default=0)
    return blocks[: min(MOST_BLOCKS, max(12, -(-(last + 1) // 12) * 12))]


def _rest(blocks: Sequence[BlockView]) -> str:
    free = sum(block.state == "free" for block in blocks)
    return f"and {len(blocks):,} more, {'all' if free == len(blocks) else f'{free:,}'} free"


def _tile(
    picture: Picture,
    block: BlockView,
    x: float,
    y: float,
    block_size: int,
    colour: Mapping[str, int],
    view: PoolView | None,
) -> None:
    if block.state == "free":
        picture.rect(x, y, TILE, HEIGHT, "free")
    elif block.state == "evictable":
        picture.rect(x, y, TILE, HEIGHT, "shade")
        picture.hatch(x, y, TILE, HEIGHT, 8)
    else:
        picture.rect(x, y, TILE, HEIGHT, fill(block, colour) if block.owners else "tint0")
    look = "soft" if block.state == "free" else "ink"
    picture.text(x + 5, y + 13, str(block.block), look, 10.5)
    if block.ref_count > 1:
        picture.text(x + TILE - 5, y + 13, f"\u00d7{block.ref_count}", "ink", 10.5, "end", bold=True)
    if block.state == "used":
        picture.text(x + TILE / 2, y + 29, _name(block, view), "ink", 12, "middle", True)
    if block.filled is not None:
        full = (TILE - 12) * block.filled / block_size
        picture.rect(x + 6, y + HEIGHT - 11, TILE - 12, 5, "paper", 1)
        picture.rect(x + 6, y + HEIGHT - 11, full, 5, "ink", 1)


def _name(block: BlockView, view: PoolView | None) -> str:
    if view is None or not block.owners:
        return "used"
    requests = {table.request for table in block.owners}
    name = label(block.owners[0], view) if len(block.owners) == 1 else block.owners[0].request
    return (
        name
        if len(requests) == 1 and len(name) < 7
        else "shared"
        if len(requests) > 1
        else name[:5] + "\u2026"
    )


def _legend(picture: Picture, y: float, blocks: Sequence[BlockView], counts: bool) -> None:
    x: float = MARGIN
    for state, name in (("used", "in use"), ("evictable", "cached, evictable"), ("free", "free")):
        count = sum(block.state == state for block in blocks)
        if not count:
            continue
        picture.rect(x, y - 10, 16, 13, {"used": "tint0", "evictable": "shade", "free": "free"}[state], 3)
        if state == "evictable":
            picture.hatch(x, y - 10, 16, 13, 5)
        told = f"{name} ({count})" if counts else name
        picture.text(x + 22, y + 1, told, "soft", 12.5)
        x += 22 + text_width(told, 12.5) + 14
    if any(block.filled is not None for block in blocks):
        picture.rect(x, y - 6, 16, 5, "ink", 1)
        picture.text(x + 22, y + 1, "filled slots", "soft", 12.5)
