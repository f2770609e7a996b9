"""An LLM to which nothing refers any more gives its memory back at once.

Reference cycles would keep the weights and the pool until Python's garbage collector runs, perhaps while
the next model is loaded.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator
from weakref import ref

import pytest

from minipaged import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
)
from minipaged.config import config_from
from minipaged.execution.model_runner import ModelRunner
from tests.models.survey import build_small


def refused(llm: LLM) -> None:
    """A request that is never built."""
    with pytest.raises(ValueError, match="is empty"):
        llm.generate({"prompt_token_ids": []})


WAYS = {
    "built only": lambda llm: None,
    "greedy": lambda llm: llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8)),
    "samples that preempt one another": lambda llm: llm.generate(
        ["The little robot", "Once upon a time"] * 3, SamplingParams(n=3, max_tokens=60, seed=1)
    ),
    "beams": lambda llm: llm.generate("Once", BeamSearchParams(beam_width=4, max_tokens=20)),
    "a choice": lambda llm: llm.generate(
        "Once", SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    ),
    "a stream that is left": lambda llm: next(llm.stream("Once", SamplingParams(max_tokens=8))),
    "a refused prompt": refused,
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only reference counts free anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("settings", [{}, {"num_speculative_tokens": 2, "preemption_mode": "swap"}], ids=str)
def test_a_dropped_llm_is_freed_without_the_garbage_collector(no_collector, settings):
    """Catches a hook, a method or a generator that refers to the engine and belongs to it."""
    alive = {}
    for way, use in WAYS.items():
        llm = LLM(num_blocks=40, disable_log_stats=True, **settings)
        parts = [ref(llm.engine), ref(llm.engine.executor), ref(llm.engine.scheduler)]
        use(llm)
        del llm
        if left := [type(part()).__name__ for part in parts if part() is not None]:
            alive[way] = left
    assert not alive


def test_so_is_a_hybrid_one_with_its_states(no_collector):
    """Catches a prefix cache that refers to itself, and to the recurrent states that its hits need, which can
    be large."""
    options = {"num_blocks": 40, "max_model_len": 64, "disable_log_stats": True}
    llm = LLM(executor=ModelRunner(build_small("lfm2"), config_from(options)), **options)
    llm.generate(TokensPrompt(prompt_token_ids=[3] * 20), SamplingParams(max_tokens=4, detokenize=False))
    states = llm.engine.executor._states
    parts = [
        ref(llm.engine.executor),
        ref(states),
        *(ref(kept.place.states) for kept in states.kept.values()),
    ]
    del llm, states
    assert [part() for part in parts] == [None] * 3


@pytest.mark.parametrize("ends", ["dropped", "shut down"])
def test_so_is_an_asynchronous_one(no_collector, ends):
    """Catches a thread that has ended and still refers to the engine, whose hooks refer to it."""

    async def use() -> list[ref]:
        llm = AsyncLLM(num_blocks=40, disable_log_stats=True)
        parts = [ref(llm._thread), ref(llm.engine), ref(llm.engine.executor)]
        async for _ in llm.generate("Once", SamplingParams(max_tokens=4)):
            pass
        if ends == "shut down":
            llm.shutdown()
        return parts

    assert [part() for part in asyncio.run(use())] == [None] * 3


@pytest.mark.slow
def test_so_is_the_first_of_a_process():
    """Catches the imports of torch and transformers, which keep the frames that they run in, and what those
    refer to."""
    script = """if True:
        import gc
        from weakref import ref
        from minipaged import LLM
        gc.disable()

        def built():
            return ref(LLM(num_blocks=40, disable_log_stats=True).engine.executor)

        print("freed" if built()() is None else "alive", "on" if gc.isenabled() else "off")
    """
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert found.stdout.split() == ["freed", "off"], found.stderr
