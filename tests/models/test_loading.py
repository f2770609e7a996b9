"""Models from a directory; and one clear line for everything that is not one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from minipaged.config import ConfigError, EngineConfig
from minipaged.execution.loading import ModelLoadError, load_model
from minipaged.execution.model_runner import ModelRunner
from tests.models.driver import Driver, random_tokens
from tests.models.zoo import VOCAB_SIZE, build

CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path)
    return tmp_path


def refusal(name: str | Path) -> str:
    with pytest.raises(ModelLoadError) as error:
        load_model(str(name), "auto", CPU)
    message = str(error.value)
    assert "\n" not in message
    assert str(name) in message
    return message


def test_a_saved_model_computes_what_it_did_before(directory: Path) -> None:
    """Weights, configuration and rope survive the way through the files."""
    token_ids = random_tokens(9, VOCAB_SIZE, seed=1)
    logits = [
        driver.logits([(driver.add(token_ids), 9)])[0]
        for driver in (Driver(build("llama")), Driver(load_model(str(directory), "float32", CPU)))
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


def test_a_file_is_no_directory(directory: Path) -> None:
    """Somebody named the weights themselves."""
    assert "there is no directory" in refusal(directory / "config.json")


def test_a_directory_without_a_configuration(tmp_path: Path) -> None:
    """The most common wrong directory."""
    assert "has no config.json" in refusal(tmp_path)


def test_a_hub_id_that_cannot_be_had_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt directory looks like a hub id; the network's error alone would mislead."""

    def unreachable(*args: object, **options: object) -> None:
        raise OSError("We couldn't connect to the hub.\nCheck your connection.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", unreachable)
    message = refusal("pocket_modle")
    assert message == (
        "cannot load pocket_modle (no directory here, so a hub id): OSError: We couldn't connect to the hub."
    )


def test_a_configuration_without_weights(directory: Path) -> None:
    """An interrupted download."""
    (directory / "model.safetensors").unlink()
    assert refusal(directory).startswith("cannot load")


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
    with pytest.raises(ConfigError, match="max_model_len is 500; the model ends at 128 positions"):
        ModelRunner.load(str(directory), EngineConfig(num_blocks=5, max_model_len=500))
