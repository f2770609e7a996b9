"""Structured output: the text follows a JSON schema, a regular expression, a list of choices or a grammar.

Before each token, llguidance walks a trie of the vocabulary to find the tokens that keep the text inside the
grammar; the logits of all others become -inf. EOS is allowed where the text may end, so a text that stops is
valid:

    choice ["yes", "no"]    {y, ye, yes, n, no}  -- "ye" -->  {s}  -- "s" -->  {EOS}

The position of a text in its grammar depends only on its generated tokens. A matcher per sequence remembers
how many it has consumed and catches up; a sequence without one (forked, or new here) copies another's, or
starts over. So preemption, rolled-back steps and forks need no code in this module.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from minipaged.decoding.checks import ParamsError, items, refuse
from minipaged.decoding.field_names import named_fields
from minipaged.decoding.forcing import forces_little, without_forcing
from minipaged.decoding.free_formats import as_followed
from minipaged.decoding.grammar_source import check_source, with_deep_stack
from minipaged.decoding.reasoning import AfterReasoning, ReasoningTags
from minipaged.decoding.refusals import explained
from minipaged.scheduling.request import Request, Sequence
from minipaged.text_io import cut, lone_surrogate

if TYPE_CHECKING:
    import numpy as np  # where it is used: the engine runs without it, in a browser too

KINDS = ("json", "regex", "choice", "grammar")

JSON_DEFAULTS = {"whitespace_pattern": " ?"}
"""At most one space between JSON tokens: without a limit, a model may write nothing but spaces."""

ESCAPES = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}|\\u(?!d[89a-f])[0-9a-f]{4}", re.I)
"""One character of a JSON text, which may take two codes; half of one is none."""

MOST_ALTERNATIVES = 100_000
"""Alternatives that are followed at one position: of thousands of choices, many begin alike."""

START = re.compile(r"^\s*[?!]+start\s*:", re.M)
"""Lark's first rule, with a sign for its tree."""

PIECE, OVERLAP = 4096, 64
"""Characters of a text that are turned into tokens at once: a call holds the interpreter's lock."""


OF_VLLM: dict[str, Any] = {
    "json_object": 'give json={"type": "object"}',
    "structural_tag": "give regex or grammar",
    "whitespace_pattern": 'give the schema "x-guidance": {"whitespace_pattern": ...}',
    "disable_any_whitespace": 'give the schema "x-guidance": {"whitespace_pattern": ""}',
    "disable_additional_properties": "drop it: objects have only the keys that their schema names",
}
"""Fields of vLLM's class, and what to give instead."""


