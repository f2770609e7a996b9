"""From a directory or hub id to a model that paged attention can serve, or one clear line why not.

A model whose results would silently differ from its own attention's is refused here or by the `ProbeContext`.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from huggingface_hub import model_info
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.utils import logging as transformers_logging

from minipaged.config import ConfigError, Device, EngineConfig
from minipaged.execution import gguf_files
from minipaged.execution.checkpoints import (
    INSTEAD,
    ModelLoadError,
    check_description,
    check_directory,
    read_as_floats,
)
from minipaged.execution.load_errors import in_one_line, refuse, within_memory
from minipaged.progress import progress_bar

logger = logging.getLogger(__name__)

HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub to say whether it has a model."""

STATEFUL = {"linear_attention", "conv", "hybrid"}
"""Types of layers that keep a recurrent state, where a configuration lists types. (Others show it later.)"""

_loading = Lock()
"""Held while transformers loads a model, a download included: it replaces functions of its own classes
meanwhile."""

_SCALE = re.compile(r"(.*(?:weight|proj))_scales?(?:_inv)?")
"""The name of a quantized weight's scale, and of the weight."""

_TOKENIZER_FILE = re.compile(r"token|vocab|spiece|merges|bpe|\.model$|\.tiktoken$", re.IGNORECASE)


def find_device(name: Device) -> torch.device:
    """The torch device with that name; "auto": CUDA or ROCm if there is a GPU, else the CPU.

    Raises:
        ConfigError: this machine, or this build of torch, has no such device.
    """
    has = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = "cuda" if has["cuda"] else "cpu"
    if not has[name]:
        known = " or ".join(device for device in has if has[device])
        raise ConfigError(f"device is {name!r}, which torch does not find here; choose {known}")
    return torch.device(name)


def load_model(name: str, config: EngineConfig, device: torch.device) -> PreTrainedModel:
    """The decoder in the directory or GGUF file `name`, or of that id on the hub, ready for inference.

    Code that comes with the model's files runs only with `trust_remote_code`. On the device "meta", the model
    has shapes only: no weights are read.

    Raises:
        ModelLoadError: no such directory, no config.json in it, weights missing, unreadable or misshapen, or
            more than the memory holds.
        ConfigError: settings that this model cannot serve, as far as its configuration shows.
    """
    path = gguf_files.locate(name)
    is_gguf = gguf_files.is_gguf(path)
    if not is_gguf:
        _check_path(name, path, config.generation_config != "none")
    kind: str | None = None

    def load(source: Any, **options: Any) -> Any:
        nonlocal kind
        options["revision"] = config.revision or "main"
        if path.is_dir():
            described, _ = PreTrainedConfig.get_config_dict(source, **options)
            check_description(name, described.get("quantization_config"))
        options["trust_remote_code"] = config.trust_remote_code  # (above, it would only cause a warning)
        if is_gguf:
            described = gguf_files.read_config(path)
        else:
            described = AutoConfig.from_pretrained(source, **options)
        described._attn_implementation = None  # it is replaced, so the package for it may be missing
        kind = read_as_floats(name, described)
        layer_types = getattr(described.get_text_config(decoder=True), "layer_types", None)
        if not STATEFUL.isdisjoint(layer_types or ()):
            config.check_states()
        auto = auto_class(described)
        if device.type == "meta" or is_gguf:
            with torch.device("meta"):
                model = auto.from_config(described, trust_remote_code=config.trust_remote_code)
        if device.type == "meta":
            return model, {}
        is_local = "local_files_only" in options
        if is_gguf:
            source, auto = None, type(model)
            options = {"state_dict": gguf_files.weights(name, path, model)}
        if config.generation_config == "none":
            options["generation_config"] = GenerationConfig()  # (or transformers would check the file's)
        with _weights_counted(enabled=is_local):  # a download has the hub's own bars
            return auto.from_pretrained(
                source,
                config=described,
                dtype=config.dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )

    try:
        with _loading:
            model, info = _local_first(path, name, load, config.revision)
    except (ConfigError, ModelLoadError):
        raise
    except Exception as error:  # transformers, the hub and safetensors raise all kinds; one line for all
        refuse(name, path, kind, error)
    if device.type != "meta":
        _check_weights(name, model, info)
        if is_gguf:
            gguf_files.scale_positions(path, model)
    if config.generation_config == "none":
        model.generation_config = None
    with within_memory(name, device):
        return model.to(device).eval()


def _check_path(name: str, path: Path, has_defaults: bool) -> None:
    """Raise ModelLoadError: there is no model at this path, and its name is no hub id."""
    if path.is_dir():
        check_directory(name, path, has_defaults)
    elif path.is_file():
        directory = path.parent if (path.parent / "config.json").is_file() else "a model directory"
        raise ModelLoadError(f"{name} is a file; give {directory}, or a GGUF file")
    elif path.exists() or _is_path(name):
        raise ModelLoadError(f"there is no directory {name}; give a model directory or a hub id (org/name)")


