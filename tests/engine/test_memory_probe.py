"""What the pool leaves to the steps of a GPU: largest step, partial results of splits, captured graphs.

On a CPU, with the device's counters replaced; `test_execution_gpu` asks a real one.
"""

import gc
from functools import partial
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch

from minipaged import LLM, SamplingParams, pocket_model
from minipaged.config import DRAFT_ROWS, ConfigError, EngineConfig
from minipaged.execution import memory_budget, model_config, model_runner
from minipaged.execution.attention import LayerSpec
from minipaged.execution.draft_model import DraftModel
from minipaged.execution.memory_budget import available_bytes, step_bytes
from minipaged.execution.model_runner import ModelRunner
from minipaged.execution.probe import Probe
from minipaged.kernels.triton.config import DecodeConfig, decode_config, split_bytes
from tests.engine.conftest import make_llm
from tests.models.driver import Driver
from tests.models.survey import build_small
from tests.models.zoo import build

FREE, TOTAL = 30 << 30, 40 << 30
PER_TOKEN = 1000  # bytes of a pass over so many tokens


@pytest.fixture
def probe(monkeypatch):
    """Settings -> (bytes of the pool, the passes that were run) on a device that is not there."""

    def available(
        model=None, uses_triton=True, num_logits=None, **settings
    ) -> tuple[int, list[tuple[int, int, bool]]]:
        runner = Driver(model or build("llama", max_position_embeddings=4096), **settings).runner
        probe = Probe(runner.model, model_config.text_config(runner.model), runner.max_model_len)
        specs, _ = probe.inspect(runner.block_size)
        passes: list[tuple[int, int, bool]] = []
        allocated = [1 << 40]  # while the model was loaded
        reserved = [1 << 20]  # by PyTorch, which keeps what is freed until its cache is emptied
        logits = WeakSet[torch.Tensor]()

        def run(token_ids: list[int], num_outputs: int, apart: bool):
            passes.append((len(token_ids), num_outputs, apart))
            allocated.append(7 + PER_TOKEN * len(token_ids))
            reserved.append(allocated[-1])
            logits.add(found := torch.zeros(num_outputs, 2))
            return specs, found

        fakes = {
            "empty_cache": lambda: reserved.__setitem__(slice(None), [rows.nbytes for rows in logits]),
            "reset_peak_memory_stats": lambda device: allocated.clear(),
            "memory_allocated": lambda device: 7,
            "max_memory_allocated": lambda device: max(allocated),
            "mem_get_info": lambda device: (FREE - sum(reserved), TOTAL),
            "get_device_capability": lambda device: (9, 0),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        probe.run = run
        probe.device = SimpleNamespace(type="cuda")
        config = runner._config
        measure = partial(step_bytes, config, probe, specs, uses_triton, config.enable_cuda_graphs)
        if num_logits is not None:
            return measure(num_logits), passes
        return available_bytes(config, probe, measure), passes

    return available


def left(peak: int, share: float = 0.9) -> int:
    return int(TOTAL * share) - (TOTAL - FREE) - peak


def test_the_largest_step_has_logits_for_every_token(probe) -> None:
    """Catches a prompt whose log-probabilities, a row of logits per token, do not fit in memory."""
    _, passes = probe(max_num_batched_tokens=500, max_num_seqs=20)
    assert passes == [(20, 20, True), (500, 500, False)]


def test_without_log_probabilities_of_prompts_only_rows_that_sample_have_logits(probe) -> None:
    """Catches the logits of whole prompts counted for a draft model, and rows of drafts that are not."""
    settings = {"max_num_batched_tokens": 500, "max_num_seqs": 8, "num_logits": DRAFT_ROWS}
    assert probe(**settings)[1] == [(8, 8, True), (500, DRAFT_ROWS, False)]
    assert probe(num_speculative_tokens=4, **settings)[1][0] == (DRAFT_ROWS, DRAFT_ROWS, True)


def test_the_share_of_the_device_is_the_settings(probe) -> None:
    """Catches a pool that takes the memory which another program was promised."""
    settings = {"max_num_batched_tokens": 500, "max_num_seqs": 20, "enable_cuda_graphs": False}
    found, _ = probe(uses_triton=False, gpu_memory_utilization=0.5, **settings)
    assert found == left(500 * PER_TOKEN, share=0.5)


def test_an_engine_that_was_dropped_gives_its_memory_back_first(probe) -> None:
    """Catches a second LLM with a tiny pool: the first refers to itself, so only the collector frees it."""
    gone: list[bool] = []

    class Engine:
        def __del__(self) -> None:
            gone.append(True)

    gc.disable()
    try:
        dropped = Engine()
        dropped.itself = dropped  # type: ignore[attr-defined]
        del dropped
        probe(max_num_batched_tokens=500, max_num_seqs=20)
        assert gone
    finally:
        gc.enable()


def test_captured_decodes_and_their_partial_results_are_counted(probe) -> None:
    """Catches a pool that takes the memory which the first long batch of decodes, or its graph, asks for."""
    settings = {"max_num_batched_tokens": 500, "max_num_seqs": 20}
    splits = 4096 // 512
    partials = 20 * 4 * splits * (8 + 2) * 4  # 4 heads of 8
    captured, _ = probe(**settings)
    assert captured == left((20 + 500) * PER_TOKEN + 2 * partials)  # a mixed step has decodes, too
    plain, _ = probe(enable_cuda_graphs=False, **settings)
    assert plain == left(500 * PER_TOKEN + partials)


def test_partial_results_are_those_of_the_largest_layer(probe) -> None:
    """Catches a model with layers of several head sizes that is measured by the smallest."""
    settings = {"max_num_batched_tokens": 500, "max_num_seqs": 20, "enable_cuda_graphs": False}
    model = build("gemma4", max_position_embeddings=4096)
    partials = 20 * 4 * (4096 // 512) * (32 + 2) * 4
    assert probe(model, **settings)[0] == left(500 * PER_TOKEN + partials)


def test_steps_that_do_not_fit_beside_the_model_are_refused_with_what_to_do(probe, monkeypatch) -> None:
    """Catches a traceback where a model leaves too little of a GPU for the largest step."""

    def fail(logits):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(memory_budget, "take_memory", fail)
    with pytest.raises(ConfigError, match=r"a step of 20 tokens .*lower max_num_batched_tokens .*2\.00 GiB"):
        probe(max_num_batched_tokens=500, max_num_seqs=20)


def test_only_rows_that_sample_take_a_samplers_memory(probe, monkeypatch) -> None:
    """Catches a pool that leaves room to sort logits of prompts, which are never sampled, or none at all."""
    rows: list[int] = []
    monkeypatch.setattr(memory_budget, "take_memory", lambda logits: rows.append(len(logits)))
    probe(max_num_batched_tokens=500, max_num_seqs=20)
    assert rows == [20, 20]


def test_what_the_draft_model_takes_is_kept_free_until_the_larger_models_pool_has_its_size(monkeypatch):
    """Catches a pool that takes the memory of the draft model's steps and graphs, which come later."""
    monkeypatch.setattr(ModelRunner, "step_bytes", lambda runner: 5000)
    config = EngineConfig(num_speculative_tokens=4, speculative_model=str(pocket_model.PATH))
    draft = DraftModel.load(str(pocket_model.PATH), config)
    assert draft.room is not None
    assert draft.room.nbytes == 5000
    draft.draft_for(draft.runner, None)
    assert draft.room is None


def test_a_draft_model_counts_logits_of_the_rows_that_draft(monkeypatch) -> None:
    """Catches gigabytes kept for the logits of prompts, which a draft model does not report."""
    runner = Driver(build("llama"), max_num_batched_tokens=500, max_num_seqs=16).runner
    assert runner.step_bytes() == 0  # on a CPU
    asked: list[int] = []
    monkeypatch.setattr(runner, "_measure", lambda num_logits: asked.append(num_logits) or 5)
    monkeypatch.setattr(runner, "device", SimpleNamespace(type="cuda"))
    assert runner.step_bytes() == 5
    assert asked == [16]


def test_states_of_recurrent_layers_are_counted(probe) -> None:
    """Catches a pool that takes the memory of the states, which no probe of a single sequence needs."""
    settings: dict = {"max_num_batched_tokens": 500, "max_num_seqs": 20, "enable_cuda_graphs": False}
    found, _ = probe(build_small("lfm2"), **settings)
    state = 2 * 32 * 3 * 4  # two convolutions over 3 inputs of 32 numbers
    assert found == int(left(500 * PER_TOKEN + 2 * 20 * state) / 1.25)  # the rest is for cached prefixes
    settings["enable_prefix_caching"] = False
    assert probe(build_small("lfm2"), **settings)[0] == left(500 * PER_TOKEN + 2 * 20 * state)


def test_a_context_of_one_split_has_no_partial_results() -> None:
    """Catches memory put aside for nothing: its programs write the output themselves."""
    config = DecodeConfig(tile=64, split_length=512, num_warps=4, num_stages=3)
    assert split_bytes(config, 10, 8, 128, 512) == 0
    assert split_bytes(config, 10, 8, 128, 513) == 10 * 8 * 2 * 130 * 4


def test_the_partial_results_are_what_a_decode_allocates(monkeypatch) -> None:
    """Catches an estimate that the kernel's own allocation has left behind."""
    pytest.importorskip("triton", reason="needs the package triton")
    from minipaged.kernels.triton import decode
    from tests.kernels.cases import make_case

    class NoKernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: None

    monkeypatch.setattr(decode, "decode_kernel", NoKernel())
    monkeypatch.setattr(decode, "reduce_kernel", NoKernel())
    case = make_case([(1, 1300), (1, 3)])
    config = decode_config("sm_90", 32, torch.bfloat16, num_pairs=4)
    allocated = []
    new_empty = torch.Tensor.new_empty

    def counting(tensor, *shape, **options):
        found = new_empty(tensor, *shape, **options)
        allocated.append(found.nbytes)
        return found

    monkeypatch.setattr(torch.Tensor, "new_empty", counting)
    inputs = case.query, case.key_cache, case.value_cache, case.metadata
    decode.paged_decode(torch.empty_like(case.query), *inputs, config, 1.0)
    assert sum(allocated) == split_bytes(config, 2, 4, 32, 1300)


def test_the_partial_results_of_a_long_context_take_no_more_than_those_of_a_middling_one() -> None:
    """Catches gigabytes kept for one context of 100k tokens, times the batch, and splits for it alone."""
    config = decode_config("sm_90", 128, torch.bfloat16, num_pairs=256)
    assert config.num_splits(32 * 1024) == config.num_splits(100_000) == 32
    assert split_bytes(config, 256, 32, 128, 131_072) == split_bytes(config, 256, 32, 128, 32_768)
    assert config.num_splits(100_000, sliding_window=8192) == 9
    assert config.num_splits(100_000, sliding_window=50_000) == 33


def test_one_sequence_has_more_splits_than_each_of_many() -> None:
    """Catches one split length for all: 64 programs for the 132 multiprocessors of a chip."""
    found = {
        batch: decode_config("sm_90", 128, torch.bfloat16, 8 * batch).num_splits(4096)
        for batch in (1, 15, 16)
    }
    assert found == {1: 16, 15: 16, 16: 4}


def test_fewer_decodes_may_take_more_memory(monkeypatch) -> None:
    """Catches an estimate for the largest batch alone, whose splits are longer."""
    pytest.importorskip("triton", reason="needs the package triton")
    from minipaged.kernels.triton import config

    monkeypatch.setattr(config, "architecture_of", lambda device: "sm_90")
    spec = LayerSpec(
        num_kv_heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16, device=torch.device("cuda")
    )
    a_probe = SimpleNamespace(
        device=None, text_config=SimpleNamespace(num_attention_heads=32), max_model_len=4096
    )
    found = memory_budget._partial_result_bytes(a_probe, {0: spec}, 17)
    assert found == 15 * 32 * 16 * 130 * 4  # (17 sequences have 17 * 8 splits, 15 have 15 * 16)


def test_log_probabilities_of_a_prompt_copy_a_few_rows_at_a_time(model, monkeypatch) -> None:
    """Catches a float32 copy of a whole prompt's logits, not counted by the probe; rows lost at a cut."""
    prompt = {"prompt_token_ids": list(range(3, 33))}
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)

    def report(llm: LLM):
        return llm.generate([prompt], params)[0].prompt_logprobs

    expected = report(make_llm(model))
    rows = []
    original = model_runner.prompt_logprobs
    monkeypatch.setattr(
        model_runner,
        "prompt_logprobs",
        lambda logits, *rest: rows.append(len(logits)) or original(logits, *rest),
    )
    monkeypatch.setattr(model_runner, "LOGPROB_ROWS", 8)
    assert report(make_llm(model)) == expected
    assert rows == [8, 8, 8, 5]
