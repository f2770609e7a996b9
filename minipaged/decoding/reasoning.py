"""Models that reason first: their tags, and a grammar that only the answer follows.

    <think>They ask for Rome.</think>{"city": "Rome"}
    anything, but EOS                follows the grammar

So what ends is valid, as without thoughts. Some chat templates write the first tag themselves, or both to
turn reasoning off; else it is up to the model whether it begins with the tag or with the answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from minipaged.scheduling.request import Request, Sequence

if TYPE_CHECKING:
    import numpy as np

BEGIN, END = "<think>", "</think>"


class ReasoningTags(NamedTuple):
    """The tokens of both tags."""

    begin: int
    end: int

    @classmethod
    def of(cls, tokenizer: Any, skip_special_tokens: bool) -> ReasoningTags | None:
        """None if a tokenizer has no such tokens, or leaves them out of texts."""
        tags = [BEGIN, END]
        tokens = tokenizer.convert_tokens_to_ids(tags)
        if None in tokens or tokenizer.convert_ids_to_tokens(tokens) != tags:
            return None
        text = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return cls(*tokens) if BEGIN in text and END in text else None

    def last(self, tokenizer: Any, prompt: SequenceOf[int]) -> int | None:
        """The tag at the end of a prompt, with nothing but space after it."""
        last = next((token for token in reversed(prompt) if tokenizer.decode([token]).strip()), None)
        return last if last in self else None


class Grammar(Protocol):
    """See `minipaged.decoding.structured`."""

    def allow(self, sequence: Sequence, allowed: np.ndarray, start: int) -> None:
        """Of `sequence`, the grammar has the generated tokens from `start` on."""

    def forced_tokens(self, sequence: Sequence, start: int) -> list[int]:
        """In the same sense."""

    def eos_below(self, vocab_size: int) -> list[int]:
        """Those tokens that end a text."""


class AfterReasoning:
    """A grammar that a text follows after its thoughts, if it has any; it may begin inside."""

    def __init__(self, grammar: Grammar, tags: ReasoningTags, tokenizer: Any, is_inside: bool) -> None:
        self._grammar = grammar
        self._tags = tags
        self._tokenizer = tokenizer
        self._is_inside = is_inside
        self._lasts: WeakKeyDictionary[Request, int | None] = WeakKeyDictionary()  # tags at prompts' ends

    def allow(self, sequence: Sequence, allowed: np.ndarray) -> None:
        """As `Grammar.allow`."""
        start = self._start(sequence)
        if start is None:
            allowed[:] = True
            allowed[self._grammar.eos_below(len(allowed))] = False
        else:
            self._grammar.allow(sequence, allowed, start)
            allowed[self._tags.begin] |= self._may_begin(sequence)

    def forced_tokens(self, sequence: Sequence) -> list[int]:
        """As `Grammar.forced_tokens`."""
        start = self._start(sequence)
        if start is None or self._may_begin(sequence):
            return []
        return self._grammar.forced_tokens(sequence, start)

    def _start(self, sequence: Sequence) -> int | None:
        """How many generated tokens come before the answer; None if it has not begun."""
        begin, end = self._tags
        tokens = sequence.token_ids[sequence.num_prompt_tokens :]
        last = self._last(sequence)
        if last == end or (last is None and tokens[:1] != array("i", [begin])):
            return 0
        return tokens.index(end) + 1 if end in tokens else None

    def _may_begin(self, sequence: Sequence) -> bool:
        return not sequence.num_generated_tokens and self._last(sequence) is None

    def _last(self, sequence: Sequence) -> int | None:
        if self._is_inside:
            return self._tags.begin
        request = sequence.request
        if request not in self._lasts:
            self._lasts[request] = self._tags.last(self._tokenizer, request.prompt_token_ids)
        return self._lasts[request]
