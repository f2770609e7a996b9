"""A JSON schema whose objects have only the keys that it names.

JSON Schema lets an object have any other key, too, so a model may go on with keys of its own until
`max_tokens`. Objects with `properties` or `patternProperties` that say nothing about others are read as if
they said `"additionalProperties": false`:

    {"properties": {"age": A}}    ->    {"properties": {"age": A}, "additionalProperties": false}

What the closed schema accepts, the given one accepts, too. And it accepts something if the given one does: a
value of that, without its unnamed keys, satisfies both. This holds if a single part of the schema describes
each value (two of `allOf` would exclude each other's keys), no key is required without a name, and no part
says what is *not* accepted: a narrower one would accept more. Where it may not hold, the whole schema stays
as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NAMED = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalItems", "additionalProperties")

REFERENCE = re.compile(
    f"#(/({'|'.join(map(re.escape, (*NAMED, *LISTED)))})/[^/]*|/({'|'.join(SINGLE)})(/[0-9]+)?)*"
)
"""A path through these keywords alone: what it leads to has been read as a schema, not as data."""

NOT_MONOTONE = {
    *("not", "if", "contains", "uniqueItems", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
    *("dependentSchemas", "dependentRequired", "dependencies", "$dynamicRef", "$recursiveRef"),
}
"""With these, a narrower part may widen the whole or leave nothing, or they refer to another place."""

PARTS = (
    *({"$ref"}, {"anyOf"}, {"oneOf"}, {"allOf"}, {"const", "enum"}),
    {*NAMED[:2], *SINGLE, "prefixItems", "minProperties"},
)
"""Each describes the parts of a value."""

MOST_LEVELS = 128
"""llguidance refuses JSON with more."""

SCALARS = ("string", "number", "integer", "boolean", "null")


class _NotPlainError(Exception):
    """Closing could change more than which other keys there are."""


def named_keys_only(schema: Any) -> Any:
    """A copy whose objects are closed, or the schema itself (malformed ones, too)."""
    try:
        return _closed(schema, schema, MOST_LEVELS)
    except (_NotPlainError, TypeError, ValueError, AttributeError):
        return schema


def _closed(schema: Any, root: Any, levels: int) -> Any:
    if not levels:
        raise _NotPlainError
    if isinstance(schema, list):
        return [_closed(part, root, levels - 1) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if not _is_plain(schema, root):
        raise _NotPlainError
    closed = dict(schema)
    for name in schema.keys() & {*NAMED}:
        closed[name] = {key: _closed(part, root, levels - 1) for key, part in schema[name].items()}
    for name in schema.keys() & {*LISTED, *SINGLE}:
        closed[name] = _closed(schema[name], root, levels - 1)
    if schema.keys() & {*NAMED[:2]}:
        closed.setdefault("additionalProperties", False)
    return closed


def _is_plain(schema: Mapping[str, Any], root: Any) -> bool:
    """Whether its parts and its own object can be closed."""
    keys = schema.keys()
    return not (
        keys & NOT_MONOTONE
        or ("$id" in schema and schema is not root)  # (references in it begin there)
        or sum(not keys.isdisjoint(part) for part in PARTS) > 1
        or len(keys & {"properties", "patternProperties", "minProperties"}) > 1
        or len(schema.get("allOf", ())) > 1
        or not {*schema.get("required", ())} <= {*schema.get("properties", ())}
        or not REFERENCE.fullmatch(schema.get("$ref", "#"))
        or not _are_apart(schema.get("oneOf", ()), schema, root)
    )


def _are_apart(branches: Any, schema: Mapping[str, Any], root: Any) -> bool:
    """Whether no object or list fits two branches of a `oneOf`, even with more keys."""
    tag = schema.get("discriminator", {}).get("propertyName")
    tags: list[list[Any]] = []
    for branch in branches:
        match branch.get("$ref", "").split("/"):
            case ["#", "$defs" | "definitions" as place, name]:
                branch = root.get(place, {}).get(name, branch)
        if branch.get("type") in SCALARS or isinstance(branch.get("const"), str | int | float):
            continue
        described = branch.get("properties", {}).get(tag, {})
        is_tagged = branch.get("type") == "object" and tag in branch.get("required", ())
        tags.append(described.get("enum", [described.get("const")]) if is_tagged else [None])
    known = [value for values in tags for value in values]
    return len(tags) < 2 or (
        all(isinstance(value, str | int) for value in known) and len(known) == len({*known})
    )
