"""Which parameters of a test the README's test command leaves to `.ci/run`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(few: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters, marked slow except for a few."""
    few = list(few)
    return [value if value in few else pytest.param(value, marks=pytest.mark.slow) for value in values]
