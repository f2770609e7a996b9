"""Options of the test run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Sizes of the random tests."""
    parser.addoption(
        "--fuzz-steps", type=int, default=3000, help="Random engine steps in tests/engine/test_fuzz.py."
    )
    parser.addoption("--fuzz-seed", type=int, default=0, help="Seed of the first random scenario.")


@pytest.fixture
def fuzz_steps(pytestconfig: pytest.Config) -> int:
    """How many random engine steps to take at least."""
    return pytestconfig.getoption("--fuzz-steps")


@pytest.fixture
def fuzz_seed(pytestconfig: pytest.Config) -> int:
    """The seed of the first scenario; the next one has the next seed."""
    return pytestconfig.getoption("--fuzz-seed")
