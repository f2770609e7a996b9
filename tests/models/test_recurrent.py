"""Hybrid models: some layers keep a state, which follows its sequence wherever the scheduler takes it.

The oracle is transformers, which keeps the states of one sequence in its own cache.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from minipaged import BeamSearchParams, SamplingParams
from minipaged.config import EngineConfig
from minipaged.decoding.params import DecodingParams
from minipaged.engine import Engine
from minipaged.execution.attention import UnsupportedModelError
from minipaged.execution.model_runner import ModelRunner
from minipaged.execution.state_table import StateTable
from tests.models.driver import Driver, random_tokens, schedule
from tests.models.survey import CUTS, TOLERANCE, build_small
from tests.models.zoo import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("one_thread")

IN_CHUNKS = ["bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "olmo_hybrid"]
IN_CHUNKS += ["qwen3_5_text", "zaya"]
"""Every kind of recurrent layer: Mamba 2, alone and beside attention; gated delta nets; convolutions."""

ONE_BY_ONE = ["jamba"]
"""transformers' Mamba layers forget their state when a chunk comes behind other tokens."""


def in_pieces(model: nn.Module, token_ids: list[int], pieces: list[int]) -> Tensor:
    """The logits [T, V] that transformers computes with its own cache."""
    cache = DynamicCache(config=model.config)
    parts, first = [], 0
    for count in pieces:
        chunk = torch.tensor([token_ids[first : first + count]])
        positions = torch.arange(first, first + count)[None]
        output = model(chunk, position_ids=positions, past_key_values=cache, use_cache=True)
        parts.append(output.logits[0])
        first += count
    return torch.cat(parts)


@torch.inference_mode()
@pytest.mark.parametrize("rebuilt", [False, True], ids=["as given", "rebuilt for the CPU"])
@pytest.mark.parametrize("model_type", [*IN_CHUNKS, *ONE_BY_ONE])
def test_logits_are_those_of_transformers_own_states(model_type: str, rebuilt: bool) -> None:
    """Catches a state that is lost, taken from another sequence, or that saw a token twice."""
    reference, driver = build_small(model_type), Driver(build_small(model_type))
    if rebuilt:
        driver.runner.optimize()
    token_ids = [random_tokens(sum(pieces), VOCAB_SIZE, seed) for seed, (_, pieces) in enumerate(CUTS)]
    sequences = [driver.add(ids) for ids in token_ids]
    computed: list[list[Tensor]] = [[] for _ in sequences]
    for parts in schedule(CUTS):
        logits = driver.logits([(sequences[who], count) for who, count in parts])
        for (who, _), part in zip(parts, logits):
            computed[who].append(part)
    for ids, parts_of_sequence, (_, pieces) in zip(token_ids, computed, CUTS):
        if model_type in ONE_BY_ONE:
            expected = reference(torch.tensor([ids]), use_cache=False).logits[0]
        else:
            expected = in_pieces(reference, ids, pieces)
        assert expected.std() > 0.5, "weights too small: nothing would show"
        error = (torch.cat(parts_of_sequence) - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE


PROMPTS = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (9, 1, 14, 5, 22)]
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
FOUR_SAMPLES = SamplingParams(temperature=1.0, n=4, seed=3, max_tokens=MAX_TOKENS, ignore_eos=True)
FOUR_BEAMS = BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS, ignore_eos=True)
PARAMS = {"greedy": GREEDY, "samples": FOUR_SAMPLES, "beams": FOUR_BEAMS}


@pytest.fixture(scope="module", params=["qwen3_5_text", "lfm2", "jamba"])
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
@pytest.mark.parametrize("policy", [True, False], ids=["chunked", "prefill first"])
def test_neighbours_and_chunks_change_nothing(
    runner: ModelRunner, expected: dict, method: str, policy: bool
) -> None:
    """Forks of samples and beams go on with the state of their parent, in whatever company."""
    run = Run(runner, max_num_batched_tokens=7 if policy else 64, enable_chunked_prefill=policy)
    assert run.generate(PROMPTS, PARAMS[method]) == expected[method]


@pytest.mark.parametrize("method", PARAMS)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_nothing(runner: ModelRunner, expected: dict, method: str, mode: str) -> None:
    """A swapped request finds its states again; one that is recomputed makes new ones."""
    run = Run(runner, 18 if method == "greedy" else 40, preemption_mode=mode, max_num_batched_tokens=32)
    assert run.generate(PROMPTS, PARAMS[method]) == expected[method]
    assert run.count("preempted", mode=mode) > 0


def test_a_recomputed_group_shares_blocks_and_states(runner: ModelRunner, expected: dict) -> None:
    """Sample 2 begins behind the prompt's blocks, which sample 1 computes: with the state it has there."""
    run = Run(runner, 40, preemption_mode="recompute", max_num_batched_tokens=32)
    run.generate(PROMPTS, FOUR_SAMPLES)
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


def test_prefixes_are_not_cached(runner: ModelRunner, expected: dict) -> None:
    """A cached block has keys and values, but no state for whoever would begin behind it."""
    run = Run(runner, enable_prefix_caching=True)
    assert run.generate([PROMPTS[4], PROMPTS[4]], GREEDY) == [expected["greedy"][4]] * 2
    assert run.engine.scheduler.kv.prefix_cache is None


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
def test_a_sequence_that_pauses_keeps_only_its_own_state() -> None:
    """It was one of many decodes, whose states are one tensor."""
    driver = Driver(build_small("lfm2"))
    pausing, other = (driver.add(random_tokens(6, VOCAB_SIZE, seed)) for seed in (1, 2))
    for counts in ([3, 3], [1, 1], [0, 1]):
        driver.logits([(s, count) for s, count in zip((pausing, other), counts) if count])
    place = driver.runner._states._places[pausing]
    assert place.num_tokens == 4
    assert place.states.num_sequences == 1


@torch.inference_mode()
def test_a_missing_state_is_an_error() -> None:
    """Beginning from nothing in the middle of a sequence would be quietly wrong."""
    driver = Driver(build_small("lfm2"))
    sequence = driver.add(random_tokens(6, VOCAB_SIZE, 1))
    driver.logits([(sequence, 3)])
    driver.runner._states = StateTable(in_chunks=True)
    with pytest.raises(RuntimeError, match="after 3 tokens"):
        driver.logits([(sequence, 1)])


def test_layers_that_differ_in_pieces_are_refused() -> None:
    """Nemotron-H bounds its time steps in chunks, but not in single tokens: preemption would show."""
    with pytest.raises(UnsupportedModelError, match="something else in pieces than at once"):
        ModelRunner(build_small("nemotron_h"), EngineConfig(num_blocks=8))


def test_a_refused_model_still_runs_elsewhere() -> None:
    """Its layers have their own `forward` again."""
    model = build_small("nemotron_h")
    rows = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        before = model(rows, use_cache=False).logits
        with pytest.raises(UnsupportedModelError):
            ModelRunner(model, EngineConfig(num_blocks=8))
        assert torch.equal(model(rows, use_cache=False).logits, before)
