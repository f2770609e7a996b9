"""ALiBi by two more elements of queries and keys; `test_parity.py` compares such models with transformers."""

import pytest
import torch

from minipaged import LLM, SamplingParams
from minipaged.config import ConfigError, EngineConfig
from minipaged.execution.alibi import MAX_POSITIONS, MORE, ALiBi
from minipaged.execution.attention import UnsupportedModelError
from minipaged.execution.model_runner import ModelRunner
from minipaged.execution.older_attention import Bloom
from tests.models.driver import Driver, greedy, own_logits, own_tokens, random_tokens
from tests.models.zoo import VOCAB_SIZE, build

LENGTH = {"bloom": "seq_length", "mpt": "max_seq_len", "falcon": "max_position_embeddings"}
"""How a configuration calls its longest sequence."""

pytestmark = pytest.mark.usefixtures("one_thread")


def biases(dtype: torch.dtype, slopes: torch.Tensor, size: int, scale: float) -> torch.Tensor:
    """What `extend` adds to the score of a key at every position: [H, positions], computed in float64."""
    positions = torch.arange(MAX_POSITIONS)
    query = torch.zeros(1, len(slopes), size, dtype=dtype)
    key = torch.zeros(MAX_POSITIONS, 1, size, dtype=dtype)
    query, key = ALiBi(slopes).extend(query, key, positions, scale)
    assert query.dtype == key.dtype == dtype
    return scale * torch.einsum("hd,td->ht", query[0].double(), key[:, 0].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128])
def test_a_bias_is_the_slope_times_the_position(size: int, dtype: torch.dtype) -> None:
    """Up to 65,535: one number of 8 bits would hold positions up to 256 only, and then every other one."""
    slopes = 2.0 ** (-torch.arange(1, 33) / 4)  # of 32 heads
    added = biases(dtype, slopes, size, scale=size**-0.5)
    line = added[:, 1:2] * torch.arange(MAX_POSITIONS)
    torch.testing.assert_close(added, line, atol=0, rtol=1e-14)
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(added[:, 1], slopes.double(), atol=0, rtol=1.01 * rounding)


def test_a_query_and_a_key_keep_their_own_elements() -> None:
    """The score of both must be in the sum, and nothing of memory that was not cleared."""
    query, key = torch.randn(5, 4, 6), torch.randn(5, 2, 6)
    longer = ALiBi(torch.ones(4)).extend(query, key, torch.arange(300, 305), scale=0.5)
    for extended, own in zip(longer, (query, key)):
        assert extended.shape == (*own.shape[:-1], 6 + MORE)
        torch.testing.assert_close(extended[..., :6], own, atol=0, rtol=0)
    assert longer[0][0, 0, 6:].tolist() == [512, 2, 0, 0, 0, 0, 0, 0]
    assert longer[1][:, 1, 6:8].tolist() == [[1, 44], [1, 45], [1, 46], [1, 47], [1, 48]]


def test_grouped_queries_have_slopes_of_their_own() -> None:
    """Positions belong to keys and slopes to queries, so heads may share keys."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0])
    query, key = ALiBi(slopes).extend(torch.zeros(1, 4, 8), torch.zeros(1, 2, 8), torch.tensor([700]), 0.25)
    scores = 0.25 * torch.einsum("hgd,hd->hg", query.view(2, 2, 16), key[0])
    assert scores.flatten().tolist() == (700 * slopes).tolist()


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon_alibi"])
def test_only_keys_grow(name: str) -> None:
    """By 8 elements: a pool whose values were padded, too, would hold fewer tokens for nothing."""
    runner = ModelRunner(build(name), EngineConfig(num_blocks=16, block_size=4), greedy)
    sizes = {(spec.key_dim, spec.value_dim) for spec, _, _ in runner.cache.pools.values()}
    assert sizes == {(16, 8)}


def test_the_distance_is_felt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or parity would hold with a bias that is forgotten."""
    token_ids = random_tokens(20, VOCAB_SIZE, seed=1)
    biased = Driver(build("bloom"))
    monkeypatch.setattr(Bloom, "find_alibi", lambda module: None)
    plain = Driver(build("bloom"))
    first, second = (driver.logits([(driver.add(token_ids), 20)])[0] for driver in (biased, plain))
    torch.testing.assert_close(first[0], second[0], atol=1e-5, rtol=0)
    assert (first[2:] - second[2:]).abs().max(dim=-1).values.min() > 1e-2


