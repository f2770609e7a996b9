"""Drafts with real models: texts, log-probabilities and ends are those of a run without."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minipaged import LLM, BeamSearchParams, SamplingParams, pocket_model
from minipaged.components import Components
from minipaged.config import ConfigError
from minipaged.execution.draft_model import DraftModel
from minipaged.scheduling import FCFSScheduler, PreemptionCosts
from tests.engine.conftest import make_llm
from tests.engine.drafters import blurred_copy, changed_copy
from tests.machine import in_interpreter, skip_without_compiler
from tests.models.survey import build_small

PROMPTS = [
    "Once upon a time",
    "The robot said: I am a robot. The robot said: I am",
    "A cat and a dog. A cat and a dog. A cat",
    "The sun",
]
SMALL = {"num_blocks": 256, "max_model_len": 256, "disable_log_stats": True}


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(**SMALL)


@pytest.fixture(scope="module")
def looking_up() -> LLM:
    return LLM(**SMALL, num_speculative_tokens=5)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory) -> LLM:
    path = blurred_copy(tmp_path_factory.mktemp("draft"), 0.3)
    return LLM(**SMALL, num_speculative_tokens=4, speculative_model=str(path))


def drafts(llm: LLM) -> tuple[int, int]:
    """Tokens drafted so far, and how many of them were accepted."""
    return llm.engine.metrics.draft_tokens, llm.engine.metrics.accepted_tokens


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=60),
        SamplingParams(temperature=0.8, seed=3, max_tokens=60),
        SamplingParams(temperature=1.3, seed=7, top_p=0.9, top_k=40, min_p=0.01, max_tokens=60),
        SamplingParams(temperature=0, repetition_penalty=1.2, frequency_penalty=0.5, max_tokens=60),
        SamplingParams(temperature=0, no_repeat_ngram_size=4, max_tokens=60),
        SamplingParams(temperature=0, stop=["robot", "dog and"], max_tokens=60),
        SamplingParams(temperature=0, bad_words=["the"], min_tokens=30, max_tokens=60),
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=150),
        SamplingParams(temperature=0.7, seed=1, logit_bias={5: 3.0}, max_tokens=40),
    ],
    ids=["greedy", "seed", "filters", "penalties", "ngrams", "stop", "words", "past_eos", "bias"],
)
@pytest.mark.parametrize("way", ["looking_up", "drafting"])
def test_texts_are_the_same_whatever_the_parameters(plain, way, params, request):
    """Catches a row that is drawn with another row's penalties, noise or number of tokens."""
    llm = request.getfixturevalue(way)
    before = drafts(llm)
    got, wanted = llm.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in wanted]
    assert [o.outputs[0].text for o in got] == [o.outputs[0].text for o in wanted]
    assert [o.outputs[0].finish_reason for o in got] == [o.outputs[0].finish_reason for o in wanted]
    assert drafts(llm)[0] > before[0]
    llm.engine.check_invariants()


def test_log_probabilities_come_with_every_token(plain, looking_up):
    """Catches tokens of a draft without their report."""
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=2)
    for got, wanted in zip(looking_up.generate(PROMPTS, params), plain.generate(PROMPTS, params)):
        (mine,), (theirs,) = got.outputs, wanted.outputs
        assert [list(top) for top in mine.logprobs] == [list(top) for top in theirs.logprobs]
        assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)


def test_a_stream_gives_the_text_of_generate(looking_up, plain):
    """Catches pieces that are lost when a step gives several tokens."""
    params = SamplingParams(temperature=0, max_tokens=60)
    for prompt in PROMPTS:
        assert "".join(looking_up.stream(prompt, params)) == plain.generate(prompt, params)[0].outputs[0].text


def test_everybody_else_in_the_batch_decodes_as_ever(looking_up, plain):
    """Beams, samples and a grammar beside a request with drafts."""
    params = [
        SamplingParams(temperature=0, max_tokens=40),
        BeamSearchParams(beam_width=3, max_tokens=20),
        SamplingParams(n=3, seed=1, max_tokens=20),
        SamplingParams(temperature=0, max_tokens=40),
    ]
    got, wanted = looking_up.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    assert [[c.token_ids for c in o.outputs] for o in got] == [
        [c.token_ids for c in o.outputs] for o in wanted
    ]


def test_a_draft_model_samples_with_the_noise_of_the_sample_it_drafts():
    """The same model as its own draft model is always right, at any temperature. (With noise of its own, at
    temperature 1, about one token in two.)"""
    llm = LLM(**SMALL, num_speculative_tokens=4, speculative_model=pocket_model.NAME)  # its own draft model
    params = SamplingParams(temperature=1.0, max_tokens=60)
    llm.generate(PROMPTS, params)
    drafted, accepted = drafts(llm)
    assert accepted > 0.97 * drafted  # (after an end token, draft tokens count as rejected)


