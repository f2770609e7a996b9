"""Ctrl-C at a line of one's choice."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest

may_be_swallowed = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""For Ctrl-C at random moments: Python drops one in the callback of a weak reference, and goes on."""


def interrupted_at_line(number: int, call: Callable[[], object], modules: tuple[str, ...]) -> bool:
    """Call it, with a SIGINT at line `number` that it runs of these modules. False: it runs fewer."""
    left = number

    def trace(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.endswith(modules):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return left <= 0
