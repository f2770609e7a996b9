"""Many overrides, one test session: `pytest FILES --trials IN.json --trials-out OUT.json`.

    IN   [{"name": "stub", "use": ["allocator=FILE.py:Class"], "tests": ["tests/concepts/test_x.py::test_y"]}]
    OUT  {"stub": {"tests/concepts/test_x.py::test_y": {"failure": ""}}}       an `Outcome`, by its fields

The files are collected once; each trial puts its overrides in place, runs its tests and takes them out
again. A test that has parameters stands for all of them.
"""

from __future__ import annotations

import _thread
import ast
import inspect
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from minipaged.learn.trials import ENDLESS, Outcome
from tests.overrides import installed, replacements

NOT_FOUND = "there is no such test"
ATTEMPTS = 5
"""How often a loop is stopped, once a second, before the process ends: it may catch every exception."""
SECONDS_AFTER_A_LOOP = 1
"""How long the other tests of a trial may compute once one was not done: most of them meet the same loop."""


class TrialRunner:
    """Plays every trial over the collected tests."""

    def __init__(self, source: Path, destination: Path, seconds: int) -> None:
        self.trials = json.loads(source.read_text())
        self.destination = destination
        self.seconds = seconds
        self._left_undone = False  # a test of this trial
        self._outcome = Outcome()
        self._files: list[Path] = []  # of the overrides
        self._write = print

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of running each test once."""
        named = by_name(session.items)
        results: dict[str, dict[str, Any]] = {}
        self._write = session.config.get_terminal_writer().line  # past the capture of output
        for trial in self.trials:
            self._left_undone = False
            outcomes = results[trial["name"]] = {}
            self._save(results)
            try:
                with at_most(self.seconds), at_most(6 * self.seconds, waiting=True):
                    pairs = replacements(trial["use"])
                    parameters = list(replaced_parameters(session.items, pairs))
            except (ValueError, NotImplementedError, pytest.fail.Exception) as error:
                outcomes |= {test: {"failure": str(error)} for test in trial["tests"]}
                continue
            self._files = [Path(use.partition("=")[2].rpartition(":")[0]).resolve() for use in trial["use"]]
            with installed(pairs), in_place(parameters):
                for name in trial["tests"]:
                    outcome = self._run(named.get(name, []))
                    outcomes[name] = outcome._asdict()
                    self._left_undone |= outcome.failure.startswith("not done")
                    self._save(results)
                    self._write("@ran")
                    if outcome.failure and trial.get("until_red"):
                        break
        self._save(results)
        self.destination.with_suffix(".done").touch()
        self._write("@done")
        session.config.get_terminal_writer().flush()
        return True

    def _save(self, results: dict[str, Any]) -> None:
        """Whatever ends the process, the tests that ran have run."""
        unfinished = self.destination.with_suffix(".new")
        unfinished.write_text(json.dumps(results))
        unfinished.replace(self.destination)

    def _run(self, items: list[pytest.Item]) -> Outcome:
        for item in items:
            self._outcome = Outcome(says=first_paragraph(item))
            item._report_sections.clear()  # (what it printed in another trial)
            item._initrequest()  # type: ignore[attr-defined]  # as pytest-rerunfailures: run it once more
            with waiting_less(item) if self._left_undone else nullcontext():
                item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            if self._outcome.failure:
                return self._outcome
        return Outcome() if items else Outcome(NOT_FOUND)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None]:
        """An exercise that works for too long has an endless loop."""
        if self._left_undone:
            seconds = min(SECONDS_AFTER_A_LOOP, self.seconds)
            reason = (
                f"not done after {seconds} s, and an earlier test was not done; is there an endless loop?"
            )
        else:
            seconds, reason = self.seconds, ""
        with at_most(seconds, reason):
            return (yield)

    def pytest_exception_interact(
        self, node: pytest.Item, call: pytest.CallInfo[object], report: pytest.TestReport
    ) -> None:
        """Remember where the test stood, and where the override did."""
        if call.excinfo is None or self._outcome.test_line is not None:
            return
        lines = lines_of(call.excinfo)
        of_test = [line for line in lines if line[0] == node.path]
        inner = [line for cause in causes(call.excinfo.value) for line in lines_of(cause)]  # (of a kernel)
        of_override = [line for line in (*lines, *inner) if line[0].resolve() in self._files]
        root = node.config.rootpath
        known = {line[0] for line in (*of_test, *of_override)}
        of_project = [line for line in lines if line[0] in known or is_of_project(line[0], root)]
        is_error = not call.excinfo.errisinstance(pytest.fail.Exception)
        if not is_error:  # was it stopped? What a loop calls says less than the loop
            of_override = [line for line in of_override if is_in_loop(line[1])] or of_override
        elsewhere = is_error and bool(of_project) and of_project[-1][0] not in known
        self._outcome = self._outcome._replace(
            test_line=named(of_test[-1], root) if of_test else None,
            your_line=named(of_override[-1], root) if of_override else None,
            failed_line=named(of_project[-1], root) if elsewhere else None,
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember the first failure of the test that runs."""
        if report.failed and not self._outcome.failure:
            crash: Any = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash is not None else report.longreprtext
            if (limit := re.match(r"Failed: Timeout \(>(\d+)", text)) is not None:
                text = f"not done after {limit[1]} s; is there an endless loop?"
            if text.startswith("Failed: not done"):
                text = text.removeprefix("Failed: ")
            failure = " ".join(text.split())[:300] or "failed"
            printed = report.capstdout[-3000:]
            self._outcome = self._outcome._replace(failure=failure, message=text[:3000], printed=printed)
        if report.skipped and not self._outcome.failure:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self._outcome = self._outcome._replace(failure=f"skipped, which counts as red: {why}")


