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
    members = (
        f"{json.dumps(name)}: {_as_json(value, _types(schemas.get(name), schema, set()))}"
        for name, value in values.items()
    )
    return f"{{{', '.join(members)}}}"


def _as_json(text: str, types: Collection[str]) -> str:
    """A value of one of these types; as a string, if there is no other."""
    written = PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        found = JSON_TYPES[type(json.loads(written, parse_constant=refuse_constant))]
    except (ValueError, RecursionError):
        found = "string"
    is_value = found != "string" and (found in types or (found == "integer" and "number" in types))
    return written if is_value else json.dumps(text, ensure_ascii=False)


def refuse_constant(name: str) -> None:
    """Raise ValueError."""
    raise ValueError(f"{name} is not JSON")  # (Python reads NaN and Infinity)


def _types(schema: Any, whole: Any, seen: set[str], levels: int = 8) -> Collection[str]:
    """The types that a schema, a part of a `whole` one, names itself or through parts not `seen` yet."""
    if not isinstance(schema, dict) or not levels:
        return UNKNOWN
    match str(schema.get("$ref")).split("/"):
        case ["#", "$defs" | "definitions" as place, name] if isinstance(whole.get(place), dict):
            if name in seen:  # (following it again could take for ever)
                return ()
            seen.add(name)
            return _types(whole[place].get(name), whole, seen, levels - 1)
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(alternatives, list):
        return {name for part in alternatives for name in _types(part, whole, seen, levels - 1)}
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return [name for name in given if isinstance(name, str)]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return [JSON_TYPES[type(value)] for value in values]
    parts = schema.get("allOf")
    types = (_types(part, whole, seen, levels - 1) for part in parts) if isinstance(parts, list) else ()
    return next((names for names in types if names is not UNKNOWN), UNKNOWN)
