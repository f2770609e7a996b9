"""The home page's picture: figure 6 as a row of frames, for docs/javascripts/site.js to step through.

They come from a trace that the real engine wrote: scheduler, allocator and block tables are the project's,
only the model is a script that says the next word. Without scripts, and on paper, all frames are shown below
one another. (The figures of the concept pages are scenes of the viewer: viewer_scenes.py.)
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from minipaged.components import Components
from minipaged.decoding.params import SamplingParams
from minipaged.memory import BlockAllocator
from minipaged.viewer.pictures.runs import modelless
from minipaged.viewer.pictures.tables import tables_svg
from minipaged.viewer.replay import read_trace
from minipaged.viewer.snapshot import PoolView
from minipaged.viewer.trace import TraceWriter

WORDS = ["Four", "score", "and", "seven", "years", "ago", "our", "fathers", "brought", "forth"]
PROMPT = 7
NUM_BLOCKS = 9


Frame = tuple[str, str, PoolView]
"""A heading, a sentence, the memory then."""


def figure_6() -> list[Frame]:
    """The frames of the home page, from a trace."""
    # The executor answers with the number of the next token, which is that of the next word.
    engine = modelless(
        NUM_BLOCKS,
        components=Components(allocator=lambda count: BlockAllocator(count, order=(7, 1, 3))),
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figure-6.jsonl")
        with TraceWriter(path, engine):
            engine.add_request(
                "A", range(PROMPT), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            )
            while engine.has_unfinished:
                engine.step()
            engine.check_invariants()
        records = list(read_trace(path))
    empty = PoolView(engine.config.block_size, NUM_BLOCKS)
    prompt, first, second = (record.planned for record in records)
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


def frames_html(
    frames: Sequence[Frame], label: str, text_of: Callable[[int], str], plays: bool = False
) -> str:
    """Frames as HTML.

    Args:
        frames: at least one.
        label: what they show together, for readers who do not see it.
        text_of: text of a token.
        plays: whether it begins to move by itself (never where the reader prefers stillness).
    """
    figures = []
    for number, (heading, sentence, view) in enumerate(frames, 1):
        wide, narrow = (tables_svg(view, text_of, stacked=stacked).strip() for stacked in (False, True))
        picture = f'<div class="on-wide">{wide}</div><div class="on-phone">{narrow}</div>'
        count = f"{number} of {len(frames)}: " if len(frames) > 1 else ""
        caption = f"<strong>{count}{escape(heading)}</strong> {escape(sentence)}".strip()
        figures.append(
            f'<figure class="frame"><div class="sheet" tabindex="0" role="group" '
            f'aria-label="{escape(heading)}">{picture}</div><figcaption>{caption}</figcaption></figure>'
        )
    play = ' data-plays="true" data-start="1"' if plays else ""
    first, end, others = "".join(figures).partition("</style>")  # one style sheet serves all pictures
    shown = first + end + re.sub(r"<style>.*?</style>", "", others, flags=re.DOTALL)
    return f'<div class="frames" role="group" aria-label="{escape(label)}"{play}>{shown}</div>\n'
