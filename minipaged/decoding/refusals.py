"""Why llguidance refuses a source, in one short line, and what to do about it."""

from __future__ import annotations

import re

from minipaged.text_io import cut

MOST = 160
"""Characters of a reason; the library may add regular expressions of its own, or a number's 300 zeros."""

FIXES = (
    ("NoExtensionBias", "no text follows it; give one that some text follows"),
    ("Unimplemented keys|Unknown format", "{}; leave it out"),
    ("lookarounds", "^, $ and \\b are not supported inside a regular expression; leave them out"),
    ("look-around|backreferences", "{}; leave them out"),
    ("Resource '.*' is not present", "$ref is an address; put the schema into $defs, and give #/$defs/NAME"),
    ("decimal literal invalid", "a length or count is greater than 4,294,967,295; give a smaller one"),
    ("anyOf is empty", "anyOf or enum is empty; give at least one entry"),
    ("Regex is empty", "no string satisfies its pattern, format and lengths together; drop one"),
    ("Unsatisfiable", "{}; no text follows it, so relax it"),
    ("oneOf constraints", "the branches of oneOf may overlap; give anyOf"),
    (
        "if regex is empty|limit|fuel|too many|too complex|too large",
        "it is too large to compile; give a simpler one",
    ),
    ("", "{}; correct it"),
)
"""In a reason -> what is said, with the reason in the place of {}."""


def explained(reason: str) -> str:
    """A reason of the library, which may have many lines, and a fix."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    # (For a regular expression, the library's first lines quote it with marks below.)
    line = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    plain = re.sub(r"\"[^\"]*\"|'\S*'", "''", line)  # (a name may be "limit")
    said = next(said for found, said in FIXES if re.search(found, plain))
    return said.replace("{}", cut(line, MOST))