def _is_path(name: str) -> bool:
    """Whether it can only be a path, not a hub id."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _check_weights(name: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise ModelLoadError: weights are missing, misshapen, or quantized without an entry in config.json.

    `info` is transformers' report on the loading.
    """
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelLoadError(
            f"{name} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}; "
            "the checkpoint is damaged or belongs to another architecture"
        )
    for tensor, found, expected in info["mismatched_keys"]:
        raise ModelLoadError(
            f"{name} has {tensor} of shape {list(found)}, but its config.json asks for {list(expected)}; "
            "the checkpoint is damaged or belongs to another architecture"
        )
    unread = info["unexpected_keys"]
    for tensor in sorted(unread):
        if (scaled := _SCALE.fullmatch(tensor)) and scaled[1] not in unread:
            raise ModelLoadError(
                f"{name} has {tensor}, which quantized weights have, but its config.json has no "
                f"quantization_config that describes them; add the one they were made with, or {INSTEAD}"
            )


@contextmanager
def _weights_counted(enabled: bool) -> Iterator[None]:
    """Our own progress bar instead of the one that transformers shows while it loads weights."""
    with progress_bar("loading weights", enabled=enabled) as advance:

        def counted(weights: Any) -> Iterator[Any]:
            for number, weight in enumerate(weights):
                advance(number, len(weights))
                yield weight
            advance(len(weights))

        def bar(make: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
            is_ours = enabled and options.get("desc") == "Loading weights"
            return counted(given[0]) if is_ours else make(*given, **options)

        before = transformers_logging.set_tqdm_hook(bar)
        try:
            yield
        finally:
            transformers_logging.set_tqdm_hook(before)


def _local_first(path: Path, name: str, load: Callable[..., Any], revision: str | None) -> Any:
    """`load` a directory or GGUF file, or a hub id from the local cache, or else from the hub."""
    if path.is_dir():
        return load(str(path), local_files_only=True)
    if gguf_files.is_gguf(path):
        return load(str(path.parent), gguf_file=path.name, local_files_only=True)
    try:
        return load(name, local_files_only=True)
    except OSError:
        # Fails at once where transformers would keep retrying.
        model_info(name, revision=revision, timeout=HUB_TIMEOUT)
        return load(name)


def auto_class(config: PreTrainedConfig) -> Any:
    """The class that builds the model, even if it takes images and text: its text part is a decoder."""
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    takes_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if takes_images and not is_causal else AutoModelForCausalLM


def load_tokenizer(name: str, config: EngineConfig, must_exist: bool = False) -> Any:
    """The tokenizer of a model, or None if it cannot be built (then prompts are token ids).

    Raises:
        ModelLoadError: it cannot be built and `must_exist`.
    """
    options = {"trust_remote_code": config.trust_remote_code, "revision": config.revision or "main"}
    path = Path(name).expanduser()
    try:
        path = gguf_files.locate(name)
        if _is_path(name) and not path.exists():
            raise FileNotFoundError("there is no such directory")
        if path.is_dir() and not any(_TOKENIZER_FILE.search(file.name) for file in path.iterdir()):
            raise FileNotFoundError("it has no tokenizer.json, vocabulary or similar file")
        is_gguf = gguf_files.is_gguf(path)
        if is_gguf:
            gguf_files.check_splits(path)
        kind: Any = PreTrainedTokenizerFast if is_gguf else AutoTokenizer  # (which reads all of a GGUF file)
        tokenizer = _local_first(path, name, partial(kind.from_pretrained, **options), config.revision)
        if is_gguf:
            gguf_files.as_llama_cpp(path, tokenizer)
        if not len(tokenizer):
            raise ValueError("its vocabulary is empty")
        # (Else it warns once that a long text will cause indexing errors; such a text is refused or cut.)
        warned = getattr(tokenizer, "deprecation_warnings", {})
        warned["sequence-length-is-longer-than-the-specified-maximum"] = True
    except Exception as error:  # of all kinds, as for models
        reason = in_one_line(error)
        if importlib.util.find_spec("sentencepiece") is None and (path / "tokenizer.model").is_file():
            reason = "tokenizer.model needs a package that is missing; pip install sentencepiece protobuf"
        if must_exist:
            raise ModelLoadError(
                f"tokenizer is {name!r}, which cannot be loaded: {reason}; give a directory or a hub id"
            ) from error
        logger.warning("no tokenizer for %s, so its prompts are token ids: %s", name, reason)
        return None
    return tokenizer
