"""Models from a directory; and one clear line for everything that is not one."""

import argparse
import importlib.util
import json
import logging
import re
import socket
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file

from minipaged import LLM, SamplingParams, pocket_model
from minipaged.config import ConfigError, EngineConfig
from minipaged.engine import RequestError
from minipaged.execution import checkpoints, gguf_files, loading, model_runner, probe
from minipaged.execution.loading import find_device, load_model, load_tokenizer
from minipaged.execution.model_runner import ModelRunner
from tests.models.driver import Driver, random_tokens
from tests.models.refusal import refusal
from tests.models.zoo import VOCAB_SIZE, build

CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_model_computes_what_it_did_before(directory: Path) -> None:
    """Weights, configuration and rope survive the way through the files."""
    token_ids = random_tokens(9, VOCAB_SIZE, seed=1)
    logits = [
        driver.logits([(driver.add(token_ids), 9)])[0]
        for driver in (
            Driver(build("llama")),
            Driver(load_model(str(directory), EngineConfig(dtype="float32"), CPU)),
        )
    ]
    assert torch.equal(*logits)


def test_load_makes_a_runner(directory: Path) -> None:
    """The way the engine comes to its executor."""
    runner = ModelRunner.load(str(directory), EngineConfig(num_blocks=5))
    assert (runner.num_blocks, runner.vocab_size) == (5, VOCAB_SIZE)


def test_dtype_is_the_checkpoints_or_the_one_that_is_asked_for(directory: Path) -> None:
    """The pool follows the weights: block bytes halve."""
    build("llama").to(torch.bfloat16).save_pretrained(directory)
    found = {
        dtype: ModelRunner.load(str(directory), EngineConfig(num_blocks=5, dtype=dtype))
        for dtype in ("auto", "float32", "bfloat16")
    }
    dtypes = {dtype: runner.cache.pools[0][1].dtype for dtype, runner in found.items()}
    assert dtypes == {"auto": torch.bfloat16, "float32": torch.float32, "bfloat16": torch.bfloat16}
    assert found["float32"].block_bytes == 2 * found["auto"].block_bytes


def test_a_missing_directory(tmp_path: Path) -> None:
    """It must not be looked up on the hub, where the error would be about the network."""
    assert "there is no directory" in refusal(tmp_path / "nowhere")
    assert "there is no directory" in refusal("./nowhere")
    assert "there is no directory" in refusal("some/path/nowhere")


def test_a_file_is_not_a_directory(directory: Path) -> None:
    """Somebody named the weights themselves."""
    assert refusal(directory / "config.json").endswith(
        f"config.json is a file; give {directory}, or a GGUF file"
    )


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_is_cut_short_is_reported_with_a_fix(directory: Path, name: str) -> None:
    """Catches "invalid header length" and "is not a valid JSON file" as the last word."""
    (directory / name).write_bytes((directory / name).read_bytes()[:40])
    assert refusal(directory).endswith("; a file is damaged or cut short: download it again")


def test_a_pickled_file_that_is_cut_short_is_reported_without_bad_advice(directory: Path) -> None:
    """Catches torch's advice to load it with code execution allowed."""
    weights = load_file(directory / "model.safetensors")
    torch.save(weights, directory / "pytorch_model.bin")
    whole = (directory / "pytorch_model.bin").read_bytes()
    (directory / "model.safetensors").unlink()
    for data in (whole[:1000], b"not a pickle", b"", bytes(1000), b"hello", b"Repository not found"):
        (directory / "pytorch_model.bin").write_bytes(data)
        message = refusal(directory)
        assert message.endswith("; a file is damaged or cut short: download it again")
        assert "weights_only" not in message


