"""The executor on a GPU: the same numbers, swaps on a stream of their own, a pool sized by what is free."""

import pytest
import torch

from minipaged import LLM, SamplingParams, pocket_model
from minipaged.config import EngineConfig, config_from
from minipaged.execution.model_runner import ModelRunner
from minipaged.memory import BlockCopy
from minipaged.scheduling import StepPlan
from tests.machine import on_gpu
from tests.models.driver import Driver, greedy, own_logits, random_tokens
from tests.models.survey import build_small
from tests.models.zoo import VOCAB_SIZE, build

pytestmark = on_gpu


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "llama4"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_logits_agree_with_transformers_on_the_cpu(name: str, backend: str) -> None:
    """Devices of indices, tables and pools: whatever stayed on the host shows here."""
    token_ids = random_tokens(30, VOCAB_SIZE, seed=1)
    driver = Driver(build(name).cuda(), attention_backend=backend)
    sequence, other = driver.add(token_ids), driver.add(random_tokens(30, VOCAB_SIZE, seed=2))
    computed = [driver.logits([(other, 2), (sequence, count)])[1] for count in (3, 14, 1, 1, 11)]
    expected = own_logits(build(name), token_ids)
    torch.testing.assert_close(torch.cat(computed).cpu(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_5_text", "granitemoehybrid", "jamba"])
def test_states_of_recurrent_layers_are_on_the_device(model_type: str) -> None:
    """The tolerance is for TF32, in which cuDNN convolves."""
    token_ids = random_tokens(30, VOCAB_SIZE, seed=1)
    driver = Driver(build_small(model_type).cuda())
    sequence, other = driver.add(token_ids), driver.add(random_tokens(30, VOCAB_SIZE, seed=2))
    computed = [driver.logits([(other, 2), (sequence, count)])[1] for count in (3, 14, 1, 1, 11)]
    expected = own_logits(build_small(model_type), token_ids)
    error = (torch.cat(computed).cpu() - expected).abs().max() / expected.abs().max()
    assert error < 3e-2


@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "sampled"])
def test_steps_that_begin_before_their_plan_leave_the_texts_as_they_are(seed: int | None) -> None:
    """In streams of a real device; many blocks are borrowed, and the pool is too small."""
    options = {"num_blocks": 120, "block_size": 4, "dtype": "float32", "disable_log_stats": True}
    params = SamplingParams(temperature=0 if seed is None else 0.8, seed=seed, max_tokens=60, ignore_eos=True)
    prompts = [
        f"{subject} {verb}" for subject in ("Tom", "The cat", "A dog") for verb in ("has", "saw", "is")
    ]
    plain, overlapped = (
        [output.outputs[0].token_ids for output in LLM(**options, **more).generate(prompts, params)]
        for more in ({"async_scheduling": False}, {})
    )
    assert overlapped == plain


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no_graphs"])
@pytest.mark.parametrize("draft", [None, str(pocket_model.PATH)], ids=["lookup", "draft_model"])
def test_drafts_leave_the_texts_as_they_are(graphs: bool, draft: str | None) -> None:
    """Rows over one block table, in the Triton kernels and in a captured graph; two models on one device."""
    options = {
        "num_blocks": 256,
        "max_model_len": 256,
        "disable_log_stats": True,
        "enable_cuda_graphs": graphs,
    }
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = ["Once upon a time", "A cat and a dog. A cat and a dog. A cat", "The sun"]
    plain, drafting = (
        LLM(**options, **more) for more in ({}, {"num_speculative_tokens": 4, "speculative_model": draft})
    )
    wanted, got = plain.generate(prompts, params), drafting.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in wanted]
    assert drafting.engine.metrics.accepted_tokens > 0
    drafting.engine.check_invariants()


def test_swaps_are_ordered_with_the_steps_around_them() -> None:
    """Out, overwritten and in again, many times without a wait in between."""
    runner = Driver(build("llama").cuda(), num_blocks=3).runner
    _, keys, _ = runner.cache.pools[0]
    for value in range(200):
        keys[0] = value
        runner.execute(StepPlan(1, swap_out=[BlockCopy(0, 0)]))
        keys[0] = -1
        runner.execute(StepPlan(2, swap_in=[BlockCopy(0, 1)], copies=[BlockCopy(1, 2)]))
        assert keys[:, 0, 0, 0].tolist() == [-1, value, value]
    assert all(pool.is_pinned() for pool in runner.cache._host_pools)


