"""The model runner: moves before the forward pass, samples and reports after it."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from minipaged.config import EngineConfig
from minipaged.decoding.params import SamplingParams
from minipaged.execution.loading import ModelLoadError
from minipaged.execution.model_runner import ModelRunner
from minipaged.memory import BlockCopy, SwapSpace
from minipaged.scheduling import Sample, ScheduledSequence, StepPlan
from tests.models.driver import Driver, own_logits, random_tokens
from tests.models.zoo import VOCAB_SIZE, build


def expected_logits(token_ids: list[int]) -> Tensor:
    return own_logits(build("llama"), token_ids)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_the_protocol_of_executors_needs_no_torch() -> None:
    """The engine and the simulation name it; a simulated run must not take seconds to import torch."""
    code = "import sys, minipaged.execution.executor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_it_tells_the_engine_what_it_must_know() -> None:
    """The numbers of `Executor`."""
    runner = ModelRunner(build("llama", eos_token_id=[2, 7]), EngineConfig(block_size=8, num_blocks=5))
    # 2 layers, keys and values, 8 tokens, 2 heads of 8 floats
    assert runner.block_bytes == 2 * 2 * 8 * 2 * 8 * 4
    assert (runner.block_size, runner.num_blocks, runner.num_host_blocks) == (8, 5, 5)
    assert (runner.max_model_len, runner.vocab_size) == (128, VOCAB_SIZE)
    assert runner.eos_token_ids == (2, 7)


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (2, (2,)), (-1, ())])
def test_end_of_text_may_be_one_token_or_none(eos: int | None, expected: tuple[int, ...]) -> None:
    """Configurations write it in four ways; -1 is not the last token of the vocabulary."""
    runner = ModelRunner(build("llama", eos_token_id=eos), EngineConfig(num_blocks=5))
    assert runner.eos_token_ids == expected


def test_an_end_of_text_that_is_not_a_token_id_is_named() -> None:
    """Catches a TypeError that does not say which file has it."""
    model = build("llama")
    model.generation_config.eos_token_id = "1"
    with pytest.raises(ModelLoadError, match=r"eos_token_id is '1'; give an int .* generation_config.json"):
        ModelRunner(model, EngineConfig(num_blocks=5))


def test_max_model_len_is_the_wish_if_it_is_shorter() -> None:
    """Or what the model was trained for (above)."""
    assert ModelRunner(build("llama"), EngineConfig(num_blocks=5, max_model_len=50)).max_model_len == 50


def test_swapped_out_and_in_a_sequence_goes_on_as_before() -> None:
    """Its blocks are overwritten by another sequence in the very step that swaps them out."""
    driver = Driver(build("llama"), num_blocks=8)
    host = SwapSpace(8, 8)
    token_ids = random_tokens(20, VOCAB_SIZE, seed=1)
    sequence = driver.add(token_ids)
    computed = driver.logits([(sequence, 17)])

    out = host.swap_out([sequence.table])
    intruder = driver.add(random_tokens(30, VOCAB_SIZE, seed=2))
    chunks = driver.scheduled([(intruder, 30)])
    assert {copy.source for copy in out} & set(intruder.table.blocks), "nothing would be overwritten"
    driver.runner.execute(StepPlan(1, chunks, swap_out=out))
    intruder.table.free()

    back = host.swap_in([sequence.table], driver.pool)
    driver.runner.execute(StepPlan(2, swap_in=back))
    computed += driver.logits([(sequence, 3)])
    close(torch.cat(computed), expected_logits(token_ids))


def test_a_block_is_swapped_out_before_another_is_swapped_in_over_it() -> None:
    """The order of the moves in one step: out, in, copies."""
    runner = Driver(build("llama"), num_blocks=3).runner
    _, keys, _ = runner.cache.pools[0]
    for block in range(3):
        keys[block] = block
    runner.execute(StepPlan(1, swap_out=[BlockCopy(2, 0)]))
    runner.execute(
        StepPlan(2, swap_out=[BlockCopy(1, 1)], swap_in=[BlockCopy(0, 1)], copies=[BlockCopy(1, 0)])
    )
    assert [block.unique().tolist() for block in keys] == [[2.0], [2.0], [2.0]]
    runner.execute(StepPlan(3, swap_in=[BlockCopy(1, 2)]))
    assert keys[2].unique().tolist() == [1.0]


def test_forks_share_blocks_until_they_write() -> None:
    """Copy-on-write: both continue with tokens of their own, and neither sees the other's."""
    driver = Driver(build("llama"))
    prompt = random_tokens(10, VOCAB_SIZE, seed=1)
    parent = driver.add(prompt)
    driver.logits([(parent, 10)])
    child = parent.fork(parent.table.fork())
    parent.token_ids.extend([5, 6])
    child.token_ids.extend([8, 9])

    copy = child.table.append(2)
    assert copy is not None
    parent.table.append(2)
    child.num_computed_tokens = parent.num_computed_tokens = 12
    chunks = [ScheduledSequence(parent, 10, 2, 1), ScheduledSequence(child, 10, 2, 1)]
    seen: list[Tensor] = []
    driver.runner.sampler = lambda logits, _: seen.append(logits) or []
    driver.runner.execute(StepPlan(1, chunks, copies=[copy]))
    close(seen[0][0], expected_logits([*prompt, 5, 6])[-1])
    close(seen[0][1], expected_logits([*prompt, 8, 9])[-1])


