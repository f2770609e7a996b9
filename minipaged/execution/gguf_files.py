"""Models in a GGUF file, llama.cpp's format, by transformers' tables: their weights become floats.

transformers silently ignores whatever it does not know: scaled positions, biases, ways to split a text. So
only kinds of models with a test are read, and only files in which nothing is ignored; some of what
transformers does not know is added here. (What reads them is imported only for such a file, because its names
in transformers may change.)
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import AutoConfig
from transformers.utils import is_gguf_available

from minipaged.execution.checkpoints import ModelLoadError, begins_with

ARCHITECTURES = ("gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen3")

OLDEST = "0.16.2"
"""Version of the package `gguf` that knows them all."""

SHAPES = {"attention.key_length", "attention.value_length", "rope.dimension_count"}
"""Evident from the weights, too: with other values, they would not fit."""

ADDED: dict[str, dict[str, str]] = {
    "phi3": {"attention.sliding_window": "sliding_window"},
    "qwen3": {"attention.key_length": "head_dim"},
}
"""Fields of a file that transformers does not read, and what its configuration calls them."""

ASSUMED: dict[str, dict[str, Any]] = {
    "gemma2": {"attention.key_length": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {"attention.key_length": 256},
}
"""What transformers takes for granted. (Where Gemma's heads have another size, scores are scaled by a
number that is not in the file.)"""

ROPE_FACTORS = "rope_freqs.weight"
"""What Llama 3.1 divides its rotary frequencies by; transformers does not read it."""

WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}
"""Ways to split a text after which a word that is a token stays whole; and, unless a file says otherwise, a
text begins with the first token."""

ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>"),
    *("<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
}
"""Tokens that end an answer, as in llama.cpp, too: a file names one, and its chat template writes another."""

_INSTEAD = "give the model as Hugging Face saves it, with config.json and safetensors"


def locate(name: str) -> Path:
    """The directory `name`, or the GGUF file that it is or holds instead of a config.json.

    Raises:
        ModelLoadError: there are several such files, or none, or no package that reads it, or transformers
            would ignore a part of its description of the model.
    """
    path = Path(name).expanduser()
    found = [path] if path.suffix == ".gguf" and not path.is_dir() else []
    if path.is_file() and not found and begins_with(path, b"GGUF"):
        raise ModelLoadError(f"{name} is a GGUF file, but its name does not end in .gguf; rename it")
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
    if not found:
        return path
    if len(found) > 1:
        raise ModelLoadError(f"{name} holds {len(found)} GGUF files; give one of them, such as {found[0]}")
    if not found[0].is_file():
        raise ModelLoadError(f"there is no file {name}; give a GGUF file, a model directory or a hub id")
    if not is_gguf_available(OLDEST):
        raise ModelLoadError(f'{name} is a GGUF file; pip install "gguf>={OLDEST}" to read it, or {_INSTEAD}')
    _check_header(found[0])
    return found[0]


def is_gguf(path: Path) -> bool:
    """Whether what `locate` returned is such a file."""
    return path.suffix == ".gguf" and path.is_file()


def _header(file: Path, *whole: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The file's description of its model, and the names of its tensors.

    Args:
        whole: the lists of strings to read; of others, there is only the length.
    """
    from transformers.integrations.gguf import read_gguf_metadata

    return read_gguf_metadata(str(file), whole)


def _check_header(file: Path) -> None:
    from transformers.integrations import GGUF_CONFIG_MAPPING

    try:
        meta, _ = _header(file)
    except Exception as error:  # of all kinds: these may be any bytes
        raise ModelLoadError(
            f"{file} is damaged, or no GGUF file that transformers can read: {error}; compare its size with "
            "the original's"
        ) from error
    kind = meta["general.architecture"]
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelLoadError(
            f"{file} is a GGUF file of a {kind} model, and only {known} are read; {_INSTEAD}"
        )
    if (parts := meta.get("split.count", 1)) > 1:
        raise ModelLoadError(f"{file} is one of {parts} parts; join them with llama-gguf-split --merge")
    mapped: Any = GGUF_CONFIG_MAPPING[kind]
    is_scaled = meta.get(f"{kind}.rope.scaling.type") == "linear"
    read = {*mapped, *SHAPES, *ADDED.get(kind, ()), *(["rope.scaling.factor"] if is_scaled else [])}
    assumed = {"rope.scaling.type": "linear" if is_scaled else "none", **ASSUMED.get(kind, {})}
    if kind == "phi3":  # neither longer contexts nor partly rotated heads
        assumed["rope.scaling.original_context_length"] = meta.get("phi3.context_length")
        assumed["rope.dimension_count"] = meta["phi3.embedding_length"] // meta["phi3.attention.head_count"]
    for key, value in meta.items():
        short = key.removeprefix(f"{kind}.")
        is_right = value == assumed[short] if short in assumed else short in read
        if short != key and not is_right:
            raise ModelLoadError(f"{file} has {key} = {value}, which is not read from GGUF; {_INSTEAD}")


