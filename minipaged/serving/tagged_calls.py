"""Tool calls whose arguments are in tags, inside of `<tool_call>`, as Qwen 3.5 and Qwen 3 Coder write them:

    <function=weather>
    <parameter=city>
    Rome
    </parameter>
    </function>

Only the function's schema tells whether 5 is a number or a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

TAGGED = re.compile(r"\s*+<function=")
TAGGED_BEGIN = re.compile(r"\s*+<function=([^>]++)>")
TAGGED_NEXT = re.compile(r"<tool_call>\s*+<function=")
TAGGED_END = re.compile(r"</function>\s*+</tool_call>")
"""(Searched alone, because that is 20 times as fast as behind a `.*?`.)"""
ARGUMENT = re.compile(r"<parameter=([^>]+)>\n?(.*?)(?:\n?</parameter>|\n(?=<parameter=)|\n?\Z)", re.S)
"""(Some models forget an end tag.)"""

JSON_TYPES = {
    **{dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"},
    type(None): "null",
}
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""That templates have shown to models in place of JSON's."""

UNKNOWN = frozenset({"object", "array", "string"})
"""Types of an argument whose schema names none."""


def arguments_of(text: str, schema: Any) -> str:
    """The arguments between a function's tags, as a JSON object; what is JSON stays as written.

    Args:
        text: with a tag for each.
        schema: of an object that has them as properties; unchecked.
    """
    properties = schema.get("properties") if isinstance(schema, dict) else None
    schemas = properties if isinstance(properties, dict) else {}
    values = {name.strip(): value for name, value in ARGUMENT.findall(text)}
    members = (f"{json.dumps(name)}: {_as_json(value, schemas.get(name))}" for name, value in values.items())
    return f"{{{', '.join(members)}}}"


def _as_json(text: str, schema: Any) -> str:
    """A value of a type that its schema names; as a string, if there is no other."""
    written = PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        found = JSON_TYPES[type(json.loads(written, parse_constant=refuse_constant))]
    except (ValueError, RecursionError):
        found = "string"
    types = _types(schema)
    is_value = found != "string" and (found in types or (found == "integer" and "number" in types))
    return written if is_value else json.dumps(text, ensure_ascii=False)


def refuse_constant(name: str) -> None:
    """Raise ValueError."""
    raise ValueError(f"{name} is not JSON")  # (Python reads NaN and Infinity)


def _types(schema: Any, levels: int = 1) -> Collection[str]:
    """The types that a schema names, or one of its alternatives."""
    if not isinstance(schema, dict):
        return UNKNOWN
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if levels and isinstance(alternatives, list):
        return {name for part in alternatives for name in _types(part, levels - 1)}
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return [name for name in given if isinstance(name, str)]
    values = schema.get("enum")
    return [JSON_TYPES[type(value)] for value in values] if isinstance(values, list) else UNKNOWN