@torch.inference_mode()
def long_run(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [T, V] of 1,200 tokens: minipaged's and transformers' in this type, and exact ones."""
    length = {LENGTH[name.partition("_")[0]]: 1200}
    token_ids = random_tokens(1200, VOCAB_SIZE, seed=1)
    driver = Driver(build(name, **length).to(dtype), num_blocks=300)
    sequence = driver.add(token_ids)
    computed = torch.cat([driver.logits([(sequence, count)])[0] for count in (900, 1, 299)])
    models = build(name, **length).to(dtype), build(name, **length)
    rounded, exact = (own_logits(model, token_ids) for model in models)
    return computed.float(), rounded.float(), exact


@pytest.mark.parametrize("name", ["bloom_six_heads", "mpt_six_heads", "falcon_alibi"])
def test_far_from_the_beginning_logits_still_agree(name: str) -> None:
    """Biases of hundreds leave fewer bits for the rest. Falcon's are rounded to bfloat16; so must ours be."""
    computed, expected, _ = long_run(name, torch.float32)
    torch.testing.assert_close(computed, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("name", ["bloom_six_heads", "mpt_six_heads", "falcon_alibi"])
def test_far_from_the_beginning_bfloat16_is_closer_than_transformers(name: str) -> None:
    """It rounds BLOOM's biases, so that neighbours can no longer be told apart."""
    computed, rounded, exact = long_run(name, torch.bfloat16)
    assert (computed - exact).abs().mean() < 1.1 * (rounded - exact).abs().mean()
    if name == "bloom_six_heads":
        assert (computed - exact).abs().mean() < 0.3 * (rounded - exact).abs().mean()


def test_positions_beyond_the_two_parts_are_refused() -> None:
    """bfloat16 rounds the first part from 257 on: keys that are 256 positions apart would have one bias."""
    with pytest.raises(UnsupportedModelError, match="set max_model_len to 65536 or less"):
        ModelRunner(build("bloom", seq_length=65_537), EngineConfig(num_blocks=16), greedy)
    fits = EngineConfig(num_blocks=16, max_model_len=MAX_POSITIONS)
    assert ModelRunner(build("bloom", seq_length=65_537), fits, greedy).max_model_len == 65_536
    without = build("llama", max_position_embeddings=65_537)
    assert ModelRunner(without, EngineConfig(num_blocks=16), greedy).max_model_len == 65_537


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_the_length_of_the_configuration_is_the_limit(name: str) -> None:
    """Under names of their own: transformers' MPT has no biases for longer sequences."""
    runner = ModelRunner(build(name), EngineConfig(num_blocks=16), greedy)
    assert runner.max_model_len == 128
    with pytest.raises(ConfigError, match="the model was trained for 128 positions"):
        ModelRunner(build(name), EngineConfig(num_blocks=16, max_model_len=129), greedy)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bloom")
    build("bloom_six_heads").save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_and_cached_keys_keep_their_positions(model_path: str, mode: str) -> None:
    """A key says where it is: it must come back to the same place, whoever uses it."""
    shared = random_tokens(24, VOCAB_SIZE, seed=7)
    prompts = [shared + random_tokens(length, VOCAB_SIZE, seed=length) for length in (3, 6, 9, 14)]
    llm = LLM(
        model_path,
        block_size=4,
        num_blocks=18,
        preemption_mode=mode,
        max_num_batched_tokens=24,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16))
    model = build("bloom_six_heads")
    assert [list(o.outputs[0].token_ids) for o in outputs] == [own_tokens(model, p, 16) for p in prompts]
    assert llm.engine.metrics.num_preemptions > 0
    assert llm.engine.metrics.prefix_cache_hits > 0
