"""Random engines with random accidents: whatever is raised, and wherever, no block and no token is lost.

As in `test_fuzz.py`, but through the `Engine` with every setting of its config. Errors and SIGINTs strike
inside batch policy, preemption policy, manager, block tables, decoding methods, executor, commit and step
hooks: at a counted call, so that a seed repeats them, and in some scenarios from a timer at any instruction.
"""

from __future__ import annotations

import functools
import logging
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from minipaged import BeamSearchParams, SamplingParams
from minipaged.components import Components
from minipaged.config import EngineConfig
from minipaged.decoding.methods import SamplingMethod
from minipaged.engine import Engine
from minipaged.memory import BlockAllocator, BlockTable, Chunked, OnDemand, Reserve
from minipaged.scheduling import PreemptionCosts, Request, RequestTooLongError, StepPlan, StepResult
from tests.engine.ctrl_c import may_be_swallowed
from tests.engine.drafters import Foresight
from tests.engine.test_fuzz import MAX_STEPS_OF_A_SCENARIO, VOCABULARY, Scenario, run_scenarios
from tests.engine.toy_model import ToyModel
from tests.toy import check_plan, outputs, run_alone

HAS_TIMER = hasattr(signal, "setitimer")  # not on Windows

MANAGER_CALLS = (
    "can_admit",
    "admit",
    "blocks_to_grow",
    "grow",
    "register",
    "can_swap_out",
    "swap_out",
    "can_swap_in",
    "swap_in",
    "free_preallocated",
    "new_table",
    "fork",
    "free",
    "commit_registered",
)
NO_TOKEN = "no valid token"

WHOLE = ("new_table", "fork", "free")
"""Calls that fail before their work or not at all: after it, only who called them knows of the blocks."""


class InjectedError(Exception):
    """Raised by the tests."""


