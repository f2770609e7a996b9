"""Shapes on a sheet: the few that the pictures are made of, as SVG text.

    picture = Picture(200, 80);  picture.block(...);  picture.render("title", "what a reader would see")

Every picture is one `<svg role="img">` with a title and a description, brings its own style sheet
(palette.py) and stands on paper of its own, so that it can be read on any page. Knows no block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from minipaged.viewer.pictures import palette

SLOT_TEXT = 12.0
"""Font size of the token in a slot."""

MONO = 0.6
"""Width of a monospaced character / font size."""


class Svg(str):
    """The text of a picture; notebooks show it as one."""

    def _repr_svg_(self) -> str:
        return str(self)


class Picture:
    """A sheet of `width` x `height` to draw on."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._parts: list[str] = []

    def add(self, element: str) -> None:
        """Draw a raw element."""
        self._parts.append(element)

    def rect(self, x: float, y: float, width: float, height: float, look: str, radius: float = 4) -> None:
        """A rectangle; `look` are classes of the style sheet."""
        size = f'width="{_n(width)}" height="{_n(height)}"'
        self.add(f'<rect x="{_n(x)}" y="{_n(y)}" {size} rx="{_n(radius)}" class="{look}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        look: str = "ink",
        size: float = 13,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """A line of text; `y` is its base line."""
        weight = ' font-weight="600"' if bold else ""
        place = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"'
        at = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.add(f'<text {place}{at}{weight} class="{look}">{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, look: str = "rule", width: float = 1) -> None:
        """A straight line."""
        ends = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
        self.add(f'<line {ends} class="{look}" stroke-width="{_n(width)}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: int, dashed: bool = False) -> None:
        """A curved arrow from left to right in the colour of an owner."""
        bend = (x2 - x1) / 2
        curve = f"M{_n(x1)} {_n(y1)}C{_n(x1 + bend)} {_n(y1)} {_n(x2 - bend)} {_n(y2)} {_n(x2 - 6)} {_n(y2)}"
        dash = ' stroke-dasharray="5 3"' if dashed else ""
        self.add(f'<path d="{curve}" class="edge{colour}" stroke-width="1.6"{dash}/>')
        head = f"M{_n(x2)} {_n(y2)}l-8 -4v8z"
        self.add(f'<path d="{head}" class="hue{colour}"/>')

    def hatch(self, x: float, y: float, width: float, height: float, gap: float = 7) -> None:
        """Slanted lines over a rectangle: the pattern of what is kept but not in use, or not yet there."""
        lines = []
        reach = gap
        while reach < width + height:
            left, top = max(0.0, reach - height), min(reach, height)
            right, bottom = min(reach, width), max(0.0, reach - width)
            lines.append(f"M{_n(x + left)} {_n(y + top)}L{_n(x + right)} {_n(y + bottom)}")
            reach += gap
        self.add(f'<path d="{"".join(lines)}" class="rule" stroke-width="0.8"/>')

    def slots(
        self,
        x: float,
        y: float,
        slot_width: float,
        height: float,
        look: str,
        words: Sequence[str | None],
        num_computed: int | None = None,
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
            if num_computed is not None and i >= num_computed:
                self.hatch(left, y, slot_width, height)
            text, fitting = fit(word, slot_width - 4, size) if word else ("", size)
            if text:
                middle = left + slot_width / 2
                self.text(middle, y + height / 2 + fitting * 0.36, text, "ink mono", fitting, "middle")

    def render(self, title: str, description: str) -> Svg:
        """The picture as a text that is a whole SVG file and can stand in an HTML page as it is.

        Args:
            title: what it is, a few words.
            description: what there is to see, for readers who do not see it.
        """
        label = escape(f"{title}. {description}", quote=True)
        box = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" width="{_n(self.width)}"'
        return Svg(
            f'<svg xmlns="http://www.w3.org/2000/svg" class="mp" role="img" aria-label="{label}" {box} '
            f'height="{_n(self.height)}" style="max-width:100%;height:auto">'
            f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
            f"<style>{palette.css()}</style>"
            f'<rect width="{_n(self.width)}" height="{_n(self.height)}" rx="10" class="paper"/>'
            f"{''.join(self._parts)}</svg>\n"
        )


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
