"""From a directory or hub id to a model that paged attention can serve, or one clear line why not.

What would silently differ from the model's own attention is refused here or by the `ProbeContext`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from minipaged.config import ConfigError, DType
from minipaged.execution.attention import UnsupportedModelError


class ModelLoadError(ValueError):
    """The model cannot be found or read; one line that says what to change."""


def load_model(name: str, dtype: DType, device: torch.device) -> PreTrainedModel:
    """The decoder in the directory `name`, or of that id on the Hugging Face hub, ready for inference.

    Raises:
        ModelLoadError: no such directory, no config.json in it, weights missing or unreadable.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{name} has no config.json; give the directory of a Hugging Face model")
    elif path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"there is no directory {name}; give a model directory or a hub id (org/name)")
    source = str(path) if path.is_dir() else name
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
        model, info = loaded
    except Exception as error:  # transformers, the hub and safetensors raise all kinds; one line for all
        what = name if path.is_dir() else f"{name} (no directory here, so a hub id)"
        raise ModelLoadError(f"cannot load {what}: {in_one_line(error)}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelLoadError(
            f"{name} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}; "
            "the checkpoint is damaged or of another architecture"
        )
    return model.to(device).eval()


def in_one_line(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    lines = (line for line in str(error).splitlines() if line.strip())
    return f"{type(error).__name__}: {next(lines, 'no reason given')}"


def load_tokenizer(name: str) -> Any:
    """The tokenizer beside the model, or None if it has none (then prompts are token ids)."""
    try:
        return AutoTokenizer.from_pretrained(str(Path(name).expanduser()))
    except (OSError, ValueError):
        return None


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the decoder, also where it is a part of a multimodal model."""
    return model.config.get_text_config(decoder=True)


def end_of_text(model: PreTrainedModel) -> tuple[int, ...]:
    """Token ids that end a text, as `generate` of transformers sees them."""
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config(model), "eos_token_id", None)
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def longest_sequence(config: Any, max_model_len: int | None) -> int:
    """The length limit: that of the model's text configuration, or the shorter `max_model_len`.

    Raises:
        ConfigError: `max_model_len` is longer than the model can do, or neither sets a limit.
        UnsupportedModelError: rotary embeddings that depend on the other requests of a step.
    """
    trained = getattr(config, "max_position_embeddings", None)
    longest = max_model_len or trained
    if longest is None:
        raise ConfigError(f"max_model_len is None and {config.model_type} names no limit; set max_model_len")
    if trained is not None and longest > trained:
        raise ConfigError(f"max_model_len is {longest}; the model ends at {trained} positions, give no more")
    # Two rope types switch frequencies when the longest position *of the forward pass* crosses a length: the
    # tokens of one request would depend on the others. Below that length they are plain.
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer = parameters.values() if all(isinstance(p, dict) for p in parameters.values()) else [parameters]
    for rope in per_layer:
        kind = rope.get("rope_type", "default")
        if kind == "longrope" or "dynamic" in kind:
            exact = rope.get("original_max_position_embeddings") or trained or 0
            if max_model_len is None or max_model_len > exact:
                raise UnsupportedModelError(
                    f"its rope type {kind!r} depends on the longest request of a step; it is exact up to "
                    f"{exact} positions: set max_model_len to {exact} or less"
                )
    return longest
