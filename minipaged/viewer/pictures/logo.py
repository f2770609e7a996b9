"""The logo of the project, an m of blocks, and the card that social networks show with a link."""

from __future__ import annotations

from minipaged.viewer.pictures.scenes import SCORE
from minipaged.viewer.pictures.svg import Picture, Svg

SHAPE = ("00112", "0.1.2", "0.1.2", "0.1.2")
"""Rows of the m: the number of the owner, or a dot for a free block."""


def mark(picture: Picture, x: float, y: float, block: float) -> None:
    """Draw the m with its upper left corner at (x, y), blocks of `block` with gaps of an eighth."""
    side = block * 7 / 8
    for row, line in enumerate(SHAPE):
        for column, owner in enumerate(line):
            look = "free" if owner == "." else f"pure{owner}"
            picture.rect(x + column * block, y + row * block, side, side, look, block / 7)


def logo_svg() -> Svg:
    """The m in a square, on paper with round corners."""
    size = 128
    picture = Picture(size, size)
    block = size * 0.165
    width, height = 5 * block - block / 8, 4 * block - block / 8
    mark(picture, (size - width) / 2, (size - height) / 2, block)
    return picture.render("minipaged", "The letter m made of memory blocks in three colours.")


def card_svg() -> Svg:
    """The card, 1280 x 640."""
    picture = Picture(1280, 640)
    mark(picture, 96, 170, 60)
    picture.text(470, 262, "minipaged", size=104, bold=True)
    picture.text(474, 330, "Learn PagedAttention", "soft", 33)
    picture.text(474, 376, "by building a small LLM engine", "soft", 33)
    for i, block in enumerate((7, 1, 3)):
        x, row = 96 + i * 370, [*SCORE[4 * i : 4 * i + 4], None, None, None][:4]
        picture.text(x, 502, f"block {block}", "soft", 20)
        picture.slots(x, 514, 85, 48, f"tint{i}", row, size=17)
    return picture.render("minipaged", "Learn PagedAttention by building a small LLM engine.")