def test_noise_in_its_weights_makes_a_draft_model_err_now_and_then(drafting):
    """What the other tests of it rest on."""
    drafting.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    drafted, accepted = drafts(drafting)
    assert 0.2 * drafted < accepted < 0.95 * drafted


@pytest.mark.parametrize(
    ("backend", "block_size", "count", "num_tokens"),
    [
        *((backend, size, 6, 24) for backend in ("torch", "cpp") for size in (1, 4, 16)),
        pytest.param("triton", 16, 2, 9, marks=[*in_interpreter, pytest.mark.slow]),
    ],
)
def test_rows_of_one_draft_share_a_table_in_every_kernel(
    model, prompts, expected, backend, block_size, count, num_tokens
):
    """Catches attention that takes two rows over one table for two sequences that begin alike."""
    skip_without_compiler(backend)
    known = dict(zip(map(tuple, prompts), expected))

    class Foresight:
        """Knows what transformers says, and errs in every third token."""

        def draft(self, sequences, counts):
            drafts = []
            for sequence, count in zip(sequences, counts):
                done = sequence.num_generated_tokens
                text = known[tuple(sequence.request.prompt_token_ids)][done : done + count]
                drafts.append([token if (done + i) % 3 else 1 for i, token in enumerate(text)])
            return drafts

    llm = make_llm(
        model,
        Components(drafter=Foresight),
        attention_backend=backend,
        block_size=block_size,
        num_speculative_tokens=6,
    )
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:count]], params)
    assert [o.outputs[0].token_ids for o in outputs] == [text[:num_tokens] for text in expected[:count]]
    drafted, accepted = drafts(llm)
    assert 0 < accepted < drafted