@named_fields(**OF_VLLM)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the text of a completion must follow; give exactly one.

    Attributes:
        json: a JSON schema, as a dict or a string, or a pydantic model class. Objects have only the keys
            that it names, unless they say something else (see `minipaged.decoding.named_keys`).
        regex: a regular expression that the whole text matches, without look-around and back-references.
        choice: strings, one of which is the text.
        grammar: a context-free grammar, in Lark's or llama.cpp's notation (GBNF, an EBNF).
        after_reasoning: the text may have thoughts before (see `minipaged.decoding.reasoning`), if the
            tokenizer has tags for them. "inside": it begins in one, whatever the end of the prompt.

    Raises:
        ParamsError: none or several are given, one has the wrong type, or llguidance is not installed.
    """

    json: str | Mapping[str, Any] | type | None = field(default=None, hash=False)
    regex: str | None = None
    choice: Collection[str] | None = None
    grammar: str | None = None
    after_reasoning: bool | Literal["inside"] = False
    compiled: Grammar | AfterReasoning | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise ParamsError(f"structured_outputs has {found}; give exactly one of {', '.join(KINDS)}")
        if self.choice is not None:
            choice = items("choice", self.choice, lambda s: isinstance(s, str), "strings")
            object.__setattr__(self, "choice", choice or refuse("choice", [], "at least one string"))
        for kind in ("regex", "grammar"):
            if not isinstance(getattr(self, kind), str | None):
                refuse(kind, getattr(self, kind), "a string")
        for text in (*(self.choice or ()), self.regex, self.grammar, self.json):
            if isinstance(text, str) and (wrong := lone_surrogate(text)):
                raise ParamsError(f"{given[0]} {wrong}")
        if not isinstance(self.json, str | Mapping | None) and not hasattr(self.json, "model_json_schema"):
            refuse("json", self.json, "a JSON schema (a dict or a string) or a pydantic model class")
        if self.after_reasoning not in (True, False, "inside"):
            refuse("after_reasoning", self.after_reasoning, "True, False or 'inside'")
        if find_spec("llguidance") is None:
            raise ParamsError(
                "structured_outputs needs llguidance; in your clone, run "
                'pip install -c constraints.txt -e ".[structured]"'
            )

    def compile(self, tokenizer: Any, eos_token_ids: Collection[int]) -> StructuredOutputsParams:
        """The same with its grammar compiled for a tokenizer (only once for all requests that use it).

        Raises ParamsError for a grammar that is malformed or cannot be followed exactly.
        """
        if not eos_token_ids:
            raise ParamsError("structured_outputs ends a text with EOS, but the model has no EOS token")
        kind, source = self._source()
        compiled = copy(self)
        eos = tuple(sorted(eos_token_ids))
        grammar = _vocabulary(tokenizer, eos).compile(kind, source)
        tags = ReasoningTags.of(tokenizer, skip_special_tokens=False) if self.after_reasoning else None
        is_inside = self.after_reasoning == "inside"
        made = grammar if tags is None else AfterReasoning(grammar, tags, tokenizer, is_inside)
        object.__setattr__(compiled, "compiled", made)
        return compiled

    @property
    def num_characters(self) -> int:
        """Length of the source that is compiled."""
        return len(self._source()[1])

    def check(self, name: str) -> None:
        """Raise ParamsError, with this name, for what no tokenizer can follow; needs no model."""
        kind, source = self._source()
        compiled_source(name, kind, source, _validated)

    def _source(self) -> tuple[str, str]:
        """Which kind it is, and its text."""
        kind = next(kind for kind in KINDS if getattr(self, kind) is not None)
        value: Any = getattr(self, kind)
        if kind == "json":
            if isinstance(value, Mapping):
                value = dict(value)
            elif not isinstance(value, str):
                value = value.model_json_schema()
            elif value.strip() == "true":
                value = {}  # the same, but llguidance adds its defaults only to objects
        try:
            return kind, value if isinstance(value, str) else json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ParamsError(f"json is not a valid JSON schema: {error}") from error
        except RecursionError:
            raise ParamsError("json is nested too deeply; give a flatter schema") from None


class Grammar:
    """A compiled grammar, and the position of each sequence in it."""

    def __init__(self, compiled: Callable[[], Any], eos_token_ids: SequenceOf[int]) -> None:
        self._compiled = compiled
        self.start = compiled()
        """All matchers are its copies, which share an automaton."""
        self._eos = list(eos_token_ids)
        self._walks: WeakKeyDictionary[Sequence, tuple[array[int], Any]] = WeakKeyDictionary()

    def allow(self, sequence: Sequence, allowed: np.ndarray, start: int = 0) -> None:
        """Set `allowed` [vocabulary] to which tokens may follow the generated ones of `sequence`, of which
        those from `start` on are in the grammar."""
        matcher, bits = self._mask(sequence, start)
        if matcher.get_error().startswith("lexer error"):  # the automaton is full, perhaps of other texts
            self.start = self._compiled()
            self._walks.clear()
            matcher, bits = self._mask(sequence, start)
        bits = bits[: len(allowed)]
        allowed[: len(bits)] = bits
        eos = self.eos_below(len(allowed))
        if not matcher.is_accepting():  # (a matcher that fails, e.g. at a limit of its own, allows EOS)
            allowed[eos] = False
        elif sequence.request.params.ignore_eos:
            allowed[eos] = False
            allowed[eos] = not allowed.any()

    def eos_below(self, vocab_size: int) -> list[int]:
        """The EOS tokens of a vocabulary."""
        return [token for token in self._eos if token < vocab_size]

    def forced_tokens(self, sequence: Sequence, start: int = 0) -> list[int]:
        """What must follow the generated tokens of `sequence`, because nothing else is allowed."""
        return self._matcher(sequence, start).compute_ff_tokens()

    def _mask(self, sequence: Sequence, start: int) -> tuple[Any, np.ndarray]:
        """The matcher of `sequence`, and which tokens it allows, bool [at least the vocabulary]."""
        import numpy as np

        matcher = self._matcher(sequence, start)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return matcher, np.unpackbits(bits, bitorder="little").view(bool)

    def _matcher(self, sequence: Sequence, start: int) -> Any:
        """A matcher that has consumed the generated tokens of `sequence` from `start` on."""
        tokens = sequence.token_ids[sequence.num_prompt_tokens + start :]
        # (Popped, because a Ctrl-C may come when the matcher has consumed more than is noted.)
        walk = self._walks.pop(sequence, None)
        consumed, matcher = walk or self._walk_of_another(sequence.request, tokens)
        if tokens[: len(consumed)] != consumed:
            consumed, matcher = array("i"), self.start.deep_copy()
        if len(consumed) < len(tokens):
            matcher.consume_tokens(tokens[len(consumed) :].tolist())
        self._walks[sequence] = tokens, matcher
        return matcher

    def _walk_of_another(self, request: Request, tokens: array[int]) -> tuple[array[int], Any]:
        """A copy of what a sequence of the same request has consumed, if these tokens begin with it."""
        for consumed, matcher in filter(None, map(self._walks.get, request.sequences)):
            if tokens[: len(consumed)] == consumed:
                return consumed, matcher.deep_copy()
        return array("i"), self.start.deep_copy()


def allowed_tokens(sequences: SequenceOf[Sequence], vocab_size: int) -> np.ndarray:
    """Which tokens may follow each sequence, bool [rows, vocab_size]; all of them have a compiled grammar."""
    import numpy as np

    allowed = np.zeros((len(sequences), vocab_size), bool)
    for sequence, row in zip(sequences, allowed):
        sequence.request.params.structured_outputs.compiled.allow(sequence, row)
    return allowed


def compiled_source(name: str, kind: str, source: str, work: Callable[[str, str], tuple[Any, str]]) -> Any:
    """The result of `work` on a source, which is called `name` in the ParamsError if `work` refuses it."""
    wrong = f"{name} is {cut(source)!r}"
    try:
        check_source(kind, source)
    except ValueError as error:
        raise ParamsError(f"{wrong}: {error}") from error
    try:
        made, reason = with_deep_stack(partial(work, kind, source))
    except ValueError as error:
        made, reason = None, str(error)
    if reason:
        raise ParamsError(f"{wrong}: {explained(reason)}")
    return made


def _validated(kind: str, source: str) -> tuple[None, str]:
    from llguidance import LLMatcher

    return None, LLMatcher.validate_grammar(_grammar(kind, source)[1])


def _grammar(kind: str, source: str) -> tuple[str, str]:
    """The source that is followed, and the same in llguidance's notation."""
    from llguidance import LLMatcher, grammar_from

    if kind == "grammar" and START.search(source):
        kind = "lark"  # (llguidance recognises the notation by a plain `start:`)
    if kind != "json":
        return source, grammar_from(kind, source)  # type: ignore[arg-type]
    source = as_followed(source)
    return source, LLMatcher.grammar_from_json_schema(source, defaults=JSON_DEFAULTS)  # type: ignore[arg-type]


