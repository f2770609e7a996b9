"""Token ids -> text, one token at a time, at a constant cost per token.

A token is not a piece of text: it may be half a UTF-8 character, or lose its leading space where a text
begins. So a short window of tokens is decoded with and without the new one, and the difference is the
new text:

    tokens   ... [ The | quick ] [ br | own ]      shown: decode(window[:num_read])
                 ^ window        ^ num_read         delta: decode(window) without `shown`

An output's window begins with the last tokens of its prompt, all read. Text is held back while it ends in
U+FFFD (an incomplete character), so that the pieces join to `decode` of all tokens. (Only a
decoder that looks across words, as WordPiece's around apostrophes, may space them differently. The prefix
and read offsets are those of Hugging Face's text-generation-inference and of vLLM.)
"""

from __future__ import annotations

from collections.abc import Reversible, Sequence
from itertools import islice
from typing import Any, NamedTuple

NUM_BEFORE = 5
"""Tokens of a prompt that an output's window begins with."""


class Window(NamedTuple):
    """The last few tokens, of which the first `num_read` are shown already."""

    tokens: tuple[int, ...] = ()
    num_read: int = 0


class Detokenizer:
    """Decodes with one transformers tokenizer; stateless, so all requests share it."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._backend = _backend(tokenizer)
        self._other: Detokenizer | None = None
        self._tokens: dict[int, str] = {}
        added = tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self._skipped = frozenset(i for i in special if skip_special_tokens and not self.decode([i]))
        # Byte fallback (SentencePiece): a run of <0xNN> tokens is text only as a whole; one bad byte
        # turns every byte of the run into U+FFFD, those before it too.
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        vocabulary = tokenizer.get_vocab()
        self._bytes = frozenset(vocabulary[name] for name in names if name in vocabulary)

    def skipping(self, skip_special_tokens: bool) -> Detokenizer:
        """The same with special tokens left out of texts, or shown."""
        if skip_special_tokens == self.skip_special_tokens:
            return self
        self._other = self._other or Detokenizer(self.tokenizer, skip_special_tokens)
        return self._other

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all tokens at once."""
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=self.skip_special_tokens)
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token(self, token_id: int) -> str:
        """The text of a token by itself; special tokens have their names."""
        if token_id not in self._tokens:
            self._tokens[token_id] = self.tokenizer.decode(
                [token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return self._tokens[token_id]

    def window_after(self, prompt_token_ids: Reversible[int]) -> Window:
        """The window in which an output begins. After half a character it is empty, so that the output has
        the rest."""
        shown = (i for i in reversed(prompt_token_ids) if i not in self._skipped)
        last = tuple(islice(shown, NUM_BEFORE + 3))[::-1]
        for first in range(max(len(last) - NUM_BEFORE, 0), -1, -1):  # (one of four begins a character)
            if not self.decode(last[first:]).endswith("\ufffd"):
                return Window(last[first:], len(last) - first)
        return Window()

    def decode_after(self, prompt_token_ids: Reversible[int], token_ids: Sequence[int]) -> str:
        """The text of all tokens of an output at once."""
        before = self.window_after(prompt_token_ids)
        return self.flush(Window((*before.tokens, *token_ids), before.num_read))

    def push(self, window: Window, token_id: int) -> tuple[Window, str]:
        """Add a token; return the new window and the text that is certain now, possibly none."""
        if token_id in self._skipped:
            return window, ""
        tokens, num_read = (*window.tokens, token_id), window.num_read
        if token_id in self._bytes:
            return Window(tokens, num_read), ""
        text = self.decode(tokens)
        if text.endswith("\ufffd"):
            # Bytes that never become a character would make the window grow without bound. The last 4
            # tokens may still become one; before them, cut where both halves decode as the whole does.
            for cut in range(len(tokens) - 4, num_read, -1):
                head = self.decode(tokens[:cut])
                if head + self.decode(tokens[cut:]) == text:
                    return Window(tokens[cut:]), head[len(self.decode(tokens[:num_read])) :]
        elif delta := text[len(self.decode(tokens[:num_read])) :]:
            return Window(tokens[num_read:], len(tokens) - num_read), delta
        return Window(tokens, num_read), ""

    def flush(self, window: Window) -> str:
        """The text that was held back, when no token follows."""
        return self.decode(window.tokens)[len(self.decode(window.tokens[: window.num_read])) :]


def _backend(tokenizer: Any) -> Any:
    """What a fast tokenizer's `decode` hands the ids to; None if the tokenizer's class has its own.

    Called directly, it is several times as fast: transformers checks each id's type in Python.
    """
    decode, inner = (getattr(type(tokenizer), name, None) for name in ("decode", "_decode"))
    origins = getattr(decode, "__module__", ""), getattr(inner, "__module__", "")
    plain = "transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"
    return tokenizer.backend_tokenizer if origins == plain else None
