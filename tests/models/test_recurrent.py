"""Hybrid models: some layers keep a state, which follows its sequence wherever the scheduler takes it.

The oracle is transformers, which keeps the states of one sequence in its own cache.
"""

from __future__ import annotations

import gc
import inspect
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from minipaged import BeamSearchParams, SamplingParams
from minipaged.config import ConfigError, EngineConfig
from minipaged.decoding.params import DecodingParams
from minipaged.engine import Engine
from minipaged.execution.attention import UnsupportedModelError
from minipaged.execution.model_runner import ModelRunner
from minipaged.execution.recurrent import (
    CACHE_ARGUMENTS,
    Piece,
    Recurrent,
    States,
    compute_piecewise,
    find_recurrent,
    set_pieces,
)
from minipaged.execution.state_table import StateTable
from minipaged.execution.subclassing import adopt
from minipaged.scheduling import Request
from tests.machine import skip_without_compiler
from tests.models.driver import CUTS, Driver, logits_in_cuts, own_logits, random_tokens
from tests.models.survey import TOLERANCE, build_small
from tests.models.zoo import VOCAB_SIZE
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("one_thread")

IN_CHUNKS = ["bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "olmo_hybrid"]
IN_CHUNKS += ["qwen3_5_text", "zaya"]
"""Every kind of recurrent layer: Mamba 2, alone and beside attention; gated delta nets; convolutions."""

WITH_DELTA_RULE = ["qwen3_5_text", "olmo_hybrid"]
ONE_BY_ONE = ["jamba"]
"""transformers' Mamba layers forget their state when a chunk comes behind other tokens."""


def in_pieces(model: nn.Module, token_ids: list[int], pieces: list[int]) -> Tensor:
    """The logits [T, V] that transformers computes with its own cache."""
    cache = DynamicCache(config=model.config)
    (cache_argument,) = CACHE_ARGUMENTS.intersection(inspect.signature(model.forward).parameters)
    parts, first = [], 0
    for count in pieces:
        chunk = torch.tensor([token_ids[first : first + count]])
        positions = torch.arange(first, first + count)[None]
        output = model(chunk, position_ids=positions, use_cache=True, **{cache_argument: cache})
        parts.append(output.logits[0])
        first += count
    return torch.cat(parts)


@torch.inference_mode()
@pytest.mark.parametrize("rebuilt", slow_but([True], [False, True]), ids=["as given", "rebuilt for the CPU"])
@pytest.mark.parametrize("model_type", [*IN_CHUNKS, *ONE_BY_ONE])
def test_logits_are_those_of_transformers_own_states(model_type: str, rebuilt: bool) -> None:
    """Catches a state that is lost, taken from another sequence, or that saw a token twice."""
    reference, driver = build_small(model_type), Driver(build_small(model_type))
    if rebuilt:
        driver.runner.optimize()
    for (ids, computed), (_, pieces) in zip(logits_in_cuts(driver, CUTS), CUTS):
        if model_type in ONE_BY_ONE:
            expected = own_logits(reference, ids)
        else:
            expected = in_pieces(reference, ids, pieces)
        assert expected.std() > 0.5, "weights too small: nothing would show"
        error = (computed - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE


PROMPTS = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (9, 1, 14, 5, 22)]
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
FOUR_SAMPLES = SamplingParams(temperature=1.0, n=4, seed=3, max_tokens=MAX_TOKENS, ignore_eos=True)
FOUR_BEAMS = BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS, ignore_eos=True)
PARAMS = {"greedy": GREEDY, "samples": FOUR_SAMPLES, "beams": FOUR_BEAMS}


@pytest.fixture(scope="module", params=slow_but(["qwen3_5_text", "jamba"], ["qwen3_5_text", "lfm2", "jamba"]))
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    """With room for everybody; a test may make it smaller."""
    return ModelRunner(build_small(request.param), EngineConfig(block_size=4, num_blocks=256))


