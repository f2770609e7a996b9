"""Text that arrives in pieces, wrapped between words at the width of the terminal."""

from __future__ import annotations

import shutil
import sys

from rich.cells import cell_len

from minipaged.text_io import without_controls


class WordWrap:
    """Takes pieces of a text and returns what to write; a word is held back until its length is known.

        width 12    "Once upon a ti"  "me, there"   ->   "Once upon a "  "\\ntime, "        rest: "there"

    Control characters are replaced (`without_controls`). `width` None changes nothing.
    """

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._column = 0
        self._word = ""

    def feed(self, piece: str) -> str:
        """What can be written now."""
        if self._width is None:
            return piece
        return "".join(map(self._after, without_controls(piece)))

    def rest(self) -> str:
        """What is held back."""
        word, self._word = self._word, ""
        length = cell_len(word)
        breaks = self._width is not None and self._column > 0 and self._column + length > self._width
        self._column = length + (0 if breaks else self._column)
        return "\n" * breaks + word

    def _after(self, character: str) -> str:
        if character == "\n":
            written, self._column = self.rest() + character, 0
            return written
        if character == " ":
            written = self.rest()
            if self._column == self._width:  # the line ends here anyway
                return written
            self._column += 1
            return written + character
        if cell_len(character) > 1:  # scripts without spaces may break anywhere
            written, self._word = self.rest(), character
            return written + self.rest()
        self._word += character
        return self.rest() if cell_len(self._word) == self._width else ""


def wrap_for_output() -> WordWrap:
    """As wide as the terminal; if standard output is not one, nothing is wrapped."""
    return WordWrap(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
