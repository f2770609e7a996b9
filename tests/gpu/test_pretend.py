"""What a run on a CPU does not show of a run on a GPU, on one that is not there (see `pretend`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
import torch

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.config import EngineConfig
from minipaged.decoding.params import DecodingParams
from minipaged.decoding.structured import StructuredOutputsParams
from minipaged.execution.model_runner import ModelRunner
from minipaged.execution.overlap import OverlapRunner
from minipaged.scheduling import StepPlan, StepResult
from tests.models.driver import Driver, random_tokens
from tests.models.survey import build_small
from tests.models.test_recurrent import IN_CHUNKS, ONE_BY_ONE, PARAMS, PROMPTS, Run
from tests.models.zoo import SUPPORTED, VOCAB_SIZE, build
from tests.slow import slow_but

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is used where there is no GPU", allow_module_level=True)
pytest.importorskip("triton", reason="needs the package triton")
if torch.version.cuda is None and shutil.which("c++") is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

from minipaged.kernels.triton.cache import copy_blocks
from tests.gpu.pretend import PretendGPU, PretendTensor, pretend_gpu

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def gpu() -> Iterator[PretendGPU]:
    """The only one."""
    with pretend_gpu() as gpu:
        yield gpu


class TestPretendGPU:
    """It refuses what a GPU refuses, and counts what a GPU waits for."""

    def test_tensors_of_host_and_device_do_not_mix(self, gpu: PretendGPU) -> None:
        """Numbers are welcome."""
        there, here = torch.arange(3.0, device="cuda"), torch.arange(3.0)
        with pytest.raises(RuntimeError, match="one is on the CPU"):
            there + here
        with pytest.raises(RuntimeError, match="one is on the CPU"):
            torch.cat([there, here])
        with pytest.raises(RuntimeError, match="one is on the CPU"):
            there.index_put_((there.long(),), torch.tensor([1.0]))
        assert (there + torch.tensor(1.0)).tolist() == [1, 2, 3]
        assert here.tolist() == [0, 1, 2]

    def test_views_share_memory(self, gpu: PretendGPU) -> None:
        """As anywhere."""
        base = torch.zeros(2, 3, device="cuda")
        base[1, :2] = 5
        base.view(-1)[0] += 1
        assert base.tolist() == [[1, 0, 0], [5, 5, 0]]
        assert base.is_cuda
        assert base.cpu().device.type == "cpu"

    @pytest.mark.parametrize(
        "use",
        [
            lambda x: x.sum().item(),
            lambda x: bool(x[0]),
            lambda x: x.tolist(),
            lambda x: x.to("cpu", non_blocking=True),
            lambda x: x[[0, 1]],
            lambda x: x[torch.tensor([0, 1])],
            lambda x: x[x > 1],
            lambda x: x.nonzero(),
            lambda x: torch.tensor([1, 2], device="cuda"),
            lambda x: torch.arange(3).to("cuda", non_blocking=True),
            lambda x: x.index_put_((x.long(),), torch.tensor(5.0)),
            lambda x: torch.where(x > 1, x, torch.tensor(5.0)),
            lambda x: x.masked_fill(x > 1, x[0]),
            lambda x: torch.cuda.synchronize(),
            lambda x: torch.cuda.current_stream().synchronize(),
            lambda x: torch.cuda.Event().synchronize(),
        ],
    )
    def test_it_waits(self, gpu: PretendGPU, use: object) -> None:
        """The host needs a value, its size, or its own memory again."""
        x = torch.arange(3.0, device="cuda")
        with torch.inference_mode():
            use(x)
        assert gpu.waits.total() == 1
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchronizing"):
            use(x)

    def test_it_does_not_wait(self, gpu: PretendGPU) -> None:
        """For what is pinned, or stays on the device."""
        x = torch.arange(3.0, device="cuda")
        y = torch.arange(3).pin_memory().to("cuda", non_blocking=True)
        assert isinstance(x[y].repeat_interleave(2) + 1, PretendTensor)
        x[x > 1] = 5
        x[y] = x.where(x > 1, 7)
        assert not gpu.waits
        assert x.tolist() == [7, 7, 5]

    def test_a_copy_to_the_host_arrives_when_its_event_is_waited_for(self, gpu: PretendGPU) -> None:
        """Not before, and not with the copies of later work."""
        x, done, later = torch.arange(3.0, device="cuda"), torch.cuda.Event(), torch.cuda.Event()
        first, second = torch.empty(3, pin_memory=True), torch.empty(3, pin_memory=True)
        first.copy_(x, non_blocking=True)
        done.record()
        x += 1
        second.copy_(x, non_blocking=True)
        later.record()
        assert not gpu.waits
        assert 1 not in first.tolist()
        done.synchronize()
        assert first.tolist() == [0, 1, 2]
        assert 1 not in second.tolist()
        later.synchronize()
        assert second.tolist() == [1, 2, 3]
        assert gpu.waits.total() == 2

    def test_a_graph_repeats_what_the_host_computed(self, gpu: PretendGPU) -> None:
        """New data in the same tensors are seen, new numbers are not."""
        x, numbers = torch.zeros(3, device="cuda"), [1.0]
        result, graph = torch.empty(3, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result.copy_((x * 2 + numbers[0]).clamp_(max=9))
        x += 3
        numbers[0] = 100
        graph.replay()
        assert result.tolist() == [7, 7, 7]
        x += 3
        graph.replay()
        assert result.tolist() == [9, 9, 9]

    def test_nothing_stays(self) -> None:
        """Of the GPU, after the block."""
        with pretend_gpu():
            assert torch.ones(2, device="cuda").sum().item() == 2
        assert not torch.cuda.is_available()
        with pytest.raises((AssertionError, RuntimeError)):
            torch.ones(2, device="cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_overlapping_copies_of_blocks_are_named_on_either_side(gpu: PretendGPU, device: str) -> None:
    """The ids are best on the host, and may be on the device."""
    pool = torch.arange(4.0, device="cuda").view(4, 1, 1, 1)
    copy_blocks([pool], torch.tensor([0, 1], device=device), torch.tensor([1, 2], device=device))
    assert pool.flatten().tolist() == [0, 0, 1, 3]


COUNTS = [9, 1, 1, 3, 1]
"""Tokens of each step: the first crosses windows of 5 to 7 and chunks of 8; three decodes are replayed."""


def logits_of(model: torch.nn.Module, backend: str) -> tuple[torch.Tensor, Driver]:
    """Of a prompt in chunks and decodes, beside another sequence."""
    driver = Driver(model, num_blocks=200, attention_backend=backend)
    if backend == "triton":
        driver.runner.optimize()
    prompt, other = (driver.add(random_tokens(sum(COUNTS), VOCAB_SIZE, seed)) for seed in (1, 2))
    return torch.cat([driver.logits([(other, 1), (prompt, count)])[1] for count in COUNTS]), driver


@pytest.mark.parametrize("name", slow_but(["llama"], SUPPORTED))
def test_logits_are_those_of_the_cpu_with_graphs(name: str) -> None:
    """Through fused layers and replayed decodes: every model's step can be captured."""
    expected, _ = logits_of(build(name), "torch")
    model = build(name)
    with pretend_gpu():
        computed, driver = logits_of(model.to("cuda"), "triton")
        assert (computed.cpu() - expected).abs().max() < 1e-3
        assert driver.runner.decode_runner is not None, "its decodes cannot be captured"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["dbrx", "jetmoe", "longcat_flash", "phimoe"])
