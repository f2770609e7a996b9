"""Scheduler and block tables on rank 0, on each rank its heads of every block (paper, Figure 4)."""

from __future__ import annotations

from minipaged.memory import BlockTable
from minipaged.viewer.pictures.svg import MARGIN, Picture, Svg

WIDTH, LEFT, RIGHT = 720, 250, 370
HEADS, RANKS = 4, 2
ROW = 26


def ranks_svg(tables: dict[str, BlockTable], num_blocks: int) -> Svg:
    """The block tables of some requests, and where the heads of their blocks lie on each rank."""
    share = HEADS // RANKS
    height_of_rank = 46 + ROW * share
    height = MARGIN + 34 + RANKS * (height_of_rank + 18) + MARGIN + 14
    picture = Picture(WIDTH, height, "One plan, one block table, every rank its heads")
    top = MARGIN + 34.0
    bottom = top + RANKS * (height_of_rank + 18) - 18
    picture.rect(MARGIN, top, LEFT - MARGIN, bottom - top, "free", 8)
    for number, (text, look) in enumerate(
        (("rank 0", "ink"), ("Engine, FCFSScheduler", "soft"), ("KVManager:", "soft"))
    ):
        picture.text(MARGIN + 14, top + 22 + 20 * number, text, look, bold=look == "ink")
    owner: dict[int, int] = {}
    for number, (name, table) in enumerate(tables.items()):
        owner |= dict.fromkeys(table.blocks, number + 1)
        y = top + 78 + 32 * number
        picture.text(MARGIN + 14, y + 16, name)
        for place, block in enumerate(table.blocks):
            picture.rect(MARGIN + 40 + 38 * place, y, 34, 22, f"tint{number + 1}", 3)
            picture.text(MARGIN + 57 + 38 * place, y + 16, str(block), "ink mono", 12, "middle")
    for rank in range(RANKS):
        y = top + rank * (height_of_rank + 18)
        picture.rect(RIGHT, y, WIDTH - MARGIN - RIGHT, height_of_rank, "free", 8)
        picture.text(RIGHT + 12, y + 22, f"rank {rank}", bold=True)
        picture.text(RIGHT + 74, y + 22, "RankRunner, KVCache", "soft", 12.5)
        cell = (WIDTH - MARGIN - RIGHT - 86) / num_blocks
        for row in range(share):
            line = y + 34 + ROW * row
            picture.text(RIGHT + 12, line + 15, f"head {rank * share + row}", "soft", 12.5)
            for block in range(num_blocks):
                x = RIGHT + 72 + cell * block
                look = f"tint{owner[block]}" if block in owner else "free"
                picture.rect(x, line, cell - 4, ROW - 6, look, 3)
                picture.text(x + cell / 2 - 2, line + 14, str(block), "ink mono", 11, "middle")
        picture.arrow(LEFT, (top + bottom) / 2, RIGHT, y + height_of_rank / 2, 3)
    middle = (LEFT + RIGHT) / 2
    picture.text(middle, top + 14, "the plan,", "soft", 12.5, "middle")
    picture.text(middle, top + 30, "once a step", "soft", 12.5, "middle")
    picture.note("A block id names the same block on every rank; a rank holds only its heads of it.")
    where = "; ".join(f"{name} in blocks {table.blocks}" for name, table in tables.items())
    return picture.render(
        f"Figure 4: {RANKS} ranks",
        f"Rank 0 has the scheduler and the block tables: {where}. It sends the plan to {RANKS} ranks, "
        f"each of which holds {share} of {HEADS} heads of all {num_blocks} blocks.",
    )
