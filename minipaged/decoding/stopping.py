"""When a sequence ends: at an end token (EOS or a stop token), a stop string in its text, or its length.

`StopChecker` looks at a token *before* it is appended, so that a decoding method can say at once which token
continues a sequence and whether that ends it. Stop strings need text: `OutputText` is the text after some
tokens, immutable, so that sequences that fork share it. Text that may be the beginning of a stop string is
held back until the next tokens decide:

    stop "END"      tokens  " the" | " E"  | "N"  | "V"        | ...
                    shown   " the" | " "   | ""   | "ENV"      | ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Reversible
from typing import cast

from minipaged.decoding.checks import ParamsError
from minipaged.decoding.detokenizer import Detokenizer, Window
from minipaged.decoding.params import DecodingParams
from minipaged.scheduling.request import Sequence


def end_token_ids(params: DecodingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """Tokens that end a sequence: the model's EOS, unless ignored, and the user's stop tokens.

    After the EOS of a structured output nothing may follow, so it ends the sequence in any case.
    """
    goes_on = params.ignore_eos and params.structured_outputs is None
    return frozenset(params.stop_token_ids) | frozenset(() if goes_on else eos_token_ids)


class StopChecker:
    """Decides whether a token ends a sequence, and where its text ends.

    Raises ParamsError for stop strings without a detokenizer, or no token left before `min_tokens`.
    """

    def __init__(
        self, params: DecodingParams, eos_token_ids: Collection[int], detokenizer: Detokenizer | None = None
    ) -> None:
        if params.stop and detokenizer is None:
            raise ParamsError(f"stop is {params.stop!r}, but the model has no tokenizer; use stop_token_ids")
        if detokenizer is not None:
            detokenizer = detokenizer.skipping(params.skip_special_tokens)
        self.detokenizer = cast(Detokenizer, detokenizer)  # (without one, nobody asks for text)
        self.end_ids = end_token_ids(params, eos_token_ids)
        allowed = params.allowed_token_ids
        if params.min_tokens and allowed and self.end_ids | params.forbidden >= set(allowed):
            raise ParamsError(
                f"min_tokens is {params.min_tokens}, but allowed_token_ids has only end tokens; "
                "allow others, or set min_tokens to 0"
            )
        self.min_tokens = params.min_tokens
        self.stop = params.stop
        self._sorted = sorted(params.stop)
        self._longest = max(map(len, params.stop), default=0)
        self.include_stop = params.include_stop_str_in_output

    def check(self, sequence: Sequence, token_id: int) -> str | None:
        """Why `sequence` would end with `token_id`: "stop", "length", or None when it goes on.

        The sequence does not change, except for `text_state`, which follows its tokens.
        """
        if self.stop:
            ends = self.text(sequence).after(token_id).stopped
        else:
            # (Membership first: it fails for nearly every token, whose number is then not needed.)
            ends = token_id in self.end_ids and self.is_end_token(token_id, sequence.num_generated_tokens + 1)
        if ends:
            return "stop"
        return "length" if len(sequence.token_ids) + 1 >= sequence.request.max_num_tokens else None

    def is_end_token(self, token_id: int, num_tokens: int) -> bool:
        """Whether an output ends with `token_id` as its token number `num_tokens`."""
        return token_id in self.end_ids and num_tokens > self.min_tokens

    def find_stop(self, text: str, num_old: int, num_tokens: int) -> tuple[int, str] | None:
        """Where a stop string that ends past the first `num_old` characters cuts a text, and which it is.

        That is the stop string that is complete first, the longest of several; None if there is none. (The
        old characters may have one from before `min_tokens`.)
        """
        found = []
        for stop in self.stop if num_tokens > self.min_tokens else ():
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        end, start, stop = min(found)
        return end if self.include_stop else start, stop

    def num_undecided(self, text: str) -> int:
        """Characters at the end of a text that are the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            after = bisect_right(self._sorted, end)  # the strings that begin with it are adjacent
            if after < len(self._sorted) and self._sorted[after].startswith(end):
                return length
        return 0

    def begin_text(self, prompt_token_ids: Reversible[int]) -> OutputText:
        """The text of an output that has no tokens yet."""
        return OutputText(self, self.detokenizer.window_after(prompt_token_ids))

    def text(self, sequence: Sequence) -> OutputText:
        """The text of a sequence so far (cached in the sequence)."""
        text = sequence.text_state or self.begin_text(sequence.request.prompt_token_ids)
        text, _ = text.after_all(sequence.token_ids[sequence.num_prompt_tokens + text.num_tokens :])
        sequence.text_state = text
        return text


class OutputText:
    """The text of a sequence after `num_tokens` generated tokens. Immutable."""

    def __init__(self, rules: StopChecker, window: Window, num_tokens: int = 0) -> None:
        self.num_tokens = num_tokens
        # What the last token made certain: no half character, no part of a stop string (unless included).
        self.delta = ""
        self.stopped = False  # by an end token or a stop string: the text is complete
        self.stop_string: str | None = None  # which stop string stopped it
        self._rules = rules
        self._window = window
        self._held = ""  # what may be the beginning of a stop string
        self._pending = ""  # bytes that form a character now, but may not stay one
        self._after: dict[int, OutputText] = {}

    def after(self, token_id: int) -> OutputText:
        """The text with one more token (cached: a second call costs nothing)."""
        if token_id not in self._after:
            self._after[token_id] = self._make_after(token_id)
        return self._after[token_id]

    def after_all(self, token_ids: Iterable[int]) -> tuple[OutputText, str]:
        """The text with more tokens, and what they made certain."""
        text, pieces = self, []
        for token_id in token_ids:
            if text.stopped:
                break
            text = text.after(token_id)
            pieces.append(text.delta)
        return text, "".join(pieces)

    def rest(self) -> str:
        """The text that is held back, when no token follows."""
        if self.stopped:
            return ""
        text = self._held + self._rules.detokenizer.flush(self._window)
        found = self._rules.find_stop(text, len(self._held + self._pending), self.num_tokens + 1)
        return text if found is None else text[: found[0]]

    def _make_after(self, token_id: int) -> OutputText:
        rules, text = self._rules, OutputText(self._rules, self._window, self.num_tokens + 1)
        is_end = rules.is_end_token(token_id, text.num_tokens)
        if is_end and not rules.include_stop:
            text.stopped, text.delta = True, self.rest()
            return text
        text._window, new = rules.detokenizer.push(text._window, token_id)
        seen = self._held + new
        if rules.stop and not new:
            # A run of byte tokens is shown when it is over, but what it spells so far may be a stop string.
            text._pending = rules.detokenizer.flush(text._window)
            if text._pending.endswith("\ufffd"):
                text._pending = ""
        found = rules.find_stop(seen + text._pending, len(self._held + self._pending), text.num_tokens)
        if found is not None:
            seen += text._pending
            end, text.stop_string = found
        elif is_end:
            seen += rules.detokenizer.flush(text._window)
            end = len(seen)
        else:
            end = len(seen) - rules.num_undecided(seen)
            text._held = seen[end:]
        text.stopped = is_end or found is not None
        text.delta = seen[:end]
        return text


def final_text(rules: StopChecker, token_ids: list[int], prompt_token_ids: Reversible[int] = ()) -> str:
    """The text of all generated tokens."""
    if rules.stop or not token_ids:
        text, certain = rules.begin_text(prompt_token_ids).after_all(token_ids)
        return certain + text.rest()
    cut = not rules.include_stop and rules.is_end_token(token_ids[-1], len(token_ids))
    return rules.detokenizer.decode_after(prompt_token_ids, token_ids[:-1] if cut else token_ids)
