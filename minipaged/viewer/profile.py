"""Where a step's time goes: schedule, batch, forward, sample, commit (`minipaged bench --profile`).

A stopwatch over CPU seconds of the process: the engine's step hooks and the runner's stage hooks say which
part has just ended.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from minipaged.engine import Engine

REST = "rest of the step"

STAGES = {
    "moves": REST,
    "batch": "plan -> tensors",
    "forward": "forward: all but attention",
    "write_kv": "attention: write K/V",
    "attention": "attention: read and attend",
    "sample": "sample",
}
"""Stage of the `ModelRunner` -> name of the part."""


class StepProfile:
    """CPU seconds by part of a step."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.start()

    def start(self) -> None:
        """Begin a step: the time before it is not counted."""
        self._last = time.process_time()

    def _end(self, part: str) -> None:
        last, self._last = self._last, time.process_time()
        self.seconds[part] += self._last - last

    @contextmanager
    def watch(self, engine: Engine) -> Iterator[None]:
        """Measure the steps of an engine over a model inside the `with`; call `start` before each."""
        runner: Any = engine.executor

        def ends(part: str) -> Callable[..., None]:
            return lambda *_: self._end(part)

        hooks = engine.on_planned, engine.on_committed, runner.stage_hooks
        saved = [list(kind) for kind in hooks]
        engine.on_planned[:] = [ends("schedule"), *engine.on_planned, ends(REST)]
        engine.on_committed[:] = [ends("commit"), *engine.on_committed, ends(REST)]
        runner.stage_hooks.append(lambda stage: self._end(STAGES[stage]))
        try:
            yield
        finally:
            for kind, before in zip(hooks, saved):
                kind[:] = before