def test_sequences_admitted_together_share_a_prefix_computed_in_the_same_step() -> None:
    """Every layer writes all K/V of the step before anybody attends."""
    driver = Driver(build("llama"))
    prefix = random_tokens(8, VOCAB_SIZE, seed=1)
    first, second = driver.add([*prefix, 5]), driver.add([*prefix, 6, 7])
    first.table.append(9)
    second.table.share(first.table.blocks[:2])
    second.table.append(2)
    chunks = [ScheduledSequence(second, 8, 2, 1), ScheduledSequence(first, 0, 9, 1)]
    batch = driver.runner.builder.build(chunks)
    with torch.inference_mode():
        logits = driver.runner.forward(batch)
    close(logits[0], expected_logits([*prefix, 6, 7])[-1])
    close(logits[1], expected_logits([*prefix, 5])[-1])


class TestWhatIsSampled:
    """One sample per chunk with candidates, in the order of the chunks."""

    def test_the_sampler_gets_the_rows_of_sampling_chunks_alone(self) -> None:
        """Also when rows of a prompt are computed for its log-probabilities."""
        calls: list[tuple[Tensor, list[ScheduledSequence]]] = []

        def sampler(logits: Tensor, chunks: list[ScheduledSequence]) -> list[Sample]:
            calls.append((logits, chunks))
            return [Sample([7], [0.0]) for _ in chunks]

        driver = Driver(build("llama"))
        driver.runner.sampler = sampler
        prompts = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (6, 5, 9)]
        plain, reporting, part = [
            driver.add(prompt, SimpleNamespace(prompt_logprobs=wanted))
            for prompt, wanted in zip(prompts, (None, 1, 0))
        ]
        result = driver.execute([(plain, 6), (part, 4), (reporting, 5)])
        ((logits, chunks),) = calls
        assert [chunk.sequence for chunk in chunks] == [plain, reporting]
        close(logits[0], expected_logits(prompts[0])[-1])
        close(logits[1], expected_logits(prompts[1])[-1])
        assert [sample.token_ids for sample in result.samples] == [[7], [7]]

    def test_a_step_that_samples_nothing_has_no_samples(self) -> None:
        """The middle of a long prompt; and a step that only moves blocks."""
        driver = Driver(build("llama"))
        sequence = driver.add(random_tokens(9, VOCAB_SIZE, seed=1))
        assert driver.execute([(sequence, 4)]).samples == []
        assert driver.runner.execute(StepPlan(2, copies=[BlockCopy(0, 9)])).samples == []

    def test_without_a_sampler_each_request_gets_what_its_parameters_say(self) -> None:
        """The default is the real thing: greedy here, one token forbidden there."""
        prompt = random_tokens(9, VOCAB_SIZE, seed=1)
        best = expected_logits(prompt)[-1].argsort(descending=True).tolist()
        driver = Driver(build("llama"))
        driver.runner.sampler = ModelRunner(build("llama"), EngineConfig(num_blocks=16)).sampler
        greedy = SamplingParams(temperature=0)
        other = SamplingParams(temperature=0, logit_bias={best[0]: -float("inf")})
        sequences = [driver.add(prompt, params) for params in (greedy, other)]
        driver.execute([(sequence, 9) for sequence in sequences])
        assert [sequence.output_token_ids for sequence in sequences] == [best[:1], best[1:2]]


def test_prompt_logprobs_are_the_same_however_the_prompt_is_cut() -> None:
    """Positions 1 to 10, each once, each with its own token and the two likeliest."""
    prompt = random_tokens(11, VOCAB_SIZE, seed=3)
    logprobs = torch.log_softmax(expected_logits(prompt), dim=-1)
    for cuts in ([11], [4, 1, 6], [10, 1], [1] * 11):
        driver = Driver(build("llama"))
        sequence = driver.add(prompt, SimpleNamespace(prompt_logprobs=2))
        other = driver.add(random_tokens(30, VOCAB_SIZE, seed=4))
        reports = []
        for count in cuts:
            result = driver.execute([(other, 2), (sequence, count)])
            if result.prompt_logprobs:
                assert list(result.prompt_logprobs) == [sequence.request.request_id]
                reports += result.prompt_logprobs[sequence.request.request_id]
        assert [position for position, _ in reports] == list(range(1, 11))
        for position, report in reports:
            row = logprobs[position - 1]
            assert set(report) == {prompt[position], *row.topk(2).indices.tolist()}
            for token, (logprob, _) in report.items():
                assert logprob == pytest.approx(row[token].item(), abs=1e-4)


def test_stage_hooks_are_called_as_each_stage_ends() -> None:
    """A profile whose parts do not add up to the step, or that charges attention to the forward pass."""
    driver = Driver(build("llama"))
    stages: list[str] = []
    driver.runner.stage_hooks.append(stages.append)
    sequence = driver.add(random_tokens(5, VOCAB_SIZE, seed=1))
    driver.execute([(sequence, 5)])
    layers = ["forward", "write_kv", "attention"] * driver.runner.model.config.num_hidden_layers
    assert stages == ["moves", "batch", *layers, "forward", "sample"]
    driver.runner.stage_hooks.clear()
    driver.execute([(sequence, 1)])
    assert len(stages) == len(layers) + 4