def read_config(file: Path) -> Any:
    """The model's configuration."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    meta, tensors = _header(file, "tokenizer.ggml.tokens")
    kind = meta["general.architecture"]
    mapped: Any = GGUF_CONFIG_MAPPING[kind]
    names = {**mapped, **ADDED.get(kind, {})}
    values = {name: meta[f"{kind}.{key}"] for key, name in names.items() if name and f"{kind}.{key}" in meta}
    if values.get("sliding_window") == 0:  # (so a file says that there is none)
        values["sliding_window"] = None
    tokens = meta.get("tokenizer.ggml.tokens", [])
    named = (meta.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))
    ends = [*named, *(number for number, token in enumerate(tokens) if token in ENDS)]
    config = AutoConfig.for_model(
        {"gemma3": "gemma3_text"}.get(kind, kind),
        **{"vocab_size": len(tokens)} | values,
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=[*dict.fromkeys(end for end in ends if end is not None)] or None,
        pad_token_id=meta.get("tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )
    if factor := meta.get(f"{kind}.rope.scaling.factor"):
        rope = config.rope_parameters
        rope.get("full_attention", rope).update(rope_type="linear", factor=factor)
    return config


def _tensors(file: Path) -> dict[str, tuple[np.ndarray, Any]]:
    """The blocks of each tensor, which stay in the file, and of what kind they are."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape
    from transformers.integrations.gguf import reader

    blob = np.memmap(file, np.uint8, "r")
    meta, count, position = reader._read_metadata(blob, str(file))
    table, position = reader._read_tensor_table(blob, count, position)
    aligned = meta.get("general.alignment", 32)
    start = -(-position // aligned) * aligned
    found = {}
    for name, shape, number, offset in table:
        kind = GGMLQuantizationType(number)
        shape = quant_shape_to_byte_shape(shape, kind)
        found[name] = blob[start + offset :][: prod(shape)].reshape(shape), kind
    return found


class _Stored:
    """A weight in the file; transformers indexes it to read its values."""

    def __init__(self, name: str, blocks: np.ndarray, kind: Any, processor: Any) -> None:
        self.name, self.blocks, self.kind, self.processor = name, blocks, kind, processor

    def __getitem__(self, _: Any) -> torch.Tensor:
        from gguf import dequantize

        values = self.processor.process(dequantize(self.blocks, self.kind), self.name).weights
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def weights(name: str, file: Path, model: Any) -> dict[str, _Stored]:
    """The model's weights, each of them read when it is needed.

    Raises:
        ModelLoadError: the file has others, too.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    meta, _ = _header(file)
    kind = meta["general.architecture"]
    architecture = next(number for number, known in MODEL_ARCH_NAMES.items() if known == kind)
    names = get_tensor_name_map(architecture, model.config.num_hidden_layers)
    parts = (path.rsplit(".", 1) for path in model.state_dict())
    own = {f"{names.get_name(module)}.{rest}": f"{module}.{rest}" for module, rest in parts}
    tensors = _tensors(file)
    tensors.pop(ROPE_FACTORS, None)  # (see `scale_positions`)
    if unread := sorted(tensors.keys() - own.keys()):
        raise ModelLoadError(f"{name} has {unread[0]}, which is not read for a {kind} model; {_INSTEAD}")
    processor = TENSOR_PROCESSORS.get(kind, TensorProcessor)(model.config.to_dict())
    return {own[tensor]: _Stored(tensor, *stored, processor) for tensor, stored in tensors.items()}


def scale_positions(file: Path, model: Any) -> None:
    """Give the model the factors of its rotary frequencies, if the file has any."""
    if factors := _tensors(file).get(ROPE_FACTORS):
        model.base_model.rotary_emb.inv_freq /= torch.from_numpy(factors[0].view(np.float32).copy())


def check_splits(file: Path) -> None:
    """Raise ValueError: it is not known here how the model learned to split a text."""
    if (file.parent / "tokenizer.json").is_file():  # it comes first
        return
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    meta, _ = _header(file)
    way = meta.get("tokenizer.ggml.pre", "default")  # llama.cpp's, which is not transformers'
    known = {*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2", "smollm"}
    if meta.get("tokenizer.ggml.model") == "gpt2" and way not in known:
        raise ValueError(f"it is not known how it splits a text ({way}); put its tokenizer.json beside it")


def as_llama_cpp(file: Path, tokenizer: Any) -> None:
    """Let the tokenizer do what llama.cpp does with the file, where transformers does something else."""
    if (file.parent / "tokenizer.json").is_file():
        return
    meta, _ = _header(file)
    backend, way = tokenizer.backend_tokenizer, meta.get("tokenizer.ggml.pre")
    if meta.get("tokenizer.ggml.model") == "llama":  # a space before each text, also if it begins with one
        spaced = meta.get("tokenizer.ggml.add_space_prefix", True)
        before = [normalizers.Prepend("▁")] if spaced else []
        after = [decoders.Strip(" ", 1)] if spaced else []
        backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
        joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*joined, *after])
    if way == "smollm":
        digits, words = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    if way in WHOLE_WORDS:
        backend.model.ignore_merges = True
        tokenizer.add_bos_token = meta.get("tokenizer.ggml.add_bos_token", True)
    count = meta["tokenizer.ggml.tokens"]
    if len(tokenizer) > count:  # transformers adds GPT-2's <|endoftext|>
        added = sorted(backend.get_added_tokens_decoder().items())
        tokenizer._tokenizer = Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            setattr(tokenizer._tokenizer, part, getattr(backend, part))
        tokenizer._tokenizer.add_tokens([token for number, token in added if number < count])