def test_a_draft_model_that_cannot_draft_for_this_one_is_refused(tmp_path):
    """Catches drafts in another vocabulary, which would all be rejected."""
    other = Path(shutil.copytree(pocket_model.PATH, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["ar"], words["is"] = words["is"], words["ar"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ConfigError, match=r"speculative_model is .*, which has another vocabulary; give a smaller model"
    ):
        LLM(**SMALL, num_speculative_tokens=2, speculative_model=str(other))
    with pytest.raises(ConfigError, match=r"speculative_model is '/nowhere': there is no directory /nowhere"):
        LLM(**SMALL, num_speculative_tokens=2, speculative_model=Path("/nowhere"))
    build_small("lfm2").save_pretrained(tmp_path / "recurrent")
    with pytest.raises(ConfigError, match="whose recurrent layers cannot take a wrong token back; give"):
        LLM(**SMALL, num_speculative_tokens=2, speculative_model=str(tmp_path / "recurrent"))
    with pytest.raises(ConfigError, match="num_speculative_tokens is 0; give how many"):
        LLM(**SMALL, speculative_model=str(other))
    with pytest.raises(ConfigError, match="num_speculative_tokens is 16; give at most 15"):
        LLM(**SMALL, num_speculative_tokens=16)


@pytest.mark.parametrize(
    ("vocab_size", "expected"), [(2, [1.0, 2.0]), (3, [1.0, 2.0, 3.0]), (4, [1.0, 2.0, 3.0, -math.inf])]
)
def test_a_vocabulary_that_is_padded_otherwise_is_cut_or_filled(vocab_size, expected):
    """Catches a token that the target model lacks, and noise of another width than it samples with."""
    fast, slow = (SimpleNamespace(seconds_per_token=seconds) for seconds in (1.0, 2.0))
    sizes = {"num_blocks": 1, "block_size": 1, "max_model_len": 8}
    runner = SimpleNamespace(**sizes, preemption_costs=fast, sampler=lambda logits, scheduled: logits)
    target = SimpleNamespace(**sizes, preemption_costs=slow, vocab_size=vocab_size)
    DraftModel(runner, 8).draft_for(target, None)
    assert runner.sampler(torch.tensor([[1.0, 2.0, 3.0]]), []).tolist() == [expected]


class Mine(FCFSScheduler):
    """A scheduler of a user."""


@pytest.mark.parametrize(
    ("kinds", "use", "reason"),
    [
        (["full_attention", "linear_attention"] * 2, {}, "layers with a recurrent state cannot take"),
        (["full_attention"] * 4, {"scheduler": Mine}, "a scheduler of your own makes no drafts"),
    ],
)
def test_what_cannot_draft_is_refused_before_weights_are_loaded(kinds, use, reason, tmp_path):
    """Catches minutes of loading before an error that is evident from the settings, or from config.json."""
    path = changed_copy(tmp_path, layer_types=kinds)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"num_speculative_tokens is 2, but {reason}"):
        LLM(path, **SMALL, num_speculative_tokens=2, use=use)
    with pytest.raises(ValueError, match="cannot load"):
        LLM(path, **SMALL)


def drafting_with(path: Path, **options) -> LLM:
    return LLM(**SMALL | options, num_speculative_tokens=2, speculative_model=str(path))


def warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_a_draft_model_that_fits_is_taken_without_a_word(caplog, monkeypatch):
    """Catches warnings that everybody reads past."""
    monkeypatch.setattr(PreemptionCosts, "estimate", costs_of(2.0, 3.0))
    drafting_with(pocket_model.PATH)
    assert warnings(caplog) == []


def costs_of(*seconds: float):
    """What `PreemptionCosts.estimate` says of one model after the other."""
    costs = [PreemptionCosts(1.0, 1.0, per_token) for per_token in seconds]
    return staticmethod(lambda *_: costs.pop(0))


@pytest.mark.parametrize("seconds", [(3.0, 3.0), (3.0, 2.0)])
def test_a_draft_model_that_is_not_smaller_is_reported(seconds, caplog, monkeypatch):
    """Catches two models in the wrong order: texts are right, only slow. (It may still be what someone wants
    to see, so it is no error.)"""
    monkeypatch.setattr(PreemptionCosts, "estimate", costs_of(*seconds))
    drafting_with(pocket_model.PATH)
    (line,) = warnings(caplog)
    assert line.endswith(", which takes at least as long for a token as the model; give a smaller one")
    assert line.startswith(f"speculative_model is {str(pocket_model.PATH)!r}")


def test_a_draft_model_with_a_shorter_context_drafts_as_far_as_it_reads(tmp_path, plain, caplog, monkeypatch):
    """Catches drafts that end without a warning, and a position that the model has no embedding for."""
    monkeypatch.setattr(PreemptionCosts, "estimate", costs_of(2.0, 3.0))
    llm = drafting_with(changed_copy(tmp_path, max_position_embeddings=40))
    (line,) = warnings(caplog)
    assert line.endswith("which reads 40 tokens; longer texts (max_model_len is 256) get no draft tokens")
    lengths = []
    llm.engine.on_planned.append(
        lambda plan: lengths.extend(item.start + 1 for item in plan.scheduled if len(plan.scheduled) > 1)
    )
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    assert (
        llm.generate("Once", params)[0].outputs[0].text == plain.generate("Once", params)[0].outputs[0].text
    )
    assert 35 < max(lengths) <= 40
    assert warnings(caplog) == [line]


def test_max_model_len_is_also_the_draft_models(tmp_path):
    """Catches a draft model that is refused because it needs a limit, although one was given."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    rope["original_max_position_embeddings"] = 1024
    path = changed_copy(tmp_path, rope_parameters=rope)
    with pytest.raises(ValueError, match="set max_model_len to 1024 or less"):
        LLM(path, num_blocks=64)
    assert drafting_with(path).engine.scheduler.drafter.runner.max_model_len == 256


def test_a_draft_model_without_a_tokenizer_is_reported(tmp_path, caplog, monkeypatch):
    """Catches drafts in another vocabulary that nobody notices, and a warning about its prompts: it has none.
    For two models without one, nothing can be checked."""
    monkeypatch.setattr(PreemptionCosts, "estimate", costs_of(2.0, 3.0, 2.0, 3.0))
    path = changed_copy(tmp_path)
    for file in path.glob("token*"):
        file.unlink()
    drafting_with(path)
    (line,) = warnings(caplog)
    assert line.startswith(f"speculative_model is {str(path)!r}, which has no tokenizer; make sure that its")
    caplog.clear()
    LLM(path, **SMALL, num_speculative_tokens=2, speculative_model=str(path))
    (line,) = warnings(caplog)
    assert line.startswith(f"no tokenizer for {path}, so its prompts are token ids")


def test_a_drafter_of_ones_own_drafts_in_the_running_engine(plain):
    """`use={"drafter": ...}`, as for every concept; beside a draft model it would be ignored."""

    class Echo:
        def draft(self, sequences, counts):
            return [list(s.token_ids[-1:]) * count for s, count in zip(sequences, counts)]

    llm = LLM(**SMALL, num_speculative_tokens=2, use={"drafter": Echo})
    params = SamplingParams(temperature=0, max_tokens=30)
    assert (
        llm.generate(PROMPTS, params)[1].outputs[0].text == plain.generate(PROMPTS, params)[1].outputs[0].text
    )
    assert drafts(llm)[0] > 0
    with pytest.raises(ConfigError, match="a drafter is given, but num_speculative_tokens is 0; give"):
        LLM(**SMALL, use={"drafter": Echo})
    with pytest.raises(ConfigError, match="speculative_model and a drafter are both given"):
        LLM(**SMALL, num_speculative_tokens=2, speculative_model="small", use={"drafter": Echo})
