"""What a schema or a grammar must be so that llguidance compiles it exactly, and the stack that this needs.

llguidance reads the numbers of a schema as doubles, and its own code for ranges overflows the stack at -2^63.
It follows references by recursion: a thousand of them, each in an object, need more than the usual stack of
8 MB. Either would crash the process.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from decimal import Decimal
from typing import Any, TypeVar

T = TypeVar("T")

MOST_BYTES = 1 << 18
"""The most bytes of a source: half of `STACK` is enough for any chain of references in it."""

STACK = 1 << 29
"""Bytes of address space; memory is taken only as it is used."""

EXACT = 2**53
"""Up to here, doubles are exact."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
VALUES = ("const", "enum")

MOST_MULTIPLE = 100_000
"""Of `multipleOf`: llguidance builds a state for each remainder, in seconds for a million."""

_starting = threading.Lock()


def check_source(kind: str, source: str) -> None:
    """Raise ValueError, with the reason, for what would crash the process or not be followed exactly."""
    if kind == "choice":
        return
    if (size := len(source.encode())) > MOST_BYTES:
        raise ValueError(f"it has {size:,} bytes; give at most {MOST_BYTES:,}")
    try:
        for schema in _schemas(kind, source):
            if not isinstance(schema, dict):
                raise ValueError("no text follows it; give an object, or true")
            _check_schema(schema)
            _check_multiples(schema)
    except json.JSONDecodeError:
        return  # (llguidance says where)
    except RecursionError:
        raise ValueError("it is nested too deeply; give a flatter one") from None


def _schemas(kind: str, source: str) -> Iterator[Any]:
    if kind == "json":
        yield json.loads(source)
    elif kind == "grammar":
        for found in re.finditer(r"%json[^{]*", source):
            with suppress(json.JSONDecodeError):  # it is in a string, or llguidance says where it is wrong
                yield json.JSONDecoder().raw_decode(source, found.end())[0]


def _check_schema(schema: Any, keyword: str = "") -> None:
    """`keyword`: the key of this value, or of one around it, if numbers in it must be exact."""
    if isinstance(schema, dict):
        _check_keys(schema)
        for name, part in schema.items():
            is_exact = name in VALUES or (name in BOUNDS and isinstance(part, int | float))
            _check_schema(part, name if is_exact else keyword)
    elif isinstance(schema, list):
        for part in schema:
            _check_schema(part, keyword)
    elif keyword and isinstance(schema, int | float) and abs(schema) > EXACT:
        fix = f"numbers are exact from -2**53 to 2**53 = {EXACT:,}: give one of these, or leave it out"
        raise ValueError(f"{keyword} is {schema!r:.40}; {fix}")


def _check_keys(schema: dict[str, Any]) -> None:
    """A key that `properties` does not name may be generated twice, which is one property."""
    least, required = schema.get("minProperties"), schema.get("required")
    most = 1 + len(required if isinstance(required, list) else ())
    if isinstance(least, int | float) and least > most:
        fix = "keys may repeat, and count once: give the names of all but one in required"
        raise ValueError(f"minProperties is {least!r:.40}; {fix}")


def _check_multiples(schema: Any) -> None:
    """Raise ValueError for a number, or several that hold together, that would take too long to compile."""
    for part in _objects(schema):
        factors = [Decimal(str(given)) for given in sorted(set(_multiples(part))) if 0 < given < math.inf]
        places = max((-int(factor.as_tuple().exponent) for factor in factors), default=0)
        common = 1
        for factor in factors:
            _check_multiple("multipleOf", factor)
            common = math.lcm(common, int(factor.scaleb(places)))
            _check_multiple("the least common multiple of multipleOf", Decimal(common).scaleb(-places))


def _multiples(schema: dict[str, Any]) -> Iterator[int | float]:
    """What a number must be a multiple of, here and in `allOf`."""
    given = schema.get("multipleOf")
    if isinstance(given, int | float) and not isinstance(given, bool):
        yield given
    branches = schema.get("allOf")
    for branch in branches if isinstance(branches, list) else ():
        if isinstance(branch, dict):
            yield from _multiples(branch)


def _check_multiple(name: str, factor: Decimal) -> None:
    _, digits, exponent = factor.normalize().as_tuple()
    if len(digits) > 2 and factor.scaleb(max(0, -int(exponent))) > MOST_MULTIPLE:
        fix = f"give at most {MOST_MULTIPLE:,}, or at most two significant digits"
        raise ValueError(f"{name} is {factor.normalize():f}, which takes too long to compile; {fix}")


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects in a schema that may be schemas."""
    if isinstance(schema, dict):
        yield schema
        schema = [part for name, part in schema.items() if name not in (*VALUES, "default", "examples")]
    if isinstance(schema, list):
        for part in schema:
            yield from _objects(part)


def with_deep_stack(work: Callable[[], T]) -> T:
    """The result of `work`, or its exception; called in a thread with `STACK`."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="minipaged-grammar", daemon=True)
    with _starting:
        usual = threading.stack_size(STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return future.result()
