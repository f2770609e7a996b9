"""Every block of a pool as a small tile: its holders and how full it is, or that it is evictable or free.

Draws a `PoolView`, or what a `KVManager` knows by itself: counts without names. `tables` also shows tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipaged.memory import KVManager
from minipaged.text_io import counted
from minipaged.viewer.pictures.names import colours, fill, labels, owner, worth_showing
from minipaged.viewer.pictures.svg import MARGIN, Picture, Svg, below_caption, in_both_forms, text_width
from minipaged.viewer.pictures.tables import describe
from minipaged.viewer.snapshot import BlockView, PoolView, evictable_blocks

TILE, HEIGHT, GAP = 50, 46, 6
COLUMNS, COLUMNS_ON_A_PHONE = 12, 6
MOST_BLOCKS = 192  # drawn of a larger pool; a line says how many more there are


def pool_svg(view: PoolView, caption: str = "") -> Svg:
    """The picture of a pool whose owners are known; host blocks, if any are in use, below it."""
    groups, host = [view.blocks()], view.blocks(on_host=True)
    if any(block.owners for block in host):
        groups.append(host)
    return in_both_forms(lambda narrow: _draw(groups, view, caption, describe(view), narrow))


def manager_svg(kv: KVManager) -> Svg:
    """The picture of a `KVManager`: reference counts, evictable and free blocks, without names."""
    evictable, count = evictable_blocks(kv), kv.allocator.ref_count
    blocks = [
        BlockView(b, "used" if count(b) else "evictable" if b in evictable else "free", (), count(b))
        for b in range(kv.allocator.num_blocks)
    ]
    words = f"{kv.num_used} of {counted(len(blocks), 'block')} in use, {len(evictable)} cached and evictable."
    pool = PoolView(kv.block_size, len(blocks))
    return in_both_forms(lambda narrow: _draw([blocks], pool, "KV pool", words, narrow))


def _draw(groups: list[list[BlockView]], view: PoolView, caption: str, words: str, narrow: bool) -> Svg:
    shown = [blocks[: _num_drawn(blocks)] for blocks in groups]
    colour, label = colours(view), labels(view)
    columns = COLUMNS_ON_A_PHONE if narrow else COLUMNS
    picture = Picture(2 * MARGIN + columns * (TILE + GAP) - GAP, 0, caption)
    y = below_caption(caption, picture.width)
    for some, blocks in zip(shown, groups):
        if blocks is not groups[0]:
            picture.text(MARGIN, y + 14, "host (swapped out)", "soft")
            y += 24
        for i, block in enumerate(some):
            left, top = MARGIN + i % columns * (TILE + GAP), y + i // columns * (HEIGHT + GAP)
            look = fill(block, colour) if block.owners else "tint0"
            name = owner(block, label) if block.owners else "used"
            _tile(picture, left, top, block, view.block_size, look, name)
        y += -(-len(some) // columns) * (HEIGHT + GAP)
        if rest := blocks[len(some) :]:
            free = sum(block.state == "free" for block in rest)
            more = f"and {len(rest):,} more, {'all' if free == len(rest) else f'{free:,}'} free"
            picture.text(MARGIN, y + 12, more, "soft", 12.5)
            y += 22
    # Counts of device and host together would say nothing.
    end = _legend(picture, y + 12, [block for some in shown for block in some], counts=len(shown) == 1)
    picture.height = end + 8 + MARGIN
    return picture.render(caption or "KV pool", words)


def _num_drawn(blocks: Sequence[BlockView]) -> int:
    """All of a small pool; of a large one, whole rows up to the last block that is not free."""
    if len(blocks) <= 48:
        return len(blocks)
    return min(MOST_BLOCKS, max(COLUMNS, -(-worth_showing(blocks) // COLUMNS) * COLUMNS))


def _tile(picture: Picture, x: float, y: float, block: BlockView, size: int, look: str, name: str) -> None:
    picture.block(x, y, TILE, HEIGHT, block.state, look, gap=8)
    picture.text(x + 5, y + 13, str(block.block), "soft" if block.state == "free" else "ink", 10.5)
    if block.ref_count > 1:
        picture.text(x + TILE - 5, y + 13, f"\u00d7{block.ref_count}", "ink", 10.5, "end", bold=True)
    if block.state == "used":
        name = name if len(name) < 7 else name[:5] + "\u2026"
        picture.text(x + TILE / 2, y + 29, name, "ink", 12, "middle", True)
    if block.filled is not None:
        full = (TILE - 12) * block.filled / size
        picture.rect(x + 6, y + HEIGHT - 11, TILE - 12, 5, "paper", 1)
        picture.rect(x + 6, y + HEIGHT - 11, full, 5, "ink", 1)


def _legend(picture: Picture, y: float, blocks: Sequence[BlockView], counts: bool) -> float:
    """Draw it, and return the height of its last line."""
    entries = [
        (state, f"{name} ({count})" if counts else name)
        for state, name in (("used", "in use"), ("evictable", "cached, evictable"), ("free", "free"))
        if (count := sum(block.state == state for block in blocks))
    ]
    if any(block.filled is not None for block in blocks):
        entries.append(("filled", "filled slots"))
    x: float = MARGIN
    for state, name in entries:
        width = 22 + text_width(name, 12.5)
        if x + width > picture.width:
            x, y = MARGIN, y + 20
        if state == "filled":
            picture.rect(x, y - 6, 16, 5, "ink", 1)
        else:
            picture.block(x, y - 10, 16, 13, state, gap=5, radius=3)
        picture.text(x + 22, y + 1, name, "soft", 12.5)
        x += width + 14
    return y
