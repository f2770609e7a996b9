"""Every pair of features: bugs of this field live where two of them meet.

A feature changes the settings, the requests or what happens to them. Each pair runs one small workload that
makes both features happen, and says so if one did not; the tokens must be those of each request alone.
The toy model reads its K/V back through the block tables, and every invariant is checked after every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest

from minipaged.memory import Chunked, Reserve
from minipaged.scheduling import ChunkedPrefill, PrefillFirst, Recompute, Swap
from tests.toy import ToyEngine, alone, beams, outputs, samples, toy_scheduler

NUM_REQUESTS = 8


def never(engine: ToyEngine) -> None:
    """No accident."""


@dataclass(frozen=True)
class Feature:
    """What a feature sets, and how to see that it took part.

    `methods` replace the plain requests in turn; `accident` is called before each step and `meanwhile`
    while it is in flight.
    """

    seen: Callable[[ToyEngine], bool]
    settings: dict[str, Any] = field(default_factory=dict)
    methods: tuple[Any, ...] = ()
    accident: Callable[[ToyEngine], None] = never
    meanwhile: Callable[[ToyEngine], None] = never


def events(engine: ToyEngine, kind: str) -> list[dict[str, Any]]:
    return [event.detail for plan in engine.plans for event in plan.events if event.kind == kind]


def preempted_by(mode: str) -> Callable[[ToyEngine], bool]:
    return lambda engine: any(detail["mode"] == mode for detail in events(engine, "preempted"))


def forked(width: int) -> Callable[[ToyEngine], bool]:
    return lambda engine: any(len(r.completions) == width for r in engine.requests)


def some_stopped(engine: ToyEngine) -> bool:
    return any(c.finish_reason == "stop" for r in engine.requests for c in r.completions)


def some_aborted(engine: ToyEngine) -> bool:
    return any(c.finish_reason == "abort" for r in engine.requests for c in r.completions)


def abort_the_first(step: int) -> Callable[[ToyEngine], None]:
    def accident(engine: ToyEngine) -> None:
        if len(engine.plans) == step:
            engine.scheduler.abort(engine.scheduler.running[0])

    return accident


def fail_some_steps(engine: ToyEngine) -> None:
    if len(engine.plans) in (2, 5, 9):
        engine.fail_step()


def grants_spare_blocks(engine: ToyEngine) -> bool:
    size = engine.scheduler.kv.block_size
    return any(
        detail["blocks"] * size + detail["cached_tokens"] >= detail["prompt_tokens"] + size
        for detail in events(engine, "admitted")
    )


def some_wait(engine: ToyEngine) -> bool:
    return sum(event.kind == "admitted" for event in engine.plans[0].events) < NUM_REQUESTS


def cut_prompts(engine: ToyEngine) -> bool:
    return any(chunk.start for plan in engine.plans for chunk in plan.scheduled if chunk.num_tokens > 1)


def prompts_alone(engine: ToyEngine) -> bool:
    return all(
        len({chunk.num_tokens > 1 for chunk in plan.scheduled}) == 1
        for plan in engine.plans
        if plan.scheduled
    ) or bool(events(engine, "resumed"))


# In the order of the table: a later feature's settings win where both set the same thing.
FEATURES = {
    "parallel_sampling": Feature(forked(3), methods=(samples(3),)),
    "beams": Feature(forked(2), methods=(beams(2),)),
    "prefix_caching": Feature(
        lambda engine: any(d.get("cached_tokens") for d in events(engine, "admitted")), {"caching": True}
    ),
    "chunked_prefill": Feature(cut_prompts, {"policy": ChunkedPrefill(), "budget": 7}),
    "prefill_first": Feature(prompts_alone, {"policy": PrefillFirst()}),
    "recompute": Feature(preempted_by("recompute"), {"num_blocks": 24, "preemption": Recompute()}),
    "swap": Feature(preempted_by("swap"), {"num_blocks": 24, "num_host_blocks": 24, "preemption": Swap()}),
    "growth_chunked": Feature(grants_spare_blocks, {"growth": Chunked(7)}),
    "growth_reserve": Feature(grants_spare_blocks, {"growth": Reserve()}, methods=(samples(2),)),
    "stop_token": Feature(some_stopped, methods=(samples(2, stop=3), samples(1, stop=5))),
    "abort": Feature(some_aborted, accident=abort_the_first(4)),
    "abort_in_flight": Feature(some_aborted, meanwhile=abort_the_first(5)),
    "failed_step": Feature(lambda engine: len(engine.plans) > 9, accident=fail_some_steps),
    "tiny_pool": Feature(
        lambda engine: bool(engine.scheduler.num_preemptions or events(engine, "outgrown")),
        {"num_blocks": 12},
    ),
    "few_seats": Feature(some_wait, {"max_num_seqs": 4}),
    "block_of_one_token": Feature(lambda engine: engine.scheduler.kv.block_size == 1, {"block_size": 1}),
}
# What cannot meet: two that set the same thing to different values.
EITHER_OR = [
    {"chunked_prefill", "prefill_first"},
    {"recompute", "swap"},
    {"growth_chunked", "growth_reserve"},
]
PAIRS = [pair for pair in combinations(FEATURES, 2) if set(pair) not in EITHER_OR]


def run(names: tuple[str, ...]) -> ToyEngine:
    """The workload, with these features, to its end."""
    features = [FEATURES[name] for name in names]
    settings: dict[str, Any] = {"num_blocks": 48, "block_size": 2, "budget": 24, "max_num_seqs": 12}
    for feature in features:
        settings |= feature.settings
    if settings["block_size"] == 1:  # as many slots as before
        settings["num_blocks"] *= 2
        settings["num_host_blocks"] = 2 * settings.get("num_host_blocks", 0)
    settings["num_host_blocks"] = min(settings.get("num_host_blocks", 0), settings["num_blocks"])
    engine = ToyEngine(toy_scheduler(**settings), vocabulary=8)
    methods = [method for feature in features for method in feature.methods] or [samples()]
    rng = random.Random(0)
    stem = [rng.randrange(8) for _ in range(12)]
    for i in range(NUM_REQUESTS):
        own = [rng.randrange(8) for _ in range(i % 3)]
        engine.add(stem[: (5, 12, 8, 4)[i % 4]] + own, 10, methods[i % len(methods)])
    while engine.scheduler.has_unfinished:
        for feature in features:
            feature.accident(engine)
        engine.step(lambda: [feature.meanwhile(engine) for feature in features])
        assert len(engine.plans) < 1000, "no progress"
    assert engine.scheduler.kv.num_used == 0, "blocks are held after the last request"
    return engine


@pytest.mark.parametrize("pair", PAIRS, ids="-x-".join)
def test_two_features_together_change_no_token(pair: tuple[str, str]) -> None:
    """Catches one feature that breaks an assumption of the other; see the module's first lines."""
    engine = run(pair)
    for name in pair:
        assert FEATURES[name].seen(engine), f"{name} did not take part; the pair proves nothing"
    cut = [r for r in engine.requests if any(c.finish_reason == "abort" for c in r.completions)]
    cut += [r for plan in engine.plans for r in plan.finished]
    for request in engine.requests:
        limit = max(len(tokens) for tokens in outputs(request)) if request in cut else 10
        expected = alone(request.prompt_token_ids, limit, request.method, 8) if limit else [[]]
        assert outputs(request) == expected
    if "tiny_pool" not in pair:
        assert len(cut) <= sum(name.startswith("abort") for name in pair)
    assert any(len(set(tokens)) > 2 for r in engine.requests for tokens in outputs(r)), (
        "nothing but repetition"
    )
