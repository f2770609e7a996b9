"""A server over a toy model: no text, foreign or stale keys fail the step, steps as slow as a test wants."""

from __future__ import annotations

from minipaged import AsyncLLM
from tests.checked import checked
from tests.engine.toy_model import SlowModel

IDS = {"prompt": [1, 2, 3], "temperature": 0}


def toy(**options) -> AsyncLLM:
    return checked(AsyncLLM(executor=SlowModel(), block_size=4, disable_log_stats=True, **options))
