"""What the files of a model are; quantized weights become floats while they are read (`float_readers`).

FP8 (DeepSeek V3, Qwen3-FP8) has a scale for each block of a matrix, MXFP4 (gpt-oss) a power of two for each
32 values. Every other kind is left to transformers and the package that it needs.
"""

from __future__ import annotations

import json
import reprlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import is_peft_available

INSTEAD = "give the model in floats, FP8 or MXFP4"


class ModelLoadError(ValueError):
    """The model cannot be found or read; one line that says what to change."""


def check_directory(name: str, path: Path, has_defaults: bool) -> None:
    """Raise ModelLoadError: `path` has no model, one in GGUF, an adapter that would be left out, pointers in
    place of files, or, if it is to be read (`has_defaults`), a broken generation_config.json."""
    has_config, has_adapter = ((path / f"{kind}config.json").is_file() for kind in ("", "adapter_"))
    if has_adapter and not has_config:
        raise ModelLoadError(
            f"{name} holds an adapter without its model; merge them, or put both into one directory"
        )
    if has_adapter and not is_peft_available():
        raise ModelLoadError(
            f"{name} holds an adapter (adapter_config.json); "
            "pip install peft, or merge the adapter into the model"
        )
    if not has_config:
        raise ModelLoadError(f"{path} has no config.json; give the directory of a Hugging Face model")
    if pointer := _pointer_in(path):
        raise ModelLoadError(
            f"{pointer} is a pointer of Git LFS, not the file itself; run git lfs pull there"
        )
    defaults = path / "generation_config.json"
    if has_defaults and defaults.is_file():
        # transformers would leave a broken file out, and the model would not end its answers.
        try:
            if not isinstance(json.loads(defaults.read_text(encoding="utf-8")), dict):
                raise ValueError("it is no object")
        except ValueError as error:
            raise ModelLoadError(f"{defaults} is not valid JSON: {error}; fix or remove it") from error
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs and not any(file.suffix in (".safetensors", ".bin") for file in path.iterdir()):
        raise ModelLoadError(f"{name} has its weights as GGUF only; give the .gguf file itself: {ggufs[0]}")


def _pointer_in(path: Path) -> Path | None:
    """A file that would be read, and in whose place a clone without its large files has a pointer."""
    weights = "model*.safetensors" if any(path.glob("model*.safetensors")) else "pytorch_model*.bin"
    files = (file for pattern in (weights, "*.json", "*.model") for file in path.glob(pattern))
    return next((file for file in files if begins_with(file, b"version https://git-lfs")), None)


def begins_with(file: Path, start: bytes) -> bool:
    """Whether these are the first bytes of a file that can be read."""
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(len(start)) == start
    return False


def check_description(name: str, described: Any) -> None:
    """Raise ModelLoadError: an invalid `quantization_config`; transformers fails when it prints it."""
    # Only bitsandbytes does not name its method.
    method = described.get("quant_method", "") if isinstance(described, dict) and described else None
    if described is not None and not isinstance(method, str):
        raise ModelLoadError(
            f"{name} has quantization_config = {reprlib.repr(described)} in its config.json, which names no "
            f"quant_method; add the one it was made with, or {INSTEAD}"
        )


def read_as_floats(name: str, config: PreTrainedConfig) -> str | None:
    """Have transformers make floats of quantized weights where it can; returns the kind where it cannot.

    Raises:
        ModelLoadError: transformers would take the quantized numbers for weights.
    """
    parts = (config, config.get_text_config(decoder=True))
    described = next((found for part in parts if (found := getattr(part, "quantization_config", None))), None)
    if described is None:
        return None
    from minipaged.execution.float_readers import READERS

    kind = described.get("quant_method", "bitsandbytes")  # only bitsandbytes does not name it
    if kind in READERS:
        described |= {"quant_method": READERS[kind], "dequantize": True}
        return None
    if kind not in {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}:
        raise ModelLoadError(
            f"{name} has quantized weights ({kind}), which transformers cannot read; {INSTEAD}"
        )
    return kind
