"""`pytest --use CONCEPT=FILE.py:Class`: the concept tests run on a part of your own.

The part takes the place of the project's class wherever that class is named, in the package and in the
tests. Of a concept with several classes (page growth: OnDemand, Chunked, Reserve) the one of the same name is
replaced, or the one it derives from. The part runs unwatched: the tests are what judges it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from minipaged.learn.contracts import CONCEPTS
from minipaged.learn.overrides import OverrideError, check_concept, load_override


def replacements(values: Iterable[str]) -> list[tuple[Any, Any]]:
    """(the project's own, the part) of each `CONCEPT=FILE.py:Class`.

    Raises:
        OverrideError: not of that form, or a part that cannot be loaded.
    """
    pairs = []
    for value in values:
        name, equals, where = value.partition("=")
        if not equals or ":" not in where:
            raise OverrideError(f"--use {value} is not CONCEPT=FILE.py:Class")
        concept = CONCEPTS[check_concept(name)]
        part = load_override(where)
        concept.check(name, part)
        pairs.append((replaced_by(part, concept.originals), part))
    return pairs


def replaced_by(part: Any, originals: tuple[str, ...]) -> Any:
    """The original that a part stands for: of its name, else the one it derives from, else the first."""
    own = [getattr(import_module(m), a) for m, _, a in (o.partition(":") for o in originals)]
    name, bases = getattr(part, "__name__", ""), getattr(part, "__mro__", ())
    named = [original for original in own if original.__name__ == name]
    derived = [base for base in bases if base in own]
    return (named + derived + own)[0]


def put(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[dict[Any, Any], Any, Any]]:
    """Replace every module-level name or table entry that stands for an original; returns what was there."""
    before: list[tuple[dict[Any, Any], Any, Any]] = []
    modules = [m for n, m in list(sys.modules.items()) if n.partition(".")[0] in ("minipaged", "tests")]
    by_id = {id(original): part for original, part in pairs}
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
    """The parts in place of the originals, in all modules that are loaded, inside the `with`."""
    before = put(pairs)
    try:
        yield
    finally:
        for names, attribute, value in before:
            names[attribute] = value
