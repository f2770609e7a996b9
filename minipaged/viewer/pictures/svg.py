"""Shapes on a sheet: the few that the pictures are made of, as SVG text.

A picture has its own style sheet (palette.py) and background, so that it is readable on any page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from math import inf
from textwrap import wrap
from typing import Any

from minipaged.viewer.pictures import palette

MARGIN = 18  # between the edge of the sheet and what is drawn
CAPTION_LINE = 19
SLOT_TEXT = 12.0  # font size of the token in a slot
MONO = 0.6  # width of a monospaced character / font size


class Svg(str):
    """The text of a picture; notebooks show it as one."""

    narrow: str | None = None
    """The same for a phone, if it has such a form. It has no style sheet: a page shows it beside this one."""

    def _repr_svg_(self) -> str:
        return str(self)


class Picture:
    """A sheet of `width` x `height` to draw on. Looks are classes of the style sheet."""

    def __init__(self, width: float, height: float, caption: str = "") -> None:
        self.width = width
        self.height = height
        self._parts: list[str] = []
        for number, line in enumerate(caption_lines(caption, width)):
            self.text(MARGIN, MARGIN + 14 + CAPTION_LINE * number, line, size=15, bold=True)

    def draw(self, tag: str, content: str | None = None, **attributes: float | str) -> None:
        """Add an element; `look` is its class, "_" stands for "-", "" for no such attribute."""
        fields = "".join(
            f" {'class' if name == 'look' else name.replace('_', '-')}="
            f'"{value if isinstance(value, str) else _n(value)}"'
            for name, value in attributes.items()
            if value != ""
        )
        end = "/>" if content is None else f">{escape(content)}</{tag}>"
        self._parts.append(f"<{tag}{fields}{end}")

    def rect(self, x: float, y: float, width: float, height: float, look: str, radius: float = 4) -> None:
        """A rectangle."""
        self.draw("rect", x=x, y=y, width=width, height=height, rx=radius, look=look)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        look: str = "ink",
        size: float = 13,
        anchor: str = "",
        bold: bool = False,
    ) -> None:
        """A line of text; `y` is its base line, `anchor` "middle" or "end"."""
        weight = "600" if bold else ""
        self.draw("text", text, x=x, y=y, font_size=size, text_anchor=anchor, font_weight=weight, look=look)

    def note(self, *lines: str, above: float = 16) -> None:
        """Lines at the bottom of the sheet."""
        for i, line in enumerate(reversed(lines)):
            self.text(MARGIN, self.height - above - 18 * i, line, "soft", 12.5)

    def line(self, x1: float, y1: float, x2: float, y2: float, look: str = "rule", width: float = 1) -> None:
        """A straight line."""
        self.draw("line", x1=x1, y1=y1, x2=x2, y2=y2, look=look, stroke_width=width)

    def curve(self, x1: float, y1: float, x2: float, y2: float, tip: float = 0, **attributes: Any) -> None:
        """A line that leaves and arrives level, and ends `tip` before x2."""
        bend = (x1 + x2) / 2
        path = f"M{_n(x1)} {_n(y1)}C{_n(bend)} {_n(y1)} {_n(bend)} {_n(y2)} {_n(x2 - tip)} {_n(y2)}"
        self.draw("path", d=path, **attributes)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: int) -> None:
        """A curved arrow from left to right in the colour of an owner."""
        self.curve(x1, y1, x2, y2, tip=6, look=f"edge{colour}", stroke_width=1.6)
        self.draw("path", d=f"M{_n(x2)} {_n(y2)}l-8 -4v8z", look=f"hue{colour}")

    def hatch(self, x: float, y: float, width: float, height: float, gap: float = 7) -> None:
        """Slanted lines over a rectangle: the pattern of what is kept but not in use, or not yet there."""
        lines, reach = [], gap
        while reach < width + height:
            start = f"M{_n(x + max(0.0, reach - height))} {_n(y + min(reach, height))}"
            lines.append(f"{start}L{_n(x + min(reach, width))} {_n(y + max(0.0, reach - width))}")
            reach += gap
        self.draw("path", d="".join(lines), look="rule", stroke_width=0.8)

    def block(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        state: str,
        look: str = "tint0",
        gap: float = 7,
        radius: float = 4,
    ) -> None:
        """A block without its tokens: `look` if used, dashed if free, hatched if evictable."""
        look = {"free": "free", "evictable": "shade"}.get(state, look)
        self.rect(x, y, width, height, look, radius)
        if state == "evictable":
            self.hatch(x, y, width, height, gap)

    def slots(
        self,
        x: float,
        y: float,
        slot_width: float,
        height: float,
        look: str,
        words: Sequence[str | None],
        num_computed: float = inf,
        size: float = SLOT_TEXT,
    ) -> None:
        """A block: a slot for each word; None is an empty slot. Slots from `num_computed` on are hatched."""
        self.rect(x, y, slot_width * len(words), height, look)
        for i, word in enumerate(words):
            left = x + i * slot_width
            if word is None:
                self.rect(left + 1, y + 1, slot_width - 2, height - 2, "paper", 3)
            if i:
                self.line(left, y + 1.5, left, y + height - 1.5, "rule" if word is None else "gap")
            if word is None:
                continue
            if i >= num_computed:
                self.hatch(left, y, slot_width, height)
            text, font = fit(word, slot_width - 4, size) if word else ("", size)
            if text:
                middle, base = left + slot_width / 2, y + height / 2 + font * 0.36
                self.text(middle, base, text, "ink mono", font, "middle")

    def render(self, title: str, description: str) -> Svg:
        """A whole SVG file, which can also stand in a page; `description` is for those who cannot see it."""
        label = escape(f"{title}. {description}", quote=True)
        width, height = _n(self.width), _n(self.height)
        return Svg(
            f'<svg xmlns="http://www.w3.org/2000/svg" class="mp" role="img" aria-label="{label}" '
            f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'style="max-width:100%;height:auto"><title>{escape(title)}</title>'
            f"<desc>{escape(description)}</desc><style>{palette.css()}</style>"
            f'<rect width="{width}" height="{height}" rx="10" class="paper"/>{"".join(self._parts)}</svg>\n'
        )


def in_both_forms(draw: Callable[[bool], Svg]) -> Svg:
    """A picture, `draw(False)`, with its narrow form, `draw(True)`."""
    picture = draw(False)
    picture.narrow = re.sub(r"<style>.*?</style>", "", draw(True))
    return picture


def caption_lines(caption: str, width: float) -> list[str]:
    """A caption in lines that fit a sheet."""
    return wrap(caption, int((width - 2 * MARGIN) / text_width("x", 15, bold=True)))


def below_caption(caption: str, width: float) -> float:
    """The height on a sheet at which there is room below its caption."""
    lines = caption_lines(caption, width)
    return MARGIN + (7 + CAPTION_LINE * len(lines) if lines else 0)


def fit(word: str, width: float, largest: float = SLOT_TEXT) -> tuple[str, float]:
    """What of a word fits into `width` in the slot font, and at which size; "" if nothing does."""
    shown = word.replace("\n", "\u23ce").strip() or "\u2423"
    for size in (largest, largest - 1, largest - 2):
        if len(shown) * size * MONO <= width:
            return shown, size
    room = int(width / (size * MONO))
    return (shown[: room - 1] + "\u2026" if room > 1 else ""), size


def text_width(text: str, size: float = 13, bold: bool = False) -> float:
    """About how wide a proportional text is, bold as in a wide font."""
    return len(text) * size * (0.7 if bold else 0.56)


def _n(value: float) -> str:
    """A coordinate without needless digits."""
    return f"{value:.1f}".rstrip("0").rstrip(".")
