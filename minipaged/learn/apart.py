"""A call into somebody's code in a process of its own, because it may print, exit or never return."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from minipaged.learn.lessons import LearnError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def call_apart(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """What `function(*args)` returns; whatever it prints goes to standard error.

    Raises:
        LearnError: it took more than `seconds`, it ended its process, or it raised ValueError or
            NotImplementedError, with that message.
    """
    import multiprocessing  # (a browser has none)

    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, args), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise LearnError(f"your code is not done after {seconds:.0f} s; is there an endless loop?")
        answer = receiver.recv()
    except EOFError:
        process.join()
        raise LearnError(
            f"your code ended its process with status {process.exitcode} before it was done; "
            "drop the call of sys.exit or os._exit, or fix the error above"
        ) from None
    finally:
        assert process.pid is not None
        kill_group(process.pid)
        process.kill()  # (it may not lead its group yet)
        process.join()
    if isinstance(answer, LearnError):
        raise answer
    return answer


def end_with_parent() -> None:
    """End this process of `multiprocessing`, and the group that it leads, when its parent ends, however."""
    import multiprocessing

    parent: Any = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        kill_group(os.getpid())
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _answer(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # (so that its own children end with it)
    end_with_parent()
    os.dup2(2, 1)
    answer: Any
    try:
        answer = function(*args)
    except (ValueError, NotImplementedError) as error:
        answer = LearnError(str(error))
    with suppress(ValueError, AttributeError):  # (it may be closed, or replaced)
        sys.stdout.flush()  # who gets the answer kills this process
    sender.send(answer)


def kill_group(pid: int) -> None:
    """End a process that leads a group, and its children (where the system has groups)."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)
