"""`pytest --use CONCEPT=FILE.py:Class`: the concept tests run on a class of your own.

The override takes the place of the project's class wherever that class is named, in the package and in the
tests. Of a concept with several classes (page growth: OnDemand, Chunked, Reserve) the one of the same name is
replaced, or the one it derives from. It runs unwatched: the tests are what judges it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from minipaged.learn.overrides import concept_of, load_override, parse_option


def replacements(values: Iterable[str]) -> list[tuple[Any, Any]]:
    """(the project's own, the override) of each `CONCEPT=FILE.py:Class`.

    Raises:
        OverrideError: not of that form, or a class that cannot be loaded.
    """
    pairs = []
    for value in values:
        name, where = parse_option(value)
        override = load_override(where)
        concept_of(name).check(override)
        pairs.append((replaced_by(override, concept_of(name).originals), override))
    return pairs


def replaced_by(override: Any, originals: list[Any]) -> Any:
    """The original that it stands for: of its name, else the one it derives from, else the first."""
    name, bases = getattr(override, "__name__", ""), getattr(override, "__mro__", ())
    named = [original for original in originals if original.__name__ == name]
    derived = [base for base in bases if base in originals]
    return (named + derived + originals)[0]


def put(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[dict[Any, Any], Any, Any]]:
    """Replace every module-level name or table entry that stands for an original; returns what was there."""
    before: list[tuple[dict[Any, Any], Any, Any]] = []
    modules = [m for n, m in list(sys.modules.items()) if n.partition(".")[0] in ("minipaged", "tests")]
    by_id = {id(original): override for original, override in pairs}
    for names in [*map(vars, modules), *(v for m in modules for v in _tables(m))]:
        for key, value in list(names.items()):
            if id(value) in by_id:
                before.append((names, key, value))
                names[key] = by_id[id(value)]
    return before


def _tables(module: Any) -> list[dict[Any, Any]]:
    """Tables of classes at the top of a module, like `MODES = {"swap": Swap}`."""
    return [value for value in vars(module).values() if type(value) is dict]


@contextmanager
def installed(pairs: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """The overrides in place of the originals, in all modules that are loaded, inside the `with`."""
    before = put(pairs)
    try:
        yield
    finally:
        for names, attribute, value in before:
            names[attribute] = value
