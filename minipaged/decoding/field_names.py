"""Errors about field names: one that does not exist, and one that is assigned to."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, fields
from functools import wraps
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from minipaged.decoding.checks import ParamsError

T = TypeVar("T")


def named_fields(
    dropped: str = "", elsewhere: Mapping[str, str] = MappingProxyType({}), **instead: str
) -> Callable[[type[T]], type[T]]:
    """A decorator of frozen dataclasses: a wrong name raises `ParamsError`, an assignment says how to copy.

    Args:
        dropped: names of fields that vLLM's class has and this one does not. Their values None, False, 0 and
            "" ask for nothing and are accepted.
        elsewhere: names that other libraries have, and what to give here.
        instead: more fields of vLLM's class, and what to give instead.
    """
    instead = dict.fromkeys(dropped.split(), "drop it") | instead

    def decorate(cls: type[T]) -> type[T]:
        own = [field.name for field in fields(cls) if field.init]  # type: ignore[arg-type]
        known, build = set(own), cls.__init__

        @wraps(build)
        def init(self: T, **options: Any) -> None:
            for name in [name for name in options if name not in known]:
                value = options.pop(name)
                if value or name not in instead:
                    refuse(name, value)
            build(self, **options)

        def refuse(name: str, value: Any) -> NoReturn:
            if name in instead:
                raise ParamsError(f"{name} is {value!r}, which is not supported; {instead[name]}")
            near = difflib.get_close_matches(name, own, n=1)
            fix = elsewhere.get(name) or (f"did you mean {near[0]}?" if near else "drop it")
            raise ParamsError(f"unknown field {name!r} of {cls.__name__}; {fix}")

        def setattr(self: T, name: str, value: Any) -> NoReturn:
            copied = "params.clone(" if hasattr(cls, "clone") else "dataclasses.replace(params, "
            raise FrozenInstanceError(f"{cls.__name__} is frozen; make a copy: {copied}{name}=...)")

        cls.__init__, cls.__setattr__ = init, setattr  # type: ignore[method-assign,assignment]
        return cls

    return decorate