def lines_of(excinfo: pytest.ExceptionInfo[BaseException]) -> list[tuple[Path, Any]]:
    """File and entry of each line that an exception went through; an entry's code costs a parse."""
    return [
        (Path(entry.path), entry)
        for entry in excinfo.traceback
        if entry.frame.code.fullsource is not None  # made by exec, as in a dataclass
    ]


def is_in_loop(entry: Any) -> bool:
    """Whether a line is part of a loop of its function."""
    first, line = entry.frame.code.raw.co_firstlineno, entry.lineno + 1
    loops = (
        node
        for node in ast.walk(ast.parse(str(entry.frame.code.fullsource)))
        if isinstance(node, ast.While | ast.For)
    )
    return any(first <= loop.lineno <= line <= (loop.end_lineno or 0) for loop in loops)


def causes(error: BaseException) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """The exceptions that an exception was raised from, as Triton's interpreter does."""
    while (cause := error.__cause__) is not None:
        yield pytest.ExceptionInfo.from_exception(cause)
        error = cause


def is_of_project(file: Path, root: Path) -> bool:
    """Whether a file is neither a library's nor of the machinery that runs trials."""
    if not file.is_relative_to(root) or file == Path(__file__):
        return False
    return file.relative_to(root).parts[0] in ("minipaged", "kernels", "tests")


def named(line: tuple[Path, Any], root: Path) -> tuple[str, int, str]:
    """A line of code with the file as a reader would name it."""
    file, entry = line
    code = str(entry.statement).strip().splitlines()[0]
    return str(file.relative_to(root) if file.is_relative_to(root) else file), entry.lineno + 1, code


def first_paragraph(item: pytest.Item) -> str:
    """The first paragraph of a test's docstring, in one line."""
    doc = getattr(getattr(item, "function", None), "__doc__", None) or ""
    return " ".join(doc.partition("\n\n")[0].split())


@contextmanager
def at_most(seconds: int, message: str = "", waiting: bool = False) -> Iterator[None]:
    """Let the test fail, with `message`, when the `with` computes for longer.

    The time is the processor's: on a busy machine, or while torch is read from a disk, a correct exercise
    waits for more than that. `waiting`: on the clock.
    """
    attempts = itertools.count(1)

    def stop(*args: object) -> None:
        if next(attempts) > ATTEMPTS:
            os._exit(ENDLESS)
        pytest.fail(message or f"not done after {seconds} s; is there an endless loop?")

    if not hasattr(signal, "setitimer") and sys.platform != "win32":  # a browser
        yield
        return
    try:
        with (interval_timer if hasattr(signal, "setitimer") else polled_clock)(stop, seconds, waiting):
            yield
    except BaseException as error:
        add_missing_lines(error.__traceback__)
        raise


