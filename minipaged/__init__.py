"""Learn PagedAttention by building a small LLM engine.

    from minipaged import LLM, SamplingParams
    LLM().generate("Once upon a time", SamplingParams(max_tokens=64))

The names below are loaded when they are first used, so that `minipaged.memory` and
`minipaged.scheduling` import without torch.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minipaged.async_llm import AsyncLLM
    from minipaged.config import EngineConfig
    from minipaged.decoding.params import BeamSearchParams, RequestOutputKind, SamplingParams
    from minipaged.decoding.structured import StructuredOutputsParams
    from minipaged.engine_thread import EngineStoppedError, QueueFullError
    from minipaged.llm import LLM
    from minipaged.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from minipaged.prompts import TextPrompt, TokensPrompt

__version__ = "0.1.0"

_HOME = {
    "AsyncLLM": "minipaged.async_llm",
    "BeamSearchOutput": "minipaged.outputs",
    "BeamSearchParams": "minipaged.decoding.params",
    "BeamSearchSequence": "minipaged.outputs",
    "CompletionOutput": "minipaged.outputs",
    "EngineConfig": "minipaged.config",
    "EngineStoppedError": "minipaged.engine_thread",
    "QueueFullError": "minipaged.engine_thread",
    "LLM": "minipaged.llm",
    "Logprob": "minipaged.outputs",
    "RequestMetrics": "minipaged.outputs",
    "RequestOutput": "minipaged.outputs",
    "RequestOutputKind": "minipaged.decoding.params",
    "SamplingParams": "minipaged.decoding.params",
    "StructuredOutputsParams": "minipaged.decoding.structured",
    "TextPrompt": "minipaged.prompts",
    "TokensPrompt": "minipaged.prompts",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineConfig",
    "EngineStoppedError",
    "Logprob",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

# `minipaged/kernels` is a link to the kernels/ beside the package. In a clone without links (on Windows) it
# is a text file; this module then stands for the folder.
if not Path(__file__).with_name("kernels").is_dir():
    _spec = ModuleSpec("minipaged.kernels", None, is_package=True)
    _spec.submodule_search_locations = [str(Path(__file__).parents[1] / "kernels")]
    sys.modules[_spec.name] = kernels = module_from_spec(_spec)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    instead: dict[str, str] = import_module("minipaged.vllm_names").IMPORTS
    if name in instead:
        raise ImportError(f"minipaged has no {name}; {instead[name]}")
    raise AttributeError(f"module 'minipaged' has no attribute {name!r}")