class Run:
    """An engine over part of a runner's pool, and what it did."""

    def __init__(self, runner: ModelRunner, num_blocks: int = 256, **settings: object) -> None:
        options = {"block_size": 4, "num_blocks": num_blocks, "disable_log_stats": True, **settings}
        runner.num_blocks = num_blocks
        runner.num_host_blocks = num_blocks if settings.get("preemption_mode") == "swap" else 0
        self.engine = Engine(runner, EngineConfig(**options))
        self.events: list = []
        self.engine.on_planned.append(lambda plan: self.events.extend(plan.events))

    def generate(self, prompts: list[list[int]], params: DecodingParams) -> list[list[list[int]]]:
        """Of each prompt the tokens of its completions."""
        requests = [self.engine.add_request(str(i), ids, params) for i, ids in enumerate(prompts)]
        while self.engine.has_unfinished:
            self.engine.step()
            self.engine.check_invariants()
        outputs = [self.engine.output(request).outputs for request in requests]
        return [[list(completion.token_ids) for completion in completions] for completions in outputs]

    def count(self, kind: str, **detail: object) -> int:
        """Events of a kind with this detail."""
        return sum(e.kind == kind and detail.items() <= e.detail.items() for e in self.events)


@pytest.fixture(scope="module")
def expected(runner: ModelRunner) -> dict[str, list]:
    """What comes out when nobody is cut, preempted or in the way."""
    return {
        name: [Run(runner).generate([prompt], params)[0] for prompt in PROMPTS]
        for name, params in PARAMS.items()
    }


@pytest.mark.parametrize("model_type", [kind for kind in IN_CHUNKS + ONE_BY_ONE if kind != "zaya"])
def test_each_piece_on_a_cpu_takes_one_call_a_layer(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches convolutions that take half of a step again, in silence: a name that transformers changed.

    (Zaya's are of another kind.)
    """
    skip_without_compiler("cpp")
    from minipaged.execution.accel import recurrent_kernels

    shapes: dict[str, list[torch.Size]] = {"convolve": [], "convolve_": [], "delta_rule_": []}

    def note(name: str) -> None:
        compute = getattr(recurrent_kernels, name)

        def noted(states: Tensor, *arguments: Tensor | None) -> Tensor:
            shapes[name].append(states.shape)
            return compute(states, *arguments)

        monkeypatch.setattr(recurrent_kernels, name, noted)

    for name in shapes:
        note(name)
    driver = Driver(build_small(model_type))
    driver.runner.optimize()
    sequences = [driver.add(random_tokens(5, VOCAB_SIZE, seed)) for seed in range(2)]
    num_layers = len(find_recurrent(driver.runner.model))
    num_delta_rules = num_layers if model_type in WITH_DELTA_RULE else 0
    driver.execute([(sequence, 5) for sequence in sequences])
    assert [len(shapes[name]) for name in shapes] == [2 * num_layers, 0, 2 * num_delta_rules]
    for noted in shapes.values():
        noted.clear()
    driver.execute([(sequence, 1) for sequence in sequences])
    assert [len(shapes[name]) for name in shapes] == [0, num_layers, num_delta_rules]
    assert {shape[0] for noted in shapes.values() for shape in noted} == {2}


@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1", "granitemoehybrid"])
def test_mamba_2_on_a_cpu_neither_pads_prompts_nor_passes_often_over_states(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches, in silence, prompts that take five times as long again: a name that transformers changed."""
    skip_without_compiler("cpp")
    from minipaged.execution.accel import recurrent_kernels

    calls: Counter[str] = Counter()

    def noted(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return compute(*arguments, **keywords)

        return call

    update, scan = "mamba2_", "mamba2_chunk_scan"
    for name in (update, scan):
        monkeypatch.setattr(recurrent_kernels, name, noted(name, getattr(recurrent_kernels, name)))
    driver = Driver(build_small(model_type))
    driver.runner.optimize()
    num_layers = len(find_recurrent(driver.runner.model))
    sequence = driver.add(random_tokens(5, VOCAB_SIZE, 0))
    driver.execute([(sequence, 5)])
    assert calls == {scan: num_layers}
    driver.execute([(sequence, 1)])
    assert calls == {scan: num_layers, update: num_layers}


@torch.inference_mode()
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "granitemoehybrid", "falcon_h1"])
def test_greedy_tokens_and_beams_are_those_of_generate(model_type: str) -> None:
    """The whole way, against transformers' own generation and its own states."""
    reference = build_small(model_type)
    run = Run(ModelRunner(build_small(model_type), EngineConfig(block_size=4, num_blocks=256)))
    options = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = run.generate(PROMPTS, GREEDY)
    beams = run.generate(PROMPTS, FOUR_BEAMS)
    for prompt, (tokens,), (best, *_) in zip(PROMPTS, found, beams):
        inputs = torch.tensor([prompt])
        assert tokens == reference.generate(inputs, **options)[0, len(prompt) :].tolist()
        assert best == reference.generate(inputs, num_beams=4, **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("method", PARAMS)
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "prefill first"])
def test_neighbours_and_chunks_change_nothing(
    runner: ModelRunner, expected: dict, method: str, chunked: bool
) -> None:
    """Forks of samples and beams go on with the state of their parent, in whatever company."""
    run = Run(runner, max_num_batched_tokens=7 if chunked else 64, enable_chunked_prefill=chunked)
    assert run.generate(PROMPTS, PARAMS[method]) == expected[method]


