"""The embedded model; a small random Llama, and what transformers says of it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from minipaged.components import Components
from minipaged.config import config_from
from minipaged.execution.model_runner import ModelRunner
from minipaged.llm import LLM
from tests.checked import checked
from tests.models.zoo import build


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The embedded model."""
    return checked(LLM(num_blocks=256, max_model_len=512, disable_log_stats=True))


@pytest.fixture
def loaded(llm, monkeypatch) -> LLM:
    """`minipaged generate` uses `llm` instead of loading a model."""
    monkeypatch.setattr("minipaged.cli.generate.load", lambda *arguments: llm)
    return llm


@pytest.fixture(scope="session")
def model() -> nn.Module:
    """A random Llama whose greedy texts vary."""
    torch.set_num_threads(1)
    return build("llama")


@pytest.fixture(scope="session")
def prompts(model) -> list[list[int]]:
    """32 prompts of 1 to 70 tokens, some with a common beginning."""
    rng = random.Random(7)
    vocabulary = model.config.vocab_size
    common = [rng.randrange(3, vocabulary) for _ in range(20)]
    return [
        common[: rng.choice([0, 0, 5, 16, 20])]
        + [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 50))]
        for _ in range(32)
    ]


@pytest.fixture(scope="session")
def expected(model, prompts) -> list[list[int]]:
    """Transformers' greedy continuations, 24 tokens each, by its own attention."""
    return [reference_greedy(model, prompt, 24) for prompt in prompts]


def reference_greedy(model: nn.Module, prompt: list[int], max_tokens: int) -> list[int]:
    """`model.generate`, greedy, EOS ignored."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    finally:
        model.set_attn_implementation(own)
    return ids[0, len(prompt) :].tolist()


def make_llm(
    model: nn.Module, components: Components | None = None, kind: type[ModelRunner] = ModelRunner, **options
) -> LLM:
    """An LLM over an already built model."""
    options = {"num_blocks": 512, "disable_log_stats": True, **options}
    runner = kind(model, config_from(options))
    return checked(LLM(executor=runner, components=components, **options))
