"""Where a step's time goes: schedule, batch, forward, sample, commit (`minipaged bench --profile`).

Wraps the engine's own calls while it measures and counts CPU seconds of the process; nothing else in the
engine knows of it. What a call's inner parts took is subtracted from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from minipaged.engine import Engine


class StepProfile:
    """CPU seconds by part of a step.

    Attributes:
        seconds: part -> CPU seconds spent in it, without the parts inside it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]  # per open part, what parts inside it took

    def _wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.process_time() - start
                self.seconds[part] = self.seconds.get(part, 0.0) + elapsed - self._inner.pop()
                self._inner[-1] += elapsed

        return timed

    @contextmanager
    def watch(self, engine: Engine) -> Iterator[None]:
        """Measure the steps of an engine over a model inside the `with`."""
        runner: Any = engine.executor
        parts = [
            (engine.scheduler, "schedule", "schedule"),
            (engine.scheduler, "commit", "commit"),
            (runner.builder, "build", "plan -> tensors"),
            (runner, "forward", "forward: all but attention"),
            (runner, "_sampler", "sample"),
            (engine, "step", "rest of the step"),
        ]
        backend = runner.backend
        with ExitStack() as stack:
            for owner, name, part in parts:
                stack.enter_context(_replaced(owner, name, self._wrap(part, getattr(owner, name))))
            watched = backend._replace(
                write_kv=self._wrap("attention: write K/V", backend.write_kv),
                paged_attention=self._wrap("attention: read and attend", backend.paged_attention),
            )
            stack.enter_context(_replaced(runner, "backend", watched))
            yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