class Fuse:
    """Burns down with every call of a wrapped method; at its end one of them fails."""

    def __init__(self) -> None:
        self.calls_left = 0  # 0: out
        self.is_interrupt = False
        self.place = ""

    def burn(self, place: str) -> None:
        """A call. May raise InjectedError, or send SIGINT."""
        self.calls_left -= self.calls_left > 0
        if self.calls_left == 0 and not self.place:
            self.place = place
            if self.is_interrupt:
                signal.raise_signal(signal.SIGINT)
            else:
                raise InjectedError(place)

    def light(self, calls: int, is_interrupt: bool) -> None:
        """Fail at this call from now."""
        self.calls_left, self.is_interrupt, self.place = calls, is_interrupt, ""

    def put_out(self) -> str:
        """Nothing fails any more. Returns where it did."""
        place, self.calls_left, self.place = self.place, 0, "out"
        return place if place != "out" else ""

    def wrap(self, owner: Any, name: str, place: str, after: bool = True) -> None:
        """Let a method of an object burn the fuse, before its work and after."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            self.burn(place)
            result = original(*args, **kwargs)
            if after:
                self.burn(f"after {place}")
            return result

        setattr(owner, name, method)


def random_config(rng: random.Random) -> dict[str, Any]:
    """Fields of `EngineConfig`, mostly too small for comfort."""
    return {
        "block_size": rng.choice([1, 2, 3, 4, 5, 8, 16]),
        "max_num_seqs": rng.randint(3, 20),
        "max_num_batched_tokens": rng.choice([rng.randint(3, 12), rng.randint(8, 64)]),
        "enable_chunked_prefill": rng.random() < 0.5,
        "enable_prefix_caching": rng.random() < 0.6,
        "preemption_mode": rng.choice(["auto", "recompute", "swap"]),
        "disable_log_stats": rng.random() < 0.5,
        "num_speculative_tokens": rng.choice([0, 0, rng.randint(1, 6)]),
    }


class EngineScenario(Scenario):
    """An engine, its requests, and what happens to them."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.fuse = Fuse()
        self.fuse.put_out()
        self.requests: list[Request] = []
        self.plans: list[StepPlan] = []
        self.outgrown: set[Request] = set()
        self.counts: Counter[str] = Counter(scenarios=1)
        self.to_come = rng.randint(1, 20)
        self.calm = rng.random() < 0.2  # nothing fails, nobody aborts
        self.has_timer = HAS_TIMER and not self.calm and rng.random() < 0.3
        self.is_armed = False
        self.stems = [[rng.randrange(2) for _ in range(rng.randint(1, 40))] for _ in range(2)]
        config = random_config(rng)
        size = config["block_size"]
        num_blocks = max(3, rng.choice([40, 80, 160]) // size + rng.randint(-2, 2))
        num_host_blocks = rng.choice([0, rng.randint(1, num_blocks), num_blocks])
        growth = rng.choice([OnDemand(), OnDemand(), Chunked(rng.randint(1, 5)), Reserve()])
        self.settings = {
            **config,
            "num_blocks": num_blocks,
            "num_host_blocks": num_host_blocks,
            "growth": growth,
            "watermark": rng.choice([0.0, 0.01, 0.2]),
            "max_model_len": rng.choice([1000, rng.randint(40, 80)]),
            "eos": rng.choice([(), (0,), (0, 3)]),
            "timer": self.has_timer,
        }
        model = ToyModel(num_blocks, num_host_blocks, size, VOCABULARY, self.settings["max_model_len"])
        model.preemption_costs = PreemptionCosts(1.0, 1.0, rng.choice([0.1, 1.0, 10.0]))
        model.eos_token_ids = self.settings["eos"]
        order = rng.sample(range(num_blocks), num_blocks)
        components = Components(
            allocator=lambda count: BlockAllocator(count, order),
            block_table=fragile_table(self.fuse),
            page_growth=lambda: growth,
            drafter=lambda: Foresight(rng.random(), VOCABULARY, seed),
        )
        self.engine = Engine(model, EngineConfig(**config), components=components)
        self.engine.scheduler.kv.watermark = self.settings["watermark"]
        self.make_fragile()

    def make_fragile(self) -> None:
        """Everything that a step calls may fail."""
        engine, fuse = self.engine, self.fuse
        scheduler = engine.scheduler
        for name in ("plan_decodes", "continue_prefills", "resume_preempted", "admit_waiting"):
            fuse.wrap(scheduler, name, name)
        fuse.wrap(scheduler.policy, "fill", "batch policy")
        fuse.wrap(scheduler.preemption, "choose_victim", "victim")
        fuse.wrap(scheduler.preemption, "choose_mode", "mode")
        for name in MANAGER_CALLS:
            fuse.wrap(scheduler.kv, name, name, after=name not in WHOLE)
        if scheduler.kv.prefix_cache is not None:
            for name in ("extend_hashes", "match", "register"):
                fuse.wrap(scheduler.kv.prefix_cache, name, f"cache {name}")
        self.add, scheduler.add = scheduler.add, self.note_arrival
        self.end_outgrown, scheduler.end_outgrown = scheduler.end_outgrown, self.note_outgrown
        fuse.wrap(engine.executor, "execute", "execute")
        fuse.wrap(scheduler, "schedule", "schedule")
        fuse.wrap(scheduler, "commit", "commit")
        self.roll_back, scheduler.roll_back = scheduler.roll_back, self.roll_back_in_peace
        self.execute = engine.executor.execute
        engine.executor.execute = self.execute_or_fail
        engine.on_planned += [self.check_plan, lambda plan: fuse.burn("on_planned"), self.meanwhile]
        engine.on_committed += [lambda *step: fuse.burn("on_committed"), self.meanwhile]

    def roll_back_in_peace(self, plan: StepPlan) -> list[Request]:
        """One accident a step: what undoes it does not fail, too."""
        if not self.fuse.place:
            self.fuse.put_out()
        return self.roll_back(plan)

    def note_arrival(self, request: Request) -> None:
        """It is in the queue (Ctrl-C may come before `add_request` says so)."""
        self.add(request)
        self.fuse.wrap(request.method, "advance", "advance")
        self.requests.append(request)
        self.counts["requests"] += 1

    def note_outgrown(self, plan: StepPlan, request: Request) -> None:
        """It ends, even if the rest of the step fails."""
        try:
            self.end_outgrown(plan, request)
        finally:
            self.outgrown |= {request} if request.is_finished else set()

    def outgrew(self, request: Request) -> bool:
        """Whether it ended because it needs more than the pool."""
        return request in self.outgrown

    def check_plan(self, plan: StepPlan) -> None:
        """As every plan must be."""
        drafted = [item for item in plan.scheduled if item.sequence not in item.sequence.request.sequences]
        own = replace(plan, scheduled=[item for item in plan.scheduled if item not in drafted])
        check_plan(own, self.engine.scheduler)
        assert plan.scheduled == own.scheduled + drafted, "drafts stand behind everybody else"
        assert not drafted or plan.num_tokens <= self.settings["max_num_batched_tokens"]
        self.counts["drafted"] += len(drafted)
        self.plans.append(plan)

    def execute_or_fail(self, plan: StepPlan) -> StepResult:
        """The executor dies half way, or says that a request has no valid token."""
        result = self.execute(plan)
        if not self.calm and self.rng.random() < 0.02:
            self.engine.executor.fail(plan)
            raise InjectedError("half way through execute")
        if not self.calm and plan.sampling and self.rng.random() < 0.01:
            failed = self.rng.choice(plan.sampling)
            self.counts["no valid token"] += 1
            return result._replace(errors={failed.request_id: NO_TOKEN})
        return result

    def meanwhile(self, *step: Any) -> None:
        """What a hook may do to the engine while a step is in flight."""
        self.maybe_abort()
        if self.to_come and self.rng.random() < 0.02:
            self.arrive()
        if self.rng.random() < 0.02:
            self.engine.reset_prefix_cache()

    def run(self) -> Counter[str]:
        """Live it to the end, then compare every output."""
        engine = self.engine
        with Alarm(self) as handler:
            for _ in range(self.rng.randint(0, self.to_come)):
                self.guarded(self.arrive)
            while self.to_come or engine.has_unfinished:
                if self.to_come and (not engine.has_unfinished or self.rng.random() < 0.15):
                    self.guarded(self.arrive)
                self.guarded(self.maybe_abort)
                self.step()
                self.counts["steps"] += 1
                assert self.counts["steps"] < MAX_STEPS_OF_A_SCENARIO, "the engine makes no progress"
            assert signal.getsignal(signal.SIGINT) == handler, "Ctrl-C is not heard any more"
        assert engine.metrics.request_success.total() == len(self.requests)
        return self.check_end()

    def step(self) -> None:
        """One step, in which something may fail."""
        engine, rng = self.engine, self.rng
        if not self.calm and rng.random() < 0.1:
            self.fuse.light(rng.choice([rng.randint(1, 10), rng.randint(1, 80)]), rng.random() < 0.3)
        try:
            self.guarded(engine.step)
        except InjectedError:
            self.counts["errors"] += 1
        if place := self.fuse.put_out():
            self.counts[f"at {place}"] += 1
        engine.check_invariants()
        queued = [*engine.scheduler.waiting, *engine.scheduler.running, *engine.scheduler.swapped]
        assert engine._requests == {r.request_id: r for r in queued}, "ids kept or lost"

    def guarded(self, call: Callable[[], Any]) -> None:
        """Call it; Ctrl-C may come while it runs, at a counted call or from the timer."""
        try:
            if self.has_timer:
                self.is_armed = True
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + self.rng.random() * 0.001)
            try:
                call()
            finally:
                self.is_armed = False
        except KeyboardInterrupt:
            self.is_armed = False
            self.counts["interrupts"] += 1

    def arrive(self) -> None:
        """A request with parameters of any kind."""
        rng, engine = self.rng, self.engine
        prompt, request_id = self.random_prompt(), f"r{self.to_come}"
        stop = {"stop_token_ids": rng.choice([[], [0], [1, 2]]), "ignore_eos": rng.random() < 0.5}
        common = {"max_tokens": rng.choice([1, 4, 12, 30]), "min_tokens": 0, **stop}
        if common["max_tokens"] > 3:
            common["min_tokens"] = rng.choice([0, 0, 3])
        n, width = rng.randint(1, 4), rng.randint(1, 4)
        params = rng.choice(
            [
                SamplingParams(temperature=0, prompt_logprobs=rng.choice([None, None, 1]), **common),
                SamplingParams(n=n, best_of=n + rng.randint(0, 2), **common),
                BeamSearchParams(
                    beam_width=width,
                    num_return_sequences=rng.randint(1, width),
                    length_penalty=rng.choice([0.0, 1.0, 2.0]),
                    early_stopping=rng.choice([True, False, "never"]),
                    **common,
                ),
            ]
        )
        try:
            engine.add_request(request_id, prompt, params, rng.choice(["", "", "salt"]))
        except RequestTooLongError:
            self.counts["refused"] += 1

    def abort(self, request: Request) -> None:
        """Whatever its state."""
        self.engine.abort(request.request_id)

    def check_outputs(self, request: Request) -> None:
        """As `alone`; a request that a failed commit ended may have some samples one token longer."""
        self.fuse.put_out()
        assert request.is_finished
        if any(c.finish_reason == "error" for c in request.completions) and request.error != NO_TOKEN:
            self.counts["ended by a failed commit"] += 1
            if isinstance(request.method, SamplingMethod) and request.method.num_sequences == 1:
                (got,) = outputs(request)
                prompt = request.prompt_token_ids
                assert not got or [got] == outputs(run_alone(prompt, len(got), request.method, VOCABULARY))
            return
        super().check_outputs(request)