def test_a_swap_waits_for_the_step_before_and_the_step_after_waits_for_it() -> None:
    """Catches a missing event: the streams are kept busy, the blocks are megabytes, so that order shows."""
    model = build("llama", head_dim=256, num_key_value_heads=4, max_position_embeddings=1024).cuda()
    runner = Driver(model, num_blocks=48, block_size=256).runner  # 1 MB a block and pool
    pools = [pool for _, *both in runner.cache.pools.values() for pool in both]
    assert pools[0][0].nbytes >= 1 << 20
    moved = [(block, block) for block in range(16)]
    runner.execute(StepPlan(0, swap_out=[BlockCopy(*pair) for pair in moved]))  # host pools, compiled kernels
    runner.execute(StepPlan(0, swap_in=[BlockCopy(*pair) for pair in moved]))
    busy = 50_000_000  # cycles: tens of milliseconds
    for value in range(1, 6):
        torch.cuda.synchronize()
        torch.cuda._sleep(busy)
        for pool in pools:
            pool[:16] = value  # still waiting when the swap is asked for
        runner.execute(StepPlan(1, swap_out=[BlockCopy(*pair) for pair in moved]))
        for pool in pools:
            pool[:16] = -1  # must not overtake the swap
        with torch.cuda.stream(runner.cache._stream):
            torch.cuda._sleep(busy)  # the swap itself is late
        runner.execute(StepPlan(2, swap_in=[BlockCopy(source, source + 16) for source, _ in moved]))
        seen = [pool[16:32].clone() for pool in pools]  # must not overtake it either
        for pool, copy in zip(pools, seen):
            assert (copy == value).all()
            assert (pool[:16] == -1).all()


@pytest.mark.alone
def test_the_pool_takes_what_the_largest_step_leaves() -> None:
    """Twice the share leaves about twice the blocks; and the memory really is there."""
    settings = {"max_num_seqs": 256, "max_num_batched_tokens": 512}
    found = []
    for share in (0.05, 0.1):
        model = build("llama", max_position_embeddings=1 << 24).cuda()
        config = EngineConfig(gpu_memory_utilization=share, **settings)
        runner = ModelRunner(model, config, greedy)
        found.append(runner.num_blocks * runner.block_bytes)
        del runner, model
        torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    assert found[1] - found[0] == pytest.approx(0.05 * total, rel=0.1)


@pytest.mark.alone
def test_graphs_of_every_size_keep_no_more_than_the_pool_leaves_to_the_steps() -> None:
    """Catches graphs, captured from the smallest to the largest, that each take segments of their own."""
    options = {"num_blocks": 8192, "max_num_seqs": 256, "disable_log_stats": True}
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "max_position_embeddings": 2048}
    runner = ModelRunner(build("llama", **sizes).to("cuda", torch.bfloat16), config_from(options))
    llm, counted = LLM(executor=runner, **options), runner.step_bytes()
    before = torch.cuda.memory_reserved()
    params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=4, ignore_eos=True, seed=0)
    for length in (20, 700):
        prompt = {"prompt_token_ids": random_tokens(length, VOCAB_SIZE, seed=1)}
        for count in (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256):
            llm.generate([prompt] * count, params)
    assert runner.decode_runner is not None
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= counted + (64 << 20)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        {"temperature": 1.1, "seed": 1, "top_p": 0.9, "top_k": 10, "min_p": 0.01, "typical_p": 0.9},
        {"temperature": 0, "logit_bias": {5: 3.0}, "min_tokens": 3, "allowed_token_ids": [5, 6, 7]},
        {"temperature": 0, "no_repeat_ngram_size": 2, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.8, "n": 3, "logits_processors": [lambda token_ids, logits: logits + 1]},
    ],
    ids=["penalties", "filters", "masks", "logprobs", "processors"],
)
def test_sampling_on_a_gpu_chooses_what_it_chooses_on_a_cpu(options: dict) -> None:
    """Catches an index or a mask on the other device; an empty one, before anything is generated, too."""
    found = []
    for device in ("cpu", "cuda"):
        llm = LLM(device=device, num_blocks=64, max_model_len=128, disable_log_stats=True)
        outputs = llm.generate(["Once upon a time"] * 2, SamplingParams(max_tokens=6, **options))
        found.append([[list(one.token_ids) for one in output.outputs] for output in outputs])
    assert found[0] == found[1]
