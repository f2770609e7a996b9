"""An engine over the toy executor: no model, no torch; foreign or stale K/V fails the step that reads it."""

from __future__ import annotations

import time

from minipaged.components import Components
from minipaged.config import EngineConfig
from minipaged.engine import Engine
from minipaged.scheduling import PreemptionCosts
from tests.toy import ToyExecutor


class ToyModel(ToyExecutor):
    """A `ToyExecutor` with the numbers that an engine asks for."""

    block_bytes = 1
    eos_token_ids = ()
    kept_states = None
    preemption_costs = PreemptionCosts(1.0, 1.0, 1.0)

    def __init__(self, num_blocks=64, num_host_blocks=0, block_size=4, vocabulary=50, max_model_len=200):
        super().__init__(num_blocks, num_host_blocks, block_size, vocabulary)
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
        self.vocab_size, self.max_model_len = vocabulary, max_model_len


class SlowModel(ToyModel):
    """Every step sleeps `seconds`; while `num_broken` is above 0, it raises `broken` instead."""

    seconds = 0.0
    num_broken = 0
    broken: BaseException = RuntimeError("the accelerator is on fire")

    def execute(self, plan):
        time.sleep(self.seconds)
        if self.num_broken > 0:
            self.num_broken -= 1
            raise self.broken
        return super().execute(plan)


def toy_engine(
    num_blocks: int = 64, num_host_blocks: int = 0, components: Components | None = None, **options
) -> Engine:
    """An engine over a `ToyModel`; `options` are fields of `EngineConfig`."""
    options = {"block_size": 4, "disable_log_stats": True, **options}
    model = ToyModel(num_blocks, num_host_blocks, options["block_size"])
    return Engine(model, EngineConfig(**options), components=components)
