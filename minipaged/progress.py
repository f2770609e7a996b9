"""A progress bar on standard error for slow work: loading, compiling, generating, simulating."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class Advance(Protocol):
    """What a bar yields."""

    def __call__(self, done: int, total: int | None = None) -> None:
        """Show how many are done and, if that was not known before, of how many."""


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Done and total, once there is a total."""
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except Exception:  # there is none, or it is closed, or of a class of the user's own
        return False


@contextmanager
def restored_at_end(stop: Callable[[], None]) -> Iterator[None]:
    """If SIGTERM or SIGHUP ends the process inside the block, `stop` comes first: it gives the terminal
    back, or ends what the process has started.

    Blocks may be nested: the inner `stop` comes first.
    """
    process, is_main = os.getpid(), threading.current_thread() is threading.main_thread()

    def end(number: int, frame: Any) -> None:
        with suppress(OSError):  # the terminal is closed
            if os.getpid() == process:  # (and not a fork of it)
                stop()
        signal.signal(number, ours[number])
        signal.raise_signal(number)

    known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in known if is_main}
    ours = {
        number: handler
        for number, handler in before.items()
        if handler is signal.SIG_DFL or getattr(handler, "__code__", None) is end.__code__
    }
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


@contextmanager
def progress_bar(
    text: str, total: int | None = None, enabled: bool = True, prints: bool = False
) -> Iterator[Advance]:
    """Show a bar while the block runs, and erase it. Without a total it only moves.

    With `prints`, what `print` writes to the same terminal meanwhile is shown above the bar.
    Nothing is shown if standard error is not a terminal, whatever the environment says about colours.
    """
    if not (enabled and _is_terminal(sys.stderr)):
        yield lambda done, total=None: None
        return
    columns = TextColumn("{task.description}"), BarColumn(bar_width=None), _Count(), TimeElapsedColumn()
    redirect = prints and _is_terminal(sys.stdout)
    bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=redirect)
    with restored_at_end(bar.stop), bar:
        task = bar.add_task(text, total=total)

        def advance(done: int, total: int | None = None) -> None:
            bar.update(task, completed=done, total=total)

        yield advance
