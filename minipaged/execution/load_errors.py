"""Why a model cannot be loaded or run, in one line, where another library raised the error."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

import torch

from minipaged.execution import gguf_files
from minipaged.execution.checkpoints import INSTEAD, ModelLoadError

DAMAGED = re.compile(
    r"SafetensorError|UnpicklingError|EOFError|PytorchStreamReader|\[Errno 22\]|not a valid JSON"
    r"|JSONDecodeError"
)
"""In what other libraries say about a file that is not whole."""


def refuse(name: str, path: Path, kind: str | None, error: Exception) -> NoReturn:
    """Raise ModelLoadError: other libraries raised `error`; `kind`: of quantized weights, which they read."""
    if "trust_remote_code" in str(error):
        raise ModelLoadError(
            f"{name} brings its own code; read it, then give trust_remote_code=True (--trust-remote-code)"
        ) from error
    reason = in_one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    # (Bytes that are no pickle cause errors of all kinds; torch's message advises to run the file's code.)
    is_pickle = isinstance(error, UnpicklingError) or "weights_only" in frames[-1].filename + str(error)
    if is_pickle:
        found = re.search("(?<=Unsupported global: GLOBAL )[^ ]+|TorchScript", str(error))
        reason = (
            f"its weights hold {found[0]}, which is not loaded; convert them to safetensors"
            if found
            else "UnpicklingError"
        )
    if isinstance(error, MemoryError) or "allocate memory" in reason:
        raise ModelLoadError(
            f"{name} does not fit in memory: free some, raise the process's limit, or give a smaller model "
            f"({reason})"
        ) from error
    if kind is not None:
        reason += f"; its weights are quantized ({kind}): do what this says, or {INSTEAD}"
    is_gguf = gguf_files.is_gguf(path)
    if is_gguf:
        reason += "; the file may be damaged or cut short: compare its size with the original's"
    elif DAMAGED.search(reason) and (path.is_dir() or is_pickle):
        reason = f"{reason.rstrip('.')}; a file is damaged or cut short: download it again"
    elif "no file named" in reason and path.is_dir():
        reason = f"{reason.rstrip('.')}; put the model's weights there, or give another directory"
    elif any(frame.name == "adjust_generation_fn" for frame in frames):
        reason = (
            f"{reason.rstrip('.')}; fix generation_config.json, "
            'or set generation_config="none" (--generation-config none)'
        )
    elif isinstance(error, KeyError):
        reason += "; transformers does not know this name in config.json, or a JSON file lacks it"
    if path.exists() or kind is not None:
        raise ModelLoadError(f"cannot load {path if is_gguf else name}: {reason}") from error
    raise ModelLoadError(
        f"cannot load {name} (no directory here, so a hub id): {reason.rstrip('.')}; "
        "give a model directory, or a hub id that can be reached"
    ) from error


@contextmanager
def within_memory(name: str, device: torch.device) -> Iterator[None]:
    """Raise ModelLoadError where the memory of a GPU is too small for a model and what is made of it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(
            f"{name} does not fit in the memory of {device}: end other programs that use it, give a smaller "
            f"model, or split it with tensor_parallel_size ({in_one_line(error)})"
        ) from error


def in_one_line(error: BaseException) -> str:
    """The type of an error and the first line of its message; the second, too, if that ends in a colon."""
    first, second, *_ = (*(line.strip() for line in str(error).splitlines() if line.strip()), "", "")
    message = f"{first} {second}" if first.endswith(":") else first
    return f"{type(error).__name__}: {message.strip() or 'no reason given'}"


def why_forward_failed(error: Exception, config: Any) -> str:
    """One line about an exception from the model's code, which may rely on its own mask or cache."""
    if getattr(config, "index_topk", None):
        return f"it attends to the index_topk = {config.index_topk} tokens that its own indexer chooses"
    *_, frame = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frame.filename).stem}.{frame.name}"
    return f"its forward pass fails (perhaps without its own mask or cache), in {place}: {in_one_line(error)}"
