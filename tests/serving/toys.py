"""A server over a toy model: no text, foreign or stale keys fail the step, steps as slow as a test wants."""

from __future__ import annotations

import time

from minipaged import AsyncLLM
from tests.engine.toy_model import ToyModel

IDS = {"prompt": [1, 2, 3], "temperature": 0}


class SlowModel(ToyModel):
    """Every step sleeps `seconds`; while `num_broken` is above 0 it raises instead."""

    seconds = 0.0
    num_broken = 0

    def execute(self, plan):
        time.sleep(self.seconds)
        if self.num_broken > 0:
            self.num_broken -= 1
            raise RuntimeError("the accelerator is on fire")
        return super().execute(plan)


def toy(**options) -> AsyncLLM:
    """An engine whose invariants are checked after every step."""
    llm = AsyncLLM(executor=SlowModel(), block_size=4, disable_log_stats=True, **options)
    llm.engine.on_committed.append(lambda *step: llm.engine.check_invariants())
    return llm
