"""The home page's picture: figure 6 as a row of frames, for docs/javascripts/site.js to step through.

They come from the trace of the scene `fig6` (viewer_scenes.py). Without scripts, and on paper, all frames are
shown below one another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

import viewer_scenes
from pages import responsive

from minipaged.viewer.pictures.tables import tables_svg
from minipaged.viewer.snapshot import PoolView

Frame = tuple[str, str, PoolView]
"""A heading, a sentence, the memory then."""


def figure_6() -> list[Frame]:
    """The frames of the home page, from a trace."""
    records, _ = viewer_scenes.recorded("fig6")
    prompt, first, second = (record.planned for record in records)
    empty = PoolView(prompt.block_size, prompt.num_blocks)
    return [
        ("A request arrives", "Nine blocks of four tokens each are free. Nothing is reserved.", empty),
        (
            "The prompt",
            "Seven tokens need two blocks. The allocator hands out 7 and 1; they need not be neighbours. "
            "Hatched slots are being computed.",
            prompt,
        ),
        (
            "The first generated token",
            "“fathers” goes to the slot of block 1 that is still free. No memory is asked for.",
            first,
        ),
        (
            "The second generated token",
            "Block 1 is full now, so “brought” takes a new block: 3. At most one block of a sequence is "
            "ever partly empty.",
            second,
        ),
        (
            "The request has ended",
            "All blocks are free again, in the same step.",
            records[-1].committed,
        ),
    ]


def frames_html(frames: Sequence[Frame], label: str) -> str:
    """Frames as HTML, which begin to move by themselves (never where the reader prefers stillness).

    Args:
        frames: of words of `viewer_scenes`.
        label: what they show together, for readers who do not see it.
    """
    figures = []
    for number, (heading, sentence, view) in enumerate(frames, 1):
        picture = responsive(tables_svg(view, viewer_scenes.WORDS.__getitem__))
        caption = f"<strong>{number} of {len(frames)}: {escape(heading)}</strong> {escape(sentence)}"
        figures.append(
            f'<figure class="frame"><div class="sheet small">{picture}</div>'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    first, end, others = "".join(figures).partition("</style>")  # one style sheet serves all pictures
    shown = first + end + re.sub(r"<style>.*?</style>", "", others, flags=re.DOTALL)
    return (
        f'<div class="frames" role="group" aria-label="{escape(label)}" data-plays="true" data-start="1">'
        f"{shown}</div>\n"
    )