class _Vocabulary:
    """A tokenizer as llguidance sees it, and the grammars most recently compiled for it."""

    def __init__(self, tokenizer: Any, eos_token_ids: tuple[int, ...]) -> None:
        from llguidance.hf import from_tokenizer

        try:
            self._tokenizer = from_tokenizer(tokenizer, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise ParamsError(f"structured_outputs cannot use the model's tokenizer: {error}") from error
        self._eos_token_ids = eos_token_ids
        added = tokenizer.added_tokens_decoder
        # (llguidance takes any that is written <...> for special: <tool_call>, for one.)
        special = [i for i, token in added.items() if token.special or self._tokenizer.is_special_token(i)]
        self._special_tokens = {*tokenizer.all_special_tokens, *(added[i].content for i in special)}
        self.compile = lru_cache(maxsize=64)(self._grammar)
        """The grammar of a kind and a source."""

    def _grammar(self, kind: str, source: str) -> Grammar:
        name = f"{kind} of structured_outputs"
        return Grammar(partial(compiled_source, name, kind, source, self._matcher), self._eos_token_ids)

    def _matcher(self, kind: str, source: str) -> tuple[Any, str]:
        from llguidance import LLMatcher, LLParserLimits

        source, grammar = _grammar(kind, source)
        text = ESCAPES.sub(lambda code: str(json.loads(f'"{code[0].lower()}"')), source)
        is_special = any(token in text.replace("\\", "") for token in self._special_tokens)
        is_little = forces_little(kind, grammar if kind == "grammar" else source)
        if is_special or not is_little or not self._spells(text):
            grammar = without_forcing(grammar)
        limits = LLParserLimits(max_items_in_row=MOST_ALTERNATIVES)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # copies then have what it prepares lazily; and it may find nothing
        return matcher, matcher.get_error()

    def _spells(self, text: str) -> bool:
        """Whether the tokens of a text are that text: some tokenizers compose its letters, or put a space
        before it."""
        # (They overlap, so that characters that are composed into one are together in some piece.)
        pieces = (text[at : at + PIECE + OVERLAP] for at in range(0, len(text), PIECE))
        encode, decode = self._tokenizer.tokenize_str, self._tokenizer.decode_bytes
        return all(decode(encode(piece)) == piece.encode() for piece in pieces)


_vocabularies: WeakKeyDictionary[Any, dict[tuple[int, ...], _Vocabulary]] = WeakKeyDictionary()


def _vocabulary(tokenizer: Any, eos_token_ids: tuple[int, ...]) -> _Vocabulary:
    known = _vocabularies.setdefault(tokenizer, {})
    if eos_token_ids not in known:
        known[eos_token_ids] = _Vocabulary(tokenizer, eos_token_ids)
    return known[eos_token_ids]