def test_weights_with_code_are_not_called_damaged(directory: Path) -> None:
    """Catches "download it again" for a file that is whole."""
    torch.save({"args": argparse.Namespace(a=1)}, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    message = refusal(directory)
    assert message.endswith(
        "its weights hold argparse.Namespace, which is not loaded; convert them to safetensors"
    )


def test_a_torchscript_archive_is_not_called_damaged(directory: Path) -> None:
    """Catches a whole file that is to be downloaded again."""
    with ZipFile(directory / "pytorch_model.bin", "w") as archive:
        archive.writestr("model/version", "3")
        archive.writestr("model/constants.pkl", "")
    (directory / "model.safetensors").unlink()
    message = refusal(directory)
    assert message.endswith("its weights hold TorchScript, which is not loaded; convert them to safetensors")


def test_an_index_of_weights_that_is_cut_short_is_called_damaged(directory: Path) -> None:
    """Catches "Expecting value: line 1 column 1 (char 0)" alone."""
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text("")
    assert refusal(directory).endswith("; a file is damaged or cut short: download it again")


def test_a_pointer_of_git_lfs_is_called_one(directory: Path) -> None:
    """Catches "damaged" for the commonest mistake: a clone without its large files."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    (directory / "consolidated.safetensors").write_text(pointer)  # not read
    ModelRunner.load(str(directory), EngineConfig(num_blocks=5))
    (directory / "model.safetensors").write_text(pointer)
    assert refusal(directory).endswith(
        "model.safetensors is a pointer of Git LFS, not the file itself; run git lfs pull there"
    )


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_the_attention_that_a_config_asks_for_is_not_needed(directory: Path, field: str) -> None:
    """FlashAttention need not be installed: attention is replaced anyway."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: "flash_attention_2"}))
    runner = ModelRunner.load(str(directory), EngineConfig(num_blocks=5))
    assert runner.model.config._attn_implementation != "flash_attention_2"


def test_a_name_that_transformers_does_not_know_is_said_to_be_one(directory: Path) -> None:
    """Catches "KeyError: 'swish9'" alone."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "swish9"}))
    assert "swish9'; transformers does not know this name in config.json" in refusal(directory)


def test_a_broken_generation_config_is_not_left_out(directory: Path) -> None:
    """Catches a model without its end tokens: its answers never stop."""
    (directory / "generation_config.json").write_text("[]")
    assert "generation_config.json is not valid JSON: it is no object" in refusal(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": 5,')
    assert "generation_config.json is not valid JSON: " in refusal(directory)
    load_model(str(directory), EngineConfig(generation_config="none"), CPU)


@pytest.mark.parametrize("text", ['{"max_new_tokens": -1}', '{"early_stopping": "soon", "num_beams": 3}'])
def test_a_generation_config_that_transformers_refuses_can_be_left_out(directory: Path, text: str) -> None:
    """Catches a message that names neither the file nor the setting, and a setting that has no effect."""
    (directory / "generation_config.json").write_text(text)
    assert refusal(directory).endswith(
        '; fix generation_config.json, or set generation_config="none" (--generation-config none)'
    )
    load_model(str(directory), EngineConfig(generation_config="none"), CPU)


def test_a_directory_without_a_tokenizer_says_what_to_do(directory: Path) -> None:
    """Catches a fix that the command line cannot do: `{"prompt_token_ids": ...}`."""
    llm = LLM(str(directory), num_blocks=5)
    with pytest.raises(
        ValueError, match=r"^the model has no tokenizer; put its files \(tokenizer.json\) beside"
    ):
        llm.generate("Once")


def test_a_directory_without_a_configuration(tmp_path: Path) -> None:
    """The most common wrong directory."""
    assert "has no config.json" in refusal(tmp_path)


def test_a_hub_id_that_cannot_be_had_is_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt directory looks like a hub id; the network's error alone would mislead."""

    def unreachable(*args: object, **options: object) -> None:
        raise OSError("We couldn't connect to the hub.\nCheck your connection.")

    monkeypatch.setattr(loading, "model_info", unreachable)
    message = refusal("pocket_modle")
    assert message == (
        "cannot load pocket_modle (no directory here, so a hub id): OSError: We couldn't connect to the hub; "
        "give a model directory, or a hub id that can be reached"
    )


def test_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files were looked for, each several times: 25 seconds for a misspelt name."""
    lookups = []

    def refuse(*args: object, **options: object) -> None:
        lookups.append(args)
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    refusal("nobody/no_such_model")
    lookups.clear()  # (the first time in a process, huggingface_hub looks something up for its own headers)
    refusal("nobody/no_such_model")
    assert len(lookups) <= 1


def test_a_gguf_file_says_what_reads_it(tmp_path: Path, monkeypatch) -> None:
    """A folder has no config.json to be missed; one of a kind that an old gguf lacks was called damaged."""
    monkeypatch.setattr(gguf_files, "is_gguf_available", lambda least: Version("0.16") >= Version(least))
    (tmp_path / "model.gguf").touch()
    for name in (tmp_path, tmp_path / "model.gguf"):
        assert 'is a GGUF file; pip install "gguf>=0.16.2" to read it' in refusal(name)


def test_an_adapter_is_not_left_out_in_silence(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without peft, transformers ignores the adapter: tokens of the base model."""
    monkeypatch.setattr(checkpoints, "is_peft_available", lambda: False)
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "an adapter (adapter_config.json); pip install peft, or merge" in refusal(directory)
    (directory / "config.json").unlink()
    assert "an adapter without its model" in refusal(directory)


@pytest.fixture
def own_code(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose files bring code, which leaves a trace when it runs; and somebody who types `y`."""
    (directory / "mine.py").write_text(
        "import pathlib\n"
        f"pathlib.Path({str(directory / 'ran')!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    config = json.loads((directory / "config.json").read_text())
    classes = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    config |= {"model_type": "mine", "auto_map": classes}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(directory / "modules"))
    return directory


def test_code_in_a_model_folder_never_runs_unasked(own_code: Path) -> None:
    """transformers asks on standard input, and whatever is piped in there may begin with a `y`."""
    assert "brings its own code; read it, then give trust_remote_code=True" in refusal(own_code)
    assert load_tokenizer(str(own_code), EngineConfig()) is None
    assert not (own_code / "ran").exists()


def test_code_in_a_model_folder_runs_when_it_is_trusted(own_code: Path) -> None:
    """Or there were no way to run such a model."""
    runner = ModelRunner.load(str(own_code), EngineConfig(num_blocks=5, trust_remote_code=True))
    assert (own_code / "ran").exists()
    assert type(runner.model).__name__ == "MineForCausalLM"


def test_nothing_says_that_trust_has_no_effect(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers warned that `trust_remote_code` "has no effect here and is ignored"."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    load_model(str(directory), EngineConfig(trust_remote_code=True), CPU)
    assert "trust_remote_code" not in caplog.text


@pytest.mark.parametrize("content", [None, "{broken", "{}"], ids=["missing", "broken", "empty"])
def test_a_tokenizer_that_cannot_be_built_is_a_warning(
    directory: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    """Token ids need none: exceptions of all kinds came up through `LLM(...)`, or nothing was logged."""
    if content is not None:
        (directory / "tokenizer.json").write_text(content)
    llm = LLM(str(directory), num_blocks=8)
    warning = next(message for message in caplog.messages if message.startswith("no tokenizer for"))
    assert re.search(r"so its prompts are token ids: \w+: .+", warning)
    assert llm.generate({"prompt_token_ids": [2, 3]}, SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="has no tokenizer"):
        llm.generate("text")


def test_a_missing_sentencepiece_is_named_with_its_command(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches advice to install tiktoken, which cannot read the file either: transformers' last attempt."""
    (directory / "tokenizer.model").write_bytes(b"\x0a")
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "sentencepiece" else found(n))
    assert load_tokenizer(str(directory), EngineConfig()) is None
    assert caplog.messages[-1].endswith(
        "tokenizer.model needs a package that is missing; pip install sentencepiece protobuf"
    )


def test_a_directory_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    """GPT-2's is built from nothing: a vocabulary of one token, and every text is empty."""
    build("gpt2").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), EngineConfig()) is None


