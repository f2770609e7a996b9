"""When a sequence ends: an EOS or stop token, a stop string in its text, or its length.

`StopChecker` looks at a token *before* it is appended, so that a decoding method can say in one breath
which token continues a sequence and whether that ends it. Stop strings need text; `OutputText` is the
text after some tokens, immutable, so that sequences that fork share it without a copy. Text that may
be the beginning of a stop string is held back until the next tokens decide:

    stop "END"      tokens  " the" | " E"  | "N"  | "V"        | ...
                    shown   " the" | " "   | ""   | "ENV"      | ...

Knows neither blocks nor tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from minipaged.decoding.checks import ParamsError
from minipaged.decoding.detokenizer import Detokenizer, Window
from minipaged.decoding.params import DecodingParams, SamplingParams
from minipaged.scheduling.request import Sequence


def end_token_ids(params: DecodingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """Tokens that end a sequence: the model's EOS, unless ignored, and the user's stop tokens."""
    return frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)


class TextRules(NamedTuple):
    """How tokens become the text that a user sees.

    Attributes:
        detokenizer: decodes.
        end_ids: tokens that end the text.
        stop: strings that end the text.
        include_stop: whether what ended the text is part of it.
        min_tokens: so many tokens cannot end it.
    """

    detokenizer: Detokenizer
    end_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0

    @staticmethod
    def of(params: DecodingParams, eos_token_ids: Collection[int], detokenizer: Detokenizer) -> TextRules:
        """The rules of a request."""
        end_ids = end_token_ids(params, eos_token_ids)
        if not isinstance(params, SamplingParams):
            return TextRules(detokenizer, end_ids, min_tokens=params.min_tokens)
        include_stop = params.include_stop_str_in_output
        return TextRules(detokenizer, end_ids, params.stop, include_stop, params.min_tokens)


class OutputText:
    """The text of a sequence after `num_tokens` generated tokens. Immutable.

    Attributes:
        num_tokens: tokens seen.
        delta: text that the last token made certain: never half a character, never a part of a stop
            string (unless stop strings are included).
        stopped: whether an end token or a stop string was met; the text is complete.
    """

    __slots__ = ("_after", "_held", "_rules", "_window", "delta", "num_tokens", "stopped")

    def __init__(self, rules: TextRules) -> None:
        self._rules = rules
        self._window = Window()
        self._held = ""
        self._after: dict[int, OutputText] = {}
        self.num_tokens = 0
        self.delta = ""
        self.stopped = False

    def copy(self) -> OutputText:
        """Itself: nothing can change it."""
        return self

    def after(self, token_id: int) -> OutputText:
        """The text with one more token (remembered, so that asking twice costs once)."""
        if token_id not in self._after:
            self._after[token_id] = self._make_after(token_id)
        return self._after[token_id]

    def rest(self) -> str:
        """The text that is held back, when no token follows."""
        if self.stopped:
            return ""
        text = self._held + self._rules.detokenizer.flush(self._window)
        end = self._find_stop(text)
        return text if end is None else text[:end]

    def _make_after(self, token_id: int) -> OutputText:
        if self.stopped:
            return self
        rules, text = self._rules, OutputText(self._rules)
        text.num_tokens = self.num_tokens + 1
        may_end = text.num_tokens > rules.min_tokens
        is_end = may_end and token_id in rules.end_ids
        if is_end and not rules.include_stop:
            text.stopped, text.delta = True, self.rest()
            return text
        text._window, new = rules.detokenizer.push(self._window, token_id)
        seen = self._held + new
        end = self._find_stop(seen) if may_end else None
        if end is None and is_end:
            seen += rules.detokenizer.flush(text._window)
            end = len(seen)
        if end is not None:
            text.stopped, text.delta = True, seen[:end]
            return text
        certain = len(seen) - self._num_undecided(seen)
        text.delta, text._held = seen[:certain], seen[certain:]
        return text

    def _find_stop(self, text: str) -> int | None:
        # Where the text must be cut: at the stop string that is complete first, the longest of several.
        # Only one that ends in what is new: what was held may have one from before `min_tokens`.
        old = len(self._held)
        found = []
        for stop in self._rules.stop:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if not found:
            return None
        end, start = min(found)
        return end if self._rules.include_stop else start

    def _num_undecided(self, text: str) -> int:
        # Characters at the end that are the beginning of a stop string.
        lengths = (
            length
            for stop in self._rules.stop
            for length in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:length])
        )
        return max(lengths, default=0)


def stream_text(rules: TextRules, token_ids: Iterable[int]) -> Iterator[str]:
    """Text pieces of a sequence, as its tokens come; they join to `final_text`."""
    text = OutputText(rules)
    for token_id in token_ids:
        text = text.after(token_id)
        if text.delta:
            yield text.delta
    if rest := text.rest():
        yield rest


def final_text(rules: TextRules, token_ids: list[int]) -> str:
    """The text of all generated tokens."""
    if rules.stop:
        return "".join(stream_text(rules, token_ids))
    ended = len(token_ids) > rules.min_tokens and token_ids[-1] in rules.end_ids
    return rules.detokenizer.decode(token_ids[:-1] if ended and not rules.include_stop else token_ids)


class StopChecker:
    """Says whether a token would end a sequence. One per request.

    Args:
        params: the request's parameters.
        eos_token_ids: the model's EOS tokens, none, one or several.
        detokenizer: needed only for stop strings.

    Raises:
        ParamsError: stop strings without a detokenizer.
    """

    def __init__(
        self, params: DecodingParams, eos_token_ids: Collection[int], detokenizer: Detokenizer | None = None
    ) -> None:
        self.end_ids = end_token_ids(params, eos_token_ids)
        self.min_tokens = params.min_tokens
        self._text_rules: TextRules | None = None
        if isinstance(params, SamplingParams) and params.stop:
            if detokenizer is None:
                raise ParamsError(f"stop is {params.stop!r}; the model has no tokenizer, use stop_token_ids")
            self._text_rules = TextRules.of(params, eos_token_ids, detokenizer)

    def check(self, sequence: Sequence, token_id: int) -> str | None:
        """Why `sequence` would end with `token_id`: "stop", "length", or None when it goes on.

        The sequence itself is as before, but for `text_state`, which follows its tokens.
        """
        num_tokens = len(sequence.token_ids)
        if token_id in self.end_ids and num_tokens - sequence.num_prompt_tokens >= self.min_tokens:
            return "stop"
        if self._text_rules is not None and self._text(sequence).after(token_id).stopped:
            return "stop"
        return "length" if num_tokens + 1 >= sequence.max_num_tokens else None

    def _text(self, sequence: Sequence) -> OutputText:
        text = sequence.text_state
        if text is None:
            assert self._text_rules is not None
            text = OutputText(self._text_rules)
        for token_id in sequence.token_ids[sequence.num_prompt_tokens + text.num_tokens :]:
            text = text.after(token_id)
        sequence.text_state = text
        return text
