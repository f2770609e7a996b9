"""What bodies are made of: lists, tables and objects whose errors are found soon and name the field.

An unknown field is refused, because a typo would otherwise change the answer silently.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

MOST_ENTRIES = 1024
"""Entries of an object whose keys the client chooses."""

T = TypeVar("T")


class _FailFast(FailFast):
    __hash__ = object.__hash__  # (a type in a union must have one)


List = Annotated[list[T], _FailFast()]
"""A list with one error: describing a million wrong entries would delay everyone."""


def _check_size(value: Any) -> Any:
    """Before the entries are checked, for the same reason."""
    if isinstance(value, dict) and len(value) > MOST_ENTRIES:
        raise PydanticCustomError("too_long", "too long", {"max_length": MOST_ENTRIES})
    return value


Length = Annotated[int, Field(ge=1, lt=2**63)]
"""`max_tokens` under another name; it is checked here so that an error names the field that was given."""

Table = Annotated[dict[str, T], BeforeValidator(_check_size)]
"""An object with keys of the client's."""


class Open(BaseModel):
    """An object whose other fields, if it has any, go to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _limit(cls, data: Any) -> Any:
        return _check_size(data)


class Body(BaseModel):
    """An object whose fields are all known."""

    model_config = ConfigDict(strict=True, extra="ignore")
    elsewhere: ClassVar[dict[str, str]] = {}
    """Fields that are refused, although inherited or known from other servers -> what to give: a field,
    several words of advice, or ""."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        names = [field.alias or name for name, field in cls.model_fields.items()]
        for name, value in data.items() if isinstance(data, dict) else ():
            if value is None and name in cls.elsewhere:
                continue  # (some clients send null for what they do not use)
            if name not in names or name in cls.elsewhere:
                [near] = difflib.get_close_matches(str(name)[:80], names, n=1, cutoff=0.8) or [""]
                near = cls.elsewhere.get(name, cls.elsewhere.get(near, near))
                hint = near if " " in near else f"did you mean {near}?" if near else "leave it out"
                field = str(name)[:80].encode(errors="backslashreplace").decode()
                raise PydanticCustomError("unknown_field", "unknown", {"field": field, "hint": hint})
        return data
