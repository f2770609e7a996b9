"""Ctrl-C at a line of one's choice."""

from __future__ import annotations

import inspect
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


def interrupted_after_call(number: int, call: Callable[[], object], modules: tuple[str, ...]) -> bool:
    """Call it, with a SIGINT where call `number` that these modules make has returned, or one of their
    functions begins: there CPython looks for signals. False: there are fewer."""
    left = number

    def profile(frame, event, argument):
        nonlocal left
        if event == "return":  # (an interrupt as a generator yields would end it)
            frame = None if frame.f_code.co_flags & inspect.CO_GENERATOR else frame.f_back
        if event == "c_call" or frame is None or not frame.f_code.co_filename.endswith(modules):
            return
        left -= 1
        if left == 0:
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return left <= 0
