"""What a model's files recommend, and vLLM's settings: defaults, end tokens, another tokenizer, revision."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from minipaged import LLM, EngineConfig, SamplingParams, pocket_model
from minipaged.config import ConfigError
from minipaged.execution import loading
from minipaged.execution.loading import ModelLoadError
from minipaged.vllm_settings import HARMLESS, IGNORED, own_settings

SMALL = {"num_blocks": 32, "max_model_len": 128, "disable_log_stats": True}


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the embedded model, whose files a test may change."""
    return Path(shutil.copytree(pocket_model.PATH, tmp_path / "model"))


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_generation_config_supplies_the_defaults_unless_it_is_turned_off(copy):
    """Catches defaults of the engine where the model names its own, and a switch without effect."""
    edit(
        copy / "generation_config.json",
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        max_new_tokens=5,
    )
    llm = LLM(copy, **SMALL)
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=5)
    assert llm.get_default_sampling_params() == expected
    assert len(llm.generate("The sun")[0].outputs[0].token_ids) <= 5
    assert llm.engine.metrics.generation_tokens <= 5
    for off in ("none", "vllm"):
        assert LLM(copy, generation_config=off, **SMALL).get_default_sampling_params() == SamplingParams()


def test_a_recommendation_that_cannot_be_is_reported_with_its_file(copy):
    """Catches an error about a parameter that nobody gave."""
    edit(copy / "generation_config.json", do_sample=True, repetition_penalty=1000.0)
    with pytest.raises(
        ConfigError, match=r"generation_config.json of .*repetition_penalty is 1000.*--generation-config none"
    ):
        LLM(copy, **SMALL)


def test_end_tokens_are_those_of_generation_config_and_tokenizer(copy):
    """Catches a chat model that talks on, because its files disagree about what ends a turn."""
    edit(copy / "generation_config.json", eos_token_id=[5, 6])
    runner = LLM(copy, **SMALL).engine.executor
    assert set(runner.eos_token_ids) == {5, 6, 1}
    assert set(runner.sampler.eos_token_ids) == {5, 6, 1}
    assert set(LLM(copy, generation_config="none", **SMALL).engine.executor.eos_token_ids) == {1}


def test_the_tokenizers_eos_ends_a_text_and_waits_for_min_tokens(copy):
    """Catches an EOS that the engine stops at and the sampler does not know."""
    for name in ("generation_config.json", "config.json"):
        edit(copy / name, eos_token_id=5)
    llm = LLM(copy, **SMALL)
    eager = SamplingParams(temperature=0, max_tokens=9, logit_bias={1: 100})
    assert llm.generate("The sun", eager)[0].outputs[0].token_ids == [1]
    waited = llm.generate("The sun", eager.clone(min_tokens=4))[0].outputs[0]
    assert waited.token_ids.index(1) == 4
    assert waited.finish_reason == "stop"


def test_an_end_token_outside_the_vocabulary_ends_nothing(copy):
    """Catches a step that fails for all, when `min_tokens` of one forbids such a token."""
    edit(copy / "generation_config.json", eos_token_id=[5, 100_000])
    llm = LLM(copy, **SMALL)
    assert set(llm.engine.executor.eos_token_ids) == {5, 1}
    params = [SamplingParams(temperature=0, max_tokens=4, min_tokens=n) for n in (2, 0)]
    assert all(output.error is None for output in llm.generate(["The sun", "The moon"], params))


def test_another_tokenizer_may_be_named(copy, tmp_path):
    """Catches a path taken for a tokenizer, and a missing one that is only warned of."""
    edit(copy / "tokenizer_config.json", eos_token="<|user|>")
    llm = LLM(tokenizer=str(copy), **SMALL)
    assert llm.get_tokenizer().eos_token == "<|user|>"
    assert llm.get_tokenizer().eos_token_id in llm.engine.executor.eos_token_ids
    with pytest.raises(ConfigError, match="tokenizer is 5; give a directory"):
        LLM(tokenizer=5)
    with pytest.raises(ModelLoadError, match=r"tokenizer is .*nowhere.*; give"):
        LLM(tokenizer=tmp_path / "nowhere", **SMALL)


def test_a_revision_reaches_every_file_of_the_hub(monkeypatch):
    """Catches weights of one commit with the tokenizer of another."""
    asked = []

    def record(name, **options):
        asked.append(options["revision"])
        raise OSError("not here")

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", record)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", record)
    monkeypatch.setattr(loading, "model_info", lambda name, revision, timeout: asked.append(revision))
    config = EngineConfig(revision="abc123")
    with pytest.raises(ModelLoadError):
        loading.load_model("org/model", config, torch.device("cpu"))
    assert loading.load_tokenizer("org/model", config) is None
    assert asked == ["abc123"] * 6


