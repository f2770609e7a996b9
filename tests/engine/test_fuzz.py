"""Random engines, random requests, random accidents: nothing but the request itself decides its tokens.

A scenario is one engine with random settings and the life of its requests, all from one seed. The
executor is the toy of `tests/toy.py`, so that whatever is read from a wrong block shows. A failure
names the seed; run it alone with `--fuzz-seed SEED --fuzz-steps 1`.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from minipaged.decoding.beam_search import BeamSearch
from minipaged.memory import Chunked, OnDemand, Reserve
from minipaged.scheduling import (
    Auto,
    ChunkedPrefill,
    PreemptionCosts,
    PrefillFirst,
    Recompute,
    Request,
    RequestTooLongError,
    Swap,
)
from tests.toy import ToyEngine, beams, outputs, ranked, run_alone, samples, toy_scheduler

VOCABULARY = 8
MAX_STEPS_OF_A_SCENARIO = 3000


def random_settings(rng: random.Random) -> dict[str, Any]:
    """Settings of `toy_scheduler`, mostly too small for comfort."""
    block_size = rng.choice([1, 2, 3, 4, 5, 8, 16])
    num_blocks = max(3, rng.choice([40, 80, 160]) // block_size + rng.randint(-2, 2))
    return {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "num_host_blocks": rng.choice([0, rng.randint(1, num_blocks), num_blocks]),
        "caching": rng.random() < 0.6,
        "growth": rng.choice([OnDemand(), OnDemand(), Chunked(rng.randint(1, 5)), Reserve()]),
        "policy": rng.choice([ChunkedPrefill(), PrefillFirst()]),
        "preemption": rng.choice(
            [Recompute(), Swap(), Auto(PreemptionCosts(1.0, 1.0, rng.choice([0.1, 1.0, 10.0])))]
        ),
        "max_num_seqs": rng.randint(3, 20),
        "budget": rng.choice([rng.randint(3, 12), rng.randint(8, 64)]),
        "max_model_len": rng.choice([1000, rng.randint(40, 80)]),
        "watermark": rng.choice([0.0, 0.01, 0.2]),
        "order": rng.sample(range(num_blocks), num_blocks),
        "prefix_aware": rng.random() < 0.85,
    }


class Scenario:
    """One engine and its requests."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.settings = random_settings(rng)
        self.engine = ToyEngine(toy_scheduler(**self.settings), VOCABULARY)
        self.requests, self.plans = self.engine.requests, self.engine.plans
        self.to_come = rng.randint(1, 20)
        self.calm = rng.random() < 0.4  # nothing fails, nobody aborts
        self.stems = [[rng.randrange(2) for _ in range(rng.randint(1, 40))] for _ in range(2)]
        self.counts: Counter[str] = Counter(scenarios=1)

    def run(self) -> Counter[str]:
        """Live it to the end, then compare every output."""
        engine, scheduler = self.engine, self.engine.scheduler
        for _ in range(self.rng.randint(0, self.to_come)):
            self.arrive()
        while self.to_come or scheduler.has_unfinished:
            if self.to_come and (not scheduler.has_unfinished or self.rng.random() < 0.15):
                self.arrive()
            self.maybe_abort()
            if not self.calm and self.rng.random() < 0.03:
                self.rng.choice([engine.fail_step, engine.fail_commit])(self.maybe_abort)
                self.counts["failed steps"] += 1
            else:
                engine.step(self.maybe_abort)
            self.counts["steps"] += 1
            assert self.counts["steps"] < MAX_STEPS_OF_A_SCENARIO, "the engine makes no progress"
        return self.check_end()

    def check_end(self) -> Counter[str]:
        """Every block is free, every output right. Returns what happened."""
        kv = self.engine.scheduler.kv
        assert kv.num_free == kv.allocator.num_blocks, "blocks are held after the last request"
        assert not kv.swap_space or kv.swap_space.allocator.num_free == kv.swap_space.allocator.num_blocks
        for request in self.requests:
            self.check_outputs(request)
        return self.counts + self.count_events()

    def arrive(self) -> None:
        """A request: often the beginning of a known prompt, so that prefixes collide."""
        rng = self.rng
        prompt = self.random_prompt()
        stop = rng.choice([None, 0])
        method = rng.choice(
            [
                samples(1, stop),
                samples(rng.randint(1, 5), stop, min_tokens=rng.choice([0, 0, 3])),
                beams(
                    rng.randint(1, 4),
                    stop,
                    length_penalty=rng.choice([0.0, 1.0, 2.0]),
                    early_stopping=rng.choice([True, False, "never"]),
                    min_tokens=rng.choice([0, 0, 3]),
                ),
            ]
        )
        try:
            self.engine.add(prompt, rng.choice([1, 4, 12, 30]), method, rng.choice(["", "", "salt"]))
            self.counts["requests"] += 1
        except RequestTooLongError:
            self.counts["refused"] += 1

    def random_prompt(self) -> list[int]:
        """Often the beginning of a known one."""
        rng = self.rng
        self.to_come -= 1
        stem = rng.choice(self.stems)
        prompt = stem[: rng.randint(1, len(stem))]
        return prompt + [rng.randrange(2) for _ in range(rng.choice([0, 0, 1, 5]))]

    def maybe_abort(self) -> None:
        """Now and then end somebody, finished ones and some twice included."""
        if not self.calm and self.requests and self.rng.random() < 0.02:
            request = self.rng.choice(self.requests)
            for _ in range(self.rng.randint(1, 2)):
                self.abort(request)
            self.counts["aborts"] += 1

    def abort(self, request: Request) -> None:
        """Whatever its state."""
        self.engine.scheduler.abort(request)

    def check_outputs(self, request: Request) -> None:
        """As `alone`; where the pool or an abort cut it, as `alone` up to there."""
        assert request.is_finished
        assert request.completions
        prompt = request.prompt_token_ids
        limit = request.max_num_tokens - len(prompt)
        is_cut = outgrew = self.outgrew(request)
        cut_short = [c.finish_reason for c in request.completions if c.finish_reason in ("abort", "error")]
        if outgrew or cut_short:
            is_cut = True
            self.counts[f"cut ({'outgrown' if outgrew else cut_short[0]})"] += 1
            limit = max(map(len, outputs(request)))
            if outgrew:
                self.check_outgrown(request, limit)
        if not limit:
            assert ranked(request) == [[]]
            return
        expected = run_alone(prompt, limit, request.method, VOCABULARY)
        # (Beams that are cut have more completions than those that end at this length.)
        answer = ranked if is_cut else outputs
        got, wanted = answer(request), answer(expected)
        assert got == wanted, f"{request.request_id}: {got} instead of {wanted}"
        self.counts["hypotheses"] += sum(
            completion.finish_reason == "stop" and isinstance(request.method, BeamSearch)
            for completion in request.completions
        )

    def check_outgrown(self, request: Request, length: int) -> None:
        """Only what needs more than the pool, sharing nothing, may be cut."""
        kv = self.engine.scheduler.kv
        cut = [c for c in request.completions if c.num_generated_tokens == length]
        most = sum(kv.num_blocks_of(c.num_tokens) for c in cut if c.finish_reason == "length")
        assert most > kv.allocator.num_blocks, f"{request.request_id} was cut though it fits"

    def outgrew(self, request: Request) -> bool:
        """Whether it ended because it needs more than the pool."""
        return any(
            event.kind == "outgrown" and event.request_id == request.request_id
            for plan in self.plans
            for event in plan.events
        )

    def count_events(self) -> Counter[str]:
        """How often the interesting things happened."""
        counts: Counter[str] = Counter()
        for plan in self.plans:
            counts["tokens"] += plan.num_tokens
            counts["copies"] += len(plan.copies)
            for event in plan.events:
                mode = event.detail.get("mode")
                counts[event.kind + (f" ({mode})" if mode else "")] += 1
                counts["cached tokens"] += event.detail.get("cached_tokens", 0)
        return counts


