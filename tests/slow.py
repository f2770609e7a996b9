"""Which parameters of a test the README's test command leaves to `.ci/run`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(few: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters (tuples, where a test has several), marked slow except for a few."""
    return [
        value if value in few else pytest.param(*_as_tuple(value), marks=pytest.mark.slow) for value in values
    ]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