@pytest.mark.parametrize("given", ["float", "float32", torch.float32])
def test_a_dtype_has_its_short_names(given):
    """Catches names of PyTorch that are refused."""
    assert EngineConfig(dtype=given).dtype == "float32"
    assert EngineConfig(dtype="half").dtype == EngineConfig(dtype=torch.float16).dtype == "float16"


def test_settings_of_vllm_that_ask_for_nothing_pass():
    """Catches a script that fails for a default which it spells out."""
    for name, harmless in HARMLESS.items():
        for value in harmless:
            assert own_settings({name: value}) == {}, name
    assert own_settings(dict.fromkeys(IGNORED, 5)) == {}
    assert own_settings({"seed": None, "quantization": None, "enforce_eager": False}) == {}


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("max_num_seqs", None),
        ("max_num_batched_tokens", None),
        ("block_size", None),
        ("enable_prefix_caching", None),
        ("enable_chunked_prefill", None),
        ("served_model_name", None),
        ("limit_mm_per_prompt", {"image": 0}),
        ("max_num_partial_prefills", 1),
        ("num_lookahead_slots", 0),
        ("scheduler_delay_factor", 0.0),
        ("disable_log_requests", True),
        ("download_dir", None),
        ("code_revision", None),
        ("chat_template", None),
        ("async_scheduling", None),
        ("pooler_config", None),
        ("mm_processor_kwargs", None),
        ("speculative_config", {}),
        ("prefix_caching_hash_algo", "sha256"),
        ("worker_cls", "auto"),
        ("disable_sliding_window", False),
        ("enable_expert_parallel", False),
        ("distributed_executor_backend", "mp"),
    ],
)
def test_a_default_of_vllm_means_the_default_here(name, default):
    """Catches a default that is refused, or taken for a misspelt setting of this engine."""
    assert own_settings({name: default}) == {}


@pytest.mark.parametrize("name", ["data_parallel_sise", "mm_processor", "offload_everything", "sleep_mode"])
def test_what_only_begins_like_a_setting_of_vllm_is_unknown(name):
    """Catches a misspelt setting that passes, and does nothing."""
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'"):
        LLM(**{name: 8})


def test_none_is_no_default_of_a_setting_that_does_not_exist():
    """Catches a misspelt name that passes because its value asks for nothing."""
    with pytest.raises(ConfigError, match="unknown setting 'blok_size'; did you mean block_size"):
        LLM(blok_size=None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_parallel_size", 2),
        ("data_parallel_size", True),
        ("kv_cache_dtype", "fp8"),
        ("enable_lora", True),
        ("speculative_config", {"method": "eagle", "model": "x"}),
        ("speculative_config", {"method": "mtp"}),
        ("cpu_offload_gb", 4),
        ("enable_expert_parallel", True),
        ("disable_sliding_window", True),
        ("watermark", 0.5),
        ("long_prefill_token_threshold", 128),
        ("max_num_partial_prefills", 2),
        ("scheduler_reserve_full_isl", False),
    ],
)
def test_settings_of_vllm_that_would_be_ignored_are_refused(name, value):
    """Catches a model that runs unquantized, on one device, where the script asked for something else, and a
    scheduler that ignores what it was asked for."""
    with pytest.raises(
        ConfigError, match=f"{name} is {value!r}".replace("{", ".").replace("}", ".")
    ) as error:
        LLM(**{name: value})
    assert "; give" in str(error.value)


@pytest.mark.parametrize(
    ("given", "model", "count"),
    [
        ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}, None, 5),
        ({"model": "[ngram]", "num_speculative_tokens": 5}, None, 5),
        ({"model": "small", "num_speculative_tokens": 3}, "small", 3),
        ({"method": "draft_model", "model": "small", "num_speculative_tokens": 3}, "small", 3),
        ('{"method": "ngram", "num_speculative_tokens": 2}', None, 2),
        ({"method": "ngram"}, None, 4),
        ({"method": "ngram", "num_speculative_tokens": 0}, None, 0),
    ],
)
def test_speculative_config_is_translated(given, model, count):
    """Catches a script that asks for drafts, and gets none."""
    wanted = {"num_speculative_tokens": count, "speculative_model": model}
    assert own_settings({"speculative_config": given}) == wanted
    if isinstance(given, dict):
        short = {"spec_method": given.get("method"), "spec_model": given.get("model")}
        short["spec_tokens"] = given.get("num_speculative_tokens")
        assert own_settings(short) == wanted