@contextmanager
def interval_timer(stop: Callable[..., None], seconds: int, waiting: bool) -> Iterator[None]:
    """Call `stop` after `seconds` inside the block, and then every second, by a signal of a POSIX system."""
    clock, processor = (signal.SIGALRM, signal.ITIMER_REAL), (signal.SIGPROF, signal.ITIMER_PROF)
    number, timer = clock if waiting else processor
    before = signal.signal(number, stop)
    signal.setitimer(timer, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


@contextmanager
def polled_clock(stop: Callable[..., None], seconds: int, waiting: bool) -> Iterator[None]:
    """The same on Windows: a thread looks at the clock every second, and interrupts the main one."""
    clock = time.monotonic if waiting else time.process_time
    end, is_over = clock() + seconds, threading.Event()

    def poll() -> None:
        while not is_over.wait(1):
            if clock() >= end:
                _thread.interrupt_main()

    before = signal.signal(signal.SIGINT, stop)
    poller = threading.Thread(target=poll, daemon=True)
    poller.start()
    try:
        yield
    finally:
        is_over.set()
        poller.join()  # (a late interrupt would be a KeyboardInterrupt)
        signal.signal(signal.SIGINT, before)


def add_missing_lines(traceback: TracebackType | None) -> None:
    """Give an entry without a line number the nearest line before it.

    On Python 3.11 a signal may stop a loop at an instruction that has none, which pytest cannot show.
    """
    while traceback is not None and (inner := traceback.tb_next) is not None:
        if (inner.tb_lineno or -1) < 0:  # None, or -1 in Python 3.11.2
            lines = [line for line, *_ in inner.tb_frame.f_code.co_positions()][: inner.tb_lasti // 2]
            line = next(filter(None, reversed(lines)), inner.tb_frame.f_code.co_firstlineno)
            traceback.tb_next = TracebackType(inner.tb_next, inner.tb_frame, inner.tb_lasti, line)
        traceback = traceback.tb_next


def replaced_parameters(
    items: Iterable[pytest.Item], pairs: list[tuple[Any, Any]]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The parameters of the tests that were made when the files were imported, and what takes their place."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        for name, value in parameters.items():
            for original, override in pairs:
                if value is original or type(value) is original:
                    yield parameters, name, override if value is original else remade(value, override)


@contextmanager
def in_place(parameters: list[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Let tests have these parameters."""
    before = [(held, name, held[name]) for held, name, _ in parameters]
    for held, name, value in parameters:
        held[name] = value
    try:
        yield
    finally:
        for held, name, value in before:
            held[name] = value


def remade(value: Any, override: type) -> Any:
    """An object of the override, made as `value` was. Raises ValueError if it cannot be."""
    arguments = {name: getattr(value, name) for name in inspect.signature(type(value)).parameters}
    try:
        return override(**arguments)
    except Exception as error:
        text = f"{override.__name__} cannot be made with {', '.join(arguments) or 'nothing'}: {error}"
        raise ValueError(text) from error


@contextmanager
def waiting_less(item: pytest.Item) -> Iterator[None]:
    """A test after one that was not done may wait only for a few seconds; a fixture may import torch."""
    item.own_markers.insert(0, pytest.mark.timeout(6 * SECONDS_AFTER_A_LOOP, func_only=True).mark)
    try:
        yield
    finally:
        del item.own_markers[0]


def by_name(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The tests that a node id stands for; without parameters it stands for all of them."""
    named: dict[str, list[pytest.Item]] = {}
    for item in items:
        for name in {item.nodeid, item.nodeid.partition("[")[0]}:
            named.setdefault(name, []).append(item)
    return named