@pytest.mark.parametrize("method", PARAMS)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "not cached"])
def test_preemption_changes_nothing(
    runner: ModelRunner, expected: dict, method: str, mode: str, cached: bool
) -> None:
    """A swapped request finds its states again; one that is recomputed makes new ones."""
    num_blocks = 18 if method == "greedy" else 40
    settings = {"preemption_mode": mode, "enable_prefix_caching": cached, "max_num_batched_tokens": 32}
    run = Run(runner, num_blocks, **settings)
    assert run.generate(PROMPTS, PARAMS[method]) == expected[method]
    assert run.count("preempted", mode=mode) > 0
    if mode == "recompute" and method != "greedy":
        # Sample 2 started after the prompt's blocks, which sample 1 computed: with the state there.
        resumed = [event for event in run.events if event.kind == "resumed"]
        assert any(event.detail["cached_tokens"] > 0 for event in resumed)


def test_a_step_that_failed_is_computed_again(
    runner: ModelRunner, expected: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers have moved their states on; these must not be used."""
    sampler, calls = runner.sampler, []

    def failing(logits: Tensor, items: list) -> list:
        calls.append(items)
        if len(calls) in (2, 6, 7):
            raise RuntimeError("injected")
        return sampler(logits, items)

    monkeypatch.setattr(runner, "sampler", failing)
    run = Run(runner)
    requests = [run.engine.add_request(str(i), ids, FOUR_SAMPLES) for i, ids in enumerate(PROMPTS)]
    while run.engine.has_unfinished:
        if len(calls) + 1 in (2, 6, 7):
            with pytest.raises(RuntimeError, match="injected"):
                run.engine.step()
        else:
            run.engine.step()
    outputs = [run.engine.output(request).outputs for request in requests]
    assert [[list(c.token_ids) for c in completions] for completions in outputs] == expected["samples"]


class TestGroupsThatAreRecomputed:
    """Sample 2 starts after full blocks that sample 1 computes."""

    def preempted(self, runner: ModelRunner, **settings: object) -> tuple[Run, Request]:
        """A run whose only request, of four samples with 9 + 2 tokens, is to be recomputed."""
        run = Run(runner, enable_prefix_caching=False, **settings)
        request = run.engine.add_request("0", PROMPTS[0], FOUR_SAMPLES)
        while len(request.sequences[0].token_ids) < 11:
            run.engine.step()
        run.engine.scheduler._requeue(request)
        return run, request

    def finish(self, run: Run, request: Request) -> list[list[int]]:
        """The tokens of all completions."""
        while run.engine.has_unfinished:
            run.engine.step()
        return [list(completion.token_ids) for completion in run.engine.output(request).outputs]

    def test_a_chunk_of_one_token_may_end_where_a_follower_starts(
        self, runner: ModelRunner, expected: dict
    ) -> None:
        """Catches a decode in form, whose state at the follower's start nobody keeps."""
        run, request = self.preempted(runner, max_num_batched_tokens=7)
        run.engine.step()
        run.engine.scheduler.max_num_batched_tokens = 1
        run.engine.step()
        assert request.sequences[0].num_computed_tokens == 8
        run.engine.step()  # now the leader's own state is past the follower's start
        run.engine.scheduler.max_num_batched_tokens = 7
        assert self.finish(run, request) == expected["samples"][0]

    @pytest.mark.parametrize("budget", [7, 8, 9, 64])
    def test_a_step_that_fails_between_layers_leaves_no_state(
        self, runner: ModelRunner, expected: dict, budget: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Catches half-made states, which a follower would wait with for ever."""
        run, request = self.preempted(runner, max_num_batched_tokens=budget, max_num_seqs=4)
        backend = runner.backend

        def fail(*_: object, **__: object) -> None:
            monkeypatch.setattr(runner, "backend", backend)
            raise RuntimeError("injected")

        monkeypatch.setattr(runner, "backend", backend._replace(paged_attention=fail))
        with pytest.raises(RuntimeError, match="injected"):
            run.engine.step()
        assert self.finish(run, request) == expected["samples"][0]


class TestPrefixes:
    """A request starts after cached blocks only where a state was kept."""

    def hits(self, run: Run, prompt: list[int]) -> tuple[int, list[int]]:
        """Cached tokens of a prompt, and what follows it."""
        request = run.engine.add_request(f"{run.engine.clock()}", prompt, GREEDY)
        while run.engine.has_unfinished:
            run.engine.step()
            run.engine.check_invariants()
        return request.num_cached_tokens, list(run.engine.output(request).outputs[0].token_ids)

    def test_a_longer_prompt_starts_at_the_last_full_block_of_the_shorter(self, runner: ModelRunner) -> None:
        """What a conversation does; the state there was cut out of the middle of a chunk."""
        prompt = PROMPTS[4]  # 22 tokens: 5 blocks of 4, and 2 more
        longer = [*prompt, 7, 11, 5]
        expected = self.hits(Run(runner, enable_prefix_caching=False), longer)[1]
        run = Run(runner)
        assert self.hits(run, prompt)[0] == 0
        assert self.hits(run, longer) == (20, expected)

    def test_the_answer_is_found_again_too(self, runner: ModelRunner) -> None:
        """The last full block of prompt and answer: 32 of 34 tokens, the last of which is never computed."""
        run = Run(runner)
        longer = [*PROMPTS[4], *self.hits(run, PROMPTS[4])[1], 7]
        expected = self.hits(Run(runner, enable_prefix_caching=False), longer)[1]
        assert self.hits(run, longer) == (32, expected)

    @pytest.mark.parametrize(("length", "cached"), [(20, 16), (21, 20)])
    def test_an_equal_prompt_computes_at_least_its_last_token(
        self, runner: ModelRunner, length: int, cached: int
    ) -> None:
        """The state after all tokens gives no logits."""
        run, prompt = Run(runner), PROMPTS[4][:length]
        first = self.hits(run, prompt)[1]
        assert self.hits(run, prompt) == (cached, first)

    @pytest.mark.parametrize("is_known", [False, True])
    def test_equal_prompts_of_one_step(self, runner: ModelRunner, is_known: bool) -> None:
        """The first one's blocks are pending, and there is no state after them yet, unless one was kept."""
        answer = self.hits(Run(runner), PROMPTS[4])[1]
        run = Run(runner)
        if is_known:
            self.hits(run, PROMPTS[4])
            run.engine.reset_prefix_cache()
        assert run.generate([PROMPTS[4]] * 3, GREEDY) == [[answer]] * 3

    def test_a_prefix_whose_state_was_dropped_is_found_again(
        self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its blocks are still cached, those that are computed again are not: the state must fit both."""
        monkeypatch.setattr(runner._states, "_num_kept", 2)
        run = Run(runner)
        prompt, others = PROMPTS[4], [random_tokens(9, VOCAB_SIZE, seed) for seed in range(4)]
        assert [self.hits(run, prompt)[0] for _ in range(2)] == [0, 20]
        assert [self.hits(run, other)[0] for other in others] == [0] * 4
        assert [self.hits(run, prompt)[0] for _ in range(3)] == [0, 20, 20]

    def test_the_least_recently_used_state_is_dropped_first(
        self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A system prompt that everybody has stays."""
        monkeypatch.setattr(runner._states, "_num_kept", 4)
        run = Run(runner)
        prompt, others = PROMPTS[4], [random_tokens(9, VOCAB_SIZE, seed) for seed in range(8)]
        cached = []
        for other in others:
            self.hits(run, other)
            cached.append(self.hits(run, [*prompt, other[0]])[0])
        assert cached == [0] + [20] * 7

    def test_states_of_blocks_that_get_other_content_are_those_of_their_tokens(
        self, runner: ModelRunner
    ) -> None:
        """A tiny pool, each of whose blocks is used again and again, and prompts with equal beginnings."""
        source = random.Random(5)
        prompts = [PROMPTS[4][: source.randrange(3, 22)] + PROMPTS[2][:i] for i in range(13)]
        expected = [self.hits(Run(runner, enable_prefix_caching=False), prompt)[1] for prompt in prompts]
        run = Run(runner, 24, max_num_batched_tokens=16)
        found = [run.generate([prompts[i % 13]], GREEDY)[0][0] for i in range(40)]
        assert found == [expected[i % 13] for i in range(40)]
        together = Run(runner, 24, max_num_batched_tokens=16).generate(prompts * 2, GREEDY)
        assert together == [[tokens] for tokens in expected] * 2

    @pytest.mark.parametrize("budget", [1, 3, 4, 5, 7, 19, 20, 21])
    def test_a_prompt_in_chunks_leaves_one_state(
        self, runner: ModelRunner, budget: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At its last full block, wherever chunks end: those of others are not worth their memory."""
        monkeypatch.setattr(runner._states, "kept", {})
        run = Run(runner, max_num_batched_tokens=budget, max_num_seqs=1)
        run.generate([PROMPTS[4]], SamplingParams(temperature=0, max_tokens=1))
        assert [kept.place.num_tokens for kept in runner._states.kept.values()] == [20]

    def test_a_bounded_number_of_states_is_kept(
        self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each may be as large as the keys and values of a thousand tokens."""
        monkeypatch.setattr(runner._states, "_num_kept", 3)
        run = Run(runner)
        for seed in range(20):
            self.hits(run, random_tokens(9, VOCAB_SIZE, seed))
        assert len(runner.kept_states) == 3
        assert self.hits(run, random_tokens(9, VOCAB_SIZE, 19))[0] == 8
        assert self.hits(run, random_tokens(9, VOCAB_SIZE, 0))[0] == 0


def test_states_go_with_their_sequences(runner: ModelRunner) -> None:
    """One is as large as thousands of tokens' keys and values: none may outlive its request."""
    run = Run(runner)
    for i, prompt in enumerate(PROMPTS):
        run.engine.add_request(str(i), prompt, FOUR_SAMPLES)
    run.engine.step()
    run.engine.step()
    assert len(runner._states._places) == 4 * len(PROMPTS)
    for i in range(len(PROMPTS)):
        run.engine.abort(str(i))
    gc.collect()
    assert len(runner._states._places) == 0


@torch.inference_mode()
def test_decodes_that_stay_together_copy_no_state() -> None:
    """Catches a copy of every state in every step: they can be changed in place."""
    driver = Driver(build_small("lfm2"), enable_prefix_caching=False)
    first, second = (driver.add(random_tokens(6, VOCAB_SIZE, seed)) for seed in (1, 2))
    places = driver.runner._states._places
    driver.logits([(first, 3)])
    alone = places[first].states
    driver.logits([(first, 1)])
    assert places[first].states is alone
    driver.logits([(second, 4)])
    driver.logits([(first, 1), (second, 1)])
    together = places[first].states
    driver.logits([(first, 1), (second, 1)])
    assert places[first].states is places[second].states is together


@torch.inference_mode()
def test_a_sequence_that_pauses_keeps_only_its_own_state() -> None:
    """It was one of two decodes, which are computed together: their states are one tensor."""
    driver = Driver(build_small("lfm2"))
    pausing, other = (driver.add(random_tokens(6, VOCAB_SIZE, seed)) for seed in (1, 2))
    for counts in ([3, 3], [1, 1]):
        driver.logits(list(zip((pausing, other), counts)))
    places = driver.runner._states._places
    assert places[pausing].states is places[other].states
    for _ in range(2):  # (in the first step the other one still starts from there)
        driver.logits([(other, 1)])
    assert places[pausing].num_tokens == 4
    assert places[pausing].states.num_sequences == 1


@torch.inference_mode()
def test_a_preempted_sequence_keeps_no_state() -> None:
    """It would be as large as a thousand tokens' keys and values, and nobody needs it again."""
    driver = Driver(build_small("lfm2"))
    preempted, other = (driver.add(random_tokens(6, VOCAB_SIZE, seed)) for seed in (1, 2))
    driver.logits([(preempted, 3), (other, 3)])
    preempted.num_computed_tokens = 0
    driver.logits([(other, 1)])
    assert list(driver.runner._states._places) == [other]


class Masked(nn.Module):
    """A recurrent layer whose second argument has a value for each row."""

    layer_idx = 3

    def forward(
        self, hidden_states: Tensor, mask: Tensor | None = None, cache_params: object = None
    ) -> Tensor:
        return hidden_states if mask is None else hidden_states * mask


def test_what_a_layer_gets_besides_its_rows_must_not_be_a_tensor() -> None:
    """Catches a mask of the whole batch beside the rows of a piece."""
    layer, rows = Masked(), torch.ones(1, 4, 2)
    names = ["hidden_states", "mask", "cache_params"]
    adopt(layer, Recurrent, names=names, own_forward=Masked.forward)
    assert torch.equal(layer(rows, None), rows)
    with pytest.raises(UnsupportedModelError, match="layer 3 asks for 'mask' besides its rows"):
        layer(rows, torch.ones(1, 4, 1))


class BeforeTransformers5_24(nn.Module):
    """A recurrent layer whose state is its last row."""

    layer_idx = 0

    def forward(self, rows: Tensor, cache_params: Cache) -> Tensor:
        cache_params.update_recurrent_state(rows[:, -1], self.layer_idx)
        return rows


class SinceTransformers5_24(nn.Module):
    """The same one."""

    layer_idx = 0

    def forward(self, rows: Tensor, cache: Cache) -> Tensor:
        cache.update_recurrent_state(rows[:, -1], self.layer_idx)
        return rows


@pytest.mark.parametrize("kind", [BeforeTransformers5_24, SinceTransformers5_24])
def test_recurrent_layers_are_found_whatever_they_call_the_cache(kind: type[nn.Module]) -> None:
    """transformers 5.24 renamed the argument: every hybrid model was refused."""
    layer, states = kind(), States(1)
    compute_piecewise(layer)
    with set_pieces([Piece(torch.arange(3)[None], [], states)]):
        layer(torch.tensor([[[4.0], [5.0], [6.0]]]), None)
    assert states.layers[0].recurrent_states[0].tolist() == [[6.0]]


class SinceSomeLaterTransformers(nn.Module):
    """The same one again."""

    layer_idx = 0

    def forward(self, rows: Tensor, memory: Cache) -> Tensor:
        memory.update_recurrent_state(rows[:, -1], self.layer_idx)
        return rows


def test_a_layer_whose_cache_has_another_name_is_left_to_be_refused() -> None:
    """Catches an error about arguments in place of the refusal: such a layer cannot be given its states."""
    assert find_recurrent(SinceSomeLaterTransformers()) == []


@torch.inference_mode()
def test_a_missing_state_is_an_error() -> None:
    """Beginning from nothing in the middle of a sequence would be quietly wrong."""
    driver = Driver(build_small("lfm2"))
    sequence = driver.add(random_tokens(6, VOCAB_SIZE, 1))
    driver.logits([(sequence, 3)])
    driver.runner._states = StateTable(in_chunks=True, num_kept=0)
    with pytest.raises(RuntimeError, match="after 3 tokens"):
        driver.logits([(sequence, 1)])


@torch.inference_mode()
def test_layers_that_differ_in_pieces_are_refused() -> None:
    """Nemotron-H bounds its time steps in chunks, but not in single tokens: preemption would show. The model
    still runs elsewhere."""
    model, rows = build_small("nemotron_h"), torch.tensor([PROMPTS[0]])
    before = model(rows, use_cache=False).logits
    with pytest.raises(UnsupportedModelError, match="other results in pieces than all at once"):
        ModelRunner(model, EngineConfig(num_blocks=8))
    assert torch.equal(model(rows, use_cache=False).logits, before)


@pytest.mark.parametrize("model_type", [*IN_CHUNKS, *ONE_BY_ONE])
def test_layers_that_forget_in_chunks_are_known_whatever_their_weights(model_type: str) -> None:
    """With the small weights of a fresh model, what Jamba forgets changes an output by less than 1e-3."""
    model = build_small(model_type)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.02)
    assert Driver(model).runner._states._in_chunks == (model_type not in ONE_BY_ONE)


def test_a_layer_may_read_a_state_and_forget_it() -> None:
    """Catches the refusal of a model whose gates close: a state that decays to nothing is still read."""
    model = build_small("qwen3_5_text")
    layer = find_recurrent(model)[1]
    with torch.no_grad():
        layer.A_log.fill_(4.0)
        layer.dt_bias.fill_(10.0)
    assert Driver(model).runner._states._in_chunks


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", [*IN_CHUNKS, *ONE_BY_ONE])
def test_half_precision_is_not_taken_for_a_difference(model_type: str, dtype: torch.dtype) -> None:
    """Released weights are in bfloat16; a Mamba layer then rounds by 3 % of its largest output."""
    runner = ModelRunner(build_small(model_type).to(dtype), EngineConfig(block_size=4, num_blocks=64))
    assert len(Run(runner, 64).generate(PROMPTS, GREEDY)) == len(PROMPTS)


def test_a_model_may_have_several_runners() -> None:
    """Catches layers that are adopted twice, and those of one runner lost by the refusal of another."""
    model, settings = build_small("lfm2"), EngineConfig(block_size=4, num_blocks=64)
    too_long = EngineConfig(num_blocks=64, max_model_len=10**6)
    with pytest.raises(ConfigError, match="max_model_len"):
        ModelRunner(model, too_long)
    first = ModelRunner(model, settings)
    expected = Run(first, 64).generate(PROMPTS, GREEDY)
    with pytest.raises(ConfigError, match="max_model_len"):
        ModelRunner(model, too_long)
    assert Run(first, 64).generate(PROMPTS, GREEDY) == expected
    assert Run(ModelRunner(model, settings), 64).generate(PROMPTS, GREEDY) == expected


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there are kernels for GPUs to be recommended")
def test_the_command_line_recommends_no_kernels_for_gpus_on_a_cpu(tmp_path: Path) -> None:
    """transformers warns of each that is missing, four lines before the first word."""
    build_small("qwen3_5_text").save_pretrained(tmp_path)
    sizes = ("--prompt-tokens", "8", "--output-tokens", "4")
    command = (sys.executable, "-m", "minipaged", "bench", "--model", str(tmp_path), *sizes)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "falling back" not in done.stderr
    assert "flash-linear-attention" not in done.stderr


def test_layers_that_may_differ_in_pieces_are_refused_whatever_their_weights() -> None:
    """Catches Nemotron-H weights of which nine rows reach no bound of the time steps, but a tenth does."""
    for seed in range(3):
        torch.manual_seed(seed)
        model = build_small("nemotron_h")
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "dt_bias" in name:
                    weight.fill_(3.0)  # far from the bound
        with pytest.raises(UnsupportedModelError, match="other results in pieces than all at once"):
            ModelRunner(model, EngineConfig(num_blocks=8))