def run_scenarios(
    make: Callable[[int], Scenario], first_seed: int, steps: int, capsys: pytest.CaptureFixture[str]
) -> Counter[str]:
    """Scenarios with the next seed each, until so many steps are taken. Prints and returns what happened."""
    counts: Counter[str] = Counter()
    seed = first_seed
    while counts["steps"] < steps:
        scenario = make(seed)
        try:
            counts += scenario.run()
        except BaseException as error:
            error.add_note(f"seed {seed}, step {scenario.counts['steps']}, settings {scenario.settings}")
            raise
        seed += 1
    with capsys.disabled():
        print(f"\nfuzz: seeds {first_seed} to {seed - 1}, {dict(sorted(counts.items()))}")
    return counts


@pytest.mark.timeout(0)
def test_nothing_but_the_request_decides_its_tokens(
    fuzz_steps: int,
    fuzz_seed: int,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches any pair of features that meet badly: foreign or stale KV, lost or doubly freed blocks,
    a request that never ends, tokens that depend on the settings or on the neighbours."""
    caplog.set_level(logging.ERROR, "minipaged")  # thousands of preemption warnings
    counts = run_scenarios(Scenario, fuzz_seed, fuzz_steps, capsys)
    if fuzz_steps >= 3000:
        missed = [
            kind
            for kind in (
                "preempted (swap)",
                "preempted (recompute)",
                "resumed (swap)",
                "resumed",
                "outgrown",
                "hypotheses",
            )
            if not counts[kind]
        ]
        assert not missed, f"the random scenarios never met {missed}"
