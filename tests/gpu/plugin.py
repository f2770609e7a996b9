"""Records the result of every test of a pytest run: `-p tests.gpu.plugin` and MINIPAGED_GPU_RECORDS=FILE."""

import os
from pathlib import Path

import pytest

from tests.gpu.records import Records


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Failures in full, and what was skipped, with its reason."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return  # (the process that started the workers hears of it, too)
    reason = {} if report.passed else {"reason": str(report.longrepr)[-500:]}
    record = {"check": report.nodeid, "result": report.outcome, "seconds": round(report.duration, 2)}
    Records(Path(os.environ["MINIPAGED_GPU_RECORDS"])).add(record | reason)
