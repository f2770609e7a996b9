"""The pools are too small on purpose."""

import logging

import pytest


@pytest.fixture(autouse=True)
def no_warning_for_each_preemption() -> None:
    logging.getLogger("minipaged.scheduling").setLevel(logging.ERROR)
