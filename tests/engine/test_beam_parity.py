"""Beam search in the engine against `model.generate(num_beams=W)`: ids and scores, ragged prompts."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from minipaged import BeamSearchParams
from tests.engine.conftest import make_llm

CASES_PER_BATCH = 14


def draw(rng: random.Random, vocabulary: int) -> tuple[list[int], BeamSearchParams]:
    """A prompt of 1 to 20 tokens and the settings of a search."""
    width = rng.randint(1, 8)
    return (
        [rng.randrange(3, vocabulary) for _ in range(rng.randint(4, 20))],
        BeamSearchParams(
            beam_width=width,
            num_return_sequences=rng.randint(1, width),
            length_penalty=rng.choice([0.0, 0.6, 1.0, 2.0]),
            early_stopping=rng.choice([True, False, "never"]),
            max_tokens=rng.randint(3, 12),
        ),
    )


def reference(model, prompt: list[int], params: BeamSearchParams, eos: list[int]):
    """What transformers finds: (token ids, score) of each hypothesis, the best first."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=params.beam_width,
            num_return_sequences=params.num_return_sequences,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_new_tokens=params.max_tokens,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    finally:
        model.set_attn_implementation(own)
    hypotheses = []
    scores = found.sequences_scores.tolist() if params.beam_width > 1 else [None]
    for row, score in zip(found.sequences.tolist(), scores):
        ids = row[len(prompt) :]
        ends = [i for i, token in enumerate(ids) if token in eos]
        hypotheses.append((ids[: ends[0] + 1] if ends else ids, score))
    return hypotheses


@pytest.mark.parametrize("mode", ["ample", "recompute", "swap"])
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 10))]
)
def test_beams_equal_those_of_transformers(model, seed, mode, caplog):
    """Beams out of order after a fork, EOS taken for a candidate, a penalty on the wrong length."""
    caplog.set_level(logging.ERROR)
    rng = random.Random(100 * seed + len(mode))
    vocabulary = model.config.vocab_size
    eos = rng.sample(range(3, vocabulary), rng.choice([6, 12]))
    cases = [draw(rng, vocabulary) for _ in range(CASES_PER_BATCH)]
    llm = make_llm(
        model,
        block_size=4,
        num_blocks=512 if mode == "ample" else 34,
        preemption_mode="auto" if mode == "ample" else mode,
        enable_prefix_caching=rng.random() < 0.5,
        max_num_batched_tokens=rng.choice([16, 64]) if mode == "ample" else 2048,
    )
    llm.engine.executor.eos_token_ids = tuple(eos)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in cases], [p for _, p in cases])
    for output, (prompt, params) in zip(outputs, cases):
        expected = reference(model, prompt, params, eos)
        assert [c.token_ids for c in output.outputs] == [ids for ids, _ in expected]
        for completion, (_, score) in zip(output.outputs, expected):
            if score is not None:
                assert completion.score == pytest.approx(score, abs=1e-4)
    if mode != "ample":
        assert llm.engine.metrics.num_preemptions > 0
    assert any(c.finish_reason == "stop" for output in outputs for c in output.outputs)