def test_a_text_beyond_the_models_length_warns_of_no_indexing_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches transformers' warning of what never happens: such a prompt is refused, or cut."""
    tokenizer = load_tokenizer(str(pocket_model.PATH), EngineConfig())
    with caplog.at_level(logging.WARNING, "transformers"):
        logging.getLogger("transformers").addHandler(caplog.handler)
        try:
            assert len(tokenizer.encode("a b " * tokenizer.model_max_length)) > tokenizer.model_max_length
        finally:
            logging.getLogger("transformers").removeHandler(caplog.handler)
    assert caplog.messages == []


def test_a_tensor_of_another_shape_is_named(directory: Path) -> None:
    """A page of a table that ends in advice for trainers."""
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][:40].clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    message = refusal(directory)
    assert (
        "model.layers.1.mlp.up_proj.weight of shape [40, 32], but its config.json asks for [48, 32]"
        in message
    )


def test_a_configuration_without_weights(directory: Path) -> None:
    """An interrupted download."""
    (directory / "model.safetensors").unlink()
    message = refusal(directory)
    assert message.startswith("cannot load")
    assert message.endswith("; put the model's weights there, or give another directory")


def test_the_reason_is_reported_where_it_is_the_second_line(directory: Path) -> None:
    """Catches "Validation error for field 'num_attention_heads':" and nothing more."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_attention_heads": "four"}))
    assert re.search(r"field 'num_attention_heads': \S.*four", refusal(directory))


def test_unreadable_weights(directory: Path) -> None:
    """A truncated file."""
    (directory / "model.safetensors").write_bytes(b"\x07\x00\x00")
    assert refusal(directory).startswith("cannot load")


def test_an_unknown_model_type(directory: Path) -> None:
    """The configuration of something newer than the installed transformers."""
    (directory / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    assert refusal(directory).startswith("cannot load")


def test_missing_weights_are_not_made_up(directory: Path) -> None:
    """transformers fills them with random numbers and logs a warning."""
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    message = refusal(directory)
    assert "lacks 1 weights of LlamaForCausalLM, such as model.layers.1.mlp.up_proj.weight" in message


def test_a_length_beyond_the_model_is_a_config_error(directory: Path) -> None:
    """The same line whether the model is loaded or handed over."""
    with pytest.raises(ConfigError, match="max_model_len is 500; the model was trained for 128 positions"):
        ModelRunner.load(str(directory), EngineConfig(num_blocks=5, max_model_len=500))


@pytest.mark.parametrize(
    ("name", "present", "expected"),
    [
        ("auto", [], "cpu"),
        ("auto", ["cuda"], "cuda"),
        ("auto", ["mps"], "cpu"),
        ("cpu", ["cuda"], "cpu"),
        ("mps", ["mps"], "mps"),
    ],
)
def test_the_device_is_the_one_that_was_asked_for(name, present, expected, monkeypatch):
    """Catches a GPU taken from someone who said cpu, and a Mac's GPU that nobody can ask for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in present)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in present)
    assert find_device(name).type == expected


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_a_config_error(name, monkeypatch):
    """Catches torch's assertion about a build without CUDA, after the model was read."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"device is '{name}', which torch does not find here; choose cpu"):
        find_device(name)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("unable to mmap 8 bytes from file <a.safetensors>: Cannot allocate memory (12)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError(),
    ],
)
def test_a_model_that_does_not_fit_in_memory_is_refused_with_what_to_do(error, tmp_path, monkeypatch):
    """Catches the bare message of mmap, and one that names no reason."""

    def fail(*arguments, **options):
        raise error

    build("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(checkpoints.ModelLoadError, match="does not fit in memory: free some"):
        load_model(str(tmp_path), EngineConfig(), torch.device("cpu"))


def test_a_model_that_does_not_fit_on_the_device_is_refused_with_what_to_do(tmp_path, monkeypatch):
    """Catches a traceback for the commonest failure of a GPU."""

    def fail(model, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    build("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(loading.PreTrainedModel, "to", fail)
    with pytest.raises(checkpoints.ModelLoadError, match=r"memory of cuda: .*allocate 2\.00 GiB"):
        load_model(str(tmp_path), EngineConfig(), torch.device("cuda"))


@pytest.mark.parametrize("where", ["call_model", "optimize"])
def test_a_model_that_leaves_no_memory_for_its_probe_or_stacked_weights_is_refused_so_too(
    where, directory, monkeypatch
):
    """Catches "is not supported", and a traceback."""

    def fail(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(probe if where == "call_model" else model_runner, where, fail)
    with pytest.raises(checkpoints.ModelLoadError, match=rf"{directory} does not fit .*allocate 2\.00 GiB"):
        ModelRunner.load(str(directory), EngineConfig(num_blocks=5))
