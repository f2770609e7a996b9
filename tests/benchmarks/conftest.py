"""A run of the whole suite calls each benchmark once, to see that it works; it measures when asked to."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

from tests.benchmarks.peers.materials import MODELS


def is_asked_for(config: pytest.Config) -> bool:
    """Whether the command line names a benchmark or pytest-benchmark."""
    return config.getoption("benchmark_only") or any("benchmarks" in argument for argument in config.args)


@pytest.fixture
def benchmark(benchmark: BenchmarkFixture, pytestconfig: pytest.Config) -> BenchmarkFixture:
    """pytest-benchmark's fixture; in a run of the whole suite it calls the function once, unmeasured."""
    benchmark.disabled = benchmark.disabled or not is_asked_for(pytestconfig)
    return benchmark


@pytest.fixture
def llama(one_thread) -> LlamaForCausalLM:
    """A random Llama of 3.4 million parameters: 8 query and 4 KV heads of 32 in 4 layers, 1024 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=2048, tie_word_embeddings=False, **MODELS["tiny"])
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def hybrid(one_thread) -> PreTrainedModel:
    """A random Qwen 3.5 of 2.9 million parameters: 3 of its 4 layers are gated delta nets, 1024 tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    states = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    states |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    config = Qwen3_5TextConfig(max_position_embeddings=2048, **sizes, **heads, **states)
    return AutoModelForCausalLM.from_config(config).eval()
