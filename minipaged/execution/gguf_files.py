"""Models in a GGUF file, llama.cpp's format: transformers reads it and turns its weights into floats.

It passes over whatever it does not know, in silence: scaled positions, biases, ways to split a text. So only
kinds of models with a test are read, and only files in which nothing is passed over. (What reads them is
imported when there is such a file, for its names in transformers may change.)
"""

from __future__ import annotations

import importlib.util
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from minipaged.execution.checkpoints import ModelLoadError

ARCHITECTURES = ("llama", "qwen2", "qwen3")

SHAPES = {"attention.key_length", "attention.value_length", "rope.dimension_count"}
"""What the weights show as well: were it another one, they would not fit."""

ROPE_FACTORS = "rope_freqs.weight"
"""What Llama 3.1 divides its rotary frequencies by; transformers does not read it."""

_INSTEAD = "give the model as Hugging Face saves it, with config.json and safetensors"


def locate(name: str) -> Path:
    """The directory `name`, or the GGUF file that it is or holds instead of a config.json.

    Raises:
        ModelLoadError: there are several such files, or none, or no package that reads it, or transformers
            would leave out something that it says about its model.
    """
    path = Path(name).expanduser()
    found = [path] if path.suffix == ".gguf" and not path.is_dir() else []
    if path.is_file() and not found and _begins_as_gguf(path):
        raise ModelLoadError(f"{name} is a GGUF file, but its name does not end in .gguf; rename it")
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
    if not found:
        return path
    if len(found) > 1:
        raise ModelLoadError(f"{name} holds {len(found)} GGUF files; give one of them, such as {found[0]}")
    if not found[0].is_file():
        raise ModelLoadError(f"there is no file {name}; give a GGUF file, a model directory or a hub id")
    if missing := [package for package in ("gguf", "accelerate") if not importlib.util.find_spec(package)]:
        raise ModelLoadError(
            f"{name} is a GGUF file; pip install {' '.join(missing)} to read it, or {_INSTEAD}"
        )
    _check_header(name, found[0])
    return found[0]


def is_gguf(path: Path) -> bool:
    """Whether what `locate` returned is such a file."""
    return path.suffix == ".gguf" and path.is_file()


def _header(file: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the file says about its model (of a list, only its length), and the names of its tensors."""
    from transformers.integrations.gguf import read_gguf_metadata

    return read_gguf_metadata(str(file))


def _begins_as_gguf(file: Path) -> bool:
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(4) == b"GGUF"
    return False


def _check_header(name: str, file: Path) -> None:
    from transformers.integrations import GGUF_CONFIG_MAPPING

    try:
        said, _ = _header(file)
    except Exception as error:  # of all kinds, for these are any bytes
        raise ModelLoadError(
            f"{name} is damaged, or no GGUF file that transformers can read: {error}"
        ) from error
    kind = said["general.architecture"]
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelLoadError(
            f"{name} is a GGUF file of a {kind} model, and only {known} are read; {_INSTEAD}"
        )
    if (parts := said.get("split.count", 1)) > 1:
        raise ModelLoadError(f"{name} is one of {parts} parts; join them with llama-gguf-split --merge")
    mapped: Any = GGUF_CONFIG_MAPPING[kind]
    read = {f"{kind}.{key}" for key in (*mapped, *SHAPES)}
    default = {f"{kind}.rope.scaling.type": "none"}
    for key, value in said.items():
        if key.startswith(f"{kind}.") and key not in read and value != default.get(key):
            raise ModelLoadError(
                f"{name} has {key} = {value}, which transformers does not read from GGUF; {_INSTEAD}"
            )


def complete(name: str, file: Path, model: Any) -> None:
    """Give the model the factors of its rotary frequencies; refuse it if other tensors were left out."""
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    _, tensors = _header(file)
    read = {*get_gguf_hf_weights_map(model, TensorProcessor()), ROPE_FACTORS}
    if unread := sorted({*tensors} - read):
        kind = model.config.model_type
        raise ModelLoadError(
            f"{name} has {unread[0]}, which transformers does not read for a {kind} model; {_INSTEAD}"
        )
    if ROPE_FACTORS in tensors:
        (factors,) = (tensor.data for tensor in GGUFReader(file).tensors if tensor.name == ROPE_FACTORS)
        model.base_model.rotary_emb.inv_freq /= torch.from_numpy(np.array(factors, np.float32))


def check_splits(file: Path) -> None:
    """Raises ValueError: transformers would split a text otherwise than the model learned it."""
    if (file.parent / "tokenizer.json").is_file():  # it comes first
        return
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    said, _ = _header(file)
    way = said.get("tokenizer.ggml.pre", "default")  # llama.cpp's, which is not transformers'
    if said.get("tokenizer.ggml.model") == "gpt2" and way not in {*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2"}:
        raise ValueError(
            f"transformers does not know how it splits a text ({way}); put its tokenizer.json beside it"
        )


def remove_additions(file: Path, tokenizer: Any) -> None:
    """Take tokens from the tokenizer that the file does not have: transformers adds GPT-2's <|endoftext|>."""
    said, _ = _header(file)
    count = said["tokenizer.ggml.tokens"]
    if len(tokenizer) <= count or (file.parent / "tokenizer.json").is_file():
        return
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < count]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
