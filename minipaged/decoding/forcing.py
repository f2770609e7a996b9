"""Whether llguidance may force text: where only one may follow, it asks for the tokenizer's tokens of it.

Before each token, it looks for the end of that text, and splits all of it into tokens, without any limit. In
`/a+/ /a+/`, the first expression takes every `a`, so the text has no end, and neither has the search; of
`a{100000}`, each token takes as long as the tokenizer needs for all that remains. Without forcing, the model
chooses among all tokens that the grammar allows, which takes no longer for a long text.
"""

from __future__ import annotations

import json
import math
import re

MOST_FORCED = 1024
"""Characters that are split again before each token: about a millisecond."""

STRING = re.compile(r'"((?:\\.|[^"\\\n])*)"')

DESCRIPTION = re.compile(rf'"(?:description|title)":\s*{STRING.pattern}')

OF_GRAMMAR = re.compile(rf"{STRING.pattern}|(?:#|//)[^\n]*|(?P<rest>/(?:\\.|[^/\\])+/)")
"""Strings, comments and regular expressions in Lark's notation."""

LEXEMES = re.compile(r"/|[A-Z]|%regex|\w\s*\[")
"""Regular expressions, terminals, and rules with attributes, which are terminals, too: each takes as much
text as it can, whatever must follow."""

REPETITION = re.compile(r"[*+~]|\{\s*\d")

GUIDANCE = re.compile(
    r'"x-guidance": \{"whitespace_pattern": "(?: |\\\\?[nrt]|\\\\s|[][()|*+?]|\{\d*,?\d*\})*"\}'
)
"""Of a schema: its spaces may be other ones, but nothing that could also be a part of the JSON."""

COMPACT = re.compile(r'"whitespace_pattern": ""')


def forces_little(kind: str, source: str) -> bool:
    """Whether all text that it forces is short, as far as a look at the source can tell.

    Args:
        kind: of structured output.
        source: in Lark's notation, if it is a grammar.
    """
    if kind == "regex":
        return _is_short(source)
    if not all(map(_is_short, STRING.findall(DESCRIPTION.sub("", source)))):
        return False
    if kind == "grammar":
        rest = OF_GRAMMAR.sub(lambda found: found["rest"] or "", source)
        is_finite = not (LEXEMES.search(rest) and REPETITION.search(rest))
        return is_finite and _is_little_json(source) and not re.search(r"\\u00[2-7]", source)
    return kind == "choice" or _is_little_json(source)


def _is_short(text: str) -> bool:
    """Whether a string, or what a regular expression matches at least, is."""
    once = sum(map(int, re.findall(r"[^)}]\{(\d{1,9})", text)))
    nested = math.prod(max(1, int(count)) for count in re.findall(r"[)}]\{(\d{1,9})", text))
    return (len(text) + once) * nested <= MOST_FORCED


def _is_little_json(text: str) -> bool:
    """Whether no string in it is long by a keyword, its spaces are spaces, and it is short if it has none."""
    longest = _largest("minLength", text)
    if COMPACT.search(text):  # (all may be forced; most of a schema are keywords)
        longest = max(longest, len(text) * max(1, _largest("minItems", text)) // 8)
    return longest <= MOST_FORCED and '"x-guidance"' not in GUIDANCE.sub("", text)


def _largest(keyword: str, text: str) -> int:
    return max(map(int, re.findall(rf'"{keyword}"\s*:\s*(\d{{1,9}})', text)), default=0)


def without_forcing(grammar: str) -> str:
    """A grammar in llguidance's notation that forces no text.

    Also for text whose forced tokens would not spell it: a special token, or the tokens of another text.
    """
    if grammar.lstrip().startswith("{"):
        (part,) = json.loads(grammar)["grammars"]
        grammar = part.get("lark_grammar") or f"start: %json {json.dumps(part['json_schema'])}"
    # (At the end: the last of several options counts, and the lines of the grammar keep their numbers.)
    return grammar.replace("%llguidance {}", "") + '\n%llguidance {"no_forcing": true}\n'