def fragile_table(fuse: Fuse) -> type[BlockTable]:
    """A block table whose `append` burns the fuse."""

    class FragileTable(BlockTable):
        __slots__ = ()

        def append(self, count: int = 1) -> Any:
            fuse.burn("append")
            copy = super().append(count)
            fuse.burn("after append")
            return copy

    return FragileTable


class Alarm:
    """While the timer of a scenario may interrupt it, SIGALRM sends SIGINT."""

    def __init__(self, scenario: EngineScenario) -> None:
        self.scenario = scenario

    def __enter__(self) -> Any:
        self.before = signal.signal(signal.SIGALRM, self.alarm) if HAS_TIMER else None
        return signal.getsignal(signal.SIGINT)

    def alarm(self, number: int, frame: Any) -> None:
        """The timer is due. (What is raised in the callback of a weak reference, Python only reports.)"""
        while frame is not None and "weakref" not in frame.f_code.co_filename:
            frame = frame.f_back
        if self.scenario.is_armed and frame is None:
            signal.raise_signal(signal.SIGINT)

    def __exit__(self, *error: object) -> None:
        if HAS_TIMER:
            self.scenario.is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self.before)


@may_be_swallowed
@pytest.mark.timeout(0)
def test_whatever_is_raised_no_block_and_no_token_is_lost(
    fuzz_steps: int,
    fuzz_seed: int,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    no_gc_callbacks: None,
) -> None:
    """Catches a step that is half made, half undone or done twice, whatever the settings: blocks that are
    held forever, requests in no queue, ids that are never free again, tokens that differ."""
    caplog.set_level(logging.ERROR, "minipaged")  # thousands of preemption warnings
    counts = run_scenarios(EngineScenario, fuzz_seed, fuzz_steps, capsys)
    if fuzz_steps >= 3000:
        wanted = ["errors", "interrupts", "cut (error)", "drafted"]
        if fuzz_steps >= 20_000:
            wanted += ["ended by a failed commit", "resumed (swap)", "outgrown"]
        missed = [kind for kind in wanted if not counts[kind]]
        assert not missed, f"the random scenarios never met {missed}"
