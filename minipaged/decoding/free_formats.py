"""A JSON schema without formats that any text has.

llguidance refuses a `format` that it does not know, because it could not follow it. These restrict nothing,
so any text follows them; pydantic writes them for `Path`, `SecretStr` and `bytes`.
"""

from __future__ import annotations

import json
from typing import Any

from minipaged.decoding.named_keys import LISTED, MOST_LEVELS, NAMED, SINGLE, named_keys_only

FREE = ("binary", "directory-path", "file-path", "password", "path")


def without_free_formats(schema: Any, levels: int = MOST_LEVELS) -> Any:
    """A copy without them down to this many levels (malformed parts stay as they are)."""
    if isinstance(schema, list):
        return [without_free_formats(part, levels - 1) for part in schema] if levels else schema
    if not isinstance(schema, dict) or not levels:
        return schema
    plain = {**schema}
    if plain.get("format") in FREE:
        del plain["format"]
    for name in plain.keys() & {*NAMED}:
        if isinstance(plain[name], dict):
            plain[name] = {key: without_free_formats(part, levels - 1) for key, part in plain[name].items()}
    for name in plain.keys() & {*LISTED, *SINGLE}:
        plain[name] = without_free_formats(plain[name], levels - 1)
    return plain


def followed_schema(schema: Any) -> Any:
    """A schema without formats that any text has, whose objects have only the keys that it names."""
    return named_keys_only(without_free_formats(schema))


def as_followed(source: str) -> str:
    """The same for a schema as JSON text."""
    try:
        return json.dumps(followed_schema(json.loads(source)))
    except (ValueError, RecursionError):
        return source  # (its compilation reports it)
