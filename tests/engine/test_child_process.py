"""What is said of a process that ended."""

import signal
import sys

import pytest

from minipaged.child_process import how_it_ended


def test_a_return_code_in_words():
    assert how_it_ended(3) == "ended with code 3"
    assert how_it_ended(-signal.SIGTERM) == "was killed by SIGTERM"


@pytest.mark.skipif(sys.platform != "linux", reason="needs signals without a name")
def test_a_signal_without_a_name_has_a_number():
    """Catches a ValueError in the thread that starts a replica again."""
    assert how_it_ended(-(signal.SIGRTMIN + 3)) == f"was killed by signal {signal.SIGRTMIN + 3}"