def test_where_the_model_waits_for_its_experts_nothing_is_captured(
    model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own code does; one line says so, and its decodes run without graphs."""
    expected, _ = logits_of(build_small(model_type), "torch")
    model = build_small(model_type)
    with pretend_gpu():
        computed, driver = logits_of(model.to("cuda"), "triton")
        assert (computed.cpu() - expected).abs().max() < 1e-3
        assert driver.runner.decode_runner is None
    assert "each step launches kernels: called a synchronizing CUDA operation" in caplog.text


HYBRIDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in [*IN_CHUNKS, *ONE_BY_ONE] if kind != "lfm2"]


@pytest.mark.parametrize("model_type", ["lfm2", *HYBRIDS])
def test_a_decode_of_a_hybrid_model_waits_for_nothing(model_type: str) -> None:
    """Its states stay on the device, and so does the choice of them."""
    model = build_small(model_type)
    with pretend_gpu() as gpu, torch.inference_mode():
        driver = Driver(model.to("cuda"), attention_backend="triton")
        sequences = [driver.add(random_tokens(6, VOCAB_SIZE, seed)) for seed in range(3)]
        driver.execute([(sequence, 5) for sequence in sequences])
        batch = driver.runner.builder.build(driver.scheduled([(sequence, 1) for sequence in sequences]))
        gpu.waits.clear()
        driver.runner.forward(batch)
        assert not gpu.waits


def tokens_of(model: torch.nn.Module) -> list[list[list[list[int]]]]:
    """By every method, with a pool that is too small for all."""
    runner = ModelRunner(model, EngineConfig(block_size=4, num_blocks=256, attention_backend="torch"))
    small = {"preemption_mode": "swap", "max_num_batched_tokens": 16}
    return [Run(runner, 40, **small).generate(PROMPTS, params) for params in PARAMS.values()]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*IN_CHUNKS, *ONE_BY_ONE])
def test_hybrid_models_generate_what_they_do_on_the_cpu(model_type: str) -> None:
    """States are kept, copied and cut on the device."""
    model = build_small(model_type)
    expected = tokens_of(build_small(model_type))
    with pretend_gpu():
        assert tokens_of(model.to("cuda")) == expected


def sampled(**options: object) -> SamplingParams:
    """Three tokens, the same in any order of the tests."""
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 3, "ignore_eos": True, "seed": 5} | options)


WAITS: dict[str, tuple[DecodingParams, int]] = {
    "greedy": (sampled(temperature=0), 1),
    "sampled": (sampled(), 1),
    "filtered": (sampled(top_k=20, top_p=0.9, min_p=0.05, typical_p=0.95), 2),
    "penalized": (sampled(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2), 1),
    "biased": (sampled(logit_bias={5: 3.0}, min_tokens=2, bad_words=["the"], no_repeat_ngram_size=2), 1),
    "allowed": (sampled(allowed_token_ids=[300, 301, 302]), 1),
    "structured": (sampled(structured_outputs=StructuredOutputsParams(regex="[a-z ]{30}")), 1),
    "logprobs": (sampled(temperature=0, logprobs=3), 2),
    "prompt_logprobs": (sampled(temperature=0, prompt_logprobs=2), 1),
    "forked": (sampled(n=3), 1),
    "beams": (BeamSearchParams(beam_width=3, max_tokens=3), 1),
    "warm beams": (BeamSearchParams(beam_width=3, max_tokens=3, temperature=0.7), 1),
}
"""Parameters, and how often a decode step with them waits: for its tokens, and for what else it must know."""


def generate(llm: LLM, params: DecodingParams) -> list[list[list[int]]]:
    """Of each prompt the tokens of its completions."""
    outputs = llm.generate(["Tom has", "The cat went to"], params)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def on_cpu() -> LLM:
    """The embedded model."""
    return LLM(attention_backend="torch", dtype="float32", num_blocks=64, block_size=4)


@pytest.fixture(scope="module")
def on_gpu(on_cpu: LLM) -> LLM:
    """The same, on the device."""
    with pretend_gpu():
        return LLM(device="cuda", dtype="float32", num_blocks=64, block_size=4, async_scheduling=False)


def count_waits(gpu: PretendGPU, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often each step from now on waits."""
    counts = []
    execute = ModelRunner.execute

    def counted(runner: ModelRunner, plan: StepPlan) -> StepResult:
        gpu.waits.clear()
        result = execute(runner, plan)
        counts.append(gpu.waits.total())
        return result

    monkeypatch.setattr(ModelRunner, "execute", counted)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("method", WAITS)
def test_a_decode_step_waits_for_what_the_host_must_know(
    on_cpu: LLM, on_gpu: LLM, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are the CPU's; copies to the device, forks and copies of blocks are not waited for."""
    params, num_waits = WAITS[method]
    expected = generate(on_cpu, params)
    with pretend_gpu() as gpu:
        counts = count_waits(gpu, monkeypatch)
        assert generate(on_gpu, params) == expected
    assert counts[1:] == [num_waits] * (len(counts) - 1)


OVERLAPPED = ["greedy", "sampled", "filtered", "penalized", "biased", "allowed", "structured"]


@pytest.mark.slow
@pytest.mark.parametrize("method", OVERLAPPED)
def test_a_step_that_was_begun_before_its_plan_waits_no_longer(
    on_cpu: LLM, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for the tokens, not for the next step, which has overwritten their logits by then."""
    params, num_waits = WAITS[method]
    params = params.clone(max_tokens=6, seed=1)
    expected = generate(on_cpu, params)
    was_ready = []
    take = OverlapRunner._take
    with pretend_gpu() as gpu:
        llm = LLM(device="cuda", dtype="float32", num_blocks=64, block_size=4)
        counts = count_waits(gpu, monkeypatch)

        def noted(runner: OverlapRunner, *step: object) -> torch.Tensor | None:
            logits = take(runner, *step)
            was_ready.append(logits is not None)
            return logits

        monkeypatch.setattr(OverlapRunner, "_take", noted)
        assert generate(llm, params) == expected
        assert llm.engine.executor.decode_runner is not None
    assert counts[1:] == [num_waits] * 5
    assert was_ready == [True] * 4
    assert type(on_cpu.engine.executor) is ModelRunner  # nothing to overlap
