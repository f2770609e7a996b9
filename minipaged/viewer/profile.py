"""Where a step's time goes: schedule, batch, forward, sample, commit (`minipaged bench --profile`).

A stop watch over CPU seconds of the process: the engine's step hooks and the runner's stage hooks say which
part has just ended. The attention calls inside the forward pass are measured apart from it.
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
    "sample": "sample",
}
"""Stage of the `ModelRunner` -> name of the part; the attention in between is timed by itself."""


class StepProfile:
    """CPU seconds by part of a step.

    Attributes:
        seconds: part -> CPU seconds spent in it, without the parts inside it.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.start()

    def start(self) -> None:
        """Begin a step: what was before counts for nothing."""
        self._last, self._inner = time.process_time(), 0.0

    def _end(self, part: str) -> None:
        last, inner = self._last, self._inner
        self.start()
        self.seconds[part] += self._last - last - inner

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = function(*args, **kwargs)
            elapsed = time.process_time() - start
            self.seconds[part] += elapsed
            self._inner += elapsed
            return result

        return timed

    @contextmanager
    def watch(self, engine: Engine) -> Iterator[None]:
        """Measure the steps of an engine over a model inside the `with`; call `start` before each."""
        runner: Any = engine.executor

        def ends(part: str) -> Callable[..., None]:
            return lambda *args: self._end(part)

        def stage(name: str) -> None:
            if name in STAGES:
                self._end(STAGES[name])

        hooks = engine.on_planned, engine.on_committed, runner.stage_hooks
        saved, backend = [list(kind) for kind in hooks], runner.backend
        engine.on_planned[:] = [ends("schedule"), *engine.on_planned, ends(REST)]
        engine.on_committed[:] = [ends("commit"), *engine.on_committed, ends(REST)]
        runner.stage_hooks.append(stage)
        runner.backend = backend._replace(
            write_kv=self._timed("attention: write K/V", backend.write_kv),
            paged_attention=self._timed("attention: read and attend", backend.paged_attention),
        )
        try:
            yield
        finally:
            for kind, before in zip(hooks, saved):
                kind[:] = before
            runner.backend = backend
