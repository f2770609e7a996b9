"""Reasoning before an answer, as written by Qwen, DeepSeek, GLM and models trained like them:

    <think>They greet me.</think>Hello!

Some chat templates write the first tag themselves; then the text begins inside.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from minipaged.decoding.reasoning import BEGIN, END, ReasoningTags
from minipaged.serving.tool_calls import TAG, undecided

SPACED_END = re.compile(rf"(?<!\s)\s*+{END}")
CALLS = [f"{TAG}{space}{begin}" for space in ("", "\n") for begin in ("{", "<function=")]
END_OR_CALL = re.compile(rf"(?<!\s)\s*+(?:{END}|(?={'|'.join(map(re.escape, CALLS))}))")


class ReasoningReader:
    """Splits a text into reasoning and what follows it, as its pieces come; the space around its tags is
    dropped. A text that neither begins with the tag nor inside has no reasoning.

    Args:
        tags: of the tokenizer.
        is_open: the text begins inside.
        has_calls: a tool call ends the reasoning, too (some models forget its tag); its tag alone does not.
    """

    def __init__(self, tags: ReasoningTags, is_open: bool, has_calls: bool) -> None:
        self._tags = tags
        self._is_open = self._counts = is_open
        self._has_begun = self._has_ended = False
        self._trims = False  # the space that comes next
        self._held = ""
        self._end = END_OR_CALL if has_calls else SPACED_END
        self._undecided = undecided(END, *CALLS) if has_calls else undecided(END)

    def count(self, token_ids: Sequence[int]) -> int:
        """How many of the next tokens are reasoning, its tags included."""
        count = 0
        for token in token_ids:
            self._counts |= token == self._tags.begin
            count += self._counts
            self._counts &= token != self._tags.end
        return count

    def read(self, piece: str, is_last: bool) -> tuple[str, str]:
        """One more piece: what is now certain to be reasoning, and what is certain to follow it."""
        text, self._held = self._held + piece, ""
        if not self._has_begun:
            begun = text.lstrip()
            if not is_last and len(begun) < len(BEGIN) and BEGIN.startswith(begun):
                self._held = text
                return "", ""
            self._has_begun = True
            self._trims = begun.startswith(BEGIN)
            self._has_ended = not (self._trims or self._is_open)
            text = begun.removeprefix(BEGIN) if self._trims else text
        text = self._trimmed(text)
        if self._has_ended:
            return "", text
        if end := self._end.search(text):
            self._has_ended = self._trims = True
            return text[: end.start()], self._trimmed(text[end.end() :])
        if not is_last and (doubtful := self._undecided.search(text)):
            text, self._held = text[: doubtful.start()], text[doubtful.start() :]
        return text, ""

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text