@pytest.mark.parametrize(
    "given", ["ngram", 4, 0, False, [1], {"Method": "ngram"}, {"method": "draft_model"}, {"method": {}}]
)
def test_an_invalid_speculative_config_is_refused(given):
    """Catches an error from within where a dict is wanted, and a script that gets no draft tokens."""
    with pytest.raises(ConfigError, match=r'speculative_config is .*; give {"method": "ngram"'):
        own_settings({"speculative_config": given})


@pytest.mark.parametrize("name", ["num_spec_tokens", "model_name", "synthetic_acceptance_length"])
def test_an_entry_of_speculative_config_that_is_unknown_is_named(name):
    """Catches a number of draft tokens that is misspelt, so that 4 are drafted."""
    given = {"method": "ngram", name: 2}
    with pytest.raises(ConfigError, match=f"speculative_config .*has the unknown entry '{name}'; give {{"):
        own_settings({"speculative_config": given})
    assert own_settings({"speculative_config": {**given, name: None, "draft_tensor_parallel_size": 1}})


def test_a_speculative_config_without_a_value_asks_for_nothing():
    """Catches drafts that nobody asked for, and a value that an entry of None takes back."""
    empty = {"method": None, "model": None, "num_speculative_tokens": None}
    assert own_settings({"speculative_config": empty}) == {}
    given = own_settings({"speculative_config": empty, "spec_method": "ngram", "spec_tokens": 3})
    assert given == {"num_speculative_tokens": 3, "speculative_model": None}


def test_two_settings_that_say_different_things_are_reported():
    """Catches the one that is ignored; one that leaves open what the other says is none."""
    config = {"speculative_config": {"method": "ngram"}}
    assert own_settings({**config, "num_speculative_tokens": 7})["num_speculative_tokens"] == 7
    assert own_settings({"speculative_model": "[ngram]", "num_speculative_tokens": 7}) == {
        "num_speculative_tokens": 7,
        "speculative_model": None,
    }
    for own in ({"num_speculative_tokens": 7}, {"speculative_model": "small"}):
        config = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
        with pytest.raises(ConfigError, match=r"but speculative_config says .*; give one of the two"):
            own_settings({**config, **own})
    with pytest.raises(ConfigError, match=r"spec.* is {'num_speculative_tokens': 3}, which is not supported"):
        own_settings({"spec_tokens": 3})


@pytest.mark.parametrize(
    ("name", "value", "way"),
    [
        ("download_dir", "/models", "set HF_HOME"),
        ("chat_template", "{{ messages }}", "give it to LLM.chat"),
        ("logits_processors", ["a.b"], "give functions in SamplingParams"),
        ("data_parallel_size", 2, "minipaged serve --replicas"),
        ("reasoning_parser", "qwen3", "after_reasoning=True"),
    ],
)
def test_a_refusal_names_the_way_to_do_it_here(name, value, way):
    """Catches an error that names only what does not work."""
    with pytest.raises(ConfigError, match=way):
        LLM(**{name: value})


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ({"backend": "xgrammar", "disable_any_whitespace": True}, "x-guidance"),
        ({"backend": "auto", "reasoning_parser": "qwen3"}, r"after_reasoning=True\)"),
    ],
)
def test_a_rule_for_all_structured_outputs_is_not_passed_over(given, way):
    """Catches JSON with whitespace that the script has ruled out."""
    with pytest.raises(ConfigError, match=f"structured_outputs_config is .*not supported; .*{way}"):
        own_settings({"structured_outputs_config": given})


@pytest.mark.parametrize(
    "given",
    [
        None,
        {},
        {"backend": "xgrammar", "disable_any_whitespace": False, "disable_additional_properties": False},
        {"disable_additional_properties": True},
    ],
)
def test_a_backend_for_structured_outputs_changes_no_text(given):
    """Catches a refusal of what only chooses between libraries, or asks for what is so by default."""
    assert own_settings({"structured_outputs_config": given}) == {}


def test_a_token_is_never_printed():
    """Catches a secret in a log."""
    with pytest.raises(ConfigError, match=r"hf_token is given.*HF_TOKEN") as error:
        LLM(hf_token="hf_SECRET")
    assert "SECRET" not in str(error.value)


def test_settings_of_vllm_with_a_counterpart_are_translated():
    """Catches a pool of another size, and graphs that were turned off."""
    assert own_settings(
        {"num_gpu_blocks_override": 7, "enforce_eager": True, "seed": 3, "block_size": 8}
    ) == {
        "num_blocks": 7,
        "enable_cuda_graphs": False,
        "seed": 3,
        "block_size": 8,
    }
    with pytest.raises(ConfigError, match="unknown setting 'blok_size'; did you mean block_size"):
        LLM(blok_size=8)
